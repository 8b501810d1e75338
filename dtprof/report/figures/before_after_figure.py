"""One step as it is replayed: as it was above, after the best change below, on one scale of time."""

from typing import Any

from dtprof.analysis.results import TimelineBar
from dtprof.analysis.whatif.replayed_steps import ReplayedStep
from dtprof.report.figures.change_gains_figure import find_prediction
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, name_rows, new_figure, rank_names
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of

ROW_PX = 26
GAP = 1.4
"""Rows between the two steps."""
NO_CHANGE = Nothing(
    why="No change that you can make shortens steps beyond noise, so there is no step to compare.",
    remedy="dtprof whatif predicts others: faster links or devices, more ranks, several changes at once.",
)


def draw_before_after(source: Source) -> Drawing | Nothing:
    """Draw what ranks do and wait for, before and after."""
    found = find_prediction(source)
    if isinstance(found, Nothing):
        return found
    if len(found.timelines) != 2:
        return NO_CHANGE
    before, after = found.timelines
    offset = len(before.ranks) + GAP
    figure = new_figure(
        title="One step before and after",
        x_title="since the step began (ms)",
        y_title="",
        height=int(112 + ROW_PX * (offset + len(after.ranks))),
    )
    placed = [(before, 0.0), (after, offset)]
    kinds = dict.fromkeys(bar.kind for step, _ in placed for bar in step.intervals)
    for kind in sorted(kinds, key=lambda kind: hue_of(kind).label):
        figure.add_trace(_bars(kind, placed))
    for step, top in placed:
        figure.add_annotation(
            text=f"<b>{as_label(step.title)}</b>: {format_duration(step.step_ns)}",
            x=0,
            y=top - 0.95,
            xref="paper",
            xanchor="left",
            yref="y",
            showarrow=False,
        )
    name_rows(
        figure,
        [top + row for step, top in placed for row in range(len(step.ranks))],
        rank_names([rank for step, _ in placed for rank in step.ranks]),
        bottom=offset + len(after.ranks) - 0.4,
        top=-1.5,
    )
    gain = 1 - after.step_ns / before.step_ns if before.step_ns else 0.0
    return Drawing(
        plot=figure,
        sentence=f"With {after.title}, this step of {format_duration(before.step_ns)} takes "
        f"{format_duration(after.step_ns)}: {100 * gain:.1f} % less. Both are replayed.",
        columns=("step", "rank", "what", "begins (ms)", "lasts (ms)"),
        rows=tuple(
            (
                step.title,
                str(bar.rank),
                bar.name,
                f"{bar.begin_ns / 1e6:.3f}",
                f"{(bar.end_ns - bar.begin_ns) / 1e6:.3f}",
            )
            for step, _ in placed
            for bar in step.intervals
        ),
        zooms=True,
    )


def _bars(kind: str, placed: list[tuple[ReplayedStep, float]]) -> Any:
    mine: list[tuple[TimelineBar, float, str]] = []
    for step, top in placed:
        row_of = {rank: row for row, rank in enumerate(step.ranks)}
        mine += [(bar, top + row_of[bar.rank], step.title) for bar in step.intervals if bar.kind == kind]
    return bars(
        as_label(hue_of(kind).label or kind),
        kind,
        [row for _, row, _ in mine],
        [(bar.end_ns - bar.begin_ns) / 1e6 for bar, _, _ in mine],
        [as_label(f"{bar.label}\n{title}") for bar, _, title in mine],
        base=[bar.begin_ns / 1e6 for bar, _, _ in mine],
        width=0.86,
    )
