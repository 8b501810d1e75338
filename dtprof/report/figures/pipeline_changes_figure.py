"""Predicted bubble with more microbatches, interleaving or an even split, by replay or by formula."""

from dtprof.analysis.pipeline.schedule_changes import Changes
from dtprof.report.figures.drawing import Drawing, Nothing, bars, new_figure, stack_bars
from dtprof.report.figures.figure_numbers import format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.pipeline_figure import explain_no_pipeline


def draw_pipeline_changes(source: Source) -> Drawing | Nothing:
    """Draw one bar per change: the cost of the schedule, and the other causes."""
    if source.summary.pipeline is None:
        return explain_no_pipeline(source.summary)
    chart = source.closeup.pipeline if source.closeup else None
    changes = chart.changes.found if chart is not None else ()
    if chart is None or not changes:
        return Nothing(
            why="What would change the bubble is not known.",
            remedy="GPipe, 1F1B and interleaved 1F1B are replayed; of looped BFS a formula tells where its bubble "
            "could be split.",
        )
    is_replayed = chart.changes.replay_error is not None
    figure = new_figure(
        title="Bubble after a change", x_title="bubble (%)", y_title="",
        height=104 + 32 * len(changes),
    )  # fmt: skip
    names = [change.what for change in changes]
    parts = (
        ("schedule", [100 * (change.bubble_fraction - change.other_fraction) for change in changes]),
        ("other_causes", [100 * change.other_fraction for change in changes]),
    )
    legend = {
        "schedule": "schedule" if is_replayed else "schedule, by the formula",
        "other_causes": "other causes, replayed" if is_replayed else "other causes, as measured",
    }
    for part, values in parts:
        figure.add_trace(
            bars(
                legend[part],
                part,
                names,
                values,
                [
                    f"<b>{change.what}</b><br>bubble {format_share(change.bubble_fraction)}, of it "
                    f"{format_share(change.schedule_fraction)} for the schedule"
                    for change in changes
                ],
            )
        )
    stack_bars(figure, gap=0.3)
    return Drawing(
        plot=figure,
        sentence=_describe(chart.changes),
        columns=("change", "schedule (%)", "bubble (%)"),
        rows=tuple(
            (change.what, f"{100 * change.schedule_fraction:.1f}", f"{100 * change.bubble_fraction:.1f}")
            for change in changes
        ),
    )


def _describe(changes: Changes) -> str:
    now, best = changes.found[0], changes.best
    way = "Replayed" if changes.replay_error is not None else "By the formula"
    if best is None:
        said = f"{way}, none of these changes makes the bubble of {format_share(now.bubble_fraction)} smaller."
    else:
        said = (
            f"{way}, {best.what} would bring the bubble from {format_share(now.bubble_fraction)} to "
            f"{format_share(best.bubble_fraction)}."
        )
    if changes.replay_error is None:
        return f"{said} This is arithmetic, not a replay: it takes all other causes as they are."
    message = f", with {format_duration(changes.message_ns)} for a message" if changes.message_ns else ""
    return (
        f"{said} Replayed as it ran{message}, the bubble of a step is off by {100 * changes.replay_error:.1f} "
        "percentage points on average."
    )
