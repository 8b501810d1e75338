"""Whether the memory of a rank grows from step to step: the slope, its interval, and a verdict.

The slope is the median of the slopes between any two samples, which single peaks do not move, and its interval that of
Kendall's rank correlation, which asks nothing of the noise (Sen 1968). Of many samples the smallest of each stretch is
taken: what is freed again is no growth.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from dtprof.analysis.results import MemoryGrowth
from dtprof.columns import median
from dtprof.intervals import Column, Floats
from dtprof.records import events
from dtprof.records.tables import RankTables

_OF_HOST = (events.HEAP_BYTES, events.RSS_BYTES, events.PEAK_RSS_BYTES)
"""Samples by how closely they follow the program's memory, closest first."""
JUDGED = (events.CUDA_ALLOCATED_BYTES, *_OF_HOST)
MAX_STEP = np.iinfo(np.int64).max
MIN_SAMPLES, MIN_VERDICT_SAMPLES = 8, 24
"""Samples that a slope takes, and those that a verdict takes: in fewer steps, allocators are still settling."""
MAX_POINTS = 128
CONFIDENCE_Z = 3.29
"""Two-sided quantile of the normal distribution at 99.9 %: with many ranks, some seem to grow by chance."""
MIN_GROWTH_BYTES, MIN_GROWTH = 1 << 20, 0.01
"""Growth over the later half of the steps below this, or below this share of the memory held, is no leak."""


def find_growth(tables: RankTables, first: int, last: int = MAX_STEP) -> MemoryGrowth | None:
    """Return how the memory of a rank grows over the steps from first to last; None where too few samples tell.

    Where it computes on a device, that is the memory of the device, unless only that of the host leaks.
    """
    device, host = (_growth_of(tables, names, first, last) for names in (JUDGED[:1], _OF_HOST))
    return host if device is None or (not device.leaks and host is not None and host.leaks) else device


def _growth_of(tables: RankTables, names: Sequence[str], first: int, last: int) -> MemoryGrowth | None:
    """Judge the first of these samples that is there often enough in the steps from first to last."""
    samples = tables.samples
    if len(samples) < MIN_SAMPLES:
        return None
    for name in names:
        ids = [i for i, known in enumerate(tables.ops) if known == name]
        if not ids:
            continue
        # A sample counts the steps ended before it: that after the first measured step has its number.
        inside = (samples["op"] == ids[0]) & (samples["step"] >= first) & (samples["step"] <= last)
        if int(inside.sum()) >= MIN_SAMPLES:
            return _judge(name, samples["step"][inside].astype(np.int64), samples["value"][inside].astype(np.int64))
    return None


def _judge(name: str, steps: Column, values: Column) -> MemoryGrowth | None:
    count = len(steps)
    steps, values = _thin(steps, values)
    slope = _slope(steps, values)
    if slope is None:
        return None
    middle, low, high = slope
    leaks = None
    if count >= MIN_VERDICT_SAMPLES:
        # Allocators settle and caches fill in the first half. What leaks grows in the second half as well.
        half = len(steps) // 2
        later = _slope(steps[half:], values[half:])
        leaks = False
        if later is not None:
            grown = later[0] * float(steps[-1] - steps[half])
            is_large = grown >= max(MIN_GROWTH_BYTES, MIN_GROWTH * median(values))
            leaks = is_large and low > 0 and later[1] > 0
    return MemoryGrowth(
        sample=name, bytes_per_step=middle, low_bytes_per_step=low, high_bytes_per_step=high, leaks=leaks
    )


def _thin(steps: Column, values: Column) -> tuple[Column, Column]:
    """Return the smallest sample of each stretch."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    bounds = np.linspace(0, len(steps), MAX_POINTS + 1).astype(np.int64)
    chosen = np.array([a + int(np.argmin(values[a:b])) for a, b in itertools.pairwise(bounds.tolist())])
    return steps[chosen], values[chosen]


def _slope(steps: Column, values: Column) -> tuple[float, float, float] | None:
    """Return the median slope and its interval; None where all samples are of one step."""
    a, b = _pairs(len(steps))
    run = steps[b] - steps[a]
    rise = values[b] - values[a]
    apart = run != 0
    if not apart.all():
        rise, run = rise[apart], run[apart]
    slopes: Floats = np.sort(rise / run)
    if not len(slopes):
        return None
    n = len(steps)
    reach = CONFIDENCE_Z * np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, int(np.floor((len(slopes) - reach) / 2)))
    high = min(len(slopes) - 1, int(np.ceil((len(slopes) + reach) / 2)))
    middle = 0.5 * (slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2])
    return float(middle), float(slopes[low]), float(slopes[high])


@functools.lru_cache(maxsize=64)
def _pairs(num: int) -> tuple[Column, Column]:
    """Return the positions of all pairs; live pages ask for the same few numbers over and over."""
    first, second = np.triu_indices(num, 1)
    return first, second
