"""The course of memory over the run, rank by rank: samples thinned to their extremes, and what grows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dtprof import events
from dtprof.analysis.intervals import Column
from dtprof.tables import RankTables

MAX_POINTS = 400
"""Points of one sample of one rank: more share points, of each of which the largest value stays."""
TOTALS = (events.CUDA_ALLOCATED_BYTES, events.RSS_BYTES, events.CUDA_PEAK_ALLOCATED_BYTES, events.PEAK_RSS_BYTES)
"""What stands for the memory of a rank: the first of these that was sampled."""
FEWEST = 4
"""Samples from which a growth can be told."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One sample of one rank over time."""

    t_ns: Column
    step: Column
    value: Column


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank."""

    total: str | None  # the sample that stands for it
    courses: Mapping[str, Course] = field(default_factory=dict)
    growth_bytes_per_step: float | None = None  # slope over the later half of the run; None: too few samples
    fragmentation: float | None = None  # 1 - allocated / reserved at the peak; None without a GPU


@dataclass(frozen=True, kw_only=True)
class MemoryCourse:
    """The memory of every rank."""

    ranks: Mapping[int, RankMemory] = field(default_factory=dict)


def follow_memory(tables: RankTables) -> RankMemory:
    """Return the course of each sample of one rank."""
    samples = tables.samples
    courses: dict[str, Course] = {}
    for op in np.unique(samples["op"]).tolist():
        if op >= len(tables.ops) or not tables.ops[op].endswith("_bytes"):
            continue
        rows = samples[samples["op"] == op]
        courses[tables.ops[op]] = _thin(rows["t_ns"].astype(np.int64), rows["step"], rows["value"])
    total = next((name for name in TOTALS if name in courses), None)
    return RankMemory(
        total=total,
        courses=courses,
        growth_bytes_per_step=_growth(courses[total]) if total else None,
        fragmentation=_fragmentation(courses),
    )


def _thin(t_ns: Column, step: Column, value: Column) -> Course:
    if len(t_ns) > MAX_POINTS:
        starts = np.unique(np.linspace(0, len(t_ns), MAX_POINTS + 1).astype(np.int64))[:-1]
        ends = np.append(starts[1:], len(t_ns))
        chosen = np.array([a + int(np.argmax(value[a:b])) for a, b in zip(starts, ends, strict=True)])
        t_ns, step, value = t_ns[chosen], step[chosen], value[chosen]
    return Course(t_ns=t_ns, step=step.astype(np.int64), value=value.astype(np.int64))


def _growth(course: Course) -> float | None:
    """Return the slope of a line through the later half, by least squares."""
    late = course.step >= (course.step[0] + course.step[-1]) / 2 if len(course.step) else np.zeros(0, np.bool_)
    steps, values = course.step[late], course.value[late]
    if len(steps) < FEWEST or steps[0] == steps[-1]:
        return None
    return float(np.polyfit(steps.astype(np.float64), values.astype(np.float64), 1)[0])


def _fragmentation(courses: Mapping[str, Course]) -> float | None:
    allocated = courses.get(events.CUDA_PEAK_ALLOCATED_BYTES)
    reserved = courses.get(events.CUDA_PEAK_RESERVED_BYTES)
    if allocated is None or reserved is None or not reserved.value.max():
        return None
    return max(0.0, 1 - float(allocated.value.max()) / float(reserved.value.max()))


def state_formula_bytes(categories: Mapping[str, int | None]) -> int | None:
    """Return what Adam in one precision holds for these parameters: as much again for gradients, twice for moments.

    For parameters of 4 bytes this is the 16 bytes a parameter of docs/reference/metrics.md; a rank that holds a shard
    holds its share of it. None where the parameters are not known.
    """
    parameters = categories.get("parameters")
    return None if parameters is None else 4 * parameters
