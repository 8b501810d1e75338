"""Interval arithmetic against the plain definition: a set of integer moments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtprof import intervals
from dtprof.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(-30, 30), st.integers(-30, 30)), max_size=12).map(
    lambda rows: np.array(rows, np.int64).reshape(-1, 2)
)


def moments(pairs: Intervals) -> set[int]:
    return {t for begin, end in pairs.tolist() for t in range(begin, end)}


def is_canonical(a: Intervals) -> bool:
    flat = a.ravel()
    return bool(np.all(np.diff(flat) > 0))


@given(PAIRS)
def test_union_covers_the_same_moments_once(pairs: Intervals) -> None:
    result = intervals.union(pairs)
    assert moments(result) == moments(pairs)
    assert is_canonical(result)
    assert intervals.total(result) == len(moments(pairs))


@given(PAIRS, PAIRS)
def test_subtract_and_intersect_are_those_of_sets(a: Intervals, b: Intervals) -> None:
    a, b = intervals.union(a), intervals.union(b)
    for result, expected in (
        (intervals.subtract(a, b), moments(a) - moments(b)),
        (intervals.intersect(a, b), moments(a) & moments(b)),
    ):
        assert moments(result) == expected
        assert is_canonical(result)


@given(PAIRS, st.lists(st.integers(-40, 40), max_size=5))
def test_what_lies_before_a_time_is_counted(a: Intervals, times: list[int]) -> None:
    a = intervals.union(a)
    expected = [len([t for t in moments(a) if t < time]) for time in times]
    assert intervals.measure_before(a, np.array(times, np.int64)).tolist() == expected


@given(st.lists(PAIRS, max_size=4), PAIRS)
def test_every_moment_is_shared_out_once_to_the_first_layer_that_covers_it(
    layers: list[Intervals], window: Intervals
) -> None:
    layers, window = [intervals.union(layer) for layer in layers], intervals.union(window)
    shares = intervals.share_out(layers, window)
    assert shares.sum(axis=1).tolist() == (window[:, 1] - window[:, 0]).tolist()
    left = moments(window)
    for position, layer in enumerate(layers):
        assert shares[:, position].sum() == len(left & moments(layer))
        left -= moments(layer)
    assert shares[:, len(layers)].sum() == len(left)


def test_touching_windows_are_shared_out_apart() -> None:
    # Two steps, 0..10 and 10..30; one layer covers 5..20: 5 of the first step, 10 of the second.
    shares = intervals.share_out([np.array([[5, 20]])], np.array([[0, 10], [10, 30]]))
    assert shares.tolist() == [[5, 5], [10, 10]]


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1))
def test_the_largest_so_far_begins_anew_in_each_row(drawn: list[tuple[int, bool]]) -> None:
    values, begins = (np.array(column) for column in zip(*drawn, strict=True))
    begins[0] = True
    expected = [np.maximum.accumulate(row) for row in np.split(values, np.flatnonzero(begins)[1:])]
    assert np.array_equal(intervals.accumulate_maximum(values, begins), np.concatenate(expected))


@given(PAIRS, PAIRS)
def test_near_a_window_are_the_whole_intervals_that_reach_into_it(a: Intervals, windows: Intervals) -> None:
    a, windows = intervals.union(a), intervals.union(windows)
    expected = [row for row in a.tolist() if moments(np.array([row])) & moments(windows)]
    assert intervals.near(a, windows).tolist() == expected


@given(st.lists(st.integers(-40, 40), max_size=30), PAIRS)
def test_moments_are_located_alike_whether_they_are_in_order_or_not(times: list[int], windows: Intervals) -> None:
    windows = intervals.union(windows)
    for given_times in (times, sorted(times)):
        expected = [
            next((place for place, (begin, end) in enumerate(windows.tolist()) if begin <= time < end), -1)
            for time in given_times
        ]
        assert intervals.locate(np.array(given_times, np.int64), windows).tolist() == expected
