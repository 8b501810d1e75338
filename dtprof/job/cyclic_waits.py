"""Sets of ranks in a graph of waits that wait for one another and for nobody else."""

from collections.abc import Collection, Mapping

Edges = Mapping[int, Collection[int]]
"""From each rank that waits to those it waits for."""


def find_closed_sets(edges: Edges) -> list[tuple[int, ...]]:
    """Return the strongly connected components that no edge leaves, ranks ascending; those of one rank, too.

    Kosaraju's algorithm, without recursion: chains of waits are as long as there are ranks.
    """
    backward: dict[int, list[int]] = {}
    for rank, onward in edges.items():
        for on in onward:
            backward.setdefault(on, []).append(rank)
    found: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for root in reversed(_in_order_of_leaving(edges)):
        if root in taken:
            continue
        part, todo = {root}, [root]
        while todo:
            for rank in backward.get(todo.pop(), ()):
                if rank not in taken and rank not in part:
                    part.add(rank)
                    todo.append(rank)
        taken |= part
        if all(on in part for rank in part for on in edges.get(rank, ())):
            found.append(tuple(sorted(part)))
    return found


def _in_order_of_leaving(edges: Edges) -> list[int]:
    """Return the ranks in the order in which a depth-first walk leaves them."""
    left: list[int] = []
    entered: set[int] = set()
    for start in edges:
        if start in entered:
            continue
        entered.add(start)
        path = [(start, iter(edges[start]))]
        while path:
            rank, onward = path[-1]
            following = next((on for on in onward if on not in entered), None)
            if following is None:
                left.append(rank)
                path.pop()
            else:
                entered.add(following)
                path.append((following, iter(edges.get(following, ()))))
    return left
