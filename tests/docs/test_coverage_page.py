"""The page of coverage says what the table says; the jobs of tests/completeness check the table."""

from tests.completeness import coverage


def test_page_of_coverage_is_up_to_date() -> None:
    assert coverage.PAGE.read_text() == coverage.render(coverage.read()), "run: python -m tests.completeness.coverage"


def test_at_least_the_promised_numbers_are_checked() -> None:
    table = coverage.read()
    names = [row["name"] for key in ("calls", "scenarios") for row in table[key]]
    assert len(set(names)) == len(names)
    assert len(table["calls"]) >= 95
    assert sum(row["refused"] is None for row in table["scenarios"]) >= 60
