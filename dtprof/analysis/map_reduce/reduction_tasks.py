"""The second pass as tasks for executors: parts of the ranks to read again, with details of each on the way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, RankTiming, read_placed
from dtprof.analysis.map_reduce.rank_sums import ReductionLimits, Reductions, reduce_ranks
from dtprof.analysis.map_reduce.survey import RankRecords, SurveyedRun, Surveys
from dtprof.analysis.pipeline.bubbles import PipelineWindows
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.intervals import NONE, Intervals
from dtprof.job.clock_alignment import Clocks, state_errors
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.device_timeline import place_on_device
from dtprof.job.groups import Channel
from dtprof.records.tables import RankTables

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Ranks to read a second time, with the results of the first pass over them."""

    records: RankRecords
    clocks: Clocks
    steps: Mapping[int, RankSteps]  # of these ranks
    measured: MeasuredSteps
    pipeline_windows: Mapping[int, Intervals]
    instances: OperationInstances
    errors: ClockErrors

    def load_each(self) -> Iterator[RankTables]:
        """Read these ranks, in order, on the clock of the reference as far as clocks are aligned."""
        return map(self.clocks.align, map(place_on_device, self.records.load_each(self.steps)))

    def read_placed(self) -> Iterator[PlacedBatch]:
        """Read and place these ranks, in order, as many side by side as are worth it."""
        return read_placed(
            self.load_each(),
            steps=self.steps,
            measured=self.measured,
            instances=self.instances,
            pipeline_windows=self.pipeline_windows,
        )


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Some ranks to read a second time."""

    ranks: Sequence[int]
    channels: Sequence[Channel]  # of their operations
    task: RankTask


def part_ranks(
    run: SurveyedRun,
    surveys: Surveys,
    *,
    measured: MeasuredSteps,
    steps: Mapping[int, RankSteps],
    windows: PipelineWindows | None,
) -> Iterator[RankPart]:
    """Yield the ranks of a run in the parts in which they were surveyed.

    Parameters:
        steps: of the ranks to read.
        windows: of the pipelines; None: bubbles are not asked for.
    """
    errors = state_errors(surveys.clocks, surveys.boots)
    for part, channels in surveys.parts:
        task = RankTask(
            records=run.part(part),
            clocks=surveys.clocks,
            steps={rank: steps[rank] for rank in part if rank in steps},
            measured=measured,
            pipeline_windows={rank: windows.of(rank) if windows is not None else NONE for rank in part},
            instances=surveys.instances.of(channels),
            errors=errors,
        )
        yield RankPart(ranks=part, channels=channels, task=task)


CollectDetails = Callable[[RankTiming, RankTask], Found]
"""Extracts details of a rank while its tables are loaded; picklable, and so are its results."""
MakeCollector = Callable[[Sequence[int], Sequence[Channel]], CollectDetails[Found] | None]
"""Returns the extractor for some ranks, whose operations use these channels."""


@dataclass(frozen=True, kw_only=True)
class ReductionTask(RankTask, Generic[Found]):
    """A batch of ranks to reduce."""

    limits: ReductionLimits
    collect: CollectDetails[Found] | None  # at details of each rank


@dataclass(kw_only=True)
class DetailedReductions(Reductions, Generic[Found]):
    """The second pass over some ranks, with details of each where they are asked for."""

    details: list[Found] = field(default_factory=list)


def reduce_part(task: ReductionTask[Found]) -> DetailedReductions[Found]:
    """Reduce ranks in batches, and collect details of each rank if the task asks for them."""
    reductions: DetailedReductions[Found] = DetailedReductions()
    for batch in task.read_placed():
        found, timing = reduce_ranks(
            batch,
            measured=task.measured,
            instances=task.instances,
            limits=task.limits,
            errors=task.errors,
        )
        reductions.join(found)
        if task.collect is not None:
            reductions.details.extend(task.collect(rank, task) for rank in batch.timed(timing))
    return reductions
