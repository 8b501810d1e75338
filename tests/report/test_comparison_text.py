"""A comparison as text and JSON."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.comparison.comparison_series import measure_run
from dtprof.analysis.comparison.run_comparison import Comparison, compare_runs
from dtprof.report.documents.comparison_json import comparison_json
from dtprof.report.text.comparison_text import NO_DIFFERENCE, comparison_text
from tests.analysis.noisy_runs import build_ranks
from tests.builders import MemoryRun

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compare-two-runs.md"


def compared(a: dict[str, object], b: dict[str, object]) -> Comparison:
    runs = [
        MemoryRun(build_ranks(**{"num_steps": 60, **chosen}), path=Path(f"runs/{name}"))  # type: ignore[arg-type]
        for name, chosen in (("before", {"seed": 1, **a}), ("after", {"seed": 2, **b}))
    ]
    return compare_runs(*map(measure_run, runs))


def test_the_page_on_comparing_shows_what_is_printed() -> None:
    text = comparison_text(compared({}, {"delay_us": 3_000.0, "slow_rank": 1}))
    shown = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    assert len(shown.splitlines()) > 5
    assert text.startswith(shown)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {}),
        ({}, {"delay_us": 3_000.0}),
        ({}, {"num_ranks": 12, "slower_reduce_us": 9_000.0}),
        ({"num_ranks": 12}, {"num_ranks": 12, "delay_us": 90_000.0, "slow_rank": 11, "extra_bytes": 1 << 30}),
        ({}, {"num_steps": 1}),
        ({"num_steps": 5}, {}),
    ],
)
def test_a_comparison_fits_into_eighty_columns(a: dict[str, object], b: dict[str, object]) -> None:
    lines = comparison_text(compared(a, b)).splitlines()
    assert max(map(len, lines)) <= 82
    assert lines[-1] == "next         dtprof report runs/after"


def test_no_difference_is_said_with_what_could_have_been_seen() -> None:
    text = " ".join(comparison_text(compared({}, {})).split())
    assert f"steps {NO_DIFFERENCE}: B - A is between" in text
    assert "a step would be detected in 4 of 5 comparisons" in text
    assert "caveat" not in text


def test_what_only_a_few_ranks_differ_in_is_counted() -> None:
    delayed = {"num_ranks": 12, "delay_us": 90_000.0, "slow_rank": 11}
    text = comparison_text(compared({"num_ranks": 12}, delayed))
    assert "* rank 11 compute" in text
    assert "more differ: see --json" in text


def test_json_holds_what_the_text_shows() -> None:
    result = compared({}, {"delay_us": 3_000.0, "num_ranks": 4})
    document = json.loads(json.dumps(comparison_json(result)))
    assert document["schema"] == 1
    assert document["differs"] is True
    step = document["changes"][0]
    assert (step["table"], step["name"], step["unit"], step["verdict"]) == ("job", "step_ns", "ns", "larger")
    assert step["low"] < step["difference"] < step["high"]
    assert step["rank"] is None
    assert len(document["cannot_compare"]) == 2
