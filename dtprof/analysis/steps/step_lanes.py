"""The duration of every step on every rank side by side, and of neighbouring steps over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.analysis.results import StepSeries
from dtprof.columns import distinct
from dtprof.intervals import Floats

MAX_POINTS = 1500
"""Runs of more steps share points: a screen has no more pixels."""


@dataclass(frozen=True, kw_only=True)
class StepLanes:
    """Durations of the steps known on any rank, one row per rank, NaN where a rank does not know a step."""

    ranks: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    durations: Floats


@dataclass(frozen=True, kw_only=True)
class StepPoints:
    """The points of the figure: each covers steps first to last, with their durations over all ranks."""

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    low: Floats
    middle: Floats
    high: Floats
    slowest_rank: list[int]


def align_steps(series: Sequence[StepSeries]) -> StepLanes:
    """Put the steps of ranks side by side."""
    steps = distinct(np.concatenate([np.asarray(part, np.int64) for part in {one.steps for one in series}]))
    durations = np.full((len(series), len(steps)), np.nan)
    for row, one in zip(durations, series, strict=True):
        row[np.searchsorted(steps, one.steps)] = one.duration_ns
    return StepLanes(ranks=tuple(one.rank for one in series), steps=steps, durations=durations)


def reduce_steps(lanes: StepLanes) -> StepPoints:
    """Return the durations of neighbouring steps over all ranks, as many points as a screen shows."""
    length = len(lanes.steps)
    edges = distinct(np.linspace(0, length, min(length, MAX_POINTS) + 1).astype(np.int64))
    widths = np.diff(edges)
    low, middle, high = np.empty((3, len(widths)))
    slowest = np.empty(len(widths), np.int64)
    for width in distinct(widths).tolist():  # two at most
        chosen = np.flatnonzero(widths == width)
        parts = lanes.durations[:, edges[chosen][:, np.newaxis] + np.arange(width)].swapaxes(0, 1)
        table = np.sort(parts.reshape(len(chosen), -1), axis=1)  # NaN sorts last
        rows, count = np.arange(len(chosen)), np.count_nonzero(~np.isnan(table), axis=1)
        low[chosen], high[chosen] = table[:, 0], table[rows, count - 1]
        middle[chosen] = (table[rows, (count - 1) // 2] + table[rows, count // 2]) / 2
        slowest[chosen] = np.nanargmax(parts.reshape(len(chosen), -1), axis=1) // width
    return StepPoints(
        first=lanes.steps[edges[:-1]],
        last=lanes.steps[edges[1:] - 1],
        low=low,
        middle=middle,
        high=high,
        slowest_rank=[lanes.ranks[place] for place in slowest.tolist()],
    )
