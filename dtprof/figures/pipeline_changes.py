"""What more microbatches, interleaving or an even split would make of the bubble, by the formula of the schedule."""

import plotly.graph_objects as go

from dtprof.figures.drawing import Drawing, Nothing, marker, new_figure
from dtprof.figures.pipeline import NO_PIPELINE
from dtprof.figures.quantities import format_share
from dtprof.figures.source import Source


def draw_pipeline_changes(source: Source) -> Drawing | Nothing:
    """Draw one bar a change: what the schedule costs, and the other causes as they were measured."""
    if source.summary.pipeline is None:
        return NO_PIPELINE
    changes = source.closeup.pipeline.changes if source.closeup and source.closeup.pipeline else ()
    if not changes:
        return Nothing(
            why="What would change the bubble is not known.",
            remedy="There is a formula for GPipe, 1F1B and interleaved schedules whose bubble could be split.",
        )
    figure = new_figure(
        title="Bubble after a change", x_title="bubble, share of the window (%)", y_title="",
        height=104 + 32 * len(changes),
    )  # fmt: skip
    names = [change.what for change in changes]
    parts = (
        ("schedule", [100 * min(change.schedule_fraction, change.bubble_fraction) for change in changes]),
        ("other_causes", [100 * max(0.0, change.bubble_fraction - change.schedule_fraction) for change in changes]),
    )
    for part, values in parts:
        figure.add_trace(
            go.Bar(
                name="schedule, by the formula" if part == "schedule" else "other causes, as measured",
                meta=part,
                orientation="h",
                x=values,
                y=names,
                marker=marker(part),
                hoverinfo="text",
                hovertext=[
                    f"<b>{change.what}</b><br>bubble {format_share(change.bubble_fraction)}, of it "
                    f"{format_share(change.schedule_fraction)} for the schedule"
                    for change in changes
                ],
                textposition="none",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(rangemode="tozero")
    best = min(changes, key=lambda change: change.bubble_fraction)
    return Drawing(
        figure=figure,
        sentence=f"By the formula, {best.what} would bring the bubble "
        f"from {format_share(changes[0].bubble_fraction)} to "
        f"{format_share(best.bubble_fraction)}. "
        "This is arithmetic, not a replay: it takes all other causes as they are.",
        columns=("change", "schedule (%)", "bubble (%)"),
        rows=tuple(
            (change.what, f"{100 * change.schedule_fraction:.1f}", f"{100 * change.bubble_fraction:.1f}")
            for change in changes
        ),
    )
