"""Matrices over pairs of ranks: messages sent and waits. Beyond as many ranks as a reader can take in, a row holds all
ranks at one place along an axis of parallelism, or a block of ranks that follow each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_PAIRED = 256
"""Most rows and columns of a matrix."""
BLOCK = "ranks"
Matrix = npt.NDArray[np.int64]
Places = Mapping[int, Mapping[str, int]]
"""Of each rank its place along each axis."""


@dataclass(frozen=True, kw_only=True)
class RankPairs:
    """A value for each pair of rows, 0 for none; one value at least is known."""

    names: tuple[str, ...]  # of the rows, which are the columns, too
    unit: str  # what a row is: "rank", an axis such as "pp", or BLOCK
    members: tuple[tuple[int, ...], ...]  # the ranks of each row
    values: Matrix  # from the row to the column, summed over their ranks

    @property
    def largest(self) -> list[tuple[int, int, int]]:
        """Value, row and column of each pair that has a value, the largest first."""
        pairs = ((int(self.values[i, j]), i, j) for i, j in zip(*self.values.nonzero(), strict=True))
        return sorted(pairs, reverse=True)

    @property
    def top_column(self) -> tuple[int, float]:
        """The column that sums up to most, and its share of all."""
        sums = self.values.sum(axis=0)
        place = int(np.argmax(sums))
        return place, float(sums[place] / sums.sum())

    @property
    def is_by_rank(self) -> bool:
        """Say whether a row is one rank."""
        return self.unit == "rank"

    @property
    def row_words(self) -> str:
        """What the rows are, in a sentence."""
        return {"rank": "ranks", BLOCK: "blocks of ranks"}.get(self.unit, f"{self.unit} coordinates")

    def label(self, row: int) -> str:
        """Name a row in a sentence."""
        return f"{self.unit} {self.names[row]}"

    def averaged(self) -> "RankPairs":
        """Return the mean over the ranks of each row in place of the sum."""
        counts = np.array([len(ranks) for ranks in self.members])
        values = np.rint(self.values / counts[:, None]).astype(np.int64)
        return RankPairs(names=self.names, unit=self.unit, members=self.members, values=values)


def pair_ranks(
    ranks: Sequence[int], by_rank: Mapping[int, Mapping[int, int]], places: Places | None = None
) -> RankPairs | None:
    """Return the values of all pairs of these ranks; None where no pair has one.

    Parameters:
        by_rank: of each rank its value for each other rank; ranks that are not among `ranks` are left out.
        places: of more than MAX_PAIRED ranks along the axes; the axis is chosen along which the pairs with the largest
            values differ. Where no axis fits, rows are blocks of consecutive ranks.
    """
    known = set(ranks)
    pairs = [
        (row, column, value)
        for row, others in by_rank.items()
        for column, value in others.items()
        if row in known and column in known and value
    ]
    if not pairs:
        return None
    unit, row_of = _choose_rows(ranks, pairs, places or {})
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(row_of[rank], []).append(rank)
    rows = sorted(members)
    position = {row: i for i, row in enumerate(rows)}
    values = np.zeros((len(rows), len(rows)), np.int64)
    for rank, other, value in pairs:
        values[position[row_of[rank]], position[row_of[other]]] += value
    names = tuple(f"{min(members[row])}-{max(members[row])}" if unit == BLOCK else str(row) for row in rows)
    return RankPairs(names=names, unit=unit, members=tuple(tuple(members[row]) for row in rows), values=values)


def _choose_rows(
    ranks: Sequence[int], pairs: Sequence[tuple[int, int, int]], places: Places
) -> tuple[str, Mapping[int, int]]:
    """Return what a row is, and the row of each rank."""
    if len(ranks) <= MAX_PAIRED:
        return "rank", {rank: rank for rank in ranks}
    chosen, most = "", 0
    for axis in sorted(set.intersection(*(set(places.get(rank, {})) for rank in ranks))):
        if 1 < len({places[rank][axis] for rank in ranks}) <= MAX_PAIRED:
            between = sum(value for rank, other, value in pairs if places[rank][axis] != places[other][axis])
            if between > most:
                chosen, most = axis, between
    if chosen:
        return chosen, {rank: places[rank][chosen] for rank in ranks}
    per_block = -(-len(ranks) // MAX_PAIRED)
    return BLOCK, {rank: i // per_block for i, rank in enumerate(sorted(ranks))}
