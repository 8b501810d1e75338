"""The timeline puts every interval where it was, on the lane of its rank."""

from dataclasses import replace

from dtprof.analysis.results import Summary, Timeline, TimelineBar
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.timeline_figure import RANK_PITCH, draw_timeline
from tests.report.example_summaries import MS, empty_summary, summary_of


def drawn(summary: Summary) -> Drawing:
    drawing = draw_timeline(summary)
    assert isinstance(drawing, Drawing)
    return drawing


def test_bars_begin_and_last_as_recorded() -> None:
    data = {bar.meta: bar for bar in drawn(summary_of(num_ranks=2)).figure.data}
    # of each step of 200 ms: forward from 10 to 60
    assert list(data["forward"].base) == [10, 210, 410] * 2
    assert list(data["forward"].x) == [50] * 6


def test_each_rank_has_a_lane_for_phases_and_one_for_communication() -> None:
    data = {bar.meta: bar for bar in drawn(summary_of(num_ranks=2)).figure.data}
    assert set(data["backward"].y) == {0, RANK_PITCH}
    assert set(data["exposed"].y) == {1, RANK_PITCH + 1}


def test_every_interval_is_drawn_once_and_stands_in_the_table() -> None:
    summary = summary_of(num_ranks=3)
    assert summary.timeline is not None
    drawing = drawn(summary)
    assert sum(len(bar.x) for bar in drawing.figure.data) == len(summary.timeline.intervals) == len(drawing.rows)
    assert drawing.rows[1] == ("0", "phases", "forward", "forward", "10.000", "50.000")


def test_exposed_lies_on_top_of_overlapped() -> None:
    kinds = [bar.meta for bar in drawn(summary_of()).figure.data]
    assert kinds.index("exposed") > kinds.index("overlapped")


def test_title_unit_window_and_clock() -> None:
    drawing = drawn(summary_of())
    assert drawing.figure.layout.title.text == "Timeline of steps 10 to 12"
    assert drawing.figure.layout.xaxis.title.text == "time since the beginning of the window (ms)"
    assert tuple(drawing.figure.layout.xaxis.range) == (0, 600)
    assert drawing.sentence.replace("\u00a0", " ") == (
        "Timeline of steps 10 to 12: 600 ms of 4 ranks on one clock with an error of 0 ns."
    )


def test_what_was_skipped_and_an_unknown_clock_error_are_said() -> None:
    summary = summary_of()
    assert summary.timeline is not None
    sentence = drawn(replace(summary, clock_error_ns=None, timeline=replace(summary.timeline, left_out=1200))).sentence
    assert "an unknown error" in sentence
    assert "1,200 shorter intervals are left out" in sentence


def test_labels_are_text_even_where_plotly_would_read_tags() -> None:
    interval = TimelineBar(
        rank=0,
        lane="communication",
        name="x",
        kind="<i>odd</i>",
        begin_ns=0,
        end_ns=MS,
        label="all_reduce of <b>&lt;g&gt;</b>\ntrain.py:1" + "x" * 500,
    )
    timeline = Timeline(first_step=1, last_step=1, origin_ns=0, end_ns=MS, intervals=(interval,), left_out=0)
    (bar,) = drawn(replace(summary_of(num_ranks=1), timeline=timeline)).figure.data
    first, second = bar.hovertext[0].split("<br>")
    assert first == "all_reduce of &lt;b&gt;&amp;lt;g&amp;gt;&lt;/b&gt;"
    assert len(second) == 120
    assert bar.name == "&lt;i&gt;odd&lt;/i&gt;"


def test_no_timeline_says_why() -> None:
    nothing = draw_timeline(empty_summary())
    assert isinstance(nothing, Nothing)
    assert "No step is complete" in nothing.why
    apart = draw_timeline(replace(summary_of(), timeline=None, clock_error_ns=None, hosts=("a", "b")))
    assert isinstance(apart, Nothing)
    assert "clocks" in apart.why
