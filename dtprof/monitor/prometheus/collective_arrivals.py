"""Which rank of a node arrived last in each collective, and how long the others waited for it.

Only operations whose completion the host observes, and members on this node: what a rank waits for those on other nodes
is not known here. A collective is judged once all members on this node have ended it. A rooted one that ended on a rank
before the last came (a broadcast, a reduce) waited for nobody there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dtprof.intervals import Column, Mask
from dtprof.job.group_collectives import find_common
from dtprof.job.groups import GroupId

MAX_HELD = 16_384
"""Operations of one rank and group that wait for other members; the oldest are given up."""
SEQ, ISSUED, DONE, OP = range(4)
"""Kept rows of a rank and group, one column per operation."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Collectives that all members on this node have ended: a row a member, a column a collective."""

    ranks: list[int]
    ops: Column  # as the first member calls them
    waited_ns: Column
    last: Column  # the member that arrived last


@dataclass
class Arrivals:
    """Holds the collectives of each group until every member on this node has ended them."""

    _held: dict[GroupId, dict[int, Column]] = field(default_factory=dict)

    def add(self, rank: int, group: GroupId, operations: Column) -> None:
        """Take in collectives of one rank and group that were seen to end: rows SEQ, ISSUED, DONE, OP."""
        own = self._held.setdefault(group, {})
        if rank in own and own[rank].size:
            operations = np.concatenate((own[rank], operations), axis=1)
        own[rank] = operations[:, -MAX_HELD:]

    def judge(self, members: Mapping[GroupId, set[int]], rooted: Mask) -> list[tuple[GroupId, Judged]]:
        """Return the waits that can be judged now.

        Args:
            members: of each group, on this node.
            rooted: by number of the operation, whether it has a root.
        """
        found = []
        for group, own in self._held.items():
            here = members.get(group, set())
            if len(here) > 1 and here <= own.keys() and (judged := _judge(own, rooted)) is not None:
                found.append((group, judged))
        return found


def _judge(own: dict[int, Column], rooted: Mask) -> Judged | None:
    """Judge the operations that all ranks have, and drop them."""
    ranks = sorted(own)
    first = own[ranks[0]][SEQ]
    if all(np.array_equal(own[rank][SEQ], first) for rank in ranks[1:]) and (np.diff(first) > 0).all():
        chosen = [own[rank] for rank in ranks]
        for rank in ranks:
            own[rank] = own[rank][:, :0]
    else:
        chosen = _take_common(own, ranks)
    if not chosen[0].size:
        return None
    issued, done = (np.array([held[row] for held in chosen]) for row in (ISSUED, DONE))
    ops, arrival = chosen[0][OP], issued.max(axis=0)
    early = (done < arrival) & rooted[ops]
    return Judged(
        ranks=ranks,
        ops=ops,
        waited_ns=np.where(early, 0, np.minimum(arrival, done) - issued),
        last=issued.argmax(axis=0),
    )


def _take_common(own: dict[int, Column], ranks: list[int]) -> list[Column]:
    """Take out the operations that all ranks hold, each once, by position."""
    taken = []
    for rank, at in zip(ranks, find_common([own[rank][SEQ] for rank in ranks]), strict=True):
        held, common = own[rank], own[rank][:, at]
        own[rank] = held[:, ~np.isin(held[SEQ], common[SEQ])]
        taken.append(common)
    return taken
