"""What a program says it did, kept apart from dtprof: counters in a mapped file, which outlive any end of the process.

A counter has one writer. It is raised before an operation is issued, and a second one after its call has returned.
"""

import mmap
import os
import struct
import threading
from collections import defaultdict
from pathlib import Path

MOST_SLOTS = 256
SLOT = struct.Struct("<112sQQ")
NUMBER = struct.Struct("<Q")
AT_ISSUED, AT_RETURNED = 112, 120


class Counter:
    """How often one thread issued one operation in one group."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        """Count from 0."""
        self._memory = memory
        self._at = at
        self._issued = self._returned = 0

    def issue(self) -> None:
        """Count an operation that is about to be issued."""
        self._issued += 1
        NUMBER.pack_into(self._memory, self._at + AT_ISSUED, self._issued)

    def see_return(self) -> None:
        """Count a call that has returned; one that raised may not have come as far as an operation."""
        self._returned += 1
        NUMBER.pack_into(self._memory, self._at + AT_RETURNED, self._returned)


class Journal:
    """The counters of one process."""

    def __init__(self, path: Path) -> None:
        """Create the file."""
        with path.open("w+b") as file:
            file.truncate(MOST_SLOTS * SLOT.size)
            self._memory = mmap.mmap(file.fileno(), MOST_SLOTS * SLOT.size)
        self._slots: dict[tuple[int, str, str], Counter] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def counter(self, group: str, operation: str) -> Counter:
        """Return the counter of this thread for an operation of a group."""
        assert os.getpid() == self._pid, "a forked process has no part in its parent's journal"
        key = (threading.get_ident(), group, operation)
        known = self._slots.get(key)
        if known is None:
            with self._lock:
                at = len(self._slots) * SLOT.size
                SLOT.pack_into(self._memory, at, f"{group}|{operation}".encode(), 0, 0)
                known = self._slots[key] = Counter(self._memory, at)
        return known


def read_journal(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Return how often each operation of each group was about to be issued, and how often its call had returned."""
    counted: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    if not path.exists():
        return counted
    data = path.read_bytes()
    for at in range(0, len(data), SLOT.size):
        name, issued, returned = SLOT.unpack_from(data, at)
        group, _, operation = name.rstrip(b"\0").decode().partition("|")
        if operation:
            before = counted[group, operation]
            counted[group, operation] = (before[0] + issued, before[1] + returned)
    return counted
