"""Step time over steps: the middle, the band, what is not measured, and a scale that fits the measured steps."""

from dataclasses import replace
from typing import Any

import pytest

from dtprof.analysis.results import Steps, StepSeries, Summary
from dtprof.analysis.steps.step_lanes import MAX_POINTS
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.step_times_figure import draw_step_times
from tests.report.example_summaries import MS, empty_summary, summary_of


def with_series(*series: StepSeries, used: tuple[int, int] | None) -> Summary:
    summary = summary_of(num_ranks=len(series))
    return replace(summary, step_series=series, steps=replace(summary.steps, used=used))


def drawn(summary: Summary) -> Drawing:
    drawing = draw_step_times(summary)
    assert isinstance(drawing, Drawing)
    return drawing


def trace(drawing: Drawing, meta: str) -> Any:
    return next(trace for trace in drawing.figure.data if trace.meta == meta)


def test_line_is_the_median_and_band_the_extremes_of_the_ranks() -> None:
    # step 2: 100 110 140, step 3: 200 200 230
    summary = with_series(
        *(
            StepSeries(rank=rank, duration_ns=(a * MS, b * MS), first_step=2)
            for rank, (a, b) in enumerate([(100, 200), (110, 200), (140, 230)])
        ),
        used=(2, 3),
    )
    drawing = drawn(summary)
    assert list(trace(drawing, "ink").x) == [2, 3]
    assert list(trace(drawing, "ink").y) == [110, 200]
    assert list(trace(drawing, "edge").y) == [100, 200]
    assert list(trace(drawing, "band").y) == [140, 230]
    assert drawing.rows == (("2", "100", "110", "140", "2"), ("3", "200", "200", "230", "2"))


def test_ranks_may_know_different_steps() -> None:
    summary = with_series(
        StepSeries(rank=0, duration_ns=(100 * MS,) * 3, first_step=2),
        StepSeries(rank=1, duration_ns=(120 * MS,) * 2, first_step=4),
        used=(2, 4),
    )
    assert [row[0] for row in drawn(summary).rows] == ["2", "3", "4", "5"]
    assert drawn(summary).rows[3] == ("5", "120", "120", "120", "1")


def test_steps_skipped_are_on_grey_ground() -> None:
    drawing = drawn(summary_of(num_steps=20))
    (ground,) = drawing.figure.layout.shapes
    assert (ground.x0, ground.x1) == (1.5, 2.5)  # step 2 is the first known, step 3 the first used
    assert "warm-up, not measured" in [note.text for note in drawing.figure.layout.annotations]


def test_the_scale_fits_the_used_steps_and_a_step_above_it_is_named() -> None:
    figure = drawn(summary_of(num_steps=20)).figure
    assert figure.layout.yaxis.range[0] == 0
    assert 200 < figure.layout.yaxis.range[1] < 300
    assert any("step 2: 2.00\u00a0s, above the scale" in note.text for note in figure.layout.annotations)


def test_axes_have_titles_and_units() -> None:
    figure = drawn(summary_of()).figure
    assert figure.layout.title.text == "Step time over steps"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("step", "step time (ms)")


def test_many_steps_share_points_and_lose_neither_the_fastest_nor_the_slowest() -> None:
    durations = [100 * MS] * 10_000
    durations[7_000] = 150 * MS
    durations[7_001] = 50 * MS
    drawing = drawn(with_series(StepSeries(rank=0, duration_ns=tuple(durations), first_step=1), used=(1, 10_000)))
    assert len(trace(drawing, "ink").y) == MAX_POINTS
    assert max(trace(drawing, "band").y) == 150
    assert min(trace(drawing, "edge").y) == 50


def test_one_rank_has_no_band() -> None:
    drawing = drawn(summary_of(num_ranks=1))
    assert [trace.meta for trace in drawing.figure.data] == ["ink"]


def test_no_used_steps_is_said() -> None:
    summary = replace(summary_of(), steps=Steps(count=2, used=None, duration_ns=None))
    assert "none of them is measured" in drawn(summary).sentence


def test_used_steps_that_the_series_does_not_hold_do_no_harm() -> None:
    drawing = drawn(with_series(StepSeries(rank=0, duration_ns=(100 * MS,), first_step=2), used=(50, 60)))
    assert list(trace(drawing, "ink").y) == [100]
    assert drawing.sentence.startswith("Duration of 1 step. Steps 50 to 60 are measured: ")


@pytest.mark.parametrize("series", [(), (StepSeries(rank=0, duration_ns=()),)])
def test_no_step_says_why(series: tuple[StepSeries, ...]) -> None:
    assert isinstance(draw_step_times(replace(empty_summary(), step_series=series)), Nothing)
