"""A run whose ranks are read once and kept, for what looks through all of them several times in one process."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from dtprof.records.reader import Run
from dtprof.records.tables import RankTables

MOST_BYTES = 512 << 20
"""Of all that is kept; ranks beyond are read each time, as in any run."""


@dataclass(frozen=True, kw_only=True)
class KeptRun(Run):
    """A run on disk that reads the newest attempt of each rank once: what a running job adds later is not seen."""

    kept: dict[int, RankTables] = field(default_factory=dict)  # shared by all parts of the run

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Return one rank; its tables cannot be written to, since others get the same."""
        if attempt is not None:
            return super().load(rank, attempt)
        found = self.kept.get(rank)
        if found is None:
            found = super().load(rank)
            if _size(found) + sum(map(_size, self.kept.values())) <= MOST_BYTES:
                for table in (found.operations, found.spans, found.samples):
                    table.flags.writeable = False
                self.kept[rank] = found
        return found

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return ranks, each as `load` does."""
        return map(self.load, ranks)

    def load_newest(self, rank: int, attempt: int | None = None, *, of_all: int, of_each: int) -> RankTables:
        """Return one rank as it is kept, or else the newest of it, which is not kept."""
        if attempt is None and rank in self.kept:
            return self.kept[rank]
        return super().load_newest(rank, attempt, of_all=of_all, of_each=of_each)


def keep(run: Run) -> KeptRun:
    """Return the run as one that keeps what it has read."""
    return KeptRun(**{one.name: getattr(run, one.name) for one in fields(run)})


def _size(tables: RankTables) -> int:
    return tables.operations.nbytes + tables.spans.nbytes + tables.samples.nbytes
