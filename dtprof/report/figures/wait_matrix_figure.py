"""Waits between pairs of ranks."""

from dtprof.analysis.communication.rank_pairs import pair_ranks
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_numbers import DURATIONS, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.rank_matrix_figure import draw_matrix

MAX_ROWS = 1000


def draw_wait_matrix(source: Source) -> Drawing | Nothing:
    """Draw exposed waits a step as a heatmap: rows wait, columns came last."""
    results = source.summary.ranks
    known = {rank.rank: rank.waited_for_ns for rank in results if rank.waited_for_ns is not None}
    if not known:
        return Nothing(
            why="It is not known who waited for whom.",
            remedy="It takes measured steps, and operations that all members recorded on one clock.",
        )
    places = source.closeup.coordinates if source.closeup else None
    waited = pair_ranks([rank.rank for rank in results], known, places)
    if waited is None:
        return Nothing(why="No rank waits for another.", remedy="Those who wait at all wait for data, not for ranks.")
    title = "Exposed wait of a step, by who came last"
    if not waited.is_by_rank:
        waited, title = waited.averaged(), f"{title}: means of {waited.row_words}"
    figure = draw_matrix(
        waited,
        title=title,
        axis_titles=("waits for", ""),
        units=DURATIONS,
        write=format_duration,
        describe=lambda waiter, culprit, time: f"<b>{waiter} waits for {culprit}</b><br>{time} a step",
    )
    pairs = waited.largest
    most, waiter, culprit = pairs[0]
    worst, share = waited.top_column
    who = waited.label(waiter).capitalize() if waited.is_by_rank else f"A rank of {waited.label(waiter)}"
    return Drawing(
        plot=figure,
        sentence=f"{who} waits most for {waited.label(culprit)}, {format_duration(most)} a step; {waited.label(worst)} "
        f"comes last in {format_share(share)} of the time that ranks wait. "
        "The last rank may itself have waited before: the page Stragglers follows waits back to their origin.",
        columns=(waited.unit, f"waits for {waited.unit}", "a step"),
        rows=tuple(
            (waited.names[row], waited.names[column], format_duration(time)) for time, row, column in pairs[:MAX_ROWS]
        ),
    )
