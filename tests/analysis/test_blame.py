"""Passing waits back to the ranks whose own work was long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtprof.analysis.stragglers.blame import WaitGraph, find_excess, find_onset, pass_back, trace_forward

WORK = arrays.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 7)), elements=st.integers(0, 50))


@given(WORK)
def test_excess_is_what_a_rank_has_over_the_median_of_the_others(work: np.ndarray) -> None:
    excess = find_excess(work)
    for row, found in zip(work, excess, strict=True):
        for rank, own in enumerate(row):
            assert found[rank] == max(0, own - np.median(np.delete(row, rank)))


def test_ranks_whose_work_is_not_known_are_left_aside() -> None:
    assert find_excess(np.array([[10.0, np.nan, 10.0, 13.0]])).tolist() == [[0, 0, 0, 3]]


def graph_of(waits: list[tuple[int, int, float]], excess: list[float]) -> WaitGraph:
    waiter, culprit, waited = zip(*waits, strict=True)
    return WaitGraph(
        waiter=np.array(waiter), culprit=np.array(culprit), waited=np.array(waited), excess=np.array(excess)
    )


def test_a_wait_goes_through_a_rank_that_waited_itself() -> None:
    # 0 waits for 1, which waited for 2, which worked 20 more.
    graph = graph_of([(0, 1, 20.0), (1, 2, 20.0)], [0, 0, 20])
    assert pass_back(graph).tolist() == [0, 0, 40]
    assert trace_forward(graph, np.array([False, False, True])).tolist() == [20, 20, 0]


def test_a_rank_that_worked_long_and_waited_keeps_its_share() -> None:
    # Rank 1 is 30 late: it waited 10 for rank 2, and worked 30 more than usual: 3/4 of the 40 are its own.
    graph = graph_of([(0, 1, 40.0), (1, 2, 10.0)], [0, 30, 10])
    assert pass_back(graph) == pytest.approx([0, 30, 20])


def test_waits_without_a_long_work_blame_nobody() -> None:
    graph = graph_of([(0, 1, 20.0), (1, 0, 20.0)], [0, 0])
    assert pass_back(graph).tolist() == [0, 0]


def test_what_is_passed_back_is_never_more_than_was_waited() -> None:
    random = np.random.default_rng(5)
    waits = [(int(a), int(b), float(w)) for a, b, w in random.integers(0, 9, (60, 3)) if a != b]
    graph = graph_of(waits, random.integers(0, 20, 9).astype(float).tolist())
    assert 0 < pass_back(graph).sum() <= graph.waited.sum() + 1e-6
    everyone = sum(trace_forward(graph, np.arange(9) == rank).sum() for rank in range(9))
    assert everyone == pytest.approx(pass_back(graph).sum(), rel=0.02)


def test_the_onset_is_where_a_series_steps_up() -> None:
    low, high = [1.0, 2.0, 1.0, 0.0, 2.0], [20.0, 21.0, 19.0, 20.0]
    assert find_onset(np.array(low + high)) == 5
    assert find_onset(np.array(high + high)) == 0
    assert find_onset(np.array([20.0, 0, 20, 0, 20, 0, 20, 0])) == 0
    assert find_onset(np.array([1.0])) == 0
