"""The operations of one rank, placed, and their blocked time split by who was waited for: what all maps begin with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.blocked_time import Blocked, find_blocked
from dtprof.analysis.communication.operation_timing import Timing, time_operations
from dtprof.analysis.steps.phase_intervals import find_phases
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.intervals import Intervals
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import Matched, OperationInstances, match_operations
from dtprof.job.rank_batches import RankBatch, batch_ranks
from dtprof.records.tables import Array, RankTables


@dataclass(frozen=True, kw_only=True)
class PlacedRank:
    """One rank and where its operations belong: `blocked` has a row for each of `operations`."""

    tables: RankTables
    steps: RankSteps
    operations: Array  # those whose times can be
    spans: Array
    phases: dict[str, Intervals]
    matched: Matched
    blocked: Blocked


@dataclass(frozen=True, kw_only=True)
class RankTiming(PlacedRank):
    """One rank and what its operations took: `timing` has a row for each of `operations`."""

    timing: Timing


def place_ranks(
    batch: RankBatch, steps: Mapping[int, RankSteps], instances: OperationInstances
) -> Iterator[PlacedRank]:
    """Place the operations of some ranks, given the steps of each, by rank, and the instances of all ranks."""
    for i, (tables, matched) in enumerate(zip(batch.tables, match_operations(batch), strict=True)):
        operations, spans, own = batch.operations.of(i), batch.spans.of(i), steps[tables.rank]
        phases = find_phases(tables, spans, own)
        yield PlacedRank(
            tables=tables,
            steps=own,
            operations=operations,
            spans=spans,
            phases=phases,
            matched=matched.matched_in(instances),
            blocked=find_blocked(tables, operations, phases, own),
        )


def time_rank(tables: RankTables, own: RankSteps, instances: OperationInstances, errors: ClockErrors) -> RankTiming:
    """Return what the operations of one rank took, given the instances of all ranks and the errors of their clocks."""
    (placed,) = place_ranks(batch_ranks([tables]), {tables.rank: own}, instances)
    timing = time_operations(
        placed.operations,
        placed.matched,
        placed.matched.find_instances(instances),
        placed.blocked,
        op_names=instances.ops.values,
        rank=np.full(len(placed.operations), tables.rank),
        errors=errors,
    )
    return RankTiming(**vars(placed), timing=timing)
