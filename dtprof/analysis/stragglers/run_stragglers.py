"""The stragglers of a run: of its summary, or searched for without the rest of it, in half the time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtprof.analysis.map_reduce.blocked_steps import find_blocked_steps
from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.reduction_tasks import RankTask, part_ranks
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys, survey_run
from dtprof.analysis.memory.device_series import samples_each
from dtprof.analysis.pipeline.slack import Slack
from dtprof.analysis.results import Caveat, StragglerResult
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps, agree_on_rule, choose_steps
from dtprof.analysis.steps.throughput import LOST
from dtprof.analysis.stragglers.device_clocks import RankDevice, measure_clocks
from dtprof.analysis.stragglers.rank_waits import RankWaits
from dtprof.analysis.stragglers.straggler_ranks import bin_width, find_stragglers
from dtprof.columns import median
from dtprof.formatting import list_ranks
from dtprof.intervals import Column, Intervals
from dtprof.job.clock_alignment import worst_error_ns
from dtprof.job.rank_executor import Executor, map_tasks
from dtprof.job.world_size import newest_ranks
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.nodes.sampled_lines import read_late_lines


@dataclass(frozen=True, kw_only=True)
class RunStragglers:
    """The stragglers of a run, and the steps that show them."""

    num_steps: int  # measured
    steps: Mapping[int, RankSteps]  # by rank, also those before the measured ones
    found: tuple[StragglerResult, ...]

    def took_ns(self) -> int:
        """Return how long all steps took, on the rank where they took longest."""
        return max((_took_ns(own.windows) for own in self.steps.values()), default=0)

    def late_ns(self, straggler: StragglerResult) -> int:
        """Return how long the steps of a straggler took from that on in which it became late."""
        own = self.steps[straggler.rank]
        return _took_ns(own.windows[own.numbers >= (straggler.since_step or 0)])


def _took_ns(windows: Intervals) -> int:
    return int((windows[:, 1] - windows[:, 0]).sum())


@dataclass(frozen=True, kw_only=True)
class WaitTask(RankTask):
    """Ranks whose waits are wanted."""

    width: int  # steps a bin


def search_stragglers(run: SurveyedRun, executor: Executor) -> RunStragglers:
    """Find the stragglers that a summary of the run would name."""
    surveys = survey_run(run, newest_ranks(run.folders), executor)
    steps = agree_on_rule(surveys.steps)
    measured = choose_steps(list(steps.values()))
    width = bin_width(measured.last - measured.first + 1, len(surveys.facts))
    parts = part_ranks(run, surveys, measured=measured, steps=steps, windows=None)  # waits do not depend on bubbles
    tasks = (WaitTask(**vars(part.task), width=width) for part in parts)
    waits = [own for found in map_tasks(executor, collect_part, tasks if measured.known else ()) for own in found]
    found, _ = name_stragglers(run, surveys, waits, measured=measured, nodes=read_device_nodes(run, surveys.facts))
    num_steps = measured.last - measured.first + 1 if measured.known else 0
    return RunStragglers(num_steps=num_steps, steps=steps, found=found or ())


def collect_part(task: WaitTask) -> list[RankWaits | None]:
    """Return the waits of each rank; None where its steps, or all that may block it, were not observed."""
    waits: list[RankWaits | None] = []
    for batch in task.read_placed():
        found = find_blocked_steps(
            batch, measured=task.measured, instances=task.instances, width=task.width, errors=task.errors
        )
        waits.extend(found.waits)
    return waits


def name_stragglers(
    run: SurveyedRun,
    surveys: Surveys,
    waits: Sequence[RankWaits | None],
    *,
    measured: MeasuredSteps,
    nodes: Sequence[NodeSamples],
) -> tuple[tuple[StragglerResult, ...] | None, tuple[Caveat, ...]]:
    """Return the stragglers of a run, and caveats about the other ranks; None where none is known.

    Parameters:
        waits: of each rank in the measured steps, in bins as wide as `bin_width` says.
        nodes: where a rank computes on a device.
    """
    steps = agree_on_rule(surveys.steps)
    durations = list_durations(steps.values(), measured)
    if not measured.known or not len(durations):
        return None, ()  # what is said of the steps says it
    found, caveats = find_stragglers(
        [own for own in waits if own is not None],
        measured=(measured.first, measured.last),
        width=bin_width(measured.last - measured.first + 1, len(surveys.facts)),
        step_ns=max(1, round(median(durations))),
        mean_step_ns=float(np.mean(durations)),
        stages={rank: own.pipeline.stages for rank, own in surveys.pipelines.items()},
        hosts={fact.rank: fact.host for fact in surveys.facts},
        clocks=measure_clocks(_list_devices(surveys, steps, measured), nodes, surveys.clocks),
        slack_of=Slack(surveys.pipelines, (measured.first, measured.last)).of,
    )
    sampled = read_late_lines(run.path) if found else {}
    named = tuple(replace(one, sampled=sampled.get(one.rank)) for one in found)
    unjudged = _say_unjudged(surveys, waits)
    aligned = surveys.one_clock or worst_error_ns(surveys.clocks, surveys.boots.values()) is not None
    return None if not named and (unjudged or not aligned) else named, (*caveats, *unjudged)


def _say_unjudged(surveys: Surveys, waits: Sequence[RankWaits | None]) -> list[Caveat]:
    """Say of which ranks it is not known whether they hold others up."""
    if surveys.world_size < 2:
        return []
    judged = {own.rank for own in waits if own is not None and len(own.work)}
    if lost := surveys.incomplete - judged:
        return [Caveat("stragglers", f"{LOST.format(list_ranks(lost))}, so that not all waits are known")]
    return (
        []
        if len(judged) > 1
        else [Caveat("stragglers", "no waits of ranks for each other are known in the measured steps")]
    )


def list_durations(steps: Iterable[RankSteps], measured: MeasuredSteps) -> Column:
    """Return how long the measured steps of all ranks took, ns."""
    columns = [
        windows[:, 1] - windows[:, 0] for _, windows in (own.between(measured.first, measured.last) for own in steps)
    ]
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def read_device_nodes(run: SurveyedRun, facts: Sequence[RankFacts]) -> list[NodeSamples]:
    """Return the samples of the nodes where a rank computes on a device; nothing is read where none does."""
    if not any(fact.device_uuid for fact in facts):
        return []
    return list(run.node_samples(max_samples=samples_each(len({fact.host for fact in facts}))).values())


def _list_devices(surveys: Surveys, steps: Mapping[int, RankSteps], measured: MeasuredSteps) -> Iterator[RankDevice]:
    """Return the device of each rank that recorded which it is, and when the rank's measured steps were."""
    for fact in surveys.facts:
        _, windows = steps[fact.rank].between(measured.first, measured.last)
        if fact.device_uuid and len(windows):
            yield RankDevice(
                rank=fact.rank,
                boot_id=surveys.boots[fact.rank],
                uuid=fact.device_uuid,
                begin_ns=int(windows[0, 0]),
                end_ns=int(windows[-1, 1]),
            )
