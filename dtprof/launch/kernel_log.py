"""Processes that the OOM killer ended: from the kernel's log where this user may read it, and by its counter."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dtprof.launch.memory_cgroup import read_counter
from dtprof.records.oom_victims import OomVictim

LOG = Path("/dev/kmsg")
COUNTERS = Path("/proc/vmstat")
MAX_RECORDS = 1 << 16
_RECORD_BYTES = 8192
_KILLED = re.compile(r"out of memory[^:]*: Kill(?:ed)? process (\d+) \((.*?)\)", re.IGNORECASE)
_RESIDENT = re.compile(r"(anon|file|shmem)-rss:(\d+)kB")


def count_host_oom_kills(counters: Path = COUNTERS) -> int:
    """Return how many processes the OOM killer has ended on this host since it booted, in any control group.

    Everybody may read the counter, also in a container; it tells not which. 0 where the kernel does not count.
    """
    return read_counter(counters, "oom_kill") or 0


def list_oom_victims(*, since_ns: int, log: Path = LOG) -> list[OomVictim]:
    """Return the processes that were ended since a time; none where the log cannot be read."""
    return [victim for victim in _list_victims(log) if victim.t_ns >= since_ns]


def _list_victims(log: Path) -> Iterator[OomVictim]:
    for record in _list_records(log):
        head, _, text = record.partition(";")
        fields = head.split(",")
        found = _KILLED.search(text)
        if found is None or len(fields) < 3 or not fields[2].isdecimal():
            continue
        resident = sum(int(kib) << 10 for _, kib in _RESIDENT.findall(text))
        yield OomVictim(pid=int(found[1]), name=found[2], t_ns=int(fields[2]) * 1000, resident_bytes=resident)


def _list_records(log: Path) -> Iterator[str]:
    """Give the records of the log: one a read, as the device gives them; a line each of an ordinary file."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # it was overwritten while we read
                continue
            if not record:
                return
            yield from record.decode(errors="replace").splitlines()
    except OSError:  # there is no more, or reading is not allowed
        return
    finally:
        os.close(descriptor)
