"""The operations of one rank, placed, and their blocked time split by who was waited for: what all maps begin with."""

from dataclasses import dataclass

import numpy as np

from dtprof.analysis.blocking import Blocked, find_blocked
from dtprof.analysis.clock_errors import ClockErrors
from dtprof.analysis.intervals import Intervals
from dtprof.analysis.meetings import Matched, Meetings, match_operations
from dtprof.analysis.operation_timing import Timing, time_operations
from dtprof.analysis.phases import find_phases
from dtprof.analysis.records import sound_operations, sound_spans
from dtprof.analysis.steps import RankSteps
from dtprof.tables import Array, RankTables


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


def place_rank(tables: RankTables, own: RankSteps, meetings: Meetings) -> PlacedRank:
    """Place the operations of one rank, given the meetings of all ranks."""
    operations, spans = sound_operations(tables), sound_spans(tables)
    phases = find_phases(tables, spans, own)
    return PlacedRank(
        tables=tables,
        steps=own,
        operations=operations,
        spans=spans,
        phases=phases,
        matched=match_operations(tables, operations).met_in(meetings),
        blocked=find_blocked(tables, operations, phases, own),
    )


def time_rank(tables: RankTables, own: RankSteps, meetings: Meetings, errors: ClockErrors) -> RankTiming:
    """Return what the operations of one rank took, given the meetings of all ranks and the errors of their clocks."""
    placed = place_rank(tables, own, meetings)
    timing = time_operations(
        placed.operations,
        placed.matched,
        placed.matched.find_met(meetings),
        placed.blocked,
        op_names=meetings.ops.names,
        rank=np.full(len(placed.operations), tables.rank),
        errors=errors,
    )
    return RankTiming(**vars(placed), timing=timing)
