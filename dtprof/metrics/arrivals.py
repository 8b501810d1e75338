"""Who came last to the collectives of ranks of one node, and how long the others waited for it.

Only operations whose completion the host observes, and members on this node: what a rank waits for those on other nodes
is not known here. A collective is judged once all members on this node have ended it. A rooted one that ended on a rank
before the last came (a broadcast, a reduce) waited for nobody there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis import codes
from dtprof.analysis.intervals import Column, Mask
from dtprof.analysis.meetings import Family
from dtprof.tables import UNKNOWN_NS, Array, join, select

MAX_HELD = 16_384
"""Operations of one rank and group that wait for other members; the oldest are given up."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Collectives that all members on this node have ended: a row a member, a column a collective."""

    ranks: list[int]
    ops: Column  # as the first member calls them
    waited_ns: Column
    last: Column  # which member came last


@dataclass
class Arrivals:
    """Holds the collectives of each group until every member on this node has ended them."""

    _held: dict[Family, dict[int, Array]] = field(default_factory=dict)

    def add(self, rank: int, family: Family, operations: Array) -> None:
        """Take in operations of one rank and group."""
        seen = (operations["done_ns"] != UNKNOWN_NS) & ((operations["flags"] & codes.COMPLETION_SEEN) != 0)
        rows = select(operations, seen & (operations["kind"] == codes.COLLECTIVE))
        if len(rows):
            own = self._held.setdefault(family, {})
            own[rank] = (join([own[rank], rows]) if rank in own else rows)[-MAX_HELD:]

    def judge(self, members: Mapping[Family, set[int]], rooted: Mask) -> list[tuple[Family, Judged]]:
        """Return what can be judged now.

        Args:
            members: of each group, on this node.
            rooted: by number of the operation, whether it has a root.
        """
        found = []
        for family, own in self._held.items():
            here = members.get(family, set())
            if len(here) > 1 and here <= own.keys() and (judged := _judge(own, rooted)) is not None:
                found.append((family, judged))
        return found


def _judge(own: dict[int, Array], rooted: Mask) -> Judged | None:
    """Judge what all have in common, and hold it no longer."""
    ranks = sorted(own)
    seqs = own[ranks[0]]["seq"]
    for rank in ranks[1:]:
        seqs = np.intersect1d(seqs, own[rank]["seq"])
    if not len(seqs):
        return None
    issued, done = np.zeros((len(ranks), len(seqs)), np.int64), np.zeros((len(ranks), len(seqs)), np.int64)
    for row, rank in enumerate(ranks):
        is_common = np.isin(own[rank]["seq"], seqs)
        rows = own[rank][is_common]
        own[rank] = select(own[rank], ~is_common)
        _, first = np.unique(rows["seq"], return_index=True)
        rows = rows[first]
        issued[row], done[row] = rows["issued_ns"], rows["done_ns"]
        if row == 0:
            ops = rows["op"].astype(np.int64)
    arrival = issued.max(axis=0)
    early = (done < arrival) & rooted[ops]
    return Judged(
        ranks=ranks,
        ops=ops,
        waited_ns=np.where(early, 0, np.minimum(arrival, done) - issued),
        last=issued.argmax(axis=0),
    )
