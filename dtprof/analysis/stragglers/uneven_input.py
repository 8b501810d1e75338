"""Ranks that are given unequal input in a step, such as sequences of other lengths, and work as long as that takes.

No rank is slow then: another one is late in each step. Work is compared with input step by step, as deviations from the
mean of the ranks, so that neither slow ranks nor steps that are long for all count; the slope of a least-squares line
through them is what a sample or a token takes. With batches of equal size nobody would wait for the rank with most.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dtprof.analysis.results import UnevenInput
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.analysis.steps.throughput import RankConsumption
from dtprof.analysis.stragglers.rank_waits import RankWaits
from dtprof.intervals import Floats

QUANTITIES = ("tokens", "samples")
"""In the order of the columns of RankConsumption; tokens tell more of the work than samples."""
FEWEST_STEPS, FEWEST_PAIRS = 5, 24
"""Fewest bins of steps, and fewest samples (a rank in a bin), for a correlation to be significant."""
MIN_SPREAD = 1.05
"""The largest input of a step over the mean one."""
MIN_EXPLAINED = 0.3
"""Of the variance of work between the ranks of a step: of 24 pairs without any influence, one run in 100 is above."""
MIN_SHARE = 0.02
"""Of the step, that batches of equal size gain."""


def find_uneven_input(
    steps: Mapping[int, RankSteps],
    consumed: Mapping[int, RankConsumption],
    waits: Sequence[RankWaits | None],
    measured: MeasuredSteps,
    *,
    width: int,
    step_ns: int | None,
) -> tuple[UnevenInput, ...]:
    """Return how input and work of the ranks differ; nothing where they do not, or not together.

    Parameters:
        steps, consumed: by rank.
        waits: of each rank.
        width: steps a bin of these.
        step_ns: the median.
    """
    known = [own for own in waits if own is not None and own.rank in consumed and own.rank in steps]
    if len(known) < 2 or not measured.known or not step_ns:
        return ()
    num_bins = min(len(own.steps) for own in known)
    numbers = np.arange(measured.first, measured.first + num_bins * width)
    whole = np.all([own.steps[:num_bins] == width for own in known], axis=0)
    whole &= numbers[::width] + width - 1 <= measured.last
    work = np.array([own.work[:num_bins][whole] for own in known], np.float64)
    for column, quantity in enumerate(QUANTITIES):
        given = np.array([consumed[own.rank].at(numbers, column) for own in known], np.float64)
        given = given.reshape(len(known), num_bins, width).sum(axis=2)[:, whole]
        if given.shape[1] < FEWEST_STEPS or given.size < FEWEST_PAIRS or not given.all():
            continue
        found = _compare(work, given, quantity, width)
        if found is not None and found.gain_ns_per_step >= MIN_SHARE * step_ns:
            return (found,)
    return ()


def _compare(work: Floats, given: Floats, quantity: str, width: int) -> UnevenInput | None:
    """Compare work with input, a row for each rank and a column for each bin of steps."""
    mean = given.mean(axis=0)
    spread = float((given.max(axis=0) / mean).mean())
    of_input, of_work = given - mean, work - work.mean(axis=0)
    together, squared = float((of_input * of_work).sum()), float((of_input**2).sum())
    if spread < MIN_SPREAD or together <= 0:
        return None
    slope = together / squared
    explained = slope * together / float((of_work**2).sum())
    if explained < MIN_EXPLAINED:
        return None
    return UnevenInput(
        quantity=quantity,
        mean_per_step=float(mean.mean()) / width,
        largest_over_mean=spread,
        explained=explained,
        gain_ns_per_step=int(slope * of_input.max(axis=0).mean() / width),
    )
