from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.columns import count_alike, distinct, is_among, median, percentiles

NUMBERS = st.lists(st.integers(min_value=-5, max_value=5))


@given(NUMBERS, NUMBERS.map(sorted))
def test_rows_among_sorted_values_are_those_that_numpy_finds(column: list[int], values: list[int]) -> None:
    rows, sought = np.array(column, np.int64), np.array(values, np.int64)
    assert is_among(rows, sought).tolist() == np.isin(rows, sought).tolist()


@given(NUMBERS)
def test_distinct_values_are_those_that_numpy_finds(column: list[int]) -> None:
    rows = np.array(column, np.int64)
    assert distinct(rows).tolist() == np.unique(rows).tolist()
    assert distinct(rows.reshape(1, -1)).tolist() == np.unique(rows).tolist()


NEAR = st.integers(-1, 3)
FAR = st.integers(-(2**62), 2**62)
CLOSE = st.integers(2**40, 2**40 + 5)


@given(st.sampled_from([FAR, CLOSE]).flatmap(lambda middle: st.lists(st.tuples(NEAR, middle, NEAR))))
def test_rows_that_are_alike_are_counted(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array([row[i] for row in rows], np.int64) for i in range(3)]
    *found, counts = (column.tolist() for column in count_alike(columns))
    assert dict(zip(zip(*found, strict=True), counts, strict=True)) == Counter(rows)


@given(st.lists(st.integers(min_value=-(2**52), max_value=2**52), min_size=1))
def test_medians_are_those_that_numpy_finds(values: list[int]) -> None:
    assert median(values) == np.median(values)
    assert percentiles(values, (10, 50, 90)) == pytest.approx(np.percentile(values, (10, 50, 90)).tolist(), rel=1e-12)


def test_no_value_and_nan_have_no_median() -> None:
    assert np.isnan(median([]))
    assert np.isnan(median([1.0, float("nan")]))
