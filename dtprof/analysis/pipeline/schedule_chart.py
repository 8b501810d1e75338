"""The schedule of one step of a pipeline as a chart: planned, as it ran, and with predicted changes.

The plan is drawn with equal times: every action takes the mean of its kind, and messages take none. The step shown is
the one whose window is the middle one of those whose actions are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.pipeline.bubbles import KINDS, PipelineKey, RankPipeline
from dtprof.analysis.pipeline.schedule_changes import Changes, find_changes
from dtprof.analysis.pipeline.schedule_replay import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOSS,
    Act,
    Needed,
    in_order,
    list_acts,
)
from dtprof.analysis.results import Summary
from dtprof.columns import distinct, mean_of_each, number_distinct
from dtprof.intervals import Column
from dtprof.records.tables import Array

LETTERS = {FORWARD: "F", LOSS: "L", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
MAX_ACTIONS = 6_000
"""Of a pipeline with more in a step, no chart is drawn: its bars would be narrower than a pixel."""


@dataclass(frozen=True, kw_only=True)
class ChartAction:
    """One action of one rank; times since the begin of the window."""

    rank: int
    stage: int
    kind: str  # one of LETTERS
    microbatch: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Mean time of the actions of one stage, over the steps whose actions are kept."""

    stage: int
    ranks: tuple[int, ...]  # of all replicas
    mean_ns: Mapping[str, int]  # by LETTERS


@dataclass(frozen=True, kw_only=True)
class PipelineChart:
    """One step of one pipeline of the job."""

    step: int
    ranks: tuple[int, ...]  # by place in the pipeline
    stages: tuple[tuple[int, ...], ...]  # of each of these ranks
    planned: tuple[ChartAction, ...]  # empty: the schedule has no plan, or it cannot be laid out
    planned_ns: int
    measured: tuple[ChartAction, ...]
    measured_ns: int
    stage_times: tuple[StageTime, ...]
    changes: Changes


def chart_pipeline(members: Sequence[RankPipeline], summary: Summary) -> PipelineChart | None:
    """Chart the first pipeline of the job whose ranks all kept the actions of one step; None without one."""
    result = summary.pipeline
    used = summary.steps.used
    if result is None or used is None:
        return None
    pipelines: dict[PipelineKey, list[RankPipeline]] = {}
    for member in members:
        pipelines.setdefault(member.key, []).append(member)
    for some in pipelines.values():
        ordered = sorted(some, key=lambda member: member.pipeline.group_rank)
        steps = _shared_steps(ordered, used)
        if len(ordered) == ordered[0].pipeline.group_size and len(steps):
            break
    else:
        return None
    step, begin, end = _middle_step(ordered, steps)
    orders = [member.actions[member.actions["step"] == step] for member in ordered]
    if sum(map(len, orders)) > MAX_ACTIONS:
        return None
    means = _mean_by(members, lambda rows: rows["kind"])
    ranks = tuple(member.rank for member in ordered)
    planned = lay_out([_plan(member) for member in ordered], means, ranks)
    return PipelineChart(
        step=step,
        ranks=ranks,
        stages=tuple(member.pipeline.stages for member in ordered),
        planned=planned,
        planned_ns=max((action.end_ns for action in planned), default=0),
        measured=tuple(
            _action(member.rank, row, begin) for member, rows in zip(ordered, orders, strict=True) for row in rows
        ),
        measured_ns=end - begin,
        stage_times=_stage_times(members),
        changes=find_changes(ordered, steps, result),
    )


def _shared_steps(members: Sequence[RankPipeline], used: tuple[int, int]) -> list[int]:
    shared = set.intersection(*(set(distinct(member.actions["step"]).tolist()) for member in members))
    return sorted(step for step in shared if used[0] <= step <= used[1])


def _middle_step(members: Sequence[RankPipeline], steps: Sequence[int]) -> tuple[int, int, int]:
    """Return the step whose window is the middle one, with the begin and the end of that."""
    windows = []
    for step in steps:
        rows = [member.actions[member.actions["step"] == step] for member in members]
        begin = min(int(some["begin"].min()) for some in rows)
        windows.append((max(int(some["end"].max()) for some in rows) - begin, step, begin))
    length, step, begin = sorted(windows)[len(windows) // 2]
    return step, begin, begin + length


def _action(rank: int, row: Array, origin: int) -> ChartAction:
    return ChartAction(
        rank=rank,
        stage=int(row["stage"]),
        kind=LETTERS[int(row["kind"])],
        microbatch=int(row["microbatch"]),
        begin_ns=int(row["begin"]) - origin,
        end_ns=int(row["end"]) - origin,
    )


def _mean_by(members: Sequence[RankPipeline], key: Callable[[Array], Column]) -> dict[int, int]:
    rows = np.concatenate([member.actions for member in members])
    keys, place = number_distinct(key(rows))
    took = mean_of_each(place, rows["end"] - rows["begin"])
    return {int(value): int(mean) for value, mean in zip(keys, took, strict=True)}


def _plan(member: RankPipeline) -> list[Act]:
    """Return the actions of the plan in order; as they ran where there is none."""
    order = member.pipeline.order
    if order is None:
        some = member.actions[member.actions["step"] == member.actions["step"][0]]
        return list(list_acts(some[some["kind"] != LOSS]))
    return [
        Act(KINDS[action.name], action.stage, action.microbatch)
        for slot in order
        for action in slot
        if action.name in KINDS and action.microbatch >= 0
    ]


def lay_out(plan: Sequence[Sequence[Act]], means: Mapping[int, int], ranks: Sequence[int]) -> tuple[ChartAction, ...]:
    """Return planned actions at the times at which they could begin; empty where they wait for each other."""
    fallback = means.get(BACKWARD, means.get(FORWARD, 1))
    ready: dict[Needed, int] = {}
    now = [0] * len(plan)
    placed: list[ChartAction] = []
    for place, at, needs, gives in in_order(plan) or ():
        kind, stage, microbatch = plan[place][at]
        begin = max(now[place], 0 if needs is None else ready[needs])
        now[place] = end = begin + means.get(kind, fallback)
        if gives is not None:
            ready[gives] = end
        placed.append(
            ChartAction(
                rank=ranks[place],
                stage=stage,
                kind=LETTERS[kind],
                microbatch=microbatch,
                begin_ns=begin,
                end_ns=end,
            )
        )
    return tuple(placed)


def _stage_times(members: Sequence[RankPipeline]) -> tuple[StageTime, ...]:
    means = _mean_by(members, lambda rows: rows["kind"] * 2**32 + rows["stage"])
    stages = sorted({code & 0xFFFFFFFF for code in means})
    return tuple(
        StageTime(
            stage=stage,
            ranks=tuple(sorted(member.rank for member in members if stage in member.pipeline.stages)),
            mean_ns={
                letter: means[kind * 2**32 + stage] for kind, letter in LETTERS.items() if kind * 2**32 + stage in means
            },
        )
        for stage in stages
    )
