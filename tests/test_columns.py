from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.columns import (
    begins_of,
    count_alike,
    distinct,
    is_among,
    known_medians,
    mean_of_each,
    median,
    number_alike,
    number_distinct,
    percentiles,
)

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


@given(st.lists(st.one_of(NEAR, FAR, CLOSE, st.integers(0, 100))))
def test_each_row_has_the_position_of_its_value(column: list[int]) -> None:
    rows = np.array(column, np.int64)
    values, place = number_distinct(rows)
    assert values.tolist() == sorted(set(column))
    assert values[place].tolist() == column


@given(st.lists(st.tuples(NEAR, st.one_of(FAR, CLOSE))))
def test_rows_that_are_alike_share_a_number(rows: list[tuple[int, int]]) -> None:
    number, first = number_alike(*(np.array([row[i] for row in rows], np.int64) for i in range(2)))
    assert [rows[i] for i in first.tolist()] == sorted(set(rows))
    assert [rows[i] for i in first[number].tolist()] == rows
    assert first.tolist() == [rows.index(row) for row in sorted(set(rows))]


def test_runs_begin_where_a_column_changes() -> None:
    a, b = np.array([1, 1, 2, 2, 2]), np.array([0, 0, 0, 5, 5])
    assert begins_of(a, b).tolist() == [True, False, True, True, False]
    assert begins_of(a[:0]).tolist() == []
    assert mean_of_each(np.array([0, 1, 0]), np.array([2.0, 3.0, 4.0])).tolist() == [3.0, 3.0]


@given(st.lists(st.integers(min_value=-(2**52), max_value=2**52), min_size=1))
def test_medians_are_those_that_numpy_finds(values: list[int]) -> None:
    assert median(values) == np.median(values)
    assert percentiles(values, (10, 50, 90)) == pytest.approx(np.percentile(values, (10, 50, 90)).tolist(), rel=1e-12)


def test_no_value_and_nan_have_no_median() -> None:
    assert np.isnan(median([]))
    assert np.isnan(median([1.0, float("nan")]))


def test_medians_of_a_table_leave_out_what_is_not_known() -> None:
    nan = float("nan")
    assert known_medians(np.array([[1.0, nan, nan], [3.0, 5.0, nan]])).tolist() == pytest.approx(
        [2, 5, nan], nan_ok=True
    )
