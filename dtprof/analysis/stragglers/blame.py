"""Pass waits back along the chain of waiting ranks, to the ranks whose own work was long.

Everything is reckoned per rank and bin of steps, in flat columns of num_bins * num_ranks cells; nothing is kept per
operation. Work is the time in which a rank neither waited for others nor was blocked by a transfer. Its excess is what
it has over the median of the other ranks.

A wait lands at the rank that came last. There it stays by the share of that rank's excess in its excess and its own
waits, and the rest goes on to those for whom that rank waited itself. What lands at a rank without either has no
culprit: it is left over from the schedule. The excess of a rank bounds what each other rank can have waited for it.

Cost: O(rounds * edges), an edge being a pair of ranks of which one waited for the other in a bin.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.analysis.comparison.comparison_statistics import student_tail
from dtprof.intervals import Column

Cells = npt.NDArray[np.float64]
"""One value for each rank in each bin: shape (num_bins, num_ranks)."""
MAX_ROUNDS = 128
MAX_CHANCE = 0.005
"""How probable it may be that a rank no slower than the others has such a mean."""
MIN_SPREAD = 3
"""Steps that it takes to know how much they vary."""
LEFT_OVER = 1e-4
"""Share of all waits below which blame that is still being passed on is dropped."""


@dataclass(frozen=True, kw_only=True)
class WaitGraph:
    """Waits of ranks for ranks: one row per edge, cells counted bin by bin."""

    waiter: Column  # cell
    culprit: Column  # cell in the same bin
    waited: Cells  # ns, one value an edge
    excess: Cells  # ns, one value a cell, not below 0; flat

    @property
    def waits(self) -> Cells:
        """Return how long each cell waited."""
        return _sum(self.waiter, self.waited, len(self.excess))

    @property
    def kept(self) -> Cells:
        """Return the share of blame that stays at each cell."""
        total = self.excess + self.waits
        return np.divide(self.excess, total, out=np.zeros_like(total), where=total > 0)


def _sum(cell: Column, values: Cells, num_cells: int) -> Cells:
    return np.bincount(cell, values, num_cells).astype(np.float64, copy=False)


def find_excess(work: Cells) -> Cells:
    """Return by how much the work of each rank exceeds the median of the others; 0 where it does not or is not known.

    Parameters:
        work: shape (num_bins, num_ranks), NaN where not known.
    """
    excess = np.zeros(work.shape)
    complete = ~np.isnan(work).any(axis=1)
    excess[complete] = _over_the_others(work[complete])
    for number in np.flatnonzero(~complete):
        known = ~np.isnan(work[number])
        excess[number, known] = _over_the_others(work[number : number + 1, known])[0]
    return np.maximum(excess, 0)


def _over_the_others(work: Cells) -> Cells:
    num_ranks = work.shape[1]
    if num_ranks < 2:
        return np.zeros(work.shape)
    order = np.argsort(work, axis=1, kind="stable")
    ranked = np.take_along_axis(work, order, axis=1)
    place = np.arange(num_ranks)
    # Of the others, the middle ones lie at these places of the ranked row, one further where the own value comes first.
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    median = (ranked[:, low + (place <= low)] + ranked[:, high + (place <= high)]) / 2
    out = np.empty(work.shape)
    np.put_along_axis(out, order, ranked - median, axis=1)
    return out


def beyond_the_others(excess: Cells) -> Cells:
    """Return the excess of each rank less the mean of that of the others, of two ranks and more."""
    of_others: Cells = (excess.sum(axis=1, keepdims=True) - excess) / (excess.shape[1] - 1)
    difference: Cells = excess - of_others
    return difference


def pass_back(graph: WaitGraph) -> Cells:
    """Return the waits of others that stay with each cell, the bound by its excess not yet applied; flat."""
    kept, waits = graph.kept, graph.waits
    share = graph.waited / np.maximum(waits[graph.waiter], 1)
    landed = _sum(graph.culprit, graph.waited, len(kept))
    blame = np.zeros(len(kept))
    limit = LEFT_OVER * float(landed.sum())
    for _ in range(MAX_ROUNDS):
        blame += landed * kept
        going = landed * (1 - kept)
        landed = _sum(graph.culprit, going[graph.waiter] * share, len(kept))
        if float(landed.sum()) <= limit:
            break
    return blame


def trace_forward(graph: WaitGraph, is_culprit: npt.NDArray[np.bool_]) -> Cells:
    """Return how much of the waits of each cell stays with the culprit's cells in the end; flat."""
    kept, waits = graph.kept, graph.waits
    share = graph.waited / np.maximum(waits[graph.waiter], 1)
    ends_there = np.where(is_culprit, kept, 0.0)
    for _ in range(MAX_ROUNDS):
        onward = _sum(graph.waiter, share * ends_there[graph.culprit], len(kept))
        following = np.where(is_culprit, kept, 0.0) + (1 - kept) * onward
        if float(np.abs(following - ends_there).max(initial=0.0)) <= LEFT_OVER:
            break
        ends_there = following
    return _sum(graph.waiter, graph.waited * ends_there[graph.culprit], len(kept))


def find_onset(series: Cells) -> int:
    """Return where a series steps up and stays up; 0 where it is high from the beginning, or never steps up.

    Of all cuts that which leaves least variance within both sides; it counts when the later mean is at least twice the
    earlier one and three standard errors above it.
    """
    n = len(series)
    if n < 4:
        return 0
    cuts = np.arange(1, n)
    sums, squares = np.cumsum(series)[:-1], np.cumsum(series**2)[:-1]
    total, total_squares = float(series.sum()), float((series**2).sum())
    before, after = sums / cuts, (total - sums) / (n - cuts)
    within = (squares - cuts * before**2) + (total_squares - squares - (n - cuts) * after**2)
    cut = int(np.argmin(within))
    spread = np.sqrt(max(float(within[cut]), 0.0) / n * (1 / cuts[cut] + 1 / (n - cuts[cut])))
    risen = after[cut] - before[cut]
    return int(cuts[cut]) if after[cut] >= 2 * before[cut] and risen > 3 * spread and risen > 0 else 0


def exceeds_chance(series: Cells) -> bool:
    """Say whether the mean of a series lies above 0 by more than chance, over all of it or since it stepped up.

    By Student's t; of a series too short to know its spread it is said, too.
    """
    if len(series) < MIN_SPREAD:
        return True
    onset = find_onset(series)
    later = series[onset:]
    # Where it stepped up was looked for among all cuts.
    since = onset > 0 and len(later) >= MIN_SPREAD and _chance(later) * len(series) <= MAX_CHANCE
    return since or _chance(series) <= MAX_CHANCE


def _chance(series: Cells) -> float:
    mean, error = float(series.mean()), float(series.std(ddof=1)) / math.sqrt(len(series))
    if mean <= 0:
        return 1.0
    return student_tail(mean / error, len(series) - 1) if error > 1e-9 * mean else 0.0
