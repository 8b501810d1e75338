"""What one rank brings to the summary of a run: two maps over its records, each giving a small reduction.

The first, `survey`, finds the steps and describes the operations so that they can be matched across ranks. The second,
`reduce_rank`, knows the steps chosen and the meetings, and sums up. Each rank is read for both; none is kept.
"""

from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.alignment import collect_marks
from dtprof.analysis.apis import find_apis
from dtprof.analysis.clock_errors import ONE_CLOCK, ClockErrors
from dtprof.analysis.collectives import RowKey, sum_rows
from dtprof.analysis.critical_path import RankPath, collect_path
from dtprof.analysis.dropped import sum_dropped
from dtprof.analysis.intervals import NONE, Column, Intervals, locate, share_out
from dtprof.analysis.meetings import Family, Meetings, RankMeetings, describe_operations, match_operations
from dtprof.analysis.memory import find_categories, find_largest, find_peak
from dtprof.analysis.memory_formulas import ModelShare, find_share
from dtprof.analysis.memory_growth import find_growth
from dtprof.analysis.operation_timing import ESTIMATED, NOT_KNOWN, split_blocked
from dtprof.analysis.partition import average, partition_phases, partition_steps
from dtprof.analysis.phases import find_user_phases
from dtprof.analysis.pipeline import RankPipeline, find_bubbles, find_pipeline
from dtprof.analysis.rank_timing import time_rank
from dtprof.analysis.rank_waits import RankWaits, collect_waits
from dtprof.analysis.records import sound_operations, sound_spans
from dtprof.analysis.results import MemoryGrowth
from dtprof.analysis.serialised import SerialKey, SerialSums, find_rows
from dtprof.analysis.steps import RankSteps, UsedSteps, find_steps
from dtprof.analysis.throughput import RankConsumption, find_consumption
from dtprof.analysis.timeline import RankBars, collect_bars
from dtprof.tables import Array, Group, OutOfMemory, RankTables


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What is said of one rank as it is."""

    rank: int
    attempt: int
    world_size: int
    pid: int
    host: str
    boot_id: str
    tap: str
    torch_version: str
    features: tuple[str, ...]
    groups: dict[int, Group]
    has_exception: bool
    ended_ns: int
    first_ns: int
    last_ns: int
    events: int
    capture_ns: int
    dropped_events: int
    errors: int
    truncated: bool
    closed: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    peak_bytes: int | None
    memory_categories: dict[str, int | None]
    memory_bytes: dict[str, int]
    model_share: ModelShare
    out_of_memory: tuple[OutOfMemory, ...]
    unsound: int  # records whose times cannot be
    unmatched: int  # operations that cannot be matched with other ranks'


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The first map of one rank."""

    facts: RankFacts
    steps: RankSteps
    meetings: RankMeetings
    pipeline: RankPipeline | None
    marks: dict[Family, Array]  # for the alignment of clocks; empty where that is not asked for
    consumption: RankConsumption | None  # None: not recorded


@dataclass(frozen=True, kw_only=True)
class RankReduction:
    """The second map of one rank: sums and means over the used steps."""

    rank: int
    step_ns: int | None
    partition_ns: dict[str, int] | None
    phases_ns: dict[str, int] | None
    user_phases_ns: dict[str, int] | None
    events_per_step: float | None
    rows: dict[RowKey, Array]
    dropped: dict[RowKey, Array]  # of operations of which only sums are left
    waits: RankWaits | None  # None where no steps are used, or completion is not observed
    bars: RankBars | None
    unobserved: int  # operations in the used steps whose completion is not observed
    estimated: int  # operations whose arrival is an estimate
    not_known: int  # operations of several members whose arrival is not known
    mixed: int  # operations that met a different one
    path: RankPath | None = None  # for the critical path
    in_doubt: int = 0  # operations whose wait is smaller than the error of the clocks
    impossible: int = 0  # operations that ended before the last rank had begun them
    most_impossible_ns: int = 0  # by so much at most
    serialised: dict[SerialKey, SerialSums] = field(default_factory=dict)
    memory_growth: MemoryGrowth | None = None


def survey(tables: RankTables, *, several_clocks: bool = False) -> Survey:
    """Look through the records of one rank."""
    operations, spans = sound_operations(tables), sound_spans(tables)
    matched = match_operations(tables, operations)
    steps = find_steps(tables, spans)
    pipeline = find_pipeline(tables, spans, steps)
    return Survey(
        facts=_state_facts(
            tables,
            share=find_share(tables, operations, pipeline),
            unsound=len(tables.operations) + len(tables.spans) - len(operations) - len(spans),
            unmatched=matched.unmatched,
        ),
        steps=steps,
        meetings=describe_operations(tables, operations, find_apis(tables, operations), matched),
        pipeline=pipeline,
        marks=collect_marks(tables, operations, matched) if several_clocks else {},
        consumption=find_consumption(tables, steps),
    )


def _state_facts(tables: RankTables, *, share: ModelShare, unsound: int, unmatched: int) -> RankFacts:
    largest = find_largest(tables)
    return RankFacts(
        rank=tables.rank,
        attempt=tables.attempt,
        world_size=tables.world_size,
        pid=tables.pid,
        host=tables.host,
        boot_id=tables.boot_id,
        tap=tables.tap,
        torch_version=tables.torch_version,
        features=tables.features,
        groups=tables.groups,
        has_exception=bool(tables.exceptions),
        ended_ns=tables.ended_ns,
        first_ns=tables.first_ns,
        last_ns=tables.last_ns,
        events=tables.num_events,
        capture_ns=tables.capture_ns,
        dropped_events=tables.dropped_events,
        errors=tables.errors,
        truncated=tables.truncated,
        closed=tables.closed,
        notes=tables.notes,
        problems=tables.problems,
        peak_bytes=find_peak(largest),
        memory_categories=find_categories(largest),
        memory_bytes=largest,
        model_share=share,
        out_of_memory=tables.out_of_memory,
        unsound=unsound,
        unmatched=unmatched,
    )


def reduce_rank(
    tables: RankTables,
    *,
    own: RankSteps,
    used: UsedSteps,
    meetings: Meetings,
    max_bars: int,
    pipeline_windows: Intervals = NONE,
    width: int = 1,
    errors: ClockErrors = ONE_CLOCK,
    max_hops: int = 0,
) -> RankReduction:
    """Sum up the used steps of one rank; all it did where no steps are used.

    Parameters:
        width: steps a bin, for what is kept bin by bin.
        max_hops: operations to keep for the critical path; 0: it is not asked for.
        errors: of the clocks of the ranks against each other.
    """
    timed = time_rank(tables, own, meetings, errors)
    operations, spans, matched, phases = timed.operations, timed.spans, timed.matched, timed.phases
    blocked, timing = timed.blocked, timed.timing
    apis = find_apis(tables, operations)
    numbers, windows = own.used(used.first, used.last)
    step = _step_of(operations["issued_ns"], numbers, windows, used.first)
    chosen = step >= 0 if used.known else np.ones(len(operations), np.bool_)
    unobserved = chosen & ~blocked.known
    parts, waits, path = None, None, None
    if len(windows) and not (unobserved & blocked.counts).any():
        bubbles = find_bubbles(tables, spans, pipeline_windows)
        stretches = split_blocked(blocked, timing, blocked.counts)
        parts = partition_steps(windows, phases, *stretches, bubbles)
        waits = collect_waits(
            tables.rank,
            timing=timing,
            blocked=blocked,
            stretches=stretches,
            phases=phases,
            steps=(numbers - used.first, windows),
            step=step,
            width=width,
        )
        if max_hops:
            path = collect_path(
                tables,
                operations,
                matched=matched,
                timing=timing,
                blocked=blocked,
                phases=phases,
                steps=(numbers, windows),
                max_rows=max_hops,
            )
    return RankReduction(
        rank=tables.rank,
        step_ns=int((windows[:, 1] - windows[:, 0]).sum()) // len(windows) if len(windows) else None,
        partition_ns=average(parts) if parts is not None else None,
        phases_ns=average(partition_phases(windows, phases)) if len(windows) else None,
        user_phases_ns=_user_phases(tables, spans, own, windows) if len(windows) else None,
        events_per_step=_count_events(tables, windows) / len(windows) if len(windows) else None,
        rows=sum_rows(
            tables,
            operations,
            apis=apis,
            chosen=chosen,
            matched=matched,
            meetings=meetings,
            timing=timing,
            blocked=blocked,
        ),
        dropped=sum_dropped(tables),
        waits=waits,
        path=path,
        bars=collect_bars(
            tables,
            operations,
            steps=(numbers, windows),
            phases=phases,
            timing=timing,
            blocked=blocked,
            limit=max_bars,
        )
        if max_bars
        else None,
        unobserved=int(unobserved.sum()),
        estimated=int((chosen & (timing.source == ESTIMATED)).sum()),
        not_known=int((chosen & (timing.source == NOT_KNOWN)).sum()),
        mixed=timing.mixed,
        in_doubt=int((chosen & timing.in_doubt).sum()),
        impossible=int((chosen & (timing.impossible > 0)).sum()),
        most_impossible_ns=int(timing.impossible.max(initial=0)),
        serialised=find_rows(tables, operations, apis=apis, chosen=chosen, timing=timing, blocked=blocked)
        if used.known
        else {},
        memory_growth=find_growth(tables, used),
    )


def _user_phases(tables: RankTables, spans: Array, own: RankSteps, windows: Intervals) -> dict[str, int]:
    """Return the mean time a step of each phase that the program named, to the ns below."""
    return {
        name: int(share_out([intervals], windows)[:, 0].sum()) // len(windows)
        for name, intervals in find_user_phases(tables, spans, own).items()
    }


def _step_of(times: Column, numbers: Column, windows: Intervals, first: int) -> Column:
    """Return how many steps after the first used one each moment lies; -1 outside all."""
    at = locate(times, windows)
    return np.where(at >= 0, numbers[at] - first, -1) if len(numbers) else at


def _count_events(tables: RankTables, windows: Intervals) -> int:
    count = 0
    for times in (tables.operations["issued_ns"], tables.spans["begin_ns"], tables.samples["t_ns"]):
        at = np.searchsorted(np.sort(times), windows)
        count += int((at[:, 1] - at[:, 0]).sum())
    return count
