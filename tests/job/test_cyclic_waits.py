"""Sets of ranks that wait for one another and for nobody else."""

from hypothesis import given
from hypothesis import strategies as st

from dtprof.job.cyclic_waits import find_closed_sets

GRAPHS = st.dictionaries(st.integers(0, 6), st.frozensets(st.integers(0, 6), max_size=3), max_size=7)


def reached(edges: dict[int, frozenset[int]], start: int) -> set[int]:
    """Return what can be come to from a rank, itself included."""
    found, ahead = {start}, [start]
    while ahead:
        new = edges.get(ahead.pop(), frozenset()) - found
        found |= new
        ahead += new
    return found


def test_a_ring_that_others_wait_for_is_closed_and_they_are_not() -> None:
    assert find_closed_sets({0: {1}, 1: {2}, 2: {1}, 3: {0}}) == [(1, 2)]


def test_a_rank_that_waits_for_nobody_is_a_set_of_its_own() -> None:
    assert find_closed_sets({0: {1}, 1: set()}) == [(1,)]


@given(GRAPHS)
def test_a_closed_set_is_all_that_each_of_its_ranks_can_come_to(edges: dict[int, frozenset[int]]) -> None:
    from_each = {rank: reached(edges, rank) for rank in {*edges, *(on for ends in edges.values() for on in ends)}}
    closed = {
        tuple(sorted(ends)) for rank, ends in from_each.items() if all(rank in from_each[other] for other in ends)
    }
    found = find_closed_sets(edges)
    assert len(found) == len(set(found))
    assert {ranks for ranks in closed if set(ranks) & set(edges)} == {r for r in found if set(r) & set(edges)}
