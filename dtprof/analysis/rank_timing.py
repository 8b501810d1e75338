"""The operations of one rank, placed, and their blocked time split by who was waited for: what all maps begin with."""

from dataclasses import dataclass

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
class RankTiming:
    """One rank: `timing` and `blocked` have a row for each of `operations`."""

    operations: Array  # those whose times can be
    spans: Array
    phases: dict[str, Intervals]
    matched: Matched
    blocked: Blocked
    timing: Timing


def time_rank(tables: RankTables, own: RankSteps, meetings: Meetings, errors: ClockErrors) -> RankTiming:
    """Return what the operations of one rank took, given the meetings of all ranks and the errors of their clocks."""
    operations, spans = sound_operations(tables), sound_spans(tables)
    matched = match_operations(tables, operations).met_in(meetings)
    phases = find_phases(tables, spans, own)
    blocked = find_blocked(tables, operations, phases, own)
    timing = time_operations(operations, matched, meetings, blocked, rank=tables.rank, errors=errors)
    return RankTiming(
        operations=operations, spans=spans, phases=phases, matched=matched, blocked=blocked, timing=timing
    )
