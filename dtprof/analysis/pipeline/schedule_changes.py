"""Predicted bubbles with more microbatches, interleaving or an even split.

Where the ranks acted by the rules of their schedule, the changed schedule is replayed with the times that actions had
in the steps that were kept, and with messages as long as those steps show. Else the formula of the schedule tells its
own part, and the other parts are taken as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.pipeline.bubbles import RankPipeline, schedule_name, theory_fraction
from dtprof.analysis.pipeline.schedule_plans import make_plan
from dtprof.analysis.pipeline.schedule_replay import BACKWARD, FORWARD, LOSS, Act, SchedulePlan, list_acts, replay
from dtprof.analysis.results import PipelineResult
from dtprof.intervals import Floats
from dtprof.records.tables import Array

MAX_STEPS = 32
"""Steps that are replayed."""
MAX_ACTIONS = 6_000
"""Of the largest plan that is replayed."""
MAX_SEARCH = 12
UNEVEN = 0.005
"""As a share of the window: a smaller imbalance is not mentioned."""


@dataclass(frozen=True, kw_only=True)
class ScheduleChange:
    """The predicted bubble after one change."""

    what: str
    schedule_fraction: float  # with equal times and free messages
    bubble_fraction: float

    @property
    def other_fraction(self) -> float:
        """The bubble of other causes than the schedule."""
        return max(0.0, self.bubble_fraction - self.schedule_fraction)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The pipeline as it is, then as it would be."""

    found: tuple[ScheduleChange, ...] = ()
    replay_error: float | None = None  # by how much the replay misses the bubble of a step, mean; None: by formula
    message_ns: int | None = None  # between ranks, by which the replay fits

    @property
    def best(self) -> ScheduleChange | None:
        """The change that leaves the smallest bubble; None where none makes it smaller."""
        best = min(self.found, key=lambda change: change.bubble_fraction, default=None)
        return best if self.found and best is not self.found[0] else None


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The steps that are replayed: one column each."""

    took: dict[Act, Floats]  # forward with its loss, backward
    bubble: Floats
    ranks: int
    chunks: int
    microbatches: int


_Took = Callable[[Act], Floats]


def find_changes(members: Sequence[RankPipeline], steps: Sequence[int], result: PipelineResult) -> Changes:
    """Return the changes that would shrink the bubbles of one pipeline.

    Parameters:
        members: all its ranks, by place.
        steps: of which all of them kept their actions.
    """
    name = schedule_name(members[0].pipeline)
    measured = _measure(members, steps[:MAX_STEPS], name)
    interleaves = members[0].pipeline.could_be("Interleaved1F1B")
    replayed = _replay_changes(name, measured, result, interleaves=interleaves) if measured is not None else None
    return replayed or Changes(found=_by_formula(members[0], result))


def _measure(members: Sequence[RankPipeline], steps: Sequence[int], name: str) -> _Measured | None:
    """Return the times of the actions; None where their order is not that of the schedule."""
    pipeline = members[0].pipeline
    ranks, microbatches = pipeline.group_size, pipeline.num_microbatches
    chunks = pipeline.num_stages // max(1, ranks)
    plan = make_plan(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    if plan is None or chunks * ranks != pipeline.num_stages:
        return None
    took: dict[Act, list[float]] = {act: [] for acts in plan for act in acts}
    bubbles = []
    for step in steps:
        rows = [member.actions[member.actions["step"] == step] for member in members]
        if tuple(list_acts(acted[acted["kind"] != LOSS]) for acted in rows) != plan:
            return None
        for row in np.concatenate(rows):
            act = Act(int(row["kind"]), int(row["stage"]), int(row["microbatch"]))
            length = float(row["end"] - row["begin"])
            if act.kind != LOSS:
                took[act].append(length)
            elif (forward := took.get(act._replace(kind=FORWARD))) is not None and forward:
                forward[-1] += length
        bubbles.append(_bubble(rows))
    return _Measured(
        took={act: np.array(lengths) for act, lengths in took.items()},
        bubble=np.array(bubbles),
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
    )


def _bubble(rows: Sequence[Array]) -> float:
    window = max(int(some["end"].max()) for some in rows) - min(int(some["begin"].min()) for some in rows)
    busy = sum(int((some["end"] - some["begin"]).sum()) for some in rows)
    return 1 - busy / (len(rows) * max(1, window))


def _replay_changes(name: str, measured: _Measured, result: PipelineResult, *, interleaves: bool) -> Changes | None:
    p, v, m = measured.ranks, measured.chunks, measured.microbatches
    message_ns = _fit_messages(name, measured)

    def as_measured(act: Act) -> Floats:
        return measured.took[act._replace(microbatch=act.microbatch % m)]

    def halved(act: Act) -> Floats:
        rank, chunk = act.stage % p, act.stage // p
        return as_measured(act._replace(stage=chunk // 2 * p + rank)) / 2

    def even(act: Act) -> Floats:
        same: Floats = np.mean([as_measured(act._replace(stage=stage)) for stage in range(p * v)], axis=0)
        return same

    candidates: list[tuple[str, str, int, int, _Took]] = [
        (f"as it is: {m} microbatches", name, v, m, as_measured),
        *((f"{more} microbatches", name, v, more, as_measured) for more in (2 * m, 4 * m)),
    ]
    if interleaves:
        candidates.append((f"{2 * v} stages a rank, interleaved", "Interleaved1F1B", 2 * v, m, halved))
    if result.parts is not None and result.parts["imbalance"] > UNEVEN:
        candidates.append(("stages of equal time", name, v, m, even))
    changes: list[ScheduleChange] = []
    error = 0.0
    for what, schedule, chunks, microbatches, took in candidates:
        plan = make_plan(schedule, ranks=p, chunks=chunks, microbatches=microbatches)
        if plan is None or sum(map(len, plan)) > MAX_ACTIONS:
            continue
        bubble = replay(plan, _lengths(plan, took), message_ns=message_ns)
        equal = replay(plan, _equal(plan, measured))
        if bubble is None or equal is None:
            continue
        if not changes:
            error = float(np.abs(bubble - measured.bubble).mean())
        changes.append(
            ScheduleChange(what=what, schedule_fraction=float(equal.mean()), bubble_fraction=float(bubble.mean()))
        )
    if not changes or not changes[0].what.startswith("as it is"):
        return None
    return Changes(found=tuple(changes), replay_error=error, message_ns=round(message_ns))


def _lengths(plan: SchedulePlan, took: _Took) -> Floats:
    return np.array([took(act) for acts in plan for act in acts])


def _equal(plan: SchedulePlan, measured: _Measured) -> Floats:
    """Return the mean of its kind for each action: one replay."""
    means = {
        kind: float(np.mean([lengths.mean() for act, lengths in measured.took.items() if act.kind == kind]))
        for kind in (FORWARD, BACKWARD)
    }
    return np.array([[means[act.kind]] for acts in plan for act in acts])


def _fit_messages(name: str, measured: _Measured) -> float:
    """Return how long messages are on their way, so that the replay has the bubbles that were measured, on average."""
    plan = make_plan(name, ranks=measured.ranks, chunks=measured.chunks, microbatches=measured.microbatches)
    assert plan is not None
    took = _lengths(plan, measured.took.__getitem__)
    target = float(measured.bubble.mean())

    def too_short(message_ns: float) -> bool:
        bubble = replay(plan, took, message_ns=message_ns)
        return bubble is not None and float(bubble.mean()) < target

    low, high = 0.0, float(took.max())
    if not too_short(0.0):
        return 0.0
    for _ in range(MAX_SEARCH):
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return (low + high) / 2


def _by_formula(member: RankPipeline, result: PipelineResult) -> tuple[ScheduleChange, ...]:
    pipeline = member.pipeline
    ranks, microbatches = pipeline.group_size, pipeline.num_microbatches
    now = theory_fraction(pipeline)
    if result.parts is None or not now:
        return ()
    other = result.bubble_fraction - result.parts["schedule"]
    chunks = max(1, pipeline.num_stages // max(1, ranks))

    def change(what: str, schedule: float, kept: float) -> ScheduleChange:
        return ScheduleChange(
            what=what, schedule_fraction=schedule, bubble_fraction=min(1.0, max(0.0, schedule + kept))
        )

    changes = [change(f"as it is: {microbatches} microbatches", result.parts["schedule"], other)]
    changes += [
        change(f"{more} microbatches", (ranks - 1) / (chunks * more + ranks - 1), other)
        for more in (2 * microbatches, 4 * microbatches)
    ]
    if pipeline.could_be("Interleaved1F1B"):
        interleaved = (ranks - 1) / (2 * chunks * microbatches + ranks - 1)
        changes.append(change(f"{2 * chunks} stages a rank, interleaved", interleaved, other))
    if result.parts["imbalance"] > UNEVEN:
        changes.append(
            change("stages of equal time", result.parts["schedule"], max(0.0, other - result.parts["imbalance"]))
        )
    return tuple(changes)
