"""The stacked bars of a step carry the numbers of the partition, and sum to the step."""

from dataclasses import replace
from typing import Any

import pytest

from dtprof.analysis.results import Summary
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.stacked_step_figure import MAX_LYING_BARS, draw_step_parts, draw_step_phases
from tests.report.example_summaries import LATE_RANK, empty_summary, summary_of


def drawn(summary: Summary) -> Drawing:
    drawing = draw_step_parts(summary)
    assert isinstance(drawing, Drawing)
    return drawing


def lengths(figure: Any) -> dict[str, list[float]]:
    return {bar.meta: list(bar.x if bar.orientation == "h" else bar.y) for bar in figure.data}


def test_bars_are_the_parts_in_milliseconds() -> None:
    bars = lengths(drawn(summary_of(num_ranks=4)).figure)
    assert bars["exposed_wait"] == [60, 60, 10, 60]
    assert bars["compute"][LATE_RANK] == 140
    assert bars["data"] == [10] * 4


@pytest.mark.parametrize("num_ranks", [1, 4, 64])
def test_bars_of_each_rank_sum_to_its_step(num_ranks: int) -> None:
    bars = lengths(drawn(summary_of(num_ranks=num_ranks)).figure)
    sums = [sum(column) for column in zip(*bars.values(), strict=True)]
    assert sums == pytest.approx([200] * num_ranks)


def test_parts_that_no_rank_has_are_not_drawn() -> None:
    assert set(lengths(drawn(summary_of()).figure)) == {
        "compute",
        "exposed_transfer",
        "exposed_wait",
        "data",
        "optimizer",
        "host",
    }


def test_title_unit_and_stacking() -> None:
    figure = drawn(summary_of()).figure
    assert figure.layout.title.text == "Step time of each rank by part"
    assert figure.layout.xaxis.title.text == "time per step (ms, mean of the measured steps)"
    assert figure.layout.barmode == "stack"


def test_many_ranks_stand_and_few_lie() -> None:
    few, many = drawn(summary_of(num_ranks=MAX_LYING_BARS)), drawn(summary_of(num_ranks=MAX_LYING_BARS + 1))
    assert {bar.orientation for bar in few.figure.data} == {"h"}
    assert {bar.orientation for bar in many.figure.data} == {"v"}
    assert many.figure.layout.yaxis.title.text == "time per step (ms, mean of the measured steps)"


def test_hover_tells_rank_part_share_and_meaning() -> None:
    wait = next(bar for bar in drawn(summary_of()).figure.data if bar.meta == "exposed_wait")
    assert wait.hovertext[0].replace("\u00a0", " ") == (
        "<b>rank 0: exposed wait</b><br>60.0 ms, 30 % of a step of 200 ms"
        "<br>blocked in a collective until the last rank arrives"
    )


def test_the_table_beside_holds_the_same_numbers() -> None:
    drawing = drawn(summary_of(num_ranks=4))
    assert drawing.columns[:3] == ("rank", "step (ms)", "compute (ms)")
    assert drawing.rows[LATE_RANK][:3] == ("2", "200", "140")
    for row in drawing.rows:
        assert sum(map(float, row[2:])) == float(row[1])


def test_ranks_without_a_partition_are_skipped_and_none_at_all_says_why() -> None:
    summary = summary_of(num_ranks=2)
    half = replace(summary, ranks=(summary.ranks[0], replace(summary.ranks[1], partition_ns=None)))
    assert [row[0] for row in drawn(half).rows] == ["0"]
    nothing = draw_step_parts(empty_summary())
    assert isinstance(nothing, Nothing)
    assert nothing.why
    assert nothing.remedy


def test_phases_sum_to_the_step_too() -> None:
    drawing = draw_step_phases(summary_of())
    assert isinstance(drawing, Drawing)
    bars = lengths(drawing.figure)
    assert [sum(column) for column in zip(*bars.values(), strict=True)] == pytest.approx([200] * 4)
    assert bars["backward"] == [120] * 4


def test_a_bubble_that_is_not_known_is_not_known_as_zero() -> None:
    summary = summary_of(num_ranks=2)
    known, unknown = summary.ranks
    parts = {**(known.partition_ns or {})}
    parts["compute"], parts["bubble"] = parts["compute"] - 1_000_000, 1_000_000
    unknown = replace(unknown, partition_ns={**(unknown.partition_ns or {}), "bubble": None})
    drawing = drawn(replace(summary, ranks=(replace(known, partition_ns=parts), unknown)))
    bubble = drawing.columns.index("pipeline bubble (ms)")
    assert [row[bubble] for row in drawing.rows] == ["1", "\u2013"]
    (bars,) = [bar for bar in drawing.figure.data if bar.meta == "bubble"]
    assert "not known, of a step of" in bars.hovertext[1]
    assert drawing.sentence.endswith("Not known on 1 of 2 ranks: pipeline bubble.")
    assert sum(1 for cell in drawing.rows[1] if cell == "\u2013") == 1
