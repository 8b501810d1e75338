"""Predict the window of a pipeline with another schedule or other microbatches, replayed with measured stage times.

The batch of a step stays as it is: with more microbatches each is smaller, and its actions are as much shorter. Where a
schedule cuts the model into more stages, a stage takes its part of the time of those that it is made of. Backward
passes that the run did in one are divided into halves where a schedule has gradients of inputs and weights apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.pipeline.bubbles import PipelineKey, RankPipeline, schedule_name
from dtprof.analysis.pipeline.schedule_plans import make_h1_plan, make_plan, make_zero_bubble_plan
from dtprof.analysis.pipeline.schedule_replay import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOSS,
    SchedulePlan,
    in_order,
    list_acts,
    replay_actions,
    replay_plan,
)
from dtprof.analysis.whatif.fixes import Unpredictable
from dtprof.analysis.whatif.whatif_changes import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    ZB_H1,
    ZBV,
    parse_schedule,
)
from dtprof.formatting import plural
from dtprof.intervals import Floats

_PLANNED = {GPIPE: "GPipe", ONE_F_ONE_B: "1F1B", INTERLEAVED: "Interleaved1F1B"}
SPLITTING = (ZB_H1, ZBV, DUALPIPEV)
_IN_V = (ZBV, DUALPIPEV)
FIXED = 0.25
"""Share of an action on the smaller microbatches that may not depend on their size: a run of microbatches of one size
cannot tell. Bounds of gains allow for it."""
MAX_ACTIONS = 20_000
MAX_STEPS = 16
_KINDS = 8
_NAMES = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "interleaved1f1b": INTERLEAVED,
    "zbvzerobubble": ZBV,
    "dualpipev": DUALPIPEV,
}
"""Schedules by the names of `schedule_name`."""


@dataclass(frozen=True, kw_only=True)
class WindowChange:
    """By how much the window of a pipeline changes, and how far replayed windows miss measured ones; means."""

    change_ns: float
    error_ns: float
    fixed_ns: float = 0.0  # that it changes besides if FIXED of the smaller actions does not depend on their size


@dataclass(frozen=True, kw_only=True)
class ReplayedPlan:
    """The actions of a step, rank by rank, and when each begins and ends, ns since the first."""

    plan: SchedulePlan
    begins_ns: Floats
    ends_ns: Floats


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Times of the actions of one pipeline in some steps; ns."""

    name: str  # one of SCHEDULES; else as torch calls it
    ranks: int
    stages: int
    microbatches: int
    took: Mapping[
        int, Floats
    ]  # by kind (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT): shape (stages, microbatches, steps)
    message_ns: (
        float  # from the end of an action on one rank until one on another that waits for it begins, beyond host_ns
    )
    host_ns: float  # between actions of a rank that wait for nothing
    windows_ns: Floats  # of these steps, in the replay of the schedule as it ran
    error_ns: float  # by which they miss the measured ones, mean
    offered: tuple[str, ...] | None = None  # of SCHEDULES, those of its framework; None: not limited
    members: tuple[int, ...] = ()  # the global ranks, in the order of the stages that they begin with
    plan: SchedulePlan = ()  # the actions of each rank as they ran
    lengths_ns: Floats = field(
        default_factory=lambda: np.zeros((0, 1))
    )  # of the actions, rank by rank; a column a step

    def replay_present(self) -> ReplayedPlan | None:
        """Return the actions of a step as they ran, replayed with mean times; None where they cannot be."""
        return self._replay_means(self.plan, self.lengths_ns + self.host_ns)

    def halves_backward(self, schedule: str | None) -> bool:
        """Say whether a schedule has apart what the run did in one: gradients of inputs and of weights."""
        return schedule in SPLITTING and self.name not in SPLITTING

    def _replay_means(self, plan: SchedulePlan, took: Floats) -> ReplayedPlan | None:
        found = replay_actions(plan, took.mean(axis=1, keepdims=True), message_ns=self.message_ns)
        if found is None:
            return None
        begins, ends = (times[:, 0] - found[0].min() for times in found)
        return ReplayedPlan(plan=plan, begins_ns=begins, ends_ns=ends)

    @property
    def other_schedules(self) -> list[str]:
        """Return the schedules that the pipeline could have instead, of those of its framework."""
        return [
            name
            for name in (SCHEDULES if self.offered is None else self.offered)
            if name != self.name and self._plan(name, self.microbatches) is not None
        ]

    def predict_change(
        self, *, schedule: str | None = None, microbatches: str | None = None, split: str | None = None
    ) -> WindowChange:
        """Return the predicted window.

        Raises:
            UsageError: there is no such schedule.
            Unpredictable: it has no plan for this pipeline.
        """
        plan, took, label = self._change(schedule, microbatches, split)
        windows = replay_plan(plan, took, message_ns=self.message_ns)
        if windows is None:
            raise Unpredictable(f"{label}: the plan of the schedule cannot be replayed")
        ratio = int(microbatches) / self.microbatches if microbatches else 1.0
        smaller = FIXED + (1 - FIXED) * max(ratio, 1 / ratio)  # how many times the smaller action the larger one takes
        by_size = smaller / max(ratio, 1 / ratio)
        launched = replay_plan(plan, took * (by_size if ratio < 1 else 1 / by_size), message_ns=self.message_ns)
        assert launched is not None  # the plan is the same
        return WindowChange(
            change_ns=float((windows - self.windows_ns).mean()),
            error_ns=self.error_ns,
            fixed_ns=float((launched - windows).mean()),
        )

    def replay_means(
        self, *, schedule: str | None = None, microbatches: str | None = None, split: str | None = None
    ) -> ReplayedPlan | None:
        """Return the actions of a changed step as they are replayed, with mean times; None where they cannot be.

        Raises:
            Unpredictable: the schedule has no plan for this pipeline.
        """
        plan, took, _ = self._change(schedule, microbatches, split)
        return self._replay_means(plan, took)

    def _change(
        self, schedule: str | None, microbatches: str | None, split: str | None
    ) -> tuple[SchedulePlan, Floats, str]:
        """Return the plan of a change, what its actions take in each step, and how the change is called."""
        name = parse_schedule(schedule) if schedule else self.name
        count = int(microbatches) if microbatches else self.microbatches
        label = f"schedule={name}, microbatches={count}"
        if name not in SCHEDULES:
            raise Unpredictable(
                f"{label}: the run's schedule {self.name!r} cannot be planned; expected schedule=NAME with it, one of "
                f"{', '.join(SCHEDULES)}"
            )
        planned = self._plan(name, count, is_even=split is not None)
        if planned is None:
            raise Unpredictable(
                f"{label}: the schedule has no plan for {plural(self.ranks, 'rank')} and {plural(count, 'microbatch')}"
            )
        return *planned, label

    def _plan(self, name: str, microbatches: int, *, is_even: bool = False) -> tuple[SchedulePlan, Floats] | None:
        """Return the actions of a schedule, and their time in each step.

        Parameters:
            is_even: layers are divided so that all stages take equally long.
        """
        chunks = 1
        if name == INTERLEAVED:
            chunks = max(2, self.stages // self.ranks)
        elif name in _IN_V:
            chunks = 2
        elif name == ZB_H1 and self.name == ZB_H1:
            chunks = max(1, self.stages // self.ranks)
        stages = chunks * self.ranks
        if 3 * stages * microbatches > MAX_ACTIONS:
            return None
        share = self.microbatches / microbatches
        even = {kind: np.broadcast_to(own.mean(axis=0), own.shape) for kind, own in self.took.items()}
        times = {kind: _regroup(own, stages) * share for kind, own in (even if is_even else dict(self.took)).items()}
        times[BACKWARD] = times[BACKWARD_INPUT] + times[BACKWARD_WEIGHT]
        plan: SchedulePlan | None
        if name in _PLANNED:
            plan = make_plan(_PLANNED[name], ranks=self.ranks, chunks=chunks, microbatches=microbatches)
        elif name == ZB_H1 and chunks == 1:
            plan = make_h1_plan(ranks=self.ranks, microbatches=microbatches)
        else:
            means = (times[kind].mean(axis=(1, 2)).tolist() for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
            plan = make_zero_bubble_plan(
                ranks=self.ranks,
                rank_of_stage=_place_stages(self.ranks, stages, in_v=name in _IN_V),
                microbatches=microbatches,
                took=tuple(means),
            )
        if plan is None:
            return None
        rows = [times[act.kind][act.stage, act.microbatch % self.microbatches] for acts in plan for act in acts]
        return plan, np.array(rows) + self.host_ns


def _place_stages(ranks: int, stages: int, *, in_v: bool) -> list[int]:
    """Return the rank of each stage: in turn, or down and up again."""
    if not in_v:
        return [stage % ranks for stage in range(stages)]
    return [stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(stages)]


def _regroup(took: Floats, stages: int) -> Floats:
    """Return the times of so many stages of equal parts, given those of the stages of the run."""
    before = np.concatenate((np.zeros((1, *took.shape[1:])), np.cumsum(took, axis=0)))
    at = np.linspace(0, len(took), stages + 1)
    low = np.minimum(at.astype(np.int64), len(took) - 1)
    part = (at - low).reshape(-1, 1, 1)
    times: Floats = np.diff(before[low] * (1 - part) + before[low + 1] * part, axis=0)
    return times


def measure_times(pipelines: Sequence[RankPipeline], measured: tuple[int, int]) -> PipelineTimes | str:
    """Return the stage times of the first pipeline whose ranks all kept actions; a sentence where there is none."""
    by_key: dict[PipelineKey, list[RankPipeline]] = {}
    for member in pipelines:
        by_key.setdefault(member.key, []).append(member)
    for members in by_key.values():
        members.sort(key=lambda member: member.pipeline.group_rank)
        shared = set.intersection(*(set(member.actions["step"].tolist()) for member in members))
        steps = sorted(step for step in shared if measured[0] <= step <= measured[1])[:MAX_STEPS]
        if len(members) == members[0].pipeline.group_size and steps:
            return _measure(members, steps)
    return "the run has no pipeline schedule" if not by_key else "no pipeline has all its ranks in the run"


def _measure(members: Sequence[RankPipeline], steps: Sequence[int]) -> PipelineTimes | str:
    pipeline = members[0].pipeline
    stages, microbatches = pipeline.num_stages, max(1, pipeline.num_microbatches)
    orders = [member.actions[member.actions["step"] == steps[0]] for member in members]
    plan: SchedulePlan = tuple(list_acts(order) for order in orders)
    took = np.zeros((_KINDS, stages, microbatches, len(steps)))
    begins, ends = np.zeros((2, sum(map(len, plan)), len(steps)))
    windows = np.zeros(len(steps))
    for place, step in enumerate(steps):
        orders = [member.actions[member.actions["step"] == step] for member in members]
        if tuple(list_acts(order) for order in orders) != plan:
            return "the ranks of its pipeline act in another order from step to step"
        rows = np.concatenate(orders)
        if (rows["stage"] >= stages).any() or (rows["microbatch"] >= microbatches).any():
            return "its pipeline acts on other stages or microbatches than its schedule has"
        begins[:, place], ends[:, place] = rows["begin"] - rows["begin"].min(), rows["end"] - rows["begin"].min()
        lengths = ends[:, place] - begins[:, place]
        np.add.at(took[..., place], (rows["kind"], rows["stage"], rows["microbatch"]), lengths)
        windows[place] = rows["end"].max() - rows["begin"].min()
    gaps = measure_gaps(plan, begins, ends)
    lengths = ends - begins
    replayed = replay_plan(plan, lengths + gaps[0], message_ns=gaps[1]) if gaps is not None else None
    if gaps is None or replayed is None:
        return "the actions of the ranks of its pipeline do not fit together to be replayed"
    host_ns, message_ns = gaps
    name = schedule_name(pipeline).lower()
    offered = pipeline.offered
    return PipelineTimes(
        offered=None if offered is None else tuple(_NAMES[one.lower()] for one in offered if one.lower() in _NAMES),
        name=_NAMES.get(name, ZB_H1 if "zero" in name else name),
        ranks=pipeline.group_size,
        stages=stages,
        microbatches=microbatches,
        took={
            FORWARD: took[FORWARD] + took[LOSS],
            BACKWARD_INPUT: took[BACKWARD_INPUT] + took[BACKWARD] / 2,
            BACKWARD_WEIGHT: took[BACKWARD_WEIGHT] + took[BACKWARD] / 2,
        },
        message_ns=message_ns,
        host_ns=host_ns,
        windows_ns=replayed,
        error_ns=float(np.abs(replayed - windows).mean()),
        members=tuple(member.rank for member in members),
        plan=plan,
        lengths_ns=lengths,
    )


def measure_gaps(plan: SchedulePlan, begins: Floats, ends: Floats) -> tuple[float, float] | None:
    """Return the mean time between actions that wait for nothing, and that of messages beyond it; None: no replay.

    An action waits for a message where the one that it needs, on another rank, ended later than the one before it.
    Where that ended less than a message earlier, the gap may be either, and counts for neither.
    """
    order = in_order(plan)
    if not order:
        return None
    first_row = np.cumsum([0, *map(len, plan)]).tolist()
    ready: dict[object, tuple[int, int]] = {}  # on which rank, and which row gives it
    gaps: list[Floats] = []
    leads: list[Floats] = []  # by which what an action needs was there before the rank was free
    messages: list[Floats] = []
    for rank, at, needs, gives in order:
        row = first_row[rank] + at
        source, giver = ready[needs] if needs is not None else (rank, -1)
        if source != rank:
            messages.append(np.where(at == 0 or ends[giver] > ends[row - 1], begins[row] - ends[giver], np.nan))
        if at:
            gaps.append(begins[row] - ends[row - 1])
            leads.append(ends[row - 1] - ends[giver] if source != rank else np.full(len(gaps[-1]), np.inf))
        if gives is not None:
            ready[gives] = rank, row
    message = _mean(np.array(messages))
    host = _mean(np.where(np.array(leads) > message, np.array(gaps), np.nan))
    return host, max(0.0, message - host)


def _mean(values: Floats) -> float:
    """Return the mean of what is known, at least 0; 0 where nothing is."""
    known = values[~np.isnan(values)]
    return max(0.0, float(known.mean())) if len(known) else 0.0
