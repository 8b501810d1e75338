"""Figures of the pages draw what the results hold, and say why where there is nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dtprof.analysis.results import CriticalPathResult, MemoryFormula, PathOperation, PathRank
from dtprof.report.figures.bandwidth_figure import _name_speed
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_registry import FIGURES
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.tracks_figure import encode_tracks
from dtprof.report.pages.page_dashboard import Panel
from dtprof.report.pages.page_findings import render_critical_path
from dtprof.report.pages.page_grid import render_rank_grid
from tests.report.example_closeups import nodes_of, source_of, tracks_of
from tests.report.example_summaries import MS, empty_summary

PANEL = Panel(name="x", anchor="x", title="X")


def draw(name: str, source: Source) -> Drawing:
    drawn = FIGURES[name](source)
    assert isinstance(drawn, Drawing), drawn
    return drawn


def grid_of(source: Source) -> Mapping[str, Any]:
    drawn = render_rank_grid(PANEL, source)
    assert not isinstance(drawn, Nothing)
    grid: Mapping[str, Any] = drawn[1]["grid"]
    return grid


def test_cells_of_a_dense_grid_hold_numbers_in_one_unit_that_is_said() -> None:
    # Compute takes 140 ms on rank 2 of 40, 90 ms on the others, 0.085 ms on rank 0 from here on.
    summary = source_of(num_ranks=40).summary
    ranks = list(summary.ranks)
    assert ranks[0].partition_ns is not None
    ranks[0] = replace(ranks[0], partition_ns={**ranks[0].partition_ns, "compute": 85_000}, peak_bytes=3 << 29)
    grid = grid_of(Source(summary=replace(summary, ranks=tuple(ranks))))
    compute, peak, exposed = (
        next(one for one in grid["metrics"] if one["key"] == key) for key in ("compute", "peak", "exposed")
    )
    assert (compute["unit"], compute["short"][:3]) == ("ms", ["<1", "90", "140"])
    assert (peak["unit"], peak["short"][:2]) == ("GiB", ["1.50", "0.50"])
    assert exposed["unit"] == "%"
    assert all(len(text) <= 5 for metric in grid["metrics"] for text in metric["short"])
    assert "short" not in grid_of(source_of(num_ranks=4))["metrics"][0], "there is room for the unit"


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_run_without_anything_says_why_and_what_to_do(name: str) -> None:
    drawn = FIGURES[name](Source(summary=empty_summary()))
    assert isinstance(drawn, Nothing)
    assert drawn.why.endswith(".")
    assert drawn.remedy.endswith(".")


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"blame"}))
def test_every_figure_has_titles_units_a_sentence_and_its_numbers(name: str) -> None:
    drawn = draw(name, source_of())
    layout = drawn.figure.layout
    assert layout.title.text
    assert layout.xaxis.title.text or layout.yaxis.title.text
    assert drawn.sentence.endswith(".")
    assert drawn.rows
    assert {len(row) for row in drawn.rows} == {len(drawn.columns)}
    assert all(trace.hoverinfo in ("text", "skip") for trace in drawn.figure.data)


def test_the_planned_schedule_stands_above_the_measured_one_on_one_scale() -> None:
    figure = draw("pipeline", source_of()).figure
    forward = [trace for trace in figure.data if trace.legendgroup == "F"]
    planned, measured = forward
    # Rows 0 and 1 are planned, 2.7 and 3.7 measured; stage 1 begins its forwards at 10 and 20 ms.
    assert list(planned.y) == [0, 0, 1, 1]
    assert [round(y - x, 3) for x, y in zip(planned.y, measured.y, strict=True)] == [2.7] * 4
    assert list(measured.base) == [0, 10, 10, 20]
    assert list(measured.text) == ["F0", "F1", "F0", "F1"]
    assert list(measured.customdata) == [0, 0, 1, 1]
    bubble = next(trace for trace in figure.data if trace.meta == "bubble")
    assert list(bubble.x) == [90, 90]


def test_the_parts_of_the_bubble_are_drawn_by_cause_and_by_time() -> None:
    rows = draw("bubble_parts", source_of()).rows
    assert [(row[0], row[2]) for row in rows[:2]] == [("by cause", "33.33"), ("by cause", "0.00")]
    assert sum(float(row[2]) for row in rows if row[0] == "by time") == pytest.approx(100 / 3, abs=0.02)


def test_a_cause_that_makes_the_bubble_smaller_is_named() -> None:
    source = source_of()
    pipeline = source.summary.pipeline
    assert pipeline is not None
    assert "Left of 0" not in draw("bubble_parts", source).sentence
    gained = replace(pipeline, parts={"schedule": 0.3, "imbalance": 0.0, "exposed_p2p": 0.05, "jitter": -0.01})
    sentence = draw("bubble_parts", replace(source, summary=replace(source.summary, pipeline=gained))).sentence
    assert sentence.endswith(" Left of 0 is what makes it smaller: jitter.")


def test_devices_have_lines_of_their_own_and_say_why_there_is_no_gpu() -> None:
    drawn = draw("devices", source_of())
    assert [trace.name for trace in drawn.figure.data if trace.yaxis == "y"] == ["host-0 host", "host-1 host"]
    assert drawn.sentence.startswith("2 hosts, 0 GPUs: on average processors are busy for 15\xa0% of the time.")
    assert "no samples of GPUs (NVML cannot be used)" in drawn.sentence


def test_a_device_has_one_colour_and_one_place_in_the_legend_for_all_its_quantities() -> None:
    traces = draw("devices", replace(source_of(), nodes=nodes_of(1, gpus_each=2))).plot.traces
    listed = [trace["name"] for trace in traces if trace["showlegend"]]
    assert listed == ["host", "gpu 0", "gpu 1"]
    colours = {(trace["name"], trace["line"]["color"]) for trace in traces}
    assert len(colours) == len({colour for _, colour in colours}) == 3


def test_of_many_devices_the_least_the_median_and_the_most_are_drawn() -> None:
    drawn = draw("devices", replace(source_of(), nodes=nodes_of(9, gpus_each=8)))
    hosts = {trace.name: trace.y[0] for trace in drawn.figure.data if trace.yaxis == "y" and "hosts" in trace.name}
    # Hosts are busy for 10, 20, ... 90 %.
    assert hosts == {"least of 9 hosts": 10, "median of 9 hosts": 50, "most of 9 hosts": 90}
    assert len(drawn.figure.data) == 3 * (2 + 3)  # hosts: busy, memory; GPUs: busy, power, temperature
    assert "GPUs are busy for 50\xa0% of the time" in drawn.sentence


def test_waits_are_drawn_by_pair_and_the_sentence_names_who_comes_last() -> None:
    drawn = draw("wait_matrix", source_of())
    assert drawn.figure.data[0].z.tolist() == [[1, 0, 50, 0], [1, 0, 50, 0], [0, 0, 0, 0], [1, 0, 50, 0]]
    assert drawn.sentence.startswith("Rank 3 waits most for rank 2, 50.0\xa0ms a step; rank 2 comes last in 98\xa0%")


def test_waits_of_very_many_ranks_are_drawn_by_place_along_an_axis() -> None:
    drawn = draw("wait_matrix", source_of(num_ranks=1024))
    assert drawn.figure.data[0].z.shape == (2, 2)
    # Of the 1,024 ranks all but rank 2 wait 50 ms for it and 1 ms for rank 0; both lie at pp 0.
    assert drawn.rows == (("1", "0", "51.0\xa0ms"), ("0", "0", "50.9\xa0ms"))
    assert drawn.sentence.startswith(
        "A rank of pp 1 waits most for pp 0, 51.0\xa0ms a step; pp 0 comes last in 100\xa0%"
    )


def test_memory_stands_beside_its_formula_and_above_the_phases() -> None:
    source = source_of()
    formula = MemoryFormula(
        scheme="zero1", shards=2, state_bytes=1, state_formula_bytes=400 << 20, by_scheme_bytes={},
        activation_bytes=None, activation_formula_bytes=100 << 20,
    )  # fmt: skip
    ranks = tuple(replace(rank, memory_formula=formula) for rank in source.summary.ranks)
    figure = draw("memory_course", replace(source, summary=replace(source.summary, ranks=ranks))).figure
    lines = {trace.name: list(trace.y) for trace in figure.data if trace.type == "scatter" and trace.line.dash}
    assert lines == {
        "model state, by formula": [400, 400],
        "model state and activations, by formula": [500, 500],
    }
    below = {trace.meta: trace.y[0] for trace in figure.data if trace.yaxis == "y2"}
    assert below == {"forward": 40, "backward": 60}


def test_the_grid_lays_the_first_axis_down_and_the_others_right() -> None:
    grid = grid_of(source_of())
    assert grid["axes"] == ["pp", "dp"]
    assert [(cell["rank"], cell["row"], cell["column"]) for cell in grid["cells"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    compute = next(metric for metric in grid["metrics"] if metric["key"] == "compute")
    assert compute["values"] == [90 * MS, 90 * MS, 140 * MS, 90 * MS]
    assert compute["top"] == 140 * MS


def test_a_thousand_ranks_are_folded_and_no_two_share_a_place() -> None:
    cells = grid_of(source_of(num_ranks=1024))["cells"]
    assert len({(cell["row"], cell["column"]) for cell in cells}) == 1024
    assert max(cell["column"] for cell in cells) == 31


def test_ranks_whose_axes_do_not_tell_them_apart_stand_in_order() -> None:
    source = source_of()
    assert source.closeup is not None
    same = replace(source.closeup, coordinates={rank: {"dp": 0} for rank in range(4)})
    grid = grid_of(replace(source, closeup=same))
    assert grid["axes"] == []
    assert [(cell["row"], cell["column"]) for cell in grid["cells"]] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_tracks_survive_their_way_to_the_browser() -> None:
    tracks = tracks_of(2)
    sent = encode_tracks(tracks)
    for track, rank in zip(tracks.tracks, sent["ranks"], strict=True):
        assert (np.cumsum(rank["begin"]) * sent["tick_ns"] == track.begin_ns).all()
        assert (np.array(rank["length"]) * sent["tick_ns"] == track.length_ns).all()
        lanes, kinds, names = np.array(sent["what"])[rank["what"]].T
        assert (lanes == track.lane).all()
        assert (kinds == track.kind).all()
        assert (names == track.name).all()


def test_names_of_the_run_are_escaped_in_every_figure() -> None:
    evil = "<b>x</b>"
    source = source_of()
    summary = source.summary
    collectives = tuple(replace(collective, op=evil, group=evil, api=evil) for collective in summary.collectives)
    groups = tuple(replace(group, name=evil, description=evil, axis=evil) for group in summary.groups)
    hostile = replace(source, summary=replace(summary, collectives=collectives, groups=groups))
    for name in ("bandwidth", "exposed_by_axis", "lateness"):
        assert evil not in str(draw(name, hostile).figure.to_json()).replace("\\u003c", "<").replace("\\u003e", ">")


@pytest.mark.parametrize(
    ("gb_per_s", "name"),
    [(1e-9, "1 B/s"), (1e-5, "10 kB/s"), (1e-4, "100 kB/s"), (0.1, "100 MB/s"), (1.0, "1 GB/s"), (1e3, "1 TB/s")],
)
def test_bandwidths_are_named_in_the_unit_that_suits_them(gb_per_s: float, name: str) -> None:
    assert _name_speed(gb_per_s) == name


def test_a_send_that_was_only_handed_over_is_not_the_fastest_unless_there_is_nothing_else() -> None:
    summary = source_of().summary
    (reduced,) = (collective for collective in summary.collectives if collective.busbw_gb_per_s)
    sent = replace(reduced, op="send", bytes=2**20, busbw_gb_per_s=211.4)
    handed_over = "A send is over once its message is handed over"
    both = draw("bandwidth", Source(summary=replace(summary, collectives=(reduced, sent)))).sentence
    assert "2 operations by group and api; the fastest is all_reduce of 25.0\u00a0MiB with 3.90 GB/s." in both
    assert handed_over in both
    alone = draw("bandwidth", Source(summary=replace(summary, collectives=(sent,)))).sentence
    assert "the fastest is send of 1.00\u00a0MiB" in alone
    assert handed_over not in draw("bandwidth", source_of()).sentence


def test_lateness_is_a_bar_over_most_operations_with_the_median_and_the_slowest_hundredth_marked() -> None:
    # 10 %: 1 ms, median 2, 90 %: 5, 99 %: 9.
    most, median, slowest = draw("lateness", source_of()).figure.data
    assert (most.name, tuple(most.base), tuple(most.x)) == ("10 % to 90 %", (1.0,), (4.0,))
    assert (median.name, tuple(median.x), slowest.name, tuple(slowest.x)) == ("median", (2.0,), "99 %", (9.0,))


def test_critical_path_lists_the_longest_of_each_kind_first_and_says_what_groups_are_for() -> None:
    summary = source_of().summary
    group = replace(summary.groups[0], name="7", axis="tp")
    path = CriticalPathResult(
        steps=1,
        step_ns=10 * MS,
        phases_ns={"data": 1 * MS, "forward": 2 * MS, "backward": 0},
        transfer_ns=3 * MS,
        operations=(PathOperation(op="all_reduce", group="7", transfer_ns=3 * MS),),
        ranks=(PathRank(rank=0, work_ns=1 * MS), PathRank(rank=1, work_ns=2 * MS)),
    )
    page = str(render_critical_path(PANEL, Source(summary=replace(summary, groups=(group,), critical_path=path)), ()))
    places = [page.index(text) for text in ("forward", "data wait", ">tp<", "work of rank 1", "work of rank 0")]
    assert places == sorted(places)
    assert "backward" not in page


def test_stages_that_take_the_same_time_are_not_known_as_a_range() -> None:
    source = source_of()
    assert source.closeup is not None
    assert source.closeup.pipeline is not None
    chart = source.closeup.pipeline
    even = replace(chart, stage_times=tuple(replace(chart.stage_times[0], stage=stage) for stage in range(2)))
    drawing = draw("stage_times", replace(source, closeup=replace(source.closeup, pipeline=even)))
    assert "on every stage." in drawing.sentence


def test_lateness_says_how_many_groups_it_leaves_out() -> None:
    source = source_of()
    assert source.closeup is not None
    traffic = source.closeup.traffic
    many = replace(traffic, lateness=traffic.lateness[:1] * 17)
    drawing = draw("lateness", replace(source, closeup=replace(source.closeup, traffic=many)))
    assert drawing.sentence.endswith(" 16 of 17 groups are drawn.")


def test_microbatch_numbers_are_skipped_where_they_could_not_be_read() -> None:
    assert draw("pipeline", source_of()).figure.layout.uniformtext.to_plotly_json() == {"mode": "hide", "minsize": 8}


def test_the_grid_leaves_a_bubble_that_is_not_known_open() -> None:
    summary = source_of(num_ranks=2).summary
    ranks = tuple(
        replace(rank, partition_ns={**(rank.partition_ns or {}), "bubble": bubble})
        for rank, bubble in zip(summary.ranks, (MS, None), strict=True)
    )
    grid = grid_of(Source(summary=replace(summary, ranks=ranks)))
    (bubble,) = [one for one in grid["metrics"] if one["key"] == "bubble"]
    assert (bubble["values"], bubble["texts"][1]) == ([MS, None], "not known")


def test_the_grid_of_one_rank_speaks_of_one() -> None:
    drawn = render_rank_grid(PANEL, source_of(num_ranks=1))
    assert not isinstance(drawn, Nothing)
    assert "One rank. Choose it" in drawn[0]
    assert "1 ranks" not in drawn[0]
