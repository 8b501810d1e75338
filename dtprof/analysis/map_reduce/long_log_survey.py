"""The first pass over ranks with long logs: each is read by ranges of steps, and never held whole.

What is kept of a rank grows with its steps, not with its records. Operations are matched across ranks in the second
pass, range by range (map_reduce/long_log_reduction.py): no table of them is made here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtprof.analysis.map_reduce.rank_facts import RankFacts, RankSurvey, state_facts
from dtprof.analysis.map_reduce.step_range_joins import (
    OfRange,
    join_consumption,
    join_facts,
    join_pipelines,
    join_steps,
)
from dtprof.analysis.map_reduce.survey import StepRanges, SurveyedRun, Surveys, survey_on_clocks, survey_run
from dtprof.analysis.memory.memory_formulas import LabelledOperations, ModelShare, find_share, list_labelled
from dtprof.analysis.memory.memory_growth import JUDGED
from dtprof.analysis.pipeline.bubbles import RankPipeline, find_pipelines, infer_pipeline, may_be_stage
from dtprof.analysis.pipeline.inferred_stages import NO_PASSES, InferredStage, join_places
from dtprof.analysis.steps.step_boundaries import NUMBERED, RULES, RankSteps, find_steps
from dtprof.analysis.steps.throughput import RankConsumption, find_consumption
from dtprof.columns import median
from dtprof.intervals import Column
from dtprof.job.clock_alignment import Clocks, collect_marks, join_marks
from dtprof.job.collective_matching import match_operations
from dtprof.job.device_timeline import place_on_device
from dtprof.job.groups import Channel
from dtprof.job.rank_batches import batch_ranks
from dtprof.job.rank_executor import Executor, map_tasks
from dtprof.records import events
from dtprof.records.rank_log.step_index import StepIndex
from dtprof.records.reader import Run
from dtprof.records.tables import Array, RankTables, is_own, select

LONG_LOG = 1 << 20
"""Records of a rank from which on it is read by ranges of steps."""
ROWS_AT_ONCE = 1 << 17
"""Records of a rank that are surveyed together, and of a single step however many it has."""
MAX_OF_STEP = 1 << 21
"""Records of one step, of which more cannot be read by ranges: those that no step follows, for example."""


@dataclass(frozen=True, kw_only=True)
class RangedSurveyTask:
    """A rank to be surveyed by ranges of steps."""

    records: Run
    rank: int
    clocks: Clocks
    several_clocks: bool
    index: StepIndex | None  # of its log, where that is known


@dataclass(frozen=True, kw_only=True)
class RangedSurvey(RankSurvey):
    """The first pass over one rank with a long log."""

    index: StepIndex
    boot_id: str  # as recorded
    memory: RankTables  # samples alone, of those that tell whether memory grows


@dataclass(kw_only=True)
class _Joined:
    """What is known of a rank so far."""

    facts: RankFacts | None = None
    labelled: LabelledOperations = field(default_factory=LabelledOperations)
    steps: list[OfRange[RankSteps]] = field(default_factory=list)
    pipeline: OfRange[RankPipeline] | None = None
    leads: list[int] = field(default_factory=list)  # of the host before its device: the median of each range
    may_be_stage: bool = False
    place: OfRange[tuple[InferredStage, RankPipeline]] | None = None
    no_place: str = ""
    marks: dict[Channel, list[Array]] = field(default_factory=dict)
    num_marked: dict[Channel, int] = field(default_factory=dict)
    consumed: list[OfRange[RankConsumption]] = field(default_factory=list)


def survey_by_ranges(task: RangedSurveyTask) -> RangedSurvey | None:
    """Survey one rank; None where its log cannot be read by ranges of steps."""
    index = task.index or task.records.index_steps(task.rank, held=events.CONSUMED, samples=JUDGED)
    if index is None or index.counts.max(initial=0) > MAX_OF_STEP:
        return None
    joined = _Joined()
    tables = None
    for first, last in cut_steps(index.counts, ROWS_AT_ONCE):
        tables = task.records.load_steps(task.rank, index.of(first, last, with_held=True))
        aligned = task.clocks.align(place_on_device(tables, index.device_error_ns))
        if not _take(joined, aligned, index, several_clocks=task.several_clocks):
            return None
    assert tables is not None
    assert joined.facts is not None
    facts = replace(joined.facts, host_lead_ns=int(median(joined.leads)) if joined.leads else None)
    found = _join_all_steps(joined.steps)
    pipeline = joined.pipeline.found if joined.pipeline is not None else None
    return RangedSurvey(
        index=replace(index, held=index.held[:0], samples=index.samples[:0]),
        boot_id=tables.boot_id,
        facts=replace(facts, model_share=find_share(tables, joined.labelled, pipeline)),
        steps=found,
        pipeline=pipeline,
        may_be_stage=pipeline is None and joined.may_be_stage,
        inferred=joined.place.found
        if joined.place is not None and not joined.no_place
        else joined.no_place or NO_PASSES,
        marks={channel: join_marks(parts, num=joined.num_marked[channel]) for channel, parts in joined.marks.items()},
        consumption=join_consumption(joined.consumed) if joined.consumed else None,
        memory=RankTables(
            rank=tables.rank,
            attempt=tables.attempt,
            world_size=tables.world_size,
            ops=tables.ops,
            samples=index.samples,
        ),
    )


def cut_steps(counts: Column, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of steps that together have at most so many records; one at least."""
    ends = np.cumsum(counts)
    first = 0
    while first < max(1, len(counts)):
        before = int(ends[first - 1]) if first else 0
        last = max(first, int(np.searchsorted(ends, before + most, "right")) - 1)
        yield first, min(last, max(0, len(counts) - 1))
        first = last + 1


def _take(joined: _Joined, tables: RankTables, index: StepIndex, *, several_clocks: bool) -> bool:
    """Take in a range of steps; return False where its steps are not numbered as the records count."""
    assert tables.own_steps is not None
    first, last = (step + index.offset for step in tables.own_steps)
    batch = batch_ranks([tables])
    (every,) = find_steps(batch)
    if every.rule in NUMBERED and len(every.numbers):
        # What has numbers of its own counts from the first record that is read.
        around = tables.first_whole_step or 0
        if int(every.numbers[0]) < around + index.offset:
            return False
    steps = join_steps([OfRange(first=first, last=last, found=every)], every)
    joined.steps.append(OfRange(first=first, last=last, found=every))
    (pipeline,) = find_pipelines(batch, [every])
    if pipeline is not None:
        newest = OfRange(first=first, last=last, found=pipeline)
        before = joined.pipeline
        parts = [newest] if before is None or before.found.key != pipeline.key else [before, newest]
        found = join_pipelines(parts, world_size=tables.world_size)
        if before is None or len(found.steps) >= len(before.found.steps):
            joined.pipeline = OfRange(first=parts[0].first, last=last, found=found)
    if pipeline is None and len(steps.numbers):
        joined.may_be_stage |= may_be_stage(tables, batch.operations.table, steps)
        if not joined.no_place:
            _take_place(joined, infer_pipeline(batch, 0, steps), (first, last), world_size=tables.world_size)
    consumption = find_consumption(tables, steps)
    if consumption is not None:
        joined.consumed.append(OfRange(first=int(steps.numbers[0]), last=int(steps.numbers[-1]), found=consumption))
    own = only_own(tables)
    sound = batch_ranks([own])
    operations, spans = sound.operations.table, sound.spans.table
    unsound = len(own.operations) + len(own.spans) - len(operations) - len(spans)
    facts = state_facts(own, share=ModelShare(), unsound=unsound)
    joined.facts = facts if joined.facts is None else join_facts(joined.facts, facts)
    if facts.host_lead_ns is not None:
        joined.leads.append(facts.host_lead_ns)
    joined.labelled.add(list_labelled(own, operations))
    if several_clocks:
        (matched,) = match_operations(sound)
        for channel, marks in collect_marks(own, operations, matched).items():
            joined.marks.setdefault(channel, []).append(marks)
        for channel, rows in zip(matched.channels, matched.rows, strict=True):
            joined.num_marked[channel] = joined.num_marked.get(channel, 0) + len(rows)
    return True


def _take_place(
    joined: _Joined,
    found: tuple[InferredStage, RankPipeline] | str,
    steps: tuple[int, int],
    *,
    world_size: int,
) -> None:
    """Take in what a range tells of the place of a rank in a pipeline that no framework names."""
    first, last = steps
    if isinstance(found, str):
        joined.no_place = found if found != NO_PASSES else ""  # steps that only evaluate have none
        return
    stage, pipeline = found
    known = joined.place
    place = join_places(known.found[0] if known is not None else stage, stage)
    if isinstance(place, str):
        joined.no_place = place
        return
    parts = [OfRange(first=first, last=last, found=pipeline)]
    if known is not None:
        parts.insert(0, OfRange(first=known.first, last=known.last, found=known.found[1]))
    actions = join_pipelines(parts, world_size=world_size)
    joined.place = OfRange(first=parts[0].first, last=last, found=(place, actions))


def only_own(tables: RankTables) -> RankTables:
    """Return the records of a range of steps without those that are there for what they tell of it."""

    def own(rows: Array) -> Array:
        return select(rows, is_own(tables, rows))

    return replace(
        tables,
        operations=own(tables.operations),
        spans=own(tables.spans),
        samples=own(tables.samples),
        device_intervals=own(tables.device_intervals),
    )


def load_in_ranges(run: Run, rank: int) -> Iterator[RankTables]:
    """Read the records of a rank, each once: of a long log by ranges of steps, where it can be, else whole."""
    index = run.index_steps(rank, held=(), samples=()) if run.longest_log() >= LONG_LOG else None
    if index is None:
        yield run.load(rank)
        return
    for first, last in cut_steps(index.counts, ROWS_AT_ONCE):
        yield only_own(run.load_steps(rank, index.of(first, last)))


def _join_all_steps(parts: Sequence[OfRange[RankSteps]]) -> RankSteps:
    """Return the steps of a rank by the first rule that any range meets."""
    met = {part.found.rule for part in parts if part.found.count}
    rule = next((rule for rule in RULES if rule in met), parts[-1].found.rule)
    of_rule = [part for part in parts if part.found.rule == rule]
    joined = join_steps(of_rule, of_rule[-1].found)
    return replace(joined, count=max(one.found.count for one in of_rule))


def find_long_logs(run: SurveyedRun) -> Run | None:
    """Return the run if some of its logs are long enough to be read by ranges of steps."""
    whole = run.on_disk()
    return whole if whole is not None and whole.longest_log() >= LONG_LOG else None


def survey_to_sum(run: SurveyedRun, ranks: Sequence[int], executor: Executor) -> Surveys:
    """Survey all ranks for `run_summary.reduce_run` alone: of a run with long logs by ranges of steps, where it can be.

    Parameters:
        run: whose ranks.
        ranks: to survey.
        executor: what surveys the parts.
    """
    whole = find_long_logs(run)
    if ranks and whole is not None:
        found = _survey_by_ranges(whole, ranks, executor)
        if found is not None:
            return found
    return survey_run(run, ranks, executor)


def _survey_by_ranges(run: Run, ranks: Sequence[int], executor: Executor) -> Surveys | None:
    """Survey all ranks by ranges of steps; None where the logs of some of them cannot be read so."""

    def on_clocks(clocks: Clocks, several_clocks: bool, before: Surveys | None) -> Surveys | None:
        known = before.ranges if before is not None else None
        indexes = known.indexes if known is not None else dict.fromkeys(ranks)
        return _survey_on(run, indexes, executor, clocks, several_clocks=several_clocks)

    return survey_on_clocks(run, on_clocks)


def _survey_on(
    run: Run,
    indexes: Mapping[int, StepIndex | None],
    executor: Executor,
    clocks: Clocks,
    *,
    several_clocks: bool,
) -> Surveys | None:
    tasks = (
        RangedSurveyTask(records=run.part([rank]), rank=rank, clocks=clocks, several_clocks=several_clocks, index=index)
        for rank, index in indexes.items()
    )
    found = [own for own in map_tasks(executor, survey_by_ranges, tasks) if own is not None]
    if len(found) < len(indexes) or not any(own.steps.rule in NUMBERED and own.steps.count for own in found):
        return None
    surveys = Surveys(
        clocks=clocks,
        ranges=StepRanges(
            run=run,
            indexes={own.facts.rank: own.index for own in found},
            memory={own.facts.rank: own.memory for own in found},
        ),
    )
    for own in found:
        surveys.add(own, own.boot_id)
    return surveys.with_stages()
