"""Phases of the steps of one rank over the run; of many steps, neighbours share a point."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.analysis.map_reduce.placed_ranks import PlacedRank
from dtprof.analysis.steps.step_partition import partition_phases
from dtprof.columns import distinct
from dtprof.intervals import Column

MAX_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class StepPhases:
    """The mean step of each point, by phase; one value a point in every column."""

    first: Column  # step
    last: Column
    mean_ns: Mapping[str, npt.NDArray[np.float64]]  # by PHASES, those that took time


def follow_phases(rank: PlacedRank) -> StepPhases | None:
    """Return the phases of the steps of a rank over the run; None without steps."""
    steps = rank.steps
    num_steps = len(steps.windows)
    if not num_steps:
        return None
    parts = partition_phases(steps.windows, rank.phases)
    starts = distinct(np.linspace(0, num_steps, min(num_steps, MAX_POINTS) + 1).astype(np.int64))[:-1]
    ends = np.append(starts[1:], num_steps)
    return StepPhases(
        first=steps.numbers[starts],
        last=steps.numbers[ends - 1],
        mean_ns={phase: np.add.reduceat(took, starts) / (ends - starts) for phase, took in parts.items() if took.any()},
    )
