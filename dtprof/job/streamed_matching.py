"""Match collectives whose records are still coming: an operation is given out once all its members have issued it.

What reads a running job matches with this; finished jobs are matched whole, by `collective_matching`.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np

from dtprof.intervals import Column
from dtprof.job.group_collectives import find_common
from dtprof.job.groups import GroupId

MAX_HELD = 16_384
"""Operations of one rank and group that wait for other members; the oldest are given up."""
SEQ = 0
"""The row of the sequence numbers; what stands in the others is the caller's."""


@dataclass(frozen=True, kw_only=True)
class MatchedCollectives:
    """Collectives of one group that all members have."""

    group: GroupId
    ranks: list[int]  # ascending
    rows: list[Column]  # of each rank, as they were added: a column a collective, in the same order

    def of_each(self, row: int) -> Column:
        """Return one of the rows of all members: of shape (members, collectives)."""
        return np.array([held[row] for held in self.rows])


class StreamedMatching:
    """Holds the collectives of each group until every member has them."""

    def __init__(self, *, max_held: int = MAX_HELD) -> None:
        """Hold none yet."""
        self._max_held = max_held
        self._held: dict[GroupId, dict[int, Column]] = {}

    def add(self, rank: int, group: GroupId, operations: Column) -> None:
        """Take in collectives of one rank and group: a column each, of which row `SEQ` is the sequence number."""
        own = self._held.setdefault(group, {})
        if rank in own and own[rank].size:
            operations = np.concatenate((own[rank], operations), axis=1)
        own[rank] = operations[:, -self._max_held :]

    def take(self, members: Mapping[GroupId, Set[int]]) -> Iterator[MatchedCollectives]:
        """Give out, and drop, what all members have.

        Parameters:
            members: ranks to wait for, by group; a group without any, or with one, is passed over.
        """
        for group, own in self._held.items():
            awaited = members.get(group, frozenset())
            if len(awaited) > 1 and awaited <= own.keys():
                ranks = sorted(own)
                rows = _take_common(own, ranks)
                if rows[0].size:
                    yield MatchedCollectives(group=group, ranks=ranks, rows=rows)


def _take_common(own: dict[int, Column], ranks: list[int]) -> list[Column]:
    """Take out the operations that all ranks hold, each once, by sequence number."""
    first = own[ranks[0]][SEQ]
    if all(np.array_equal(own[rank][SEQ], first) for rank in ranks[1:]) and (np.diff(first) > 0).all():  # as a rule
        whole = [own[rank] for rank in ranks]
        for rank in ranks:
            own[rank] = own[rank][:, :0]
        return whole
    taken = []
    for rank, at in zip(ranks, find_common([own[rank][SEQ] for rank in ranks]), strict=True):
        held, common = own[rank], own[rank][:, at]
        own[rank] = held[:, ~np.isin(held[SEQ], common[SEQ])]
        taken.append(common)
    return taken
