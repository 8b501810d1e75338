"""Ranks that are read once, for commands that go through a run several times in one process."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from dtprof.records.tables import RankTables

MOST_BYTES = 256 << 20
"""Of all that is kept; ranks beyond are read each time."""


@dataclass(kw_only=True)
class RankCache:
    """Ranks as first read, shared by all parts of a run: later additions of a running job are not seen.

    Sent to another process, it is the cache of the same run there, with what that process has read.
    """

    most_bytes: int = MOST_BYTES
    key: str = field(default_factory=lambda: os.urandom(8).hex())
    tables: dict[int, RankTables] = field(default_factory=dict)
    num_bytes: int = 0
    _newest: dict[tuple[int, int, int], RankTables] = field(default_factory=dict)  # by rank, of_all, of_each

    def put(self, rank: RankTables) -> None:
        """Keep a rank where there is room; its tables cannot be written to, since others get the same."""
        if self._has_room_for(rank):
            self.tables[rank.rank] = rank

    def put_newest(self, rank: RankTables, *, of_all: int, of_each: int) -> None:
        """Keep the newest operations of a rank likewise; the parameters are those of `Run.load_newest`."""
        if self._has_room_for(rank):
            self._newest[rank.rank, of_all, of_each] = rank

    def newest(self, rank: int, *, of_all: int, of_each: int) -> RankTables | None:
        """Return them where they were kept."""
        return self._newest.get((rank, of_all, of_each))

    def _has_room_for(self, rank: RankTables) -> bool:
        """Say whether there is room for a rank, and take it."""
        records = (rank.operations, rank.spans, rank.samples, rank.device_intervals)
        size = sum(table.nbytes for table in records)
        if self.num_bytes + size > self.most_bytes:
            return False
        for table in records:
            table.flags.writeable = False
        self.num_bytes += size
        return True

    def __reduce__(self) -> tuple[Callable[[str, int], "RankCache"], tuple[str, int]]:
        """Pickle which cache it is, not what it holds."""
        return _of_this_process, (self.key, self.most_bytes)


_received: dict[str, RankCache] = {}
"""The caches of a worker process, which ends with the work on its runs."""


def _of_this_process(key: str, most_bytes: int) -> RankCache:
    return _received.setdefault(key, RankCache(key=key, most_bytes=most_bytes))
