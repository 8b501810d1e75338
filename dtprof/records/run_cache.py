"""Ranks that are read once, for commands that go through a run several times in one process."""

from dataclasses import dataclass, field

from dtprof.records.tables import RankTables

MOST_BYTES = 256 << 20
"""Of all that is kept; ranks beyond are read each time."""


@dataclass(kw_only=True)
class RankCache:
    """Ranks as first read, shared by all parts of a run: later additions of a running job are not seen."""

    tables: dict[int, RankTables] = field(default_factory=dict)
    num_bytes: int = 0

    def put(self, rank: RankTables) -> None:
        """Keep a rank where there is room; its tables cannot be written to, since others get the same."""
        records = (rank.operations, rank.spans, rank.samples, rank.device_intervals)
        size = sum(table.nbytes for table in records)
        if self.num_bytes + size > MOST_BYTES:
            return
        for table in records:
            table.flags.writeable = False
        self.tables[rank.rank] = rank
        self.num_bytes += size
