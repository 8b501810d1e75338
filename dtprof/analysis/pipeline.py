"""Bubbles of pipeline schedules: how large, beside theory, and of what they are made.

The window of a step runs from the first forward of any stage to the end of the last backward. A rank's bubble is what
of the window it does not compute. The parts come from replaying the order in which the ranks really acted, without
messages: with equal times for all stages (schedule), with the mean time of each stage (what that adds is imbalance),
with the times of each action (jitter). What the real window has beyond that is communication and the host: exposed
point-to-point. The four parts sum to the bubble.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof import events
from dtprof.analysis.intervals import Column, Intervals, pair, subtract, union
from dtprof.analysis.records import ENDED, spans_of
from dtprof.analysis.results import PipelineRank, PipelineResult
from dtprof.analysis.steps import RankSteps, UsedSteps
from dtprof.tables import Array, Pipeline, RankTables

MAX_REPLAYED = 64
"""Steps of which the single actions are kept; windows are kept of all."""
FORWARD, LOSS, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(5)
KINDS = {
    events.PP_FORWARD: FORWARD,
    events.PP_LOSS: LOSS,
    events.PP_BACKWARD: BACKWARD,
    events.PP_BACKWARD_INPUT: BACKWARD_INPUT,
    events.PP_BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}
GRADIENT = (BACKWARD, BACKWARD_INPUT)
"""What gives the stage before its gradient."""
ACTION = np.dtype(
    [("step", "i8"), ("kind", "i8"), ("stage", "i8"), ("microbatch", "i8"), ("begin", "i8"), ("end", "i8")]
)


class Key(NamedTuple):
    """Name one pipeline of the job: replicas of it have groups of their own."""

    group: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankPipeline:
    """What one rank did in its pipeline."""

    rank: int
    boot_id: str
    key: Key
    pipeline: Pipeline
    steps: Column  # those in which it acted
    first: Column  # begin of the first action of each
    last: Column  # end of the last
    busy: Column  # time in actions of each
    actions: Array  # of some steps, by begin


class Window(NamedTuple):
    """The windows of one pipeline, by step."""

    steps: Column
    intervals: Intervals


def find_pipeline(tables: RankTables, spans: Array, own: RankSteps) -> RankPipeline | None:
    """Return what a rank did in its pipeline; of several schedules, in the one that ran most."""
    runs = spans_of(spans, tables, events.PP_STEP, ENDED)
    if not len(runs) or not len(own.windows):
        return None
    ids, counts = np.unique(runs["microbatch"], return_counts=True)
    pipeline = tables.pipelines.get(int(ids[np.argmax(counts)]))
    if pipeline is None or pipeline.num_stages < 1:
        return None
    actions = _actions(tables, spans, runs)
    actions["step"] = _step_of(actions["begin"], own)
    actions = actions[actions["step"] >= 0]
    if not len(actions):
        return None
    steps, start = np.unique(actions["step"], return_index=True)
    stride = 1
    while len(steps) > MAX_REPLAYED * stride:
        stride *= 2  # so that the steps that one rank keeps are among those of any other
    members = next((group.ranks for group in tables.groups.values() if group.name == pipeline.group), ())
    return RankPipeline(
        rank=tables.rank,
        boot_id=tables.boot_id,
        key=Key(pipeline.group, members),
        pipeline=pipeline,
        steps=steps,
        first=np.minimum.reduceat(actions["begin"], start),
        last=np.maximum.reduceat(actions["end"], start),
        busy=np.add.reduceat(actions["end"] - actions["begin"], start),
        actions=actions[actions["step"] % stride == 0],
    )


def _actions(tables: RankTables, spans: Array, runs: Array) -> Array:
    """Return the actions within steps of training, by begin."""
    parts = []
    for name, kind in KINDS.items():
        found = spans_of(spans, tables, name, ENDED)
        rows = np.zeros(len(found), ACTION)
        rows["kind"] = kind
        rows["stage"], rows["microbatch"] = found["stage"], found["microbatch"]
        rows["begin"], rows["end"] = found["begin_ns"], found["end_ns"]
        parts.append(rows)
    actions = np.concatenate(parts)
    actions = actions[np.argsort(actions["begin"], kind="stable")]
    run = np.searchsorted(runs["begin_ns"], actions["begin"], side="right") - 1
    inside = (run >= 0) & (actions["begin"] <= runs["end_ns"][run])
    return actions[inside]


def _step_of(times: Column, own: RankSteps) -> Column:
    """Return the number of the step within which each time lies; -1 for none."""
    at = np.searchsorted(own.windows[:, 0], times, side="right") - 1
    inside = (at >= 0) & (times < own.windows[:, 1][at])
    return np.where(inside, own.numbers[at], -1)


def find_windows(ranks: Sequence[RankPipeline]) -> dict[Key, Window]:
    """Return the windows of every pipeline whose ranks are all there, on one clock, for the steps that all have."""
    windows = {}
    for key, members in _by_pipeline(ranks).items():
        if len(members) != members[0].pipeline.group_size or len({member.boot_id for member in members}) != 1:
            continue
        steps = members[0].steps
        for member in members[1:]:
            steps = np.intersect1d(steps, member.steps)
        chosen = [np.isin(member.steps, steps) for member in members]
        first = np.minimum.reduce([member.first[some] for member, some in zip(members, chosen, strict=True)])
        last = np.maximum.reduce([member.last[some] for member, some in zip(members, chosen, strict=True)])
        windows[key] = Window(steps, pair(first, last))
    return windows


def windows_of(own: RankPipeline | None, windows: Mapping[Key, Window]) -> Intervals:
    """Return the windows of the pipeline of a rank; none for a rank without."""
    window = windows.get(own.key) if own is not None else None
    return window.intervals if window is not None else np.zeros((0, 2), np.int64)


def _by_pipeline(ranks: Iterable[RankPipeline]) -> dict[Key, list[RankPipeline]]:
    found: dict[Key, list[RankPipeline]] = {}
    for rank in ranks:
        found.setdefault(rank.key, []).append(rank)
    return {key: sorted(members, key=lambda one: one.pipeline.group_rank) for key, members in found.items()}


def find_bubbles(tables: RankTables, spans: Array, windows: Intervals) -> Intervals:
    """Return when one rank was in a bubble: in a window of its pipeline and in no action."""
    if not len(windows):
        return windows
    acted = [spans_of(spans, tables, name, ENDED) for name in KINDS]
    busy = union(np.concatenate([pair(rows["begin_ns"], rows["end_ns"]) for rows in acted]))
    return subtract(union(windows), busy)


def measure_pipelines(
    ranks: Sequence[RankPipeline], windows: Mapping[Key, Window], used: UsedSteps
) -> tuple[PipelineResult | None, list[str]]:
    """Return the bubble of the job's pipelines, mean over replicas and used steps, and what cannot be told of it."""
    if not ranks:
        return None, ["pipeline: no schedule of torch.distributed.pipelining ran; bubble is 0"]
    doubts = []
    pipelines = _by_pipeline(ranks)
    if len(windows) < len(pipelines):
        doubts.append(
            f"pipeline: of {len(pipelines)} pipelines {len(pipelines) - len(windows)} lack a rank, or span hosts whose "
            "clocks are not aligned; bubbles are those of the others"
        )
    fractions: list[npt.NDArray[np.float64]] = []
    parts: list[tuple[float, ...]] = []
    bubbles: dict[int, int] = {}
    for key, window in windows.items():
        members = pipelines[key]
        chosen = (window.steps >= used.first) & (window.steps <= used.last)
        steps, lengths = window.steps[chosen], (window.intervals[:, 1] - window.intervals[:, 0])[chosen]
        if not len(steps):
            continue
        busy = [member.busy[np.isin(member.steps, steps)] for member in members]
        fractions.append(1 - np.sum(busy, axis=0) / (len(members) * lengths))
        for member, own in zip(members, busy, strict=True):
            bubbles[member.rank] = int(np.mean(lengths - own))
        parts += _split(members, steps)
    if not fractions:
        return None, [*doubts, "pipeline: no step that every rank of a pipeline has; bubble is 0"]
    pipeline = next(iter(pipelines.values()))[0].pipeline
    fraction = float(np.concatenate(fractions).mean())
    split = _mean_parts(parts, fraction)
    if split is None:
        doubts.append("pipeline: the actions of the ranks do not fit together to be replayed; parts are not known")
    theory = theory_fraction(pipeline)
    if theory is None:
        doubts.append(f"pipeline: no formula for the bubble of {schedule_name(pipeline)}; theory_fraction is null")
    return (
        PipelineResult(
            schedule=schedule_name(pipeline),
            stages=pipeline.num_stages,
            ranks=pipeline.group_size,
            microbatches=pipeline.num_microbatches,
            bubble_fraction=fraction,
            theory_fraction=theory,
            parts=split,
            per_rank=tuple(PipelineRank(rank=rank, bubble_ns=bubble) for rank, bubble in sorted(bubbles.items())),
        ),
        doubts,
    )


def schedule_name(pipeline: Pipeline) -> str:
    """Return the common name of a schedule."""
    name = pipeline.schedule.removeprefix("Schedule")
    return {"ZBVZeroBubble": "ZBV"}.get(name, name)


def theory_fraction(pipeline: Pipeline) -> float | None:
    """Return the share of bubbles that a schedule has with equal times and free messages; None without a formula.

    With p ranks, m microbatches and v stages a rank: (p-1)/(m+p-1) for GPipe and 1F1B (Narayanan et al. 2021), m taken
    v times for interleaved ones, and about 0 for ZBV (Qi et al. 2024).
    """
    p, m = pipeline.group_size, pipeline.num_microbatches
    v = max(1, pipeline.num_stages // max(1, p))
    name = schedule_name(pipeline)
    if name in ("GPipe", "1F1B"):
        return (p - 1) / (m + p - 1)
    if name in ("Interleaved1F1B", "LoopedBFS"):
        return (p - 1) / (v * m + p - 1)
    return 0.0 if name == "ZBV" else None


PARTS = ("schedule", "imbalance", "exposed_p2p", "jitter")


def _mean_parts(parts: Sequence[tuple[float, ...]], fraction: float) -> dict[str, float] | None:
    """Return the mean of each part; exposed_p2p takes what the steps that were not replayed differ by."""
    if not parts:
        return None
    means = dict(zip(PARTS, (float(value) for value in np.mean(parts, axis=0)), strict=True))
    means["exposed_p2p"] += fraction - sum(means.values())
    return means


def _split(members: Sequence[RankPipeline], steps: Column) -> list[tuple[float, ...]]:
    """Return the parts of each step whose actions are kept by all ranks and can be replayed."""
    per_rank = [member.actions[np.isin(member.actions["step"], steps)] for member in members]
    if not all(len(actions) for actions in per_rank):
        return []
    everything = np.concatenate(per_rank)
    took = everything["end"] - everything["begin"]
    by_kind = _means(everything["kind"], took)
    by_stage = _means(everything["kind"] * 2**32 + everything["stage"], took)

    def equal(row: Array) -> float:
        return 0.0 if row["kind"] == LOSS else by_kind[int(row["kind"])]

    def of_stage(row: Array) -> float:
        return by_stage[int(row["kind"] * 2**32 + row["stage"])]

    def own(row: Array) -> float:
        return float(row["end"] - row["begin"])

    found: list[tuple[float, ...]] = []
    for step in np.unique(everything["step"]):
        orders = [actions[actions["step"] == step] for actions in per_rank]
        window = max(int(o["end"].max()) for o in orders if len(o)) - min(
            int(o["begin"].min()) for o in orders if len(o)
        )
        busy = sum(int((o["end"] - o["begin"]).sum()) for o in orders)
        replayed = [replay(orders, duration) for duration in (equal, of_stage, own)]
        if None in replayed or not window:
            continue
        schedule, uneven, jittered = (value for value in replayed if value is not None)
        real = 1 - busy / (len(orders) * window)
        found.append((schedule, uneven - schedule, real - jittered, jittered - uneven))
    return found


def _means(keys: Column, values: Column) -> dict[int, float]:
    unique, where = np.unique(keys, return_inverse=True)
    sums = np.bincount(where.reshape(-1), values)
    counts = np.bincount(where.reshape(-1))
    return {int(key): float(mean) for key, mean in zip(unique, sums / counts, strict=True)}


def replay(orders: Sequence[Array], duration: Callable[[Array], float]) -> float | None:
    """Return the share of bubbles when ranks act in their order, each action as soon as what it needs is there.

    A forward needs that of the stage before; a gradient of inputs that of the stage after. None where the actions wait
    for each other or for one that is missing.
    """
    last_stage = max(int(order["stage"].max()) for order in orders if len(order))
    ready: dict[tuple[bool, int, int], float] = {}
    at = [0] * len(orders)
    now = [0.0] * len(orders)
    busy, begun, moved = 0.0, float("inf"), True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                row = order[at[rank]]
                kind, stage, microbatch = int(row["kind"]), int(row["stage"]), int(row["microbatch"])
                needed = 0.0
                if kind == FORWARD and stage > 0:
                    needed = ready.get((True, stage - 1, microbatch), -1.0)
                elif kind in GRADIENT and stage < last_stage:
                    needed = ready.get((False, stage + 1, microbatch), -1.0)
                if needed < 0:
                    break
                took = duration(row)
                begin = max(now[rank], needed)
                now[rank] = begin + took
                begun = min(begun, begin)
                busy += took
                if kind == FORWARD or kind in GRADIENT:
                    ready[kind == FORWARD, stage, microbatch] = now[rank]
                at[rank] += 1
                moved = True
    if any(done < len(order) for done, order in zip(at, orders, strict=True)) or not busy:
        return None
    return 1 - busy / (len(orders) * (max(now) - begun))
