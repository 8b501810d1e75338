"""The newest step that every rank has ended, part by part: what changes from one look to the next.

The figures of a page are means of many steps and take their time; these are of one step, and cost little.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtprof.analysis.communication.operation_timing import split_blocked
from dtprof.analysis.placed_ranks import part_steps, read_placed, time_batch
from dtprof.analysis.rank_surveys import Run, survey_run
from dtprof.analysis.results import BUBBLE
from dtprof.analysis.steps.step_boundaries import RankSteps, UsedSteps, agree_on_rule
from dtprof.job.clock_alignment import state_errors
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.job.world_size import newest_ranks

STEPS_READ = 2
"""Behind the newest one: a step that the slowest rank has ended, and the end of the one before it."""


@dataclass(frozen=True, kw_only=True)
class NewestStep:
    """One step of all ranks."""

    number: int
    duration_ns: Mapping[int, int]  # by rank
    parts_ns: Mapping[
        int, Mapping[str, int]
    ]  # by rank, those of results.PARTS that are known; none unless all completions are
    steps: Mapping[int, RankSteps]  # of every rank, all that the records hold


def measure_newest_step(run: Run) -> NewestStep | None:
    """Return the newest step that all ranks with steps have ended; None where their newest records hold none.

    Parameters:
        run: the newest records of a run; more steps than needed cost time.
    """
    surveys = survey_run(run, newest_ranks(run.folders), THIS_PROCESS)
    steps = agree_on_rule(surveys.steps)
    stepping = [own for own in steps.values() if own.count]
    common = set.intersection(*(set(own.numbers.tolist()) for own in stepping)) if stepping else set()
    if not common:
        return None
    number = max(common)
    used = UsedSteps(count=number, first=number, last=number, warm_up=0, caveats=())
    durations, parts = {}, {}
    windows = surveys.pipeline_windows(used)
    errors = state_errors(surveys.clocks, surveys.boots)
    stepped = {rank: own for rank, own in steps.items() if own.count}
    pipeline_windows = {rank: windows.of(rank) for rank in stepped}
    batches = read_placed(
        map(surveys.clocks.align, run.load_each(stepped)),
        steps=stepped,
        used=used,
        instances=surveys.instances,
        pipeline_windows=pipeline_windows,
    )
    for batch in batches:
        timing = time_batch(batch, surveys.instances, errors)
        stretches = split_blocked(batch.blocked, timing, batch.blocked.counts, batch.shift_of_operation)
        found = part_steps(batch, stretches)
        unseen = batch.count(~batch.blocked.known & batch.blocked.counts)
        for one, own_parts, unobserved in zip(batch.ranks, found, unseen, strict=True):
            rank = one.placed.tables.rank
            durations[rank] = int(one.windows[0, 1] - one.windows[0, 0])
            if not unobserved:
                parts[rank] = {
                    part: ns for part, ns in own_parts.items() if part != BUBBLE or rank not in windows.unknown
                }
    return NewestStep(number=number, duration_ns=durations, parts_ns=parts, steps=steps)
