"""Durations on the device, from the ring that torch's NCCL back end keeps of its own operations (Flight Recorder).

Nothing of CUDA is called here: torch's watchdog has measured the durations (TORCH_NCCL_ENABLE_TIMING, which `dtprof
run` sets), and a thread of ours reads its ring now and then, for a bounded share of the time. What is overwritten
between two readings is not measured.
"""

import atexit
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dtprof import fence
from dtprof.capture.recorder import Recorder

SHORTEST_PAUSE_S = 1.0
SHARE = 0.002
"""Reading the ring takes at most this share of the time: it holds the GIL."""
NS_PER_MS = 1_000_000


class DeviceTimes:
    """Reads the ring and records each completed operation once."""

    def __init__(self, recorder: Recorder, group_ids: Mapping[str, int], read: Callable[[], bytes]) -> None:
        """Know where to write, the ids of groups by name, and how to read the ring."""
        self._recorder = recorder
        self._group_ids = group_ids
        self._read = read
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._pid = os.getpid()

    def start(self) -> None:
        """Read from now on, and a last time when the interpreter ends."""
        threading.Thread(target=self._work, name="dtprof-device-times", daemon=True).start()
        atexit.register(self.drain)

    def _work(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while True:
            time.sleep(pause_s)
            cost_s = self.drain()
            if cost_s is None:
                return
            pause_s = max(SHORTEST_PAUSE_S, cost_s / SHARE)

    @fence.fenced("how long operations took on the device")
    def drain(self) -> float | None:
        """Record what has completed since the last reading; return the seconds that took, None in a forked process."""
        if os.getpid() != self._pid:
            return None  # forked: the lock may be held by a thread that is not here
        with self._lock:
            begun = time.perf_counter()
            # The interpreter's own torch wrote these bytes in this process a moment ago.
            entries = pickle.loads(self._read()).get("entries", [])
            realtime_to_monotonic = time.monotonic_ns() - time.time_ns()
            for entry in self._new(entries):
                taken_ns = entry["time_created_ns"] + realtime_to_monotonic
                seen_ns = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) + realtime_to_monotonic
                group = self._group_ids[entry["process_group"][0]]
                duration_ns = round(entry["duration_ms"] * NS_PER_MS)
                self._recorder.device_time(group, taken_ns, duration_ns, max(seen_ns, taken_ns))
            return time.perf_counter() - begun

    def _new(self, entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the entries that have completed with a known duration and were not returned before."""
        present, new = set(), []
        for entry in entries:
            number = entry["record_id"]
            present.add(number)
            if entry.get("state") != "completed" or entry.get("duration_ms") is None or number in self._taken:
                continue
            if entry["process_group"][0] in self._group_ids:
                self._taken.add(number)
                new.append(entry)
        self._taken &= present
        return new


def reader() -> Callable[[], bytes] | None:
    """Return the function of this torch that dumps the ring without stacks, or None where it has none."""
    import torch

    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_fr_trace", None) or getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        return None
    return lambda: bytes(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
