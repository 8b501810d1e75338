"""The first pass over all ranks: facts, steps and operation instances, on one clock where that is known."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dtprof.analysis.map_reduce.rank_facts import RankFacts, RankSurvey, survey_batch
from dtprof.analysis.pipeline.bubbles import PIPELINE_AXIS, PipelineWindows, RankPipeline, find_windows, place_pipelines
from dtprof.analysis.pipeline.inferred_stages import InferredStage
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.analysis.steps.throughput import RankConsumption
from dtprof.job.axes import distinct_groups
from dtprof.job.clock_alignment import Clocks, Marks, find_measured, tighten
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.device_timeline import place_on_device
from dtprof.job.groups import Channel
from dtprof.job.rank_batches import batch_in_turn
from dtprof.job.rank_executor import Executor, map_tasks, share_out
from dtprof.job.world_size import resolve_world_size
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.host_clocks import HostClock
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.rank_log.step_index import StepIndex
from dtprof.records.reader import Run
from dtprof.records.tables import Group, NodeMemory, ProcessExit, RankTables


class RankRecords(Protocol):
    """Where the records of ranks come from."""

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Read one rank; its last attempt unless another is named."""

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Read the last attempts of ranks, in this order."""


class SurveyedRun(RankRecords, Protocol):
    """A run, whose ranks are read part by part; records.reader.Run is one, monitor.live_run.LiveWindow another."""

    @property
    def path(self) -> Path:
        """The run directory."""

    @property
    def name(self) -> str:
        """Where it lies, as it was given."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the job."""

    @property
    def problems(self) -> tuple[str, ...]:
        """The parts that could not be read, a sentence each."""

    @property
    def folders(self) -> Mapping[int, Sequence[tuple[int, Path]]]:
        """(attempt, folder) of every rank, ascending."""

    def on_disk(self) -> Run | None:
        """Return the run where any range of its steps can be read; None where only the newest are at hand."""

    def part(self, ranks: Sequence[int], /) -> RankRecords:
        """Return the records of some ranks: picklable, and little more than where they lie."""

    def exit_of(self, host: str, pid: int) -> ProcessExit | None:
        """Return how a process of a host ended; None where nobody saw it."""

    def node_samples(self, *, max_samples: int | None = None) -> Mapping[str, NodeSamples]:
        """Return the samples of each node by its name; of each at most `max_samples`, at even distances."""

    def node_memory(self) -> Sequence[NodeMemory]:
        """Return how much memory each node has, and the most that was in use."""

    def host_clocks(self) -> Mapping[str, HostClock]:
        """Return the clocks that launchers measured, by host name."""


@dataclass(frozen=True, kw_only=True)
class StepRanges:
    """What it takes to read ranks with long logs by ranges of steps."""

    run: Run
    indexes: Mapping[int, StepIndex]  # by rank
    memory: Mapping[int, RankTables]  # by rank: the samples alone that tell whether memory grows


@dataclass(kw_only=True)
class Surveys:
    """The results of the first pass, on the clock of the reference host as far as clocks are aligned."""

    clocks: Clocks
    facts: list[RankFacts] = field(default_factory=list)
    steps: dict[int, RankSteps] = field(default_factory=dict)
    instances: OperationInstances = field(default_factory=OperationInstances)
    pipelines: dict[int, RankPipeline] = field(default_factory=dict)
    possible_stages: list[int] = field(default_factory=list)  # ranks that ran no schedule, but may be stages
    inferred: dict[int, tuple[InferredStage, RankPipeline] | str] = field(default_factory=dict)  # of these, by rank
    not_inferred: dict[int, str] = field(default_factory=dict)  # why nothing is known of them
    consumed: dict[int, RankConsumption] = field(default_factory=dict)  # of the ranks of which that was recorded
    boots: dict[int, str] = field(default_factory=dict)  # by rank, as recorded
    marks: Marks = field(default_factory=Marks)  # for the alignment of clocks; empty where that is not asked for
    parts: list[tuple[Sequence[int], tuple[Channel, ...]]] = field(
        default_factory=list
    )  # ranks and the channels of their operations
    ranges: StepRanges | None = None  # where logs are long: then there are neither instances nor parts

    @property
    def one_clock(self) -> bool:
        """Say whether all ranks are on one clock."""
        return len({fact.boot_id for fact in self.facts}) <= 1

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return resolve_world_size((fact.world_size for fact in self.facts), self.steps)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the job that left no log."""
        return tuple(sorted(set(range(self.world_size)) - self.steps.keys()))

    @property
    def incomplete(self) -> frozenset[int]:
        """The ranks of which something was not read: their log is missing or damaged."""
        return frozenset(self.missing) | {fact.rank for fact in self.facts if fact.problems}

    def pipeline_windows(self, measured: MeasuredSteps) -> PipelineWindows:
        """Return when each pipeline ran, and of which ranks the bubble is not known."""
        return find_windows(self.pipelines, self.possible_stages, measured, self.not_inferred)

    def with_stages(self) -> "Surveys":
        """Take ranks whose messages and passes tell of which pipeline they are stages for such."""
        stages = {rank: found for rank, found in self.inferred.items() if not isinstance(found, str)}
        placed, reasons = place_pipelines(stages)
        return replace(
            self,
            pipelines=self.pipelines | placed,
            possible_stages=[rank for rank in self.possible_stages if rank not in placed],
            inferred={},
            not_inferred={rank: why for rank, why in self.inferred.items() if isinstance(why, str)} | reasons,
        )

    def distinct_groups(self) -> Collection[Group]:
        """Return each group once, and the ranks of pipelines that no framework names as groups along their axis."""
        keys = dict.fromkeys(own.key for own in self.pipelines.values() if own.pipeline.inferred)
        inferred = [
            Group(name="", description="", size=len(key.members), ranks=key.members, axis=PIPELINE_AXIS) for key in keys
        ]
        return distinct_groups([*(group for fact in self.facts for group in fact.groups.values()), *inferred])

    def add(self, own: RankSurvey, boot_id: str) -> None:
        """Take in one rank, given the boot id that it recorded."""
        rank = own.facts.rank
        self.facts.append(own.facts)
        self.steps[rank] = own.steps
        self.boots[rank] = boot_id
        self.marks.add(boot_id, own.marks)
        if own.pipeline is not None:
            self.pipelines[rank] = own.pipeline
        if own.may_be_stage:
            self.possible_stages.append(rank)
            self.inferred[rank] = own.inferred
        if own.consumption is not None:
            self.consumed[rank] = own.consumption

    def join(self, others: "Surveys") -> None:
        """Take in other ranks."""
        self.facts.extend(others.facts)
        self.steps.update(others.steps)
        self.instances.join(others.instances)
        self.pipelines.update(others.pipelines)
        self.possible_stages.extend(others.possible_stages)
        self.inferred.update(others.inferred)
        self.consumed.update(others.consumed)
        self.boots.update(others.boots)
        self.marks.join(others.marks)


@dataclass(frozen=True, kw_only=True)
class SurveyTask:
    """Some ranks to be surveyed."""

    records: RankRecords
    ranks: Sequence[int]
    clocks: Clocks
    several_clocks: bool


SurveyOnClocks = Callable[[Clocks, bool, Surveys | None], Surveys | None]
"""Surveys all ranks, given the clocks, whether to collect what tells those of several hosts, and the survey before."""


def survey_run(run: SurveyedRun, ranks: Sequence[int], executor: Executor) -> Surveys:
    """Survey all ranks; once more where the records of several hosts tell their clocks better than launchers did.

    Parameters:
        run: whose ranks.
        ranks: to survey.
        executor: what surveys the parts.
    """
    parts = share_out(ranks, executor)

    def on_clocks(clocks: Clocks, several_clocks: bool, _: Surveys | None) -> Surveys:
        return _survey_on(run, parts, executor, clocks, several_clocks=several_clocks)

    found = survey_on_clocks(run, on_clocks)
    assert found is not None
    return found


def survey_on_clocks(run: SurveyedRun, survey: SurveyOnClocks) -> Surveys | None:
    """Survey on the clocks that launchers measured; once more where the records of several hosts tell them better.

    Parameters:
        survey: surveys all ranks.
    """
    may_be_several = len(run.manifest.hosts) != 1 or len(run.host_clocks()) > 1
    surveys = survey(find_measured(run.host_clocks()), may_be_several, None)
    if surveys is None or len(set(surveys.boots.values())) < 2:
        return surveys
    clocks = _tighten_clocks(surveys)
    return survey(clocks, False, surveys) if clocks.corrections else replace(surveys, clocks=clocks)


def _tighten_clocks(surveys: Surveys) -> Clocks:
    """Return the clocks of the hosts of surveyed ranks as their records and the launchers' measurements tell them."""
    spans: dict[str, tuple[int, int]] = {}
    for fact in surveys.facts:
        if 0 < fact.first_ns <= fact.last_ns:
            first, last = spans.get(surveys.boots[fact.rank], (fact.first_ns, fact.last_ns))
            spans[surveys.boots[fact.rank]] = min(first, fact.first_ns), max(last, fact.last_ns)
    return tighten(surveys.clocks, surveys.marks, spans)


def _survey_on(
    run: SurveyedRun, parts: Sequence[Sequence[int]], executor: Executor, clocks: Clocks, *, several_clocks: bool
) -> Surveys:
    tasks = (
        SurveyTask(records=run.part(part), ranks=part, clocks=clocks, several_clocks=several_clocks) for part in parts
    )
    surveys = Surveys(clocks=clocks)
    same: dict[Channel, Channel] = {}
    for part, found in zip(parts, map_tasks(executor, survey_ranks, tasks), strict=True):
        surveys.join(found)
        surveys.parts.append((part, tuple(same.setdefault(channel, channel) for channel in found.instances.tables)))
    return surveys.with_stages()


def survey_ranks(task: SurveyTask) -> Surveys:
    """Survey some ranks."""
    surveys = Surveys(clocks=task.clocks)

    def align(tables: RankTables) -> RankTables:
        surveys.boots[tables.rank] = tables.boot_id
        return task.clocks.align(tables)

    for batch in batch_in_turn(map(align, map(place_on_device, task.records.load_each(task.ranks)))):
        for tables, found in zip(batch.tables, survey_batch(batch, several_clocks=task.several_clocks), strict=True):
            surveys.add(found, surveys.boots[tables.rank])
            surveys.instances.add(found.instances)
    return surveys
