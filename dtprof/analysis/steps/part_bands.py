"""How far each part of the step varies: over ranks by their mean step, and over steps by their mean over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.analysis.results import PARTS, PartBand, RankResult, Spread
from dtprof.columns import percentiles
from dtprof.intervals import Column, Mask

Sums = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of each step, summed over ranks; grows with the number of steps alone."""

    first: int  # number of the first step
    sums: Sums  # shape (steps, 1 + parts): the ranks that were summed, and their time in each of PARTS


def sum_parts(parts: Mapping[str, Column], numbers: Column, chosen: Mask) -> StepParts | None:
    """Return the parts of steps, summed over ranks.

    Parameters:
        parts: by PARTS, a row for each step of each rank. numbers: of these steps. chosen: the rows that count.
    """
    if not chosen.any():
        return None
    place = numbers[chosen] - int(numbers[chosen].min())
    columns = [np.ones(len(place), np.int64), *(parts[part][chosen] for part in PARTS)]
    sums = np.zeros((int(place.max()) + 1, len(columns)), np.int64)
    for i, column in enumerate(columns):
        # Sums of ns of one step stay below 2 ** 53, so that float64 holds them exactly.
        sums[:, i] = np.rint(np.bincount(place, column, len(sums)))
    return StepParts(first=int(numbers[chosen].min()), sums=sums)


def add_parts(known: StepParts | None, more: StepParts | None) -> StepParts | None:
    """Add the sums of other ranks or other steps."""
    if known is None or more is None:
        return known or more
    first = min(known.first, more.first)
    last = max(one.first + len(one.sums) for one in (known, more))
    sums = np.zeros((last - first, known.sums.shape[1]), np.int64)
    for one in (known, more):
        sums[one.first - first : one.first - first + len(one.sums)] += one.sums
    return StepParts(first=first, sums=sums)


def list_bands(ranks: Sequence[RankResult], steps: StepParts | None) -> tuple[PartBand, ...]:
    """Return the band of each part; empty where the steps of no rank could be split.

    A part that is not known on one of these ranks is left out.
    """
    split = [rank.partition_ns for rank in ranks if rank.partition_ns is not None]
    if not split or steps is None:
        return ()
    counted = steps.sums[steps.sums[:, 0] > 0]
    bands = []
    for i, part in enumerate(PARTS, start=1):
        of_ranks = [partition[part] for partition in split]
        known = [ns for ns in of_ranks if ns is not None]
        if len(known) == len(of_ranks):
            over_steps = counted[:, i] / counted[:, 0]
            bands.append(PartBand(part=part, over_ranks=_spread(known), over_steps=_spread(over_steps)))
    return tuple(bands)


def _spread(values: Sequence[int] | npt.NDArray[np.float64]) -> Spread:
    p10, median, p90 = map(round, percentiles(values, (10, 50, 90)))
    return Spread(median=median, p10=p10, p90=p90)
