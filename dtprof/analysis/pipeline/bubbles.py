"""Bubbles of pipeline schedules: size, theory and causes.

The window of a step runs from the first forward of any stage to the end of the last backward. A rank's bubble is what
of the window it does not compute. The parts come from replaying the order in which the ranks really acted, without
messages: with equal times for all stages (schedule), with the mean time of each stage (what that adds is imbalance),
with the times of each action (jitter). What the real window has beyond that is communication and the host: exposed
point-to-point. The four parts sum to the bubble; schedule_replay.py has them. So do the three of when it was: while a
rank warmed up (before its first gradient), while it drained (after its last forward), and steady, between.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof.analysis.pipeline.bubble_places import ActionTimes, list_steps, sum_stages
from dtprof.analysis.pipeline.inferred_stages import (
    BY_HAND,
    InferredStage,
    find_passes,
    infer_stage,
    join_stages,
    name_schedule,
    place_stage,
)
from dtprof.analysis.pipeline.schedule_replay import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT,
    LOSS,
    mean_parts,
    split_bubbles,
)
from dtprof.analysis.results import Caveat, PipelineRank, PipelineResult, Summary
from dtprof.analysis.steps.parameter_exchanges import find_parameter_messages
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.columns import begins_of, distinct, is_among, is_any
from dtprof.formatting import list_ranks
from dtprof.intervals import NONE, Column, Intervals, Mask, locate, pair, subtract, union
from dtprof.job.axes import is_clear
from dtprof.job.rank_batches import RankBatch, Rows, batch_ranks, lay_out
from dtprof.job.valid_records import ENDED, spans_of_any, stride_of, times_of
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, Pipeline, RankTables, select

MAX_REPLAYED, MIN_REPLAYED = 64, 4
"""Steps of which the single actions are kept, of many ranks fewer; windows are kept of all."""
MAX_KEPT = 1 << 17
"""Steps times ranks of which they are kept."""
KINDS = {
    events.PP_FORWARD: FORWARD,
    events.PP_LOSS: LOSS,
    events.PP_BACKWARD: BACKWARD,
    events.PP_BACKWARD_INPUT: BACKWARD_INPUT,
    events.PP_BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}
ACTION = np.dtype(
    [("step", "i8"), ("kind", "i8"), ("stage", "i8"), ("microbatch", "i8"), ("begin", "i8"), ("end", "i8")]
)


FILL = np.dtype([("warm_until", "i8"), ("busy_before", "i8"), ("drain_from", "i8"), ("busy_after", "i8")])
"""Of one rank in one step: until its first gradient, and from its last forward on, with its time in actions there."""
TIMES = ("warm_up", "steady", "drain")


NO_PIPELINE = Caveat("pipeline", "no schedule of torch.distributed.pipelining ran; bubble is 0", is_usual=True)
"""Why there is no result of a job without a pipeline."""
NO_WINDOW = "a rank of the pipeline, or aligned clocks of its hosts, are missing"
NO_SCHEDULE = (
    "a pipeline written by hand may run there (a group of the axis pp, or messages within steps), "
    "whose schedule is not recorded"
)
INFERRED = Caveat(
    "pipeline",
    "the program wrote it itself; its stages, microbatches and schedule are inferred from messages between "
    "ranks and from their forward and backward passes",
)
"""Whence a result without a framework's word is."""
NOT_EVERY_STEP = "the pipeline has measured steps in which not every rank acted"
"""Why the bubble of a rank is not known."""
UNKNOWN_BUBBLE = "the bubble of "
"""How the caveat about it begins."""
PIPELINE_AXIS = "pp"
INTERLEAVED = ("Interleaved1F1B", "LoopedBFS")
"""Schedules with several stages a rank."""
WORTH_ADVICE = 0.02
"""As a share of the window: smaller parts are not mentioned."""


class PipelineKey(NamedTuple):
    """Name one pipeline of the job: replicas of it have groups of their own."""

    group: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankPipeline:
    """The pipeline actions of one rank."""

    rank: int
    boot_id: str
    key: PipelineKey
    pipeline: Pipeline
    steps: Column  # those in which it acted
    first: Column  # begin of the first action of each
    last: Column  # end of the last
    busy: Column  # time in actions of each
    fill: Array  # and when it warmed up and drained
    actions: Array  # of some steps, by begin


class WindowsByStep(NamedTuple):
    """The windows of one pipeline, by step."""

    steps: Column
    intervals: Intervals


@dataclass(frozen=True, kw_only=True)
class PipelineWindows:
    """The windows of every pipeline of the job, and the ranks whose bubble is not known."""

    by_pipeline: Mapping[PipelineKey, WindowsByStep]
    by_rank: Mapping[int, Intervals]
    unknown: Mapping[int, str]  # rank to reason; what bubble they have stays in exposed_wait and host

    def of(self, rank: int) -> Intervals:
        """Return the windows of a rank's pipeline; none for a rank whose bubble is 0 or not known."""
        return self.by_rank.get(rank, NONE)


def find_pipelines(batch: RankBatch, steps: Sequence[RankSteps]) -> list[RankPipeline | None]:
    """Return the actions of each rank in its pipeline; of several schedules, in the one that ran most.

    Parameters:
        steps: of each rank.
    """
    runs = batch.spans.chosen(_have_ended(batch.spans) & batch.spans.is_named((events.PP_STEP,)))
    schedules = [
        _find_schedule(tables, runs.of(i)) if len(rank_steps.windows) else None
        for i, (tables, rank_steps) in enumerate(zip(batch.tables, steps, strict=True))
    ]
    if not any(schedules):
        return [None for _ in schedules]
    actions = _list_actions(batch.spans, [schedule is not None for schedule in schedules])
    acted = np.diff(actions.bounds) > 0
    runs = runs.chosen(acted[runs.place])  # those of other ranks have no place on the axis
    shifts = _lay_out_actions(actions, runs, steps)
    if shifts is None:  # only damaged records are so far apart
        alone = [batch_ranks([tables]) for tables in batch.tables]
        return [find_pipelines(rank, [rank_steps])[0] for rank, rank_steps in zip(alone, steps, strict=True)]
    actions = actions.chosen(_are_in_runs(actions, runs, shifts))
    actions.table["step"] = _step_of(actions, steps, shifts)
    actions = actions.chosen(actions.table["step"] >= 0)
    return _describe_pipelines(batch.tables, schedules, actions)


def _have_ended(spans: Rows) -> Mask:
    ended: Mask = is_any(spans.table["state"], ENDED) & (spans.table["end_ns"] != UNKNOWN_NS)
    return ended


def _find_schedule(tables: RankTables, runs: Array) -> Pipeline | None:
    """Return the schedule that ran most on a rank."""
    if not len(runs):
        return None
    ids, counts = np.unique(runs["microbatch"], return_counts=True)
    pipeline = tables.pipelines.get(int(ids[np.argmax(counts)]))
    return pipeline if pipeline is not None and pipeline.num_stages >= 1 else None


def _list_actions(spans: Rows, wanted: Sequence[bool]) -> Rows:
    """Return the actions of some ranks by begin, without their steps; those that begin together by kind."""
    kind = np.full(len(spans.table), -1, np.int64)
    for name, number in KINDS.items():
        kind[spans.is_named((name,))] = number
    chosen = (kind >= 0) & _have_ended(spans) & np.array(wanted)[spans.place]
    acted, kind = spans.chosen(chosen), kind[chosen]
    rows = np.zeros(len(acted.table), ACTION)
    rows["kind"] = kind
    rows["stage"], rows["microbatch"] = acted.table["stage"], acted.table["microbatch"]
    rows["begin"], rows["end"] = acted.table["begin_ns"], acted.table["end_ns"]
    begin, place = rows["begin"], acted.place
    unordered = (begin[1:] < begin[:-1]) | ((begin[1:] == begin[:-1]) & (kind[1:] < kind[:-1]))
    if (unordered & (place[1:] == place[:-1])).any():
        rows = select(rows, np.lexsort((kind, begin, place)))
    return replace(acted, table=rows)


def _lay_out_actions(actions: Rows, runs: Rows, steps: Sequence[RankSteps]) -> Column | None:
    """Return offsets for the times of each rank so that no two ranks overlap; None where there are none."""
    extents = []
    for i, rank_steps in enumerate(steps):
        acted, ran = actions.of(i), runs.of(i)
        if len(acted):
            firsts = int(acted["begin"].min()), int(ran["begin_ns"].min()), int(rank_steps.windows[0, 0])
            lasts = int(acted["end"].max()), int(ran["end_ns"].max()), int(rank_steps.windows[-1, 1])
            extents.append((min(firsts), max(lasts)))
        else:
            extents.append((0, 0))
    return lay_out(extents)


def _are_in_runs(actions: Rows, runs: Rows, shifts: Column) -> Mask:
    """Say which actions were within steps of training."""
    begin = actions.table["begin"] + shifts[actions.place]
    run_shifts = shifts[runs.place]
    run = np.searchsorted(runs.table["begin_ns"] + run_shifts, begin, side="right") - 1
    inside: Mask = (run >= 0) & (begin <= (runs.table["end_ns"] + run_shifts)[run])
    return inside


def _step_of(actions: Rows, steps: Sequence[RankSteps], shifts: Column) -> Column:
    """Return the number of the step within which each action begins; -1 for none."""
    acted = [begin < end for begin, end in itertools.pairwise(actions.bounds)]
    ranks = [(rank_steps, shift) for rank_steps, shift, any_ in zip(steps, shifts.tolist(), acted, strict=True) if any_]
    if not ranks:
        return np.zeros(0, np.int64)
    windows = np.concatenate([rank_steps.windows + shift for rank_steps, shift in ranks])
    numbers = np.concatenate([rank_steps.numbers for rank_steps, _ in ranks])
    begin = actions.table["begin"] + shifts[actions.place]
    at = np.searchsorted(windows[:, 0], begin, side="right") - 1
    inside = (at >= 0) & (begin < windows[:, 1][at])
    return np.where(inside, numbers[at], -1)


def _describe_pipelines(
    tables: Sequence[RankTables], schedules: Sequence[Pipeline | None], actions: Rows
) -> list[RankPipeline | None]:
    """Return the time of each rank by kind of action, given its actions within steps."""
    rows, place = actions.table, actions.place
    if not len(rows):
        return [None for _ in tables]
    start = np.flatnonzero(begins_of(rows["step"], place))
    fill = _find_fill(rows, start)
    numbers = rows["step"][start]
    first, last = np.minimum.reduceat(rows["begin"], start), np.maximum.reduceat(rows["end"], start)
    busy = np.add.reduceat(rows["end"] - rows["begin"], start)
    bounds = np.searchsorted(start, actions.bounds).tolist()
    strides = [
        _stride(end - begin, rank.world_size) for rank, begin, end in zip(tables, bounds, bounds[1:], strict=False)
    ]
    sampled = actions.chosen(rows["step"] % np.array(strides)[place] == 0)
    described: list[RankPipeline | None] = []
    for i, (rank_tables, schedule) in enumerate(zip(tables, schedules, strict=True)):
        acts = slice(bounds[i], bounds[i + 1])
        if schedule is None or acts.start == acts.stop:
            described.append(None)
            continue
        members = next((group.ranks for group in rank_tables.groups.values() if group.name == schedule.group), ())
        described.append(
            RankPipeline(
                rank=rank_tables.rank,
                boot_id=rank_tables.boot_id,
                key=PipelineKey(schedule.group, members),
                pipeline=schedule,
                steps=numbers[acts],
                first=first[acts],
                last=last[acts],
                busy=busy[acts],
                fill=fill[acts],
                actions=sampled.of(i),
            )
        )
    return described


def _stride(num_steps: int, world_size: int) -> int:
    """Return of which steps the single actions are kept: multiples of this."""
    return stride_of(num_steps, min(MAX_REPLAYED, max(MIN_REPLAYED, MAX_KEPT // max(1, world_size))))


def keep_some_actions(found: RankPipeline, world_size: int) -> RankPipeline:
    """Return a pipeline joined from ranges of steps, with single actions of as many steps as if it were read whole."""
    stride = _stride(len(found.steps), world_size)
    return replace(found, actions=select(found.actions, found.actions["step"] % stride == 0))


def _find_fill(actions: Array, start: Column) -> Array:
    """Return the end of warm-up and the begin of drain of a rank, step by step; an overlap of both counts as drain."""
    begin, end, kind = actions["begin"], actions["end"], actions["kind"]
    fill = np.zeros(len(start), FILL)
    fill["drain_from"] = np.maximum.reduceat(np.where(kind == FORWARD, end, -1), start)
    none = fill["drain_from"] < 0
    fill["drain_from"][none] = np.maximum.reduceat(end, start)[none]
    first_gradient = np.minimum.reduceat(np.where(is_any(kind, GRADIENT), begin, np.iinfo(np.int64).max), start)
    fill["warm_until"] = np.minimum(first_gradient, fill["drain_from"])
    of_step = np.repeat(np.arange(len(start)), np.diff(np.append(start, len(actions))))
    # Times of a device are rounded: an action that ends where another begins may seem to end behind that.
    before = np.minimum(end, fill["warm_until"][of_step]) - begin
    after = end - np.maximum(begin, fill["drain_from"][of_step])
    for name, busy in (("busy_before", before), ("busy_after", after)):
        fill[name] = np.add.reduceat(np.maximum(busy, 0), start)
    return fill


def _split_by_time(members: Sequence[RankPipeline], steps: Column, windows: Intervals) -> npt.NDArray[np.float64]:
    """Return which share of each window, summed over ranks, was bubble in each of TIMES; shape (TIMES, steps)."""
    shares = np.zeros((len(TIMES), len(steps)))
    length = windows[:, 1] - windows[:, 0]
    for member in members:
        chosen = is_among(member.steps, steps)
        fill = member.fill[chosen]
        warm_up = fill["warm_until"] - windows[:, 0] - fill["busy_before"]
        drain = windows[:, 1] - fill["drain_from"] - fill["busy_after"]
        shares += np.stack((warm_up, length - member.busy[chosen] - warm_up - drain, drain))
    return shares / (len(members) * length)


def infer_pipeline(batch: RankBatch, position: int, rank_steps: RankSteps) -> tuple[InferredStage, RankPipeline] | str:
    """Return the place and the actions of a rank that may be a stage, else why they cannot be inferred.

    The pipeline of the actions has no members yet, as it takes all ranks to know them: `place_pipelines` adds them.
    """
    tables, spans, operations = batch.tables[position], batch.spans.of(position), batch.operations.of(position)
    stage = infer_stage(tables, spans, operations, rank_steps)
    if isinstance(stage, str):
        return stage
    rows = np.zeros(len(stage.passes.begin), ACTION)
    rows["step"] = rank_steps.numbers[locate(stage.passes.begin, rank_steps.windows)]
    rows["kind"], rows["microbatch"] = stage.passes.kind, stage.number
    rows["begin"], rows["end"] = stage.passes.begin, stage.passes.end
    actions = Rows(table=rows, bounds=[0, len(rows)], names=[tables.ops])
    plan = Pipeline(schedule=BY_HAND, num_stages=0, stages=(0,), num_microbatches=stage.microbatches, inferred=True)
    (described,) = _describe_pipelines([tables], [plan], actions)
    return NO_SCHEDULE if described is None else (stage, described)


def place_pipelines(
    inferred: Mapping[int, tuple[InferredStage, RankPipeline]],
) -> tuple[dict[int, RankPipeline], dict[int, str]]:
    """Return the pipelines that ranks form, by rank, and why other ranks are in none."""
    chains, reasons = join_stages({rank: stage for rank, (stage, _) in inferred.items()})
    placed = {}
    for chain in chains:
        members = [inferred[rank][1] for rank in chain]
        schedule = name_schedule(_orders_of(members), members[0].pipeline.num_microbatches)
        for number, member in enumerate(members):
            actions = member.actions.copy()
            actions["stage"] = number
            pipeline = place_stage(member.pipeline, chain, member.rank, schedule)
            placed[member.rank] = replace(member, key=PipelineKey("", chain), pipeline=pipeline, actions=actions)
    return placed, reasons


def _orders_of(members: Sequence[RankPipeline]) -> list[list[int]]:
    """Return of each rank the kinds of its actions in a step of which all ranks kept them; empty ones without such."""
    steps = functools.reduce(np.intersect1d, [distinct(member.actions["step"]) for member in members])
    if not len(steps):
        return [[] for _ in members]
    return [member.actions["kind"][member.actions["step"] == steps[-1]].tolist() for member in members]


def may_be_stage(tables: RankTables, operations: Array, steps: RankSteps) -> bool:
    """Say whether a rank that ran no schedule may be a stage of a pipeline that the program wrote by hand.

    Such a rank belongs to a group of the axis pp, or exchanges messages within its steps in a group of no known axis,
    and not parameters alone.
    """
    if any(group.axis == PIPELINE_AXIS and group.size > 1 for group in tables.groups.values()):
        return True
    # Ring attention (cp) and the like send messages, too: a group that serves another axis tells that it is no stage.
    others = [number for number, group in tables.groups.items() if is_clear(group) and group.axis != PIPELINE_AXIS]
    is_message = operations["kind"] == codes.POINT_TO_POINT
    messages = operations[is_message & ~find_parameter_messages(tables, operations, steps)]
    issued_ns = messages["issued_ns"][~is_any(messages["group"], others)]
    return bool((locate(issued_ns, steps.windows) >= 0).any()) if len(issued_ns) else False


def find_windows(
    pipelines: Mapping[int, RankPipeline],
    possible_stages: Collection[int],
    measured: MeasuredSteps,
    reasons: Mapping[int, str] | None = None,
) -> PipelineWindows:
    """Return when each pipeline ran, and of which ranks the bubble is not known.

    Parameters:
        pipelines: by rank.
        possible_stages: ranks that ran no schedule, but may be stages.
        reasons: why nothing could be inferred of them, by rank.
    """
    windows = _find_windows(list(pipelines.values()))
    unknown = {rank: _no_schedule((reasons or {}).get(rank, "")) for rank in possible_stages}
    for key, members in _by_pipeline(pipelines.values()).items():
        window = windows.get(key)
        if window is None:
            unknown |= {member.rank: NO_WINDOW for member in members}
        elif any(_acted_outside(member, window, measured) for member in members):
            unknown |= {member.rank: NOT_EVERY_STEP for member in members}
    by_rank = {rank: windows[pipeline.key].intervals for rank, pipeline in pipelines.items() if rank not in unknown}
    return PipelineWindows(by_pipeline=windows, by_rank=by_rank, unknown=dict(sorted(unknown.items())))


def _no_schedule(reason: str) -> str:
    """Return why nothing is known of the pipeline of a rank, with what keeps it from being inferred."""
    return f"{NO_SCHEDULE}, nor inferred: {reason}" if reason else NO_SCHEDULE


def _acted_outside(member: RankPipeline, window: WindowsByStep, measured: MeasuredSteps) -> bool:
    """Say whether a rank acted in a measured step of which the window is not known."""
    if np.array_equal(member.steps, window.steps):
        return False
    steps = member.steps[(member.steps >= measured.first) & (member.steps <= measured.last)]
    return not is_among(steps, window.steps).all()


def _find_windows(ranks: Sequence[RankPipeline]) -> dict[PipelineKey, WindowsByStep]:
    """Return the windows of every pipeline whose ranks are all there, on one clock, for the steps that all have."""
    windows = {}
    for key, members in _by_pipeline(ranks).items():
        if len(members) != members[0].pipeline.group_size or len({member.boot_id for member in members}) != 1:
            continue
        steps = members[0].steps
        for member in members[1:]:
            steps = steps if np.array_equal(steps, member.steps) else np.intersect1d(steps, member.steps)
        chosen = [is_among(member.steps, steps) for member in members]
        first = np.minimum.reduce([member.first[some] for member, some in zip(members, chosen, strict=True)])
        last = np.maximum.reduce([member.last[some] for member, some in zip(members, chosen, strict=True)])
        windows[key] = WindowsByStep(steps, pair(first, last))
    return windows


def _by_pipeline(ranks: Iterable[RankPipeline]) -> dict[PipelineKey, list[RankPipeline]]:
    members_of: dict[PipelineKey, list[RankPipeline]] = {}
    for rank in ranks:
        members_of.setdefault(rank.key, []).append(rank)
    return {key: sorted(members, key=lambda member: member.pipeline.group_rank) for key, members in members_of.items()}


def find_bubbles(tables: RankTables, spans: Array, operations: Array, windows: Intervals) -> Intervals:
    """Return when one rank was in a bubble: in a window of its pipeline and in no action."""
    actions = find_actions(tables, spans, operations) if len(windows) else NONE
    return subtract(union(windows), union(actions))


def find_actions(tables: RankTables, spans: Array, operations: Array) -> Intervals:
    """Return when a stage acted: the actions that its framework names, else its passes."""
    if events.PP_STEP in tables.ops:
        return times_of(spans_of_any(spans, tables, KINDS, ENDED))
    return find_passes(tables, spans, operations).times


def measure_pipelines(
    ranks: Sequence[RankPipeline], windows: PipelineWindows, measured: MeasuredSteps
) -> tuple[PipelineResult | None, list[Caveat]]:
    """Return the bubble of the job's pipelines, mean over replicas and measured steps, and its caveats."""
    if not ranks and not windows.unknown:
        return None, [NO_PIPELINE]
    caveats = [
        Caveat(
            "pipeline",
            f"{UNKNOWN_BUBBLE}{list_ranks([rank for rank, why in windows.unknown.items() if why == reason])} is "
            f"not known, its time is in exposed_wait, host or idle: {reason}",
        )
        for reason in dict.fromkeys(windows.unknown.values())
    ]
    pipelines = _by_pipeline(ranks)
    if any(member.pipeline.inferred for member in ranks):
        caveats.append(INFERRED)
    fractions: list[npt.NDArray[np.float64]] = []
    by_time: list[npt.NDArray[np.float64]] = []
    by_step: list[tuple[Column, Column, npt.NDArray[np.float64]]] = []
    replayed: list[tuple[list[Array], Column]] = []
    bubbles: dict[int, int] = {}
    actions = ActionTimes()
    for key, window in windows.by_pipeline.items():
        members = pipelines[key]
        lengths = window.intervals[:, 1] - window.intervals[:, 0]
        chosen = (window.steps >= measured.first) & (window.steps <= measured.last) & (lengths > 0)
        steps, lengths = window.steps[chosen], lengths[chosen]
        if not len(steps):
            continue
        for member in members:
            actions.add(member.actions, steps, window.intervals[chosen])
        busy = [member.busy[is_among(member.steps, steps)] for member in members]
        fractions.append(1 - np.sum(busy, axis=0) / (len(members) * lengths))
        by_step.append((steps, lengths, fractions[-1]))
        for member, busy_ns in zip(members, busy, strict=True):
            bubbles[member.rank] = int(np.mean(lengths - busy_ns))
        by_time.append(_split_by_time(members, steps, window.intervals[chosen]))
        replayed.append(([member.actions for member in members], steps))
    if not fractions:
        if not windows.unknown:
            caveats.append(Caveat("pipeline", "its schedule ran outside the measured steps only; bubble is 0"))
        return None, caveats
    pipeline = next(iter(pipelines.values()))[0].pipeline
    fraction = float(np.concatenate(fractions).mean())
    split = mean_parts(split_bubbles(replayed), fraction)
    if split is None:
        caveats.append(
            Caveat("pipeline", "the actions of the ranks do not fit together to be replayed; parts are not known")
        )
    per_action = actions.listed(len(fractions))
    theory = theory_fraction(pipeline)
    if theory is None:
        caveats.append(
            Caveat("pipeline", f"no formula for the bubble of {schedule_name(pipeline)}; theory_fraction is null")
        )
    return (
        PipelineResult(
            schedule=schedule_name(pipeline),
            stages=pipeline.num_stages,
            ranks=pipeline.group_size,
            microbatches=pipeline.num_microbatches,
            bubble_fraction=fraction,
            theory_fraction=theory,
            parts=split,
            by_time=dict(zip(TIMES, np.concatenate(by_time, axis=1).mean(axis=1).tolist(), strict=True)),
            advice=_advise(pipeline, split, bubbles),
            per_action=per_action,
            per_stage=sum_stages(per_action),
            per_step=list_steps(by_step),
            per_rank=tuple(PipelineRank(rank=rank, bubble_ns=bubble) for rank, bubble in sorted(bubbles.items())),
            inferred=pipeline.inferred,
        ),
        caveats,
    )


def has_unknown_bubble(summary: Summary) -> bool:
    """Say whether ranks of the job may be stages of a pipeline whose bubble is not known."""
    return any(reason.startswith(UNKNOWN_BUBBLE) for reason in summary.reasons("pipeline"))


def _advise(pipeline: Pipeline, parts: Mapping[str, float] | None, bubbles: Mapping[int, int]) -> str | None:
    """Return the advice for the largest part of the bubble; None where no part is worth it."""
    part, share = max((parts or {"": 0.0}).items(), key=lambda item: item[1])
    if share < WORTH_ADVICE:
        return None
    p, m = pipeline.group_size, pipeline.num_microbatches
    if part == "schedule":
        more = f"{4 * p} microbatches or more" if m < 4 * p else "more microbatches"
        return more + _other_schedules(pipeline)
    if part == "imbalance":
        busiest = min(bubbles, key=lambda rank: bubbles[rank])
        return f"another split of layers over stages: those of rank {busiest} take longest"
    if part == "exposed_p2p":
        return "faster links between stages, or smaller messages"
    return "steady times: find what disturbs single actions (other load, garbage collection, input of unequal length)"


def _other_schedules(pipeline: Pipeline) -> str:
    """Return how the advice about microbatches goes on: what else the framework has that leaves smaller bubbles."""
    name = schedule_name(pipeline)
    if "ZeroBubble" in name or name in ("ZBV", "DualPipeV"):
        return ""
    has_zero_bubble = pipeline.could_be("ZBVZeroBubble")
    if name in INTERLEAVED:
        return ", more stages a rank, or a zero-bubble schedule" if has_zero_bubble else ", or more stages a rank"
    kinds = ["interleaved"] if pipeline.could_be("Interleaved1F1B") else []
    kinds += ["zero-bubble"] if has_zero_bubble else []
    return f", or {'a' if kinds == ['zero-bubble'] else 'an'} {' or '.join(kinds)} schedule" if kinds else ""


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
    if name in INTERLEAVED:
        return (p - 1) / (v * m + p - 1)
    return 0.0 if name == "ZBV" else None
