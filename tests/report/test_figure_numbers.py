"""Numbers as a page shows them."""

import pytest

from dtprof.report.figures.figure_numbers import (
    DURATIONS,
    NBSP,
    choose_decimals,
    choose_unit,
    format_bytes,
    format_duration,
    format_number,
    format_share,
    typeset,
)


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (850, "850 ns"), (29_240, "29.2 \u00b5s"), (212_400_000, "212 ms"), (1_944_000_000, "1.94 s")],
)
def test_durations_have_three_digits_and_a_space_that_does_not_break(ns: int, text: str) -> None:
    assert format_duration(ns) == text.replace(" ", NBSP)


def test_sizes_are_binary() -> None:
    assert format_bytes(25 * 2**20) == f"25.0{NBSP}MiB"


def test_sentences_of_the_terminal_have_the_signs_of_a_page() -> None:
    said = "B - A is between -12.5 us and +3 ms (1.2 %) in 64 steps of 8 sites; 25 MiB, 3 B, us"
    expected = "B - A is between -12.5_\u00b5s and +3_ms (1.2_%) in 64 steps of 8 sites; 25_MiB, 3_B, us"
    assert typeset(said) == expected.replace("_", NBSP)


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.0004, "<0.1 %"), (0.042, "4.2 %"), (0.31, "31 %"), (0.0996, "10 %")]
)
def test_shares_show_a_decimal_only_where_it_matters(share: float, text: str) -> None:
    assert format_share(share) == text.replace(" ", NBSP)


def test_a_column_takes_the_unit_and_decimals_of_its_largest_value() -> None:
    assert choose_unit([None, 40_000, 25_000_000], DURATIONS).name == "ms"
    assert choose_unit([], DURATIONS).name == "ns"
    assert choose_decimals([0.04, 25.0, None]) == 1


def test_a_small_number_in_a_column_of_large_ones_is_still_seen() -> None:
    assert [format_number(value, 1) for value in (25, 0.25, 0.0513, 0.00002, 0)] == [
        "25.0",
        "0.25",
        "0.051",
        "<0.001",
        "0",
    ]
