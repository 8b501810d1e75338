"""Several ranks whose records are gone through in one go: of few records most of the time goes into calls.

What each rank gets is what it would get alone; a single rank is a batch of one. Of the second pass there is more side
by side: analysis/map_reduce/placed_ranks.py.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.columns import is_any
from dtprof.intervals import Column, Mask
from dtprof.job.valid_records import valid_operations, valid_spans
from dtprof.records.tables import Array, RankTables, join, select

MAX_ROWS = 1 << 14
"""Operations and spans of ranks taken together: columns of so many stay in the processor's cache."""
MAX_AXIS_NS = 1 << 56
"""Two years. Only damaged records claim more."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one table of several ranks, rank after rank."""

    table: Array
    bounds: Sequence[int]  # where the rows of each rank begin, and the end of the last
    names: Sequence[tuple[str, ...]]  # of operations and phases, by id; of each rank

    @functools.cached_property
    def place(self) -> Column:
        """The position of the rank of each row."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def of(self, position: int) -> Array:
        """Return the rows of one rank."""
        return self.table[self.bounds[position] : self.bounds[position + 1]]

    def chosen(self, mask: Mask) -> "Rows":
        """Return some of the rows."""
        counts = (int(np.count_nonzero(mask[begin:end])) for begin, end in itertools.pairwise(self.bounds))
        return Rows(table=select(self.table, mask), bounds=[0, *itertools.accumulate(counts)], names=self.names)

    def is_named(self, wanted: Collection[str]) -> Mask:
        """Say which rows are of an operation or phase of one of these names."""
        found = np.zeros(len(self.table), np.bool_)
        for names, which in self._spellings.items():
            ids = [i for i, name in enumerate(names) if name in wanted]
            if len(self._spellings) == 1:
                return is_any(self.table["op"], ids)
            if ids:
                found |= is_any(self.table["op"], ids) & (self._spelling == which)
        return found

    @functools.cached_property
    def _spellings(self) -> dict[tuple[str, ...], int]:
        """The sets of names that ranks have, of which there are few, numbered."""
        return {names: i for i, names in enumerate(dict.fromkeys(self.names))}

    @functools.cached_property
    def _spelling(self) -> Column:
        """The number of that of each row."""
        return np.repeat([self._spellings[names] for names in self.names], np.diff(self.bounds))


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """Some ranks, and their sound records."""

    tables: Sequence[RankTables]
    operations: Rows
    spans: Rows


def batch_ranks(tables: Sequence[RankTables]) -> RankBatch:
    """Join ranks into one batch; one at least."""
    return RankBatch(
        tables=tables,
        operations=_rows(tables, [table.operations for table in tables], valid_operations),
        spans=_rows(tables, [table.spans for table in tables], valid_spans),
    )


def batch_in_turn(ranks: Iterable[RankTables]) -> Iterator[RankBatch]:
    """Yield all ranks in batches of up to MAX_ROWS rows, in order."""
    waiting: list[RankTables] = []
    num_rows = 0
    for tables in ranks:
        rows = len(tables.operations) + len(tables.spans)
        if waiting and num_rows + rows > MAX_ROWS:
            yield batch_ranks(waiting)
            waiting, num_rows = [], 0
        waiting.append(tables)
        num_rows += rows
    if waiting:
        yield batch_ranks(waiting)


def lay_out(extents: Sequence[tuple[int, int]]) -> Column | None:
    """Return the shift of the times of each rank that keeps ranks apart on one axis.

    Parameters:
        extents: first and last time of each rank.

    Returns:
        None where that would take more than MAX_AXIS_NS; a single rank stays in place.
    """
    if len(extents) == 1:
        return np.zeros(1, np.int64)
    first, last = np.array(extents, np.int64).T
    lengths = last - first + 1
    if sum(lengths.tolist()) > MAX_AXIS_NS:
        return None
    shifts: Column = np.concatenate(([0], np.cumsum(lengths)[:-1])) - first
    return shifts


def _rows(tables: Sequence[RankTables], parts: Sequence[Array], sound: Callable[[Array], Array]) -> Rows:
    table = join(parts)
    found = sound(table)
    # Only a damaged log loses rows: then each rank is sifted alone, because the bounds of all of them move.
    if found is not table:
        parts = [sound(part) for part in parts] if len(parts) > 1 else [found]
        table = join(parts)
    bounds = [0, *itertools.accumulate(map(len, parts))]
    return Rows(table=table, bounds=bounds, names=[rank.ops for rank in tables])
