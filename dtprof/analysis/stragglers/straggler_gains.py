"""Gain of a step if slow ranks were like the others, alone or together, and the slow ranks hidden by others.

All ranks need the same time for a step in the end. If some ranks were like the others, a rank could gain no more than
its own excess, if it is one of them, and the time in which it was blocked because of them; all have to gain as much, so
that a step gains the least of this over all ranks. Two ranks that are 50 and 30 ms late at one operation: without the
first the second still holds the step up, which gains 20 ms; without the second nothing; without both 50.

Blocked because of them is what a rank was blocked longer than the one that was blocked least, by the share of its waits
that traces to them (blame.py): what even that one was blocked are transfers that nothing hides. In a pipeline a rank is
also blocked by the schedule, and what it would gain is not known by this.

Cost: a trace of the waits for each set of ranks; none where no rank is slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.stragglers.blame import Cells, WaitGraph, beyond_the_others, exceeds_chance, trace_forward
from dtprof.columns import percentiles
from dtprof.intervals import Column, Mask

MAX_TRIED = 16
"""Slow ranks up to which it is tried whether a step gains less without each of them."""
MIN_RANKS = 4
"""Of fewer ranks it is not known how much they differ from step to step."""
MIN_TURNS = 3
"""Steps (or bins of them) in which some rank was late."""
OUTLYING = 5.0
"""Standard deviations of the excess from which on a rank is late in a step."""
UPPER_QUANTILE = 0.3186
"""Below which five eighths of a normal distribution lie, in standard deviations; late ranks are fewer than the rest."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Ranks that are late in some steps, in turns or one of them."""

    at: Column  # their places
    steps: int  # or bins of steps, in which one of them was
    gain_ns: float  # what a step would gain on average if none were


@dataclass(frozen=True, kw_only=True)
class Mending:
    """Work and waits of all ranks; cells of shape (num_bins, num_ranks), ns a step."""

    graph: WaitGraph
    excess: Cells
    blocked: Cells  # NaN where not known
    unclear: Cells  # of it waits for nobody knows whom; likewise

    def gain(self, at: Sequence[int]) -> Cells:
        """Return the gain of a step of each bin if the ranks at these places were like the others; NaN: not known.

        A rank of most of whose waits nobody knows for whom bounds nothing.
        """
        shape = self.excess.shape
        return self._gain(np.broadcast_to(np.isin(np.arange(shape[1]), at), shape))

    def _gain(self, mended: Mask) -> Cells:
        """Return it for these cells, one a rank and bin."""
        shape = self.excess.shape
        waits = self.graph.waits.reshape(shape)
        cost = trace_forward(self.graph, mended.ravel()).reshape(shape)
        share = np.divide(cost, waits, out=np.zeros(shape), where=waits > 0)
        present = ~np.isnan(self.blocked)
        least = np.where(present, self.blocked, np.inf).min(axis=1, keepdims=True)
        bound = share * (self.blocked - least) + np.where(mended, self.excess, 0.0)
        known = present & (mended | (self.unclear <= waits))
        bounds: Cells = np.where(known, bound, np.inf).min(axis=1)
        # Those that are mended alone say how much they are longer, and not what others would gain.
        return np.where((known & ~mended).any(axis=1) | mended.all(axis=1), bounds, np.nan)

    def mean_gain(self, at: Sequence[int]) -> float | None:
        """Return the mean gain over bins; None where fewer than half of them are known."""
        return _mean_of_known(self.gain(at))

    def find_hidden(self, listed: Sequence[int], *, least: float, notable: float) -> list[int]:
        """Return the places of slow ranks beyond the listed ones that limit the gain of a step.

        Parameters:
            least: mean excess and mean gain that count, ns a step.
            notable: excess that counts in a single step.
        """
        slow = [at for at in self._find_slow(least, notable).tolist() if at not in listed]
        together = (self.mean_gain([*listed, *slow]) or 0.0) if slow else 0.0
        if together - ((self.mean_gain(listed) or 0.0) if listed else 0.0) < least:
            return []
        if len(slow) > MAX_TRIED:
            return slow
        for at in slow[::-1]:  # the least slow first
            without = [other for other in slow if other != at]
            others = [*listed, *without]
            if together - ((self.mean_gain(others) or 0.0) if others else 0.0) < least:
                slow = without
        return slow

    def find_turns(self, listed: Sequence[int], *, least: float) -> Turns | None:
        """Return which other ranks are late in some steps, each in its own; None where that costs little.

        Parameters:
            least: excess in a step and mean gain that count, ns a step.
        """
        late = find_late(self.excess, least=least)
        late[:, list(listed)] = False
        at, steps = np.flatnonzero(late.any(axis=0)), int(late.any(axis=1).sum())
        if steps < MIN_TURNS:
            return None
        gain = _mean_of_known(self._gain(late))
        return Turns(at=at, steps=steps, gain_ns=gain) if gain is not None and gain >= least else None

    def _find_slow(self, least: float, notable: float) -> Column:
        """Return the places of ranks whose work is longer than that of others again and again, the slowest first."""
        num_bins, num_ranks = self.excess.shape
        if num_ranks < 2 or num_bins < 2:
            return np.zeros(0, np.int64)
        more = beyond_the_others(self.excess)
        mean = more.mean(axis=0)
        often = (self.excess >= notable).sum(axis=0) >= max(3, min(0.6, 2 / num_ranks) * num_bins)
        slow = (mean >= least) & often
        for at in np.flatnonzero(slow).tolist():
            slow[at] = exceeds_chance(more[:, at])
        return np.flatnonzero(slow)[np.argsort(-mean[slow], kind="stable")]


def find_late(excess: Cells, *, least: float) -> Mask:
    """Return in which steps which ranks are late by far more than ranks usually are, and by `least`; cell by cell."""
    if excess.shape[1] < MIN_RANKS:
        return np.zeros(excess.shape, np.bool_)
    usual = percentiles(excess, (62.5,))[0] / UPPER_QUANTILE
    late: Mask = excess >= max(least, OUTLYING * usual)
    return late


def _mean_of_known(gains: Cells) -> float | None:
    """Return the mean; None where less than half of it is known."""
    known = ~np.isnan(gains)
    return float(gains[known].mean()) if 2 * known.sum() >= len(gains) else None
