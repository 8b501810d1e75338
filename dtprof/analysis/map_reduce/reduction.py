"""The second pass over all ranks of a run: its measured steps summed up, rank by rank or range by range of steps."""

from dataclasses import dataclass

from dtprof.analysis.communication.traffic import tally_lateness
from dtprof.analysis.critical_path.longest_path import MAX_ROWS
from dtprof.analysis.map_reduce.long_log_reduction import reduce_by_ranges
from dtprof.analysis.map_reduce.rank_sums import ReductionLimits
from dtprof.analysis.map_reduce.reduction_tasks import (
    DetailedReductions,
    Found,
    MakeCollector,
    ReductionTask,
    part_ranks,
    reduce_part,
)
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, agree_on_rule
from dtprof.analysis.stragglers.straggler_ranks import bin_width
from dtprof.analysis.timeline.step_timeline import MAX_INTERVALS
from dtprof.job.rank_executor import Executor, map_tasks


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What is kept beside the sums; timeline and critical path where all ranks are on one clock."""

    timeline: bool = True
    critical_path: bool = True
    lateness: bool = True  # of ranges of steps it is always counted


ALL_DETAIL = Detail()
SUMS_ALONE = Detail(timeline=False, critical_path=False, lateness=False)


def reduce_run(
    run: SurveyedRun,
    executor: Executor,
    *,
    surveys: Surveys,
    measured: MeasuredSteps,
    make_collector: MakeCollector[Found] | None = None,
    detail: Detail = ALL_DETAIL,
) -> DetailedReductions[Found]:
    """Sum up the measured steps of the ranks that are surveyed."""
    num_ranks = len(surveys.facts)
    steps, windows = agree_on_rule(surveys.steps), surveys.pipeline_windows(measured)
    limits = ReductionLimits(
        max_bars=_max_bars(num_ranks) if detail.timeline and surveys.one_clock and measured.known else 0,
        max_hops=MAX_ROWS // max(1, num_ranks) if detail.critical_path and surveys.one_clock else 0,
        steps_per_bin=bin_width(measured.last - measured.first + 1, num_ranks),
    )
    if surveys.ranges is not None:
        return reduce_by_ranges(
            executor,
            surveys=surveys,
            ranges=surveys.ranges,
            measured=measured,
            steps=steps,
            windows={rank: windows.of(rank) for rank in surveys.ranges.indexes},
            limits=limits,
            collect=make_collector(list(surveys.ranges.indexes), ()) if make_collector is not None else None,
        )
    tasks = (
        ReductionTask(
            **vars(part.task),
            limits=limits,
            collect=make_collector(part.ranks, part.channels) if make_collector is not None else None,
        )
        for part in part_ranks(run, surveys, measured=measured, steps=steps, windows=windows)
    )
    reduced: DetailedReductions[Found] = DetailedReductions()
    for found in map_tasks(executor, reduce_part, tasks):
        reduced.join(found)
        reduced.details.extend(found.details)
    if detail.lateness:
        reduced.lateness = tally_lateness(surveys.instances)
    return reduced


def _max_bars(num_ranks: int) -> int:
    """Return how many bars a rank may bring per step: all that fit for a few ranks, fewer each for many."""
    return MAX_INTERVALS if num_ranks <= 8 else max(16, 8 * MAX_INTERVALS // num_ranks)
