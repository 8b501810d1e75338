import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtprof.job.sound_records import is_among

NUMBERS = st.lists(st.integers(min_value=-5, max_value=5))


@given(NUMBERS, NUMBERS.map(sorted))
def test_rows_among_sorted_values_are_those_that_numpy_finds(column: list[int], values: list[int]) -> None:
    rows, sought = np.array(column, np.int64), np.array(values, np.int64)
    assert is_among(rows, sought).tolist() == np.isin(rows, sought).tolist()
