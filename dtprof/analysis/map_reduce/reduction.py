"""The second pass over all ranks of a run: its measured steps summed up, rank by rank or range by range of steps."""

from dtprof.analysis.communication.traffic import tally_lateness
from dtprof.analysis.critical_path.longest_path import MAX_ROWS
from dtprof.analysis.map_reduce.long_log_reduction import reduce_by_ranges
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
from dtprof.records.reader import Run


def reduce_run(
    run: SurveyedRun,
    executor: Executor,
    *,
    surveys: Surveys,
    used: MeasuredSteps,
    make_collector: MakeCollector[Found] | None = None,
    draws: bool = True,
) -> DetailedReductions[Found]:
    """Sum up the measured steps of the ranks that are surveyed.

    Parameters:
        draws: keep what the timeline, the critical path and lateness are made of.
    """
    num_ranks = len(surveys.facts)
    tallies = draws
    steps, windows = agree_on_rule(surveys.steps), surveys.pipeline_windows(used)
    draws = draws and surveys.one_clock
    max_bars = _max_bars(num_ranks) if draws and used.known else 0
    width = bin_width(used.last - used.first + 1, num_ranks)
    max_hops = MAX_ROWS // max(1, num_ranks) if draws else 0
    if surveys.ranges is not None:
        assert isinstance(run, Run)
        return reduce_by_ranges(
            run,
            executor,
            surveys=surveys,
            ranges=surveys.ranges,
            used=used,
            steps=steps,
            windows={rank: windows.of(rank) for rank in surveys.ranges.indexes},
            max_bars=max_bars,
            width=width,
            max_hops=max_hops,
            collect=make_collector(list(surveys.ranges.indexes), ()) if make_collector is not None else None,
        )
    tasks = (
        ReductionTask(
            **vars(part.task),
            max_bars=max_bars,
            width=width,
            max_hops=max_hops,
            collect=make_collector(part.ranks, part.channels) if make_collector is not None else None,
        )
        for part in part_ranks(run, surveys, used=used, steps=steps, windows=windows)
    )
    reduced: DetailedReductions[Found] = DetailedReductions()
    for found in map_tasks(executor, reduce_part, tasks):
        reduced.join(found)
        reduced.details.extend(found.details)
    if tallies:
        reduced.lateness = tally_lateness(surveys.instances)
    return reduced


def _max_bars(num_ranks: int) -> int:
    """Return how many bars a rank may bring per step: all that fit for a few ranks, fewer each for many."""
    return MAX_INTERVALS if num_ranks <= 8 else max(16, 8 * MAX_INTERVALS // num_ranks)
