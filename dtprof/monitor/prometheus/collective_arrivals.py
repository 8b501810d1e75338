"""Which rank of a node arrived last in each collective, and how long the others waited for it.

Only operations whose completion the host observes, and members on this node: what a rank waits for those on other nodes
is not known here. A collective is judged once all members on this node have ended it. A rooted one that ended on a rank
before the last came (a broadcast, a reduce) waited for nobody there.
"""

from dataclasses import dataclass

import numpy as np

from dtprof.intervals import Column, Mask
from dtprof.job.streamed_matching import SEQ, MatchedCollectives

ISSUED, DONE, OP = SEQ + 1, SEQ + 2, SEQ + 3
"""Rows of the operations that are matched."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits in collectives that all members on this node have ended: a row a member, a column a collective."""

    ops: Column  # as the first member calls them
    waited_ns: Column
    last: Column  # row of the member that arrived last


def measure_waits(matched: MatchedCollectives, rooted: Mask) -> Waits:
    """Return how long each member waited for the last.

    Parameters:
        rooted: by number of the operation, whether it has a root.
    """
    issued, done = matched.of_each(ISSUED), matched.of_each(DONE)
    ops, arrival = matched.rows[0][OP], issued.max(axis=0)
    early = (done < arrival) & rooted[ops]
    return Waits(
        ops=ops,
        waited_ns=np.where(early, 0, np.minimum(arrival, done) - issued),
        last=issued.argmax(axis=0),
    )
