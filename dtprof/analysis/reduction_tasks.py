"""The second map as tasks for executors: ranks whose measured steps are summed, with details of each on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dtprof.analysis.placed_ranks import RankTiming
from dtprof.analysis.rank_reductions import Reductions, reduce_ranks
from dtprof.analysis.rank_surveys import RankTask
from dtprof.job.groups import Channel

Found = TypeVar("Found")
CollectDetails = Callable[[RankTiming, RankTask], Found]
"""Extracts details of a rank while its tables are loaded; picklable, and so are its results."""
MakeCollector = Callable[[Sequence[int], Sequence[Channel]], CollectDetails[Found] | None]
"""Returns the extractor for some ranks, whose operations use these channels."""


@dataclass(frozen=True, kw_only=True)
class ReductionTask(RankTask, Generic[Found]):
    """A batch of ranks to reduce; the fields are the parameters of `reduce_ranks`."""

    max_bars: int
    width: int
    max_hops: int
    collect: CollectDetails[Found] | None  # at details of each rank


@dataclass(kw_only=True)
class DetailedReductions(Reductions, Generic[Found]):
    """The second map of some ranks, with details of each where they are asked for."""

    details: list[Found] = field(default_factory=list)


def reduce_part(task: ReductionTask[Found]) -> DetailedReductions[Found]:
    """Reduce ranks in batches, and collect details of each rank if the task asks for them."""
    reductions: DetailedReductions[Found] = DetailedReductions()
    for batch in task.read_placed():
        found, timing = reduce_ranks(
            batch,
            used=task.used,
            instances=task.instances,
            max_bars=task.max_bars,
            width=task.width,
            errors=task.errors,
            max_hops=task.max_hops,
        )
        reductions.join(found)
        if task.collect is not None:
            reductions.details.extend(task.collect(rank, task) for rank in batch.timed(timing))
    return reductions
