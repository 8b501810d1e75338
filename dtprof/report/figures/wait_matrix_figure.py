"""Waits between pairs of ranks."""

from dtprof.analysis.communication.rank_pairs import MAX_PAIRED, pair_ranks
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_numbers import DURATIONS, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.rank_matrix_figure import draw_matrix

MAX_ROWS = 1000


def draw_wait_matrix(source: Source) -> Drawing | Nothing:
    """Draw exposed waits a step as a heatmap: rows wait, columns came last."""
    results = source.summary.ranks
    if len(results) > MAX_PAIRED:
        return Nothing(
            why=f"{len(results):,} ranks are too many for a matrix of pairs.",
            remedy=f"It is drawn for up to {MAX_PAIRED}; the page Stragglers names those who are waited for.",
        )
    known = {rank.rank: rank.waited_for_ns for rank in results if rank.waited_for_ns is not None}
    if not known:
        return Nothing(
            why="It is not known who waited for whom.",
            remedy="It takes measured steps, and operations that all members recorded on one clock.",
        )
    waited = pair_ranks([rank.rank for rank in results], known)
    if waited is None:
        return Nothing(why="No rank waits for another.", remedy="Those who wait at all wait for data, not for ranks.")
    figure = draw_matrix(
        waited,
        titles=("Exposed wait of a step, by who came last", "waits for rank", "rank"),
        units=DURATIONS,
        write=format_duration,
        describe=lambda waiter, culprit, time: f"<b>rank {waiter} waits for rank {culprit}</b><br>{time} a step",
    )
    pairs = waited.largest
    most, waiter, culprit = pairs[0]
    worst, share = waited.top_column
    return Drawing(
        plot=figure,
        sentence=f"Rank {waiter} waits most for rank {culprit}, {format_duration(most)} a step; rank {worst} "
        f"comes last in {format_share(share)} of the time that ranks wait. "
        "The last rank may itself have waited before: the page Stragglers follows waits back to their origin.",
        columns=("rank", "waits for rank", "a step"),
        rows=tuple((str(waiting), str(late), format_duration(time)) for time, waiting, late in pairs[:MAX_ROWS]),
    )
