"""Who waits for whom, and how long."""

import numpy as np

from dtprof.analysis.run_summary import MAX_PAIRED
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_numbers import DURATIONS, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.rank_matrix_figure import draw_matrix, largest_pairs

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
    ranks = [rank.rank for rank in results]
    place = {rank: position for position, rank in enumerate(ranks)}
    waited = np.zeros((len(ranks), len(ranks)), np.int64)
    for rank, by_culprit in known.items():
        for culprit, time_ns in by_culprit.items():
            if culprit in place:
                waited[place[rank], place[culprit]] = time_ns
    if not waited.any():
        return Nothing(why="No rank waits for another.", remedy="Those who wait at all wait for data, not for ranks.")
    figure = draw_matrix(
        waited,
        ranks,
        titles=("Exposed wait of a step, by who came last", "waits for rank", "rank"),
        units=DURATIONS,
        write=format_duration,
        describe=lambda waiter, culprit, time: f"<b>rank {waiter} waits for rank {culprit}</b><br>{time} a step",
    )
    pairs = largest_pairs(waited, ranks)
    most, waiter, culprit = pairs[0]
    of_all = waited.sum(axis=0)
    worst = int(np.argmax(of_all))
    return Drawing(
        figure=figure,
        sentence=f"Rank {waiter} waits most for rank {culprit}, {format_duration(most)} a step; rank {ranks[worst]} "
        f"comes last in {format_share(float(of_all[worst] / of_all.sum()))} of the time that ranks wait. "
        "The last rank may itself have waited before: the page Stragglers follows waits back to their origin.",
        columns=("rank", "waits for rank", "a step"),
        rows=tuple((str(waiting), str(late), format_duration(time)) for time, waiting, late in pairs[:MAX_ROWS]),
    )
