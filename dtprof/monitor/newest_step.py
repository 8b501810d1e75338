"""The newest step that every rank has ended, part by part: what changes from one look to the next.

The figures of a page are means of many steps and take their time; these are of one step, and cost little.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtprof.analysis.communication.operation_timing import split_blocked, time_operations
from dtprof.analysis.rank_reductions import place_used
from dtprof.analysis.rank_stacks import stack_in_turn
from dtprof.analysis.rank_surveys import Run, survey_run
from dtprof.analysis.results import BUBBLE
from dtprof.analysis.steps.step_boundaries import RankSteps, UsedSteps, agree_on_rule
from dtprof.analysis.steps.step_partition import average, partition_steps
from dtprof.intervals import subtract, union
from dtprof.job.clock_alignment import state_errors
from dtprof.job.rank_batches import batch_in_turn
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
    placed = (
        one
        for batch in batch_in_turn(map(surveys.clocks.align, run.load_each(stepped)))
        for one in place_used(batch, stepped, used, surveys.instances, pipeline_windows)
    )
    for stack in stack_in_turn(placed, surveys.instances):
        timing = time_operations(
            stack.operations,
            stack.matched,
            stack.instance_rows,
            stack.blocked,
            op_names=surveys.instances.ops.values,
            rank=stack.rank_of_operation,
            errors=errors,
        )
        stretches = split_blocked(stack.blocked, timing, stack.blocked.counts, stack.shift_of_operation)
        bubbles = subtract(union(stack.pipeline_windows), union(stack.on_axis([one.actions for one in stack.ranks])))
        found = average(partition_steps(stack.windows, stack.phases, *stretches, bubbles), stack.window_bounds)
        unseen = stack.count(~stack.blocked.known & stack.blocked.counts)
        for one, own_parts, unobserved in zip(stack.ranks, found, unseen, strict=True):
            rank = one.placed.tables.rank
            durations[rank] = int(one.windows[0, 1] - one.windows[0, 0])
            if not unobserved:
                parts[rank] = {
                    part: ns for part, ns in own_parts.items() if part != BUBBLE or rank not in windows.unknown
                }
    return NewestStep(number=number, duration_ns=durations, parts_ns=parts, steps=steps)
