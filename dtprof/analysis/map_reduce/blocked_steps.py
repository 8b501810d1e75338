"""When the ranks of a batch were blocked in the measured steps, and how long each waited for whom."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.operation_timing import Timing, split_blocked
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, time_batch
from dtprof.analysis.steps.step_boundaries import MeasuredSteps
from dtprof.analysis.stragglers.rank_waits import RankWaits, collect_waits
from dtprof.intervals import NONE, Column, Intervals, Mask, locate, union
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import OperationInstances


@dataclass(frozen=True, kw_only=True)
class BlockedSteps:
    """The measured steps of the ranks of a batch; columns have a value an operation."""

    timing: Timing
    step: Column  # how many steps after the first measured one; -1 outside them
    chosen: Mask  # inside them; all where no steps are measured
    unobserved: Mask  # of these, those whose completion is not observed
    seen: list[bool]  # of each rank: it has measured steps, in which all that may block it is observed
    stretches: tuple[Intervals, Intervals]  # blocked before and after the last rank arrived, on the axis
    either: Intervals  # all of them
    waits: Sequence[RankWaits | None]  # of each rank; None where not seen


def find_blocked_steps(
    batch: PlacedBatch, *, measured: MeasuredSteps, instances: OperationInstances, width: int, errors: ClockErrors
) -> BlockedSteps:
    """Find when ranks were blocked in the measured steps.

    Parameters:
        width: steps a bin of the waits.
        errors: of the clocks of the ranks against each other.
    """
    operations, blocked = batch.operations, batch.blocked
    timing = time_batch(batch, instances, errors)
    at = locate(batch.place_times(operations["issued_ns"]), batch.windows)
    step = np.where(at >= 0, batch.numbers[at] - measured.first, -1) if len(batch.windows) else at
    chosen = step >= 0 if measured.known else batch.is_own.copy()
    unobserved = chosen & ~blocked.known
    unseen = batch.count(unobserved & blocked.counts)
    seen = [len(one.windows) > 0 and not number for one, number in zip(batch.ranks, unseen, strict=True)]
    waits: Sequence[RankWaits | None] = [None] * len(batch.ranks)
    stretches, either = (NONE, NONE), NONE
    if any(seen):
        stretches = split_blocked(blocked, timing, blocked.counts, batch.shift_of_operation)
        either = union(np.concatenate(stretches))
        found = collect_waits(batch, timing=timing, stretches=either, first=measured.first, step=step, width=width)
        waits = [own if is_seen else None for own, is_seen in zip(found, seen, strict=True)]
    return BlockedSteps(
        timing=timing,
        step=step,
        chosen=chosen,
        unobserved=unobserved,
        seen=seen,
        stretches=stretches,
        either=either,
        waits=waits,
    )
