"""One entry a figure: what follows from it agrees with it."""

import re
from typing import Any

import pytest

from dtprof.analysis import metric_registry
from dtprof.analysis.metric_registry import COMPARED, JOB, KINDS, METRICS, OF_JOB, Metric
from dtprof.analysis.results import Summary
from dtprof.cli import check
from dtprof.interchange.public_tables.result_tables import tabulate_results
from dtprof.report.documents.summary_json import summary_json
from tests.report.example_summaries import empty_summary, summary_of

TABLES = {
    "rank": "ranks",
    "collective": "collectives",
    "call_site": "call_sites",
    "communication_phase": "communication_phases",
    "message_sizes": "message_sizes",
    "part_band": "part_bands",
    "pipeline_action": "pipeline",
    "pipeline_step": "pipeline_steps",
    "lateness": "lateness",
    "straggler": "stragglers",
}


def rows_of(kind: str, summary: Summary) -> list[Any]:
    if kind == "job":
        return [summary]
    if kind.startswith("pipeline_"):
        return list(getattr(summary.pipeline, f"per_{kind.removeprefix('pipeline_')}")) if summary.pipeline else []
    return list(getattr(summary, TABLES[kind]))


def values_at(document: Any, path: str) -> list[Any]:
    """Return what a path such as ranks[].partition_ns.compute leads to, one value a row; None beyond a null."""
    key, _, rest = path.partition(".")
    if document is None and key.endswith("[]"):
        return []
    rows = document[key.removesuffix("[]")] if key.endswith("[]") else [None if document is None else document[key]]
    return rows if not rest else [value for row in rows for value in values_at(row, rest)]


@pytest.mark.parametrize("summary", [summary_of(), empty_summary()], ids=["full", "empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_json_has_the_value_of_every_figure_where_its_entry_says(kind: str, summary: Summary) -> None:
    document = summary_json(summary)
    for metric in KINDS[kind]:
        if metric.json:
            values = [metric.value(row) for row in rows_of(kind, summary)]
            assert values_at(document, metric.json) == values, metric.name


@pytest.mark.parametrize("kind", TABLES)
def test_tables_have_the_columns_and_values_of_the_entries(kind: str) -> None:
    summary = summary_of()
    table = tabulate_results(TABLES[kind], summary)
    for metric in KINDS[kind]:
        if metric.is_column:
            assert table[metric.name].tolist() == [metric.value(row) for row in rows_of(kind, summary)], metric.name


def test_every_figure_is_unknown_for_a_reason_or_never() -> None:
    # Nothing is known of a job without ranks but how many records, ranks and steps there are.
    for metric in JOB:
        assert bool(metric.null) == (metric.value(empty_summary()) is None), metric.name


def test_definitions_are_sentences_and_names_end_with_their_unit() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[A-Z1].*\.", metric.definition), metric.name
        unit = {"_ns": "ns", "_bytes": "bytes", "_fraction": "fraction", "_gb_per_s": "GB/s"}
        assert [
            metric.unit for ending, wanted in unit.items() if metric.name.endswith(ending) and metric.unit != wanted
        ] == []


def test_a_name_has_one_unit_whatever_it_is_of() -> None:
    for metric in METRICS:
        assert metric_registry.unit_of(metric.name) == metric.unit, metric.name


def test_options_of_check_bound_figures_on_their_worse_side() -> None:
    assert len({option.figure for option in check.OPTIONS}) == len(check.OPTIONS)
    for option in check.OPTIONS:
        assert OF_JOB[option.figure].better == ("higher" if option.is_least else "lower")


def test_exported_names_are_distinct() -> None:
    for names in (
        [metric.prometheus for metric in METRICS if metric.prometheus],
        [metric.tracker for metric in METRICS if metric.tracker],
        [metric.name for metric in JOB],
    ):
        assert len(set(names)) == len(names)


def test_compare_shows_step_time_first_and_memory_last() -> None:
    assert (COMPARED[0], COMPARED[-1]) == ("step_ns", "peak_bytes")


def test_seconds_and_milliseconds_follow_from_nanoseconds() -> None:
    metric: Metric[int] = Metric(
        name="x_ns", unit="ns", definition="X.", section="Steps", value=float, tracker="x_ms", prometheus="x_seconds"
    )
    assert (metric.in_base_unit(2_500_000), metric.tracked(2_500_000)) == (0.0025, 2.5)
    assert metric.meaning == "x"
