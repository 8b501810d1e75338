"""A few steps of all ranks on one clock: two lanes a rank, phases above communication."""

from collections.abc import Sequence
from typing import Any

from dtprof.analysis.results import PHASES, Summary, Timeline, TimelineBar
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, name_rows, new_figure
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.palette import HUES, hue_of
from dtprof.report.figures.plot import Plot

LANES = ("phases", "communication")
RANK_PITCH = 2.5
"""Distance of two ranks in lanes; the half above two is the gap between them."""
MAX_NAMED_LANES = 8
MAX_NAMED_RANKS = 32
MAX_HEIGHT = 2_400


def draw_timeline(summary: Summary) -> Drawing | Nothing:
    """Draw the intervals of the timeline, time in milliseconds since its beginning."""
    timeline = summary.timeline
    if timeline is None and summary.clock_error_ns is None and len(summary.hosts) > 1:
        return Nothing(
            why="The clocks of the hosts are not aligned, so there is no window that all ranks share.",
            remedy="A run on one host has a timeline.",
        )
    if timeline is None or not timeline.intervals:
        return Nothing(
            why="No step is complete on every rank, so there is no window that all ranks share.",
            remedy="Let the job end at least two optimizer steps on every rank.",
        )
    ranks = sorted({interval.rank for interval in timeline.intervals})
    lane_px = 20 if len(ranks) <= 4 else 14 if len(ranks) <= 16 else 9 if len(ranks) <= 32 else 5
    figure = new_figure(
        title=_title(timeline),
        x_title="time since the beginning of the window (ms)",
        y_title="",
        height=min(MAX_HEIGHT, int(80 + lane_px * RANK_PITCH * len(ranks))),
    )
    for kind in _kinds(timeline.intervals):
        figure.add_trace(_bars(kind, timeline.intervals, ranks))
    _name_lanes(figure, ranks)
    figure.update_xaxes(range=[0, timeline.end_ns / 1e6])
    return Drawing(
        plot=figure,
        sentence=_describe(timeline, ranks, summary.time_error_ns),
        columns=("rank", "lane", "what", "kind", "begins (ms)", "lasts (ms)"),
        rows=tuple(
            (
                str(interval.rank),
                interval.lane,
                interval.name,
                interval.kind,
                f"{interval.begin_ns / 1e6:.3f}",
                f"{(interval.end_ns - interval.begin_ns) / 1e6:.3f}",
            )
            for interval in timeline.intervals
        ),
        zooms=True,
    )


def _title(timeline: Timeline) -> str:
    if timeline.first_step == timeline.last_step:
        return f"Timeline of step {timeline.first_step}"
    return f"Timeline of steps {timeline.first_step} to {timeline.last_step}"


def _kinds(intervals: Sequence[TimelineBar]) -> list[str]:
    present = {interval.kind for interval in intervals}
    order = dict.fromkeys((*PHASES, *HUES))
    return [kind for kind in order if kind in present] + sorted(present - order.keys())


def _bars(kind: str, intervals: Sequence[TimelineBar], ranks: Sequence[int]) -> Any:
    row_of = {rank: position for position, rank in enumerate(ranks)}
    mine = [interval for interval in intervals if interval.kind == kind]
    return bars(
        as_label(hue_of(kind).label or kind),
        kind,
        [row_of[interval.rank] * RANK_PITCH + (interval.lane == LANES[1]) for interval in mine],
        [(interval.end_ns - interval.begin_ns) / 1e6 for interval in mine],
        [as_label(interval.label) for interval in mine],
        base=[interval.begin_ns / 1e6 for interval in mine],
        width=0.92,
    )


def _name_lanes(figure: Plot, ranks: Sequence[int]) -> None:
    every = -(-len(ranks) // MAX_NAMED_RANKS)
    if len(ranks) <= MAX_NAMED_LANES:
        places = [position * RANK_PITCH + lane for position in range(len(ranks)) for lane in (0, 1)]
        names = [
            f"<b>rank {rank}</b>  {lane}" if lane == LANES[0] else lane
            for rank in ranks
            for lane in ("phases", "comm.")
        ]
    else:
        places = [position * RANK_PITCH + 0.5 for position in range(0, len(ranks), every)]
        names = [f"rank {rank}" for rank in ranks[::every]]
    name_rows(figure, places, names, bottom=len(ranks) * RANK_PITCH - 0.9, top=-0.6)


def _describe(timeline: Timeline, ranks: Sequence[int], time_error_ns: int | None) -> str:
    window = format_duration(timeline.end_ns)
    clock = "an unknown error" if time_error_ns is None else f"an error of {format_duration(time_error_ns)}"
    left_out = f" {timeline.left_out:,} shorter intervals are left out." if timeline.left_out else ""
    if len(ranks) == 1:
        return f"{_title(timeline)}: {window} of rank {ranks[0]}.{left_out}"
    return f"{_title(timeline)}: {window} of {len(ranks)} ranks on one clock with {clock}.{left_out}"
