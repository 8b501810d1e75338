"""Matrices over pairs of ranks: messages sent and waits, for as many ranks as a reader can take in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_PAIRED = 256
"""Most ranks of which all pairs are listed."""
Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RankPairs:
    """A value for each pair of ranks, 0 for none; one value at least is known."""

    ranks: tuple[int, ...]
    values: Matrix  # from the rank of the row to that of the column

    @property
    def largest(self) -> list[tuple[int, int, int]]:
        """Value, rank of the row and rank of the column of each pair that has a value, the largest first."""
        pairs = (
            (int(self.values[i, j]), self.ranks[i], self.ranks[j]) for i, j in zip(*self.values.nonzero(), strict=True)
        )
        return sorted(pairs, reverse=True)

    @property
    def top_column(self) -> tuple[int, float]:
        """The rank whose column sums up to most, and its share of all."""
        sums = self.values.sum(axis=0)
        place = int(np.argmax(sums))
        return self.ranks[place], float(sums[place] / sums.sum())


def pair_ranks(ranks: Sequence[int], by_rank: Mapping[int, Mapping[int, int]]) -> RankPairs | None:
    """Return the values of all pairs of these ranks; None where no pair has one, or there are too many ranks."""
    if len(ranks) > MAX_PAIRED:
        return None
    place = {rank: position for position, rank in enumerate(ranks)}
    values = np.zeros((len(ranks), len(ranks)), np.int64)
    for row, others in by_rank.items():
        for column, value in others.items():
            if column in place:
                values[place[row], place[column]] = value
    return RankPairs(ranks=tuple(ranks), values=values) if values.any() else None
