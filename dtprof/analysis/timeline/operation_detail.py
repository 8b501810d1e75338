"""All known facts of single steps and operations of a rank, for figures and exporters.

The summary keeps sums only. The figures here are those that it sums: the same functions give them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from dtprof.analysis.communication.blocked_time import Blocked
from dtprof.analysis.communication.operation_timing import Timing, split_blocked
from dtprof.analysis.map_reduce.long_log_survey import survey_to_sum
from dtprof.analysis.map_reduce.placed_ranks import RankTiming, time_batch
from dtprof.analysis.map_reduce.reduction_tasks import RankTask, part_ranks
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys, survey_run
from dtprof.analysis.pipeline.bubbles import find_bubbles
from dtprof.analysis.results import BUBBLE, PARTS, PHASES, Summary
from dtprof.analysis.steps.phase_intervals import find_user_phases
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps, agree_on_rule, choose_steps
from dtprof.analysis.steps.step_partition import paint_phases, paint_steps
from dtprof.analysis.timeline.step_selection import IndexedRun, StepExtent, index_run
from dtprof.analysis.whatif.advice import summarise_closely
from dtprof.intervals import NONE, Column, Intervals, Mask, locate
from dtprof.job.clock_alignment import Clocks
from dtprof.job.collective_matching import MatchedOperations, OperationInstances
from dtprof.job.device_timeline import start_of
from dtprof.job.groups import Channel
from dtprof.job.rank_executor import THIS_PROCESS, Executor, map_tasks
from dtprof.job.world_size import newest_ranks
from dtprof.records.reader import Run
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, select

Result = TypeVar("Result")

FIRST, BETWEEN, LAST = 0, 1, 2
"""Where in an operation of several ranks a rank arrived; a receive is last, whenever it was posted."""


@dataclass(frozen=True, kw_only=True)
class RunDetail:
    """The facts of all ranks together, before the details of single ranks."""

    run: SurveyedRun
    ranks: tuple[int, ...]  # of the newest attempt
    surveys: Surveys
    steps: dict[int, RankSteps]
    measured: MeasuredSteps
    whole: StepExtent | None = None  # of the run where only some of its steps were read

    @property
    def extent(self) -> StepExtent:
        """The steps and records of the run, of which this may be a part."""
        if self.whole is not None:
            return self.whole
        numbers = [own.numbers for own in self.steps.values() if len(own.numbers)]
        steps = (min(int(own[0]) for own in numbers), max(int(own[-1]) for own in numbers)) if numbers else None
        return StepExtent(steps=steps, events=sum(fact.events for fact in self.surveys.facts))

    @property
    def first_ns(self) -> int:
        """When the first record was made."""
        return min((fact.first_ns for fact in self.surveys.facts if fact.first_ns > 0), default=0)


@dataclass(frozen=True, kw_only=True)
class RankDetail:
    """One rank on the clock of the reference: its steps, their partition, and each operation."""

    tables: RankTables
    boot_id: str  # of its host, as recorded
    clocks: Clocks
    steps: RankSteps
    measured: MeasuredSteps  # of the run
    parts: dict[str, Column] | None  # of each step, those of PARTS that are known; None: none is
    part_stretches: tuple[Intervals, Column]  # the same as stretches, and the part as position in PARTS
    phases: dict[str, Column]  # of each step, by PHASES
    phase_stretches: tuple[Intervals, Column]
    user_phases: dict[str, Intervals]
    operations: Array
    spans: Array
    timing: Timing
    blocked: Blocked
    instance: Column  # its number, the same on all ranks that took part; 0: no other rank recorded it
    arrived: Column  # of those others recorded: FIRST, BETWEEN or LAST

    def on_clock_of_run(self, times: Column) -> Column:
        """Return times that the strings of a rank hold, which are still on the clock of its host."""
        if self.boot_id == self.tables.boot_id:
            return times
        moved = times + self.clocks.offset(self.boot_id, times.reshape(-1)).reshape(times.shape)
        return np.where(times != UNKNOWN_NS, moved, UNKNOWN_NS)


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """The facts of some ranks, before their details."""

    boots: Mapping[int, str]
    first_number: Mapping[Channel, int]  # of the instances of each channel
    unknown_bubbles: Collection[int]  # ranks


@dataclass(frozen=True, kw_only=True)
class DetailTask(RankTask):
    """Some ranks to be looked at in detail."""

    facts: PartFacts


def read_detail(
    run: SurveyedRun,
    executor: Executor = THIS_PROCESS,
    *,
    steps: tuple[int, int] | None = None,
    max_events: int | None = None,
) -> RunDetail:
    """Read a run once, rank by rank.

    Parameters:
        steps: the first and the last that are looked at; None: the newest that hold `max_events` records.
        max_events: None: all steps are looked at.
    """
    ranks = newest_ranks(run.folders)
    if max_events is not None and (indexed := index_run(run, ranks, executor)) is not None:
        return _read_chosen(indexed, executor, steps=steps, max_events=max_events)
    return _read_detail(run, ranks, executor)


def read_chosen(detail: RunDetail, executor: Executor, *, steps: tuple[int, int] | None, max_events: int) -> RunDetail:
    """Read single steps of a run that has been read by ranges of steps, as `read_detail` does."""
    return _read_chosen(_indexed(detail), executor, steps=steps, max_events=max_events)


def _read_chosen(
    indexed: IndexedRun, executor: Executor, *, steps: tuple[int, int] | None, max_events: int
) -> RunDetail:
    ranks = list(indexed.indexes)
    selected = indexed.choose(steps, max_events)
    detail = _read_detail(selected.run, ranks, executor)
    if selected.are_numbered(detail.steps):
        return replace(detail, whole=selected.find_extent(detail.steps))
    return _read_detail(indexed.run, ranks, executor)


def _indexed(detail: RunDetail) -> IndexedRun:
    """Return where the records of each step of a run lie that has been read by ranges of steps."""
    ranges = detail.surveys.ranges
    assert ranges is not None
    return IndexedRun(run=ranges.run, indexes=ranges.indexes)


def _read_detail(run: SurveyedRun, ranks: Sequence[int], executor: Executor) -> RunDetail:
    return _describe_run(run, ranks, survey_run(run, ranks, executor))


def _describe_run(run: SurveyedRun, ranks: Sequence[int], surveys: Surveys) -> RunDetail:
    steps = agree_on_rule(surveys.steps)
    measured = choose_steps(list(steps.values()))
    return RunDetail(run=run, ranks=tuple(ranks), surveys=surveys, steps=steps, measured=measured)


def read_to_sum(run: SurveyedRun, executor: Executor) -> RunDetail:
    """Read a run once; of a run with long logs no single operations are matched, as `map_ranges` does."""
    ranks = newest_ranks(run.folders)
    return _describe_run(run, ranks, survey_to_sum(run, ranks, executor))


def map_ranges(
    detail: RunDetail, work: Callable[[RankDetail], Result], executor: Executor
) -> Iterator[tuple[tuple[int, int], list[Result]]]:
    """Read the ranks of a run that has been read by ranges of steps once more, so.

    Parameters:
        work: also sees the steps around a range; it and its results are picklable.

    Yields:
        The first and last step of a range, and the result of `work` for each rank.
    """
    indexed = _indexed(detail)
    ranges = list(indexed.cut())
    runs = (indexed.select(*steps).run.part(detail.ranks) for steps in ranges)
    tasks = (_RangeTask(work=work, ranks=detail.ranks, run=run) for run in runs)
    return zip(ranges, map_tasks(executor, _work_on_range, tasks), strict=True)


@dataclass(frozen=True, kw_only=True)
class _RangeTask(Generic[Result]):
    """Some steps of all ranks, to be looked at in detail."""

    work: Callable[[RankDetail], Result]
    ranks: Sequence[int]
    run: Run


def _work_on_range(task: _RangeTask[Result]) -> list[Result]:
    return list(map(task.work, read_ranks(_read_detail(task.run, task.ranks, THIS_PROCESS))))


def read_ranks(detail: RunDetail) -> Iterator[RankDetail]:
    """Read the ranks once more, in order."""
    for task in _share_out(detail):
        yield from _read_details(task)


def map_ranks(detail: RunDetail, work: Callable[[RankDetail], Result], executor: Executor) -> Iterator[Result]:
    """Read the ranks once more; yield the result of `work` for each, in order. `work` and its results are picklable."""
    for results in map_tasks(executor, partial(_work_on, work), _share_out(detail)):
        yield from results


def summarise_and_map(
    detail: RunDetail, work: Callable[[RankDetail], Result], executor: Executor
) -> tuple[Summary, list[Result]]:
    """Summarise a run, with advice; return with it the result of `map_ranks`. Each rank is read once for both."""
    facts_of = _facts_of(detail)
    summary, results, *_ = summarise_closely(
        detail.run,
        executor,
        surveys=detail.surveys,
        make_collector=lambda part, channels: partial(_collect_details, work, facts_of(part, channels)),
        in_short=True,
    )
    return summary, results


def _work_on(work: Callable[[RankDetail], Result], task: DetailTask) -> list[Result]:
    return [work(rank) for rank in _read_details(task)]


def _collect_details(
    work: Callable[[RankDetail], Result], facts: PartFacts, timed: RankTiming, task: RankTask
) -> Result:
    return work(_describe(timed, task, facts))


def _facts_of(detail: RunDetail) -> Callable[[Sequence[int], Sequence[Channel]], PartFacts]:
    """Return the function that gives the facts of some ranks, whose operations use these channels."""
    first_number = _number_channels(detail.surveys.instances)
    unknown = detail.surveys.pipeline_windows(detail.measured).unknown
    return lambda part, channels: PartFacts(
        boots={rank: detail.surveys.boots[rank] for rank in part},
        first_number={channel: first_number[channel] for channel in channels},
        unknown_bubbles=[rank for rank in part if rank in unknown],
    )


def _share_out(detail: RunDetail) -> Iterator[DetailTask]:
    windows = detail.surveys.pipeline_windows(detail.measured)
    facts_of = _facts_of(detail)
    for part in part_ranks(detail.run, detail.surveys, measured=detail.measured, steps=detail.steps, windows=windows):
        yield DetailTask(**vars(part.task), facts=facts_of(part.ranks, part.channels))


def _read_details(task: DetailTask) -> Iterator[RankDetail]:
    for batch in task.read_placed():
        for timed in batch.timed(time_batch(batch, task.instances, task.errors)):
            yield _describe(timed, task, task.facts)


def _describe(timed: RankTiming, task: RankTask, facts: PartFacts) -> RankDetail:
    """Return the details of one rank."""
    tables, own, rank = timed.tables, timed.steps, timed.tables.rank
    operations, spans, matched, phases = timed.operations, timed.spans, timed.matched, timed.phases
    blocked, timing = timed.blocked, timed.timing
    bubbles = find_bubbles(tables, spans, operations, task.pipeline_windows[rank])
    instance, arrived = _number_instances(rank, operations, matched, task.instances, facts.first_number)
    parts, stretches = None, (NONE, np.zeros(0, np.int64))
    if len(own.windows) and not _unobserved(operations, blocked, own, task.measured).any():
        exposed = split_blocked(blocked, timing, blocked.counts)
        stretches = paint_steps(own.windows, phases, *exposed, bubbles)
        parts = _sum_up(stretches, own.windows, PARTS)
        if rank in facts.unknown_bubbles:
            del parts[BUBBLE]
    phase_stretches = paint_phases(own.windows, phases)
    return RankDetail(
        tables=tables,
        boot_id=facts.boots[rank],
        clocks=task.clocks,
        steps=own,
        measured=task.measured,
        parts=parts,
        part_stretches=stretches,
        phases=_sum_up(phase_stretches, own.windows, PHASES),
        phase_stretches=phase_stretches,
        user_phases=find_user_phases(tables, spans, own),
        operations=operations,
        spans=spans,
        timing=timing,
        blocked=blocked,
        instance=instance,
        arrived=arrived,
    )


def _unobserved(operations: Array, blocked: Blocked, own: RankSteps, measured: MeasuredSteps) -> Mask:
    """Say which operations in the measured steps kept the program for a time that is not known."""
    _, windows = own.between(measured.first, measured.last)
    return (locate(operations["issued_ns"], windows) >= 0) & ~blocked.known & blocked.counts


def _sum_up(stretches: tuple[Intervals, Column], windows: Intervals, names: Sequence[str]) -> dict[str, Column]:
    """Return how long each owner has each step, as `partition_steps` does, which would sweep over all anew."""
    times, owner = stretches
    cell = (np.searchsorted(windows[:, 0], times[:, 0], "right") - 1) * len(names) + owner
    # Sums of whole numbers below 2**53 are exact in float64.
    sums = np.bincount(cell, times[:, 1] - times[:, 0], len(windows) * len(names)).astype(np.int64)
    table = sums.reshape(len(windows), len(names))
    return {name: table[:, place] for place, name in enumerate(names)}


def _number_channels(instances: OperationInstances) -> dict[Channel, int]:
    """Return the number of the first instance of each channel; numbers begin at 1."""
    numbers: dict[Channel, int] = {}
    following = 1
    for channel in sorted(instances.tables):
        numbers[channel] = following
        following += len(instances.tables[channel])
    return numbers


def _number_instances(
    rank: int,
    operations: Array,
    matched: MatchedOperations,
    instances: OperationInstances,
    first_number: Mapping[Channel, int],
) -> tuple[Column, Column]:
    """Return the number of the instance of each operation, and whether the rank arrived first or last."""
    numbers = np.zeros(len(operations), np.int64)
    arrived = np.full(len(operations), BETWEEN, np.int64)
    start = start_of(operations)
    for channel, rows, seqs in zip(matched.channels, matched.rows, matched.seqs, strict=True):
        table = instances.tables[channel]
        at = np.searchsorted(table["seq"], seqs)
        instance_rows = select(table, at)
        numbers[rows] = np.where(instance_rows["num_seen"] > 1, first_number[channel] + at, 0)
        if channel.is_p2p:
            arrived[rows] = FIRST if channel.sending_rank == rank else LAST
        else:
            is_first = start[rows] == instance_rows["first_start"]
            arrived[rows] = np.where(instance_rows["last_rank"] == rank, LAST, np.where(is_first, FIRST, BETWEEN))
    return numbers, arrived
