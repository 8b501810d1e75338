"""Who went another way in a broadcast of gloo, from the ranks that waited in it and those that had passed it.

gloo broadcasts along a binomial tree. Counted from the root, rank v sends to v + 2^i for every 2^i above v, and ends
when all these took it. So a rank that skips the call, or names another root, leaves a pattern of waiting senders and
receivers. Each rank is tried as the one that deviates: those that leave the pattern seen are the answer.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

MOST_WORK = 30_000
"""A search through more ranks than this allows is not begun: 31 where the root is known, 13 where it is not."""


class Deviation(NamedTuple):
    """One way in which a rank explains what the others wait for."""

    how: str
    """`skipped` the broadcast, named another `root`, or made one `more` than the others."""
    rank: int


def find_deviations(waiting: Mapping[int, str], size: int, roots: Collection[int]) -> set[Deviation]:
    """Return the deviations of one rank that leave exactly these ranks waiting.

    Parameters:
        waiting: `send` or `recv`, in which each waiting rank was; the others do not wait in the broadcast.
        size: members of the group, ranks from 0.
        roots: the roots that the others may have named.
    """
    deviations: set[Deviation] = set()
    if len(roots) * size**3 > MOST_WORK:
        return deviations
    for root in roots:
        for rank in range(size):
            others: dict[int, int | None] = dict.fromkeys(range(size), root)
            if rank not in waiting and _waiting({**others, rank: None}) == waiting:
                deviations.add(Deviation("skipped", rank))
            if any(_waiting({**others, rank: other}) == waiting for other in range(size) if other != root):
                deviations.add(Deviation("root", rank))
            nobody: dict[int, int | None] = dict.fromkeys(range(size))
            if _waiting({**nobody, rank: root}) == waiting:
                deviations.add(Deviation("more", rank))
    return deviations


def tree(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """Return from whom a rank receives, nobody at the root, and to whom it sends."""
    at = (rank - root) % size
    top = at.bit_length()
    parent = (at - (1 << top - 1) + root) % size if at else None
    children = [at + (1 << bit) for bit in range(top, size.bit_length())]
    return parent, [(child + root) % size for child in children if child < size]


def _waiting(root_of: Mapping[int, int | None]) -> dict[int, str]:
    """Return the ranks that never end, by what they wait in, when each calls with its root, or not at all."""
    size = len(root_of)
    called = {rank: tree(rank, root, size) for rank, root in root_of.items() if root is not None}
    served: set[int] = {rank for rank, (parent, _) in called.items() if parent is None}
    grown = True
    while grown:  # a rank sends on what it has received from the one it asks
        fresh = {
            rank
            for rank, (parent, _) in called.items()
            if rank not in served and parent is not None and parent in served and rank in called[parent][1]
        }
        served |= fresh
        grown = bool(fresh)
    result: dict[int, str] = {}
    for rank, (_, children) in called.items():
        if rank not in served:
            result[rank] = "recv"
        elif any(child not in called or called[child][0] != rank for child in children):
            result[rank] = "send"
    return result
