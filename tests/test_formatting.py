"""Quantities and tables as people read them."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.formatting import (
    format_bytes,
    format_fraction,
    format_ns,
    format_table,
    format_times,
    join_lines,
    list_ranks,
    shorten,
)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([2], "rank 2"),
        ([3, 0, 1], "ranks 0, 1, 3"),
        (range(7), "ranks 0-6"),
        ([0, 1, 2, 5, 6, 8], "ranks 0-2, 5, 6, 8"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 4 more"),
        ([*range(100), *range(200, 1200)], "ranks 0-99, 200-1199"),
    ],
)
def test_ranks_are_written_as_ranges_and_the_rest_counted(ranks: Iterable[int], expected: str) -> None:
    assert list_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, "-"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (12_345, "12.3 us"),
        (999_400, "999 us"),
        (999_999, "1.00 ms"),
        (12_300_000, "12.3 ms"),
        (348_000_000, "348 ms"),
        (1_500_000_000, "1.50 s"),
        (7_200_000_000_000, "7,200 s"),
    ],
)
def test_times_have_three_digits_and_the_unit_that_suits(ns: int | None, expected: str) -> None:
    assert format_ns(ns) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (None, "-"),
        (0, "0 B"),
        (0.4, "<1 B"),
        (16, "16 B"),
        (2048, "2.00 KiB"),
        (1 << 30, "1.00 GiB"),
        (466_526_208, "445 MiB"),
    ],
)
def test_sizes_are_binary(nbytes: float | None, expected: str) -> None:
    assert format_bytes(nbytes) == expected


def test_fractions_are_percentages() -> None:
    assert (format_fraction(0.1234), format_fraction(None)) == ("12.3 %", "-")


def test_the_first_column_is_aligned_left_and_numbers_right() -> None:
    assert format_table([["rank", "step"], ["rank 10", "7"]]) == ["rank     step", "rank 10     7"]


@given(st.text(max_size=60), st.integers(5, 40))
def test_shortened_text_fits_and_keeps_both_ends(text: str, width: int) -> None:
    result = shorten(text, width)
    assert len(result) <= width
    assert result == text or (result[0] == text[0] and result[-1] == text[-1])


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    hostile = "\x1b[2Jgone\x1e\x85\u2028\u202etxt.exe\r\udc80 \u00e9\u4e2d\u00a0"
    text = join_lines(["plain", hostile, "two\nlines"])
    assert text.splitlines() == [
        "plain",
        "\\x1b[2Jgone\\x1e\\x85\\u2028\\u202etxt.exe\\r\\udc80 \u00e9\u4e2d\u00a0",
        "two\\nlines",
    ]
    text.encode()


def test_a_column_of_nothing_but_unknowns_claims_no_unit() -> None:
    assert format_times([None, None]) == ("", ["-", "-"])
    assert format_times([None, 2_000_000]) == ("ms", ["-", "2.00"])
