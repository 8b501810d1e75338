"""Time series of memory over the run, rank by rank: samples thinned to their extremes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.memory.rank_memory import find_fragmentation, find_largest
from dtprof.analysis.steps.phase_series import StepPhases
from dtprof.columns import distinct
from dtprof.intervals import Column
from dtprof.records import events
from dtprof.records.tables import RankTables

MAX_POINTS = 400
"""Points of one sample of one rank: more share points, of each of which the largest value stays."""
TOTALS = (events.CUDA_ALLOCATED_BYTES, events.RSS_BYTES, events.CUDA_PEAK_ALLOCATED_BYTES, events.PEAK_RSS_BYTES)
"""Samples that may give the total memory of a rank; the first one that was sampled does."""


@dataclass(frozen=True, kw_only=True)
class SampleSeries:
    """One sample of one rank over time."""

    t_ns: Column
    step: Column
    value: Column

    @property
    def least(self) -> int:
        """The smallest value."""
        return int(self.value.min())

    @property
    def most(self) -> int:
        """The largest value."""
        return int(self.value.max())

    @property
    def last(self) -> int:
        """The newest value."""
        return int(self.value[-1])


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank."""

    total: str | None  # the sample that stands for it
    samples: Mapping[str, SampleSeries] = field(default_factory=dict)
    fragmentation: float | None = None  # 1 - allocated / reserved at the peak; None without a GPU


@dataclass(frozen=True, kw_only=True)
class MemorySeries:
    """The memory of every rank."""

    ranks: Mapping[int, RankMemory] = field(default_factory=dict)
    worst: int | None = None  # the rank with the highest peak
    phases: StepPhases | None = None  # of that rank


def find_worst(facts: Iterable[RankFacts]) -> int | None:
    """Return the rank with the highest peak among the sampled ones; None where memory was not sampled."""
    most = {
        rank.rank: rank.peak_bytes or max((rank.memory_bytes.get(name, 0) for name in TOTALS), default=0)
        for rank in facts
    }
    worst = max(most, key=most.__getitem__, default=None)
    return worst if worst is not None and most[worst] else None


def follow_memory(tables: RankTables) -> RankMemory:
    """Return the time series of each sample of one rank."""
    samples = tables.samples
    series: dict[str, SampleSeries] = {}
    for op in distinct(samples["op"]).tolist():
        if op >= len(tables.ops) or not tables.ops[op].endswith("_bytes"):
            continue
        rows = samples[samples["op"] == op]
        series[tables.ops[op]] = _thin(rows["t_ns"].astype(np.int64), rows["step"], rows["value"])
    total = next((name for name in TOTALS if name in series), None)
    return RankMemory(total=total, samples=series, fragmentation=find_fragmentation(find_largest(tables)))


def _thin(t_ns: Column, step: Column, value: Column) -> SampleSeries:
    if len(t_ns) > MAX_POINTS:
        starts = distinct(np.linspace(0, len(t_ns), MAX_POINTS + 1).astype(np.int64))[:-1]
        ends = np.append(starts[1:], len(t_ns))
        chosen = np.array([a + int(np.argmax(value[a:b])) for a, b in zip(starts, ends, strict=True)])
        t_ns, step, value = t_ns[chosen], step[chosen], value[chosen]
    return SampleSeries(t_ns=t_ns, step=step.astype(np.int64), value=value.astype(np.int64))
