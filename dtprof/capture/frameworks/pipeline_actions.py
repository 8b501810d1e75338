"""Record the pipeline of a rank: its plan, the steps, and the action of each stage and microbatch."""

import dataclasses
from typing import NamedTuple

from dtprof.capture.attribution_labels import AttributionLabels
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.string_entries import entry
from dtprof.records import events
from dtprof.records.sites import Label

MOST_PLANS = 1_000


def describe_forward(stage: int, microbatch: int) -> Label:
    """Describe a message with the output of a stage."""
    return Label("pp", f"pp forward of stage {stage}, microbatch {microbatch}", stage=stage, microbatch=microbatch)


def describe_backward(stage: int, microbatch: int) -> Label:
    """Describe a message with the gradient of the input of a stage."""
    return Label("pp", f"pp backward of stage {stage}, microbatch {microbatch}", stage=stage, microbatch=microbatch)


def describe_setup() -> Label:
    """Describe what stages exchange before their first step."""
    return Label("pp", "pp set-up of stages")


def describe_messages(what: str) -> Label:
    """Describe messages of a framework that does not say of which stage and microbatch they are."""
    return Label("pp", f"pp {what}")


class OpenAction(NamedTuple):
    """An open action."""

    labels: AttributionLabels
    span: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The pipeline of a rank, as the entry `pipeline` of a run holds it."""

    schedule: str
    num_stages: int
    stages: tuple[int, ...]  # of this rank
    microbatches: int
    group: str
    group_rank: int
    group_size: int
    order: tuple[str, ...] | None = None  # the plan, a slot each; None: the framework has none
    offered: tuple[str, ...] | None = None  # the schedules of the framework; None: more than a few


class PipelineActions:
    """Records spans of steps and actions."""

    def __init__(self, attribution: Attribution) -> None:
        """Record to the log that `attribution` labels."""
        self._attribution = attribution
        self._declared: dict[PipelinePlan, tuple[AttributionLabels, int]] = {}

    def begin(self, name: str, stage: int, microbatch: int) -> OpenAction | None:
        """Begin an action, or a step with the id of its plan in place of the microbatch."""
        labels = self._attribution.labels()
        if labels is None:
            return None
        recorder = labels.recorder
        return OpenAction(labels, recorder.begin_span(recorder.name_id(name), False, stage, microbatch))

    @staticmethod
    def end(started: OpenAction | None, failed: bool) -> None:
        """End an action."""
        if started is not None:
            started.labels.recorder.end_span(started.span, failed, 0, False)

    def declare(self, plan: PipelinePlan, by: str) -> int:
        """Return the id of a plan, which is written once; 0 beyond the limit."""
        labels = self._attribution.labels()
        if labels is None:
            return 0
        known = self._declared.get(plan)
        if known is not None and known[0] is labels:
            return known[1]
        if len(self._declared) >= MOST_PLANS:
            return 0
        number = len(self._declared) + 1
        self._declared[plan] = labels, number
        labels.recorder.write_entry(entry("pipeline", id=number, **dataclasses.asdict(plan)))
        self._attribution.declare_use(plan.group, "pp", by)
        return number


class CountedActions:
    """Actions of a framework that does not number them: in a step, each stage takes its microbatches in order.

    A backward pass is that of the forward pass with the same key; of a key that is not known, the next of the stage.
    """

    def __init__(self, actions: PipelineActions) -> None:
        """Begin outside a step."""
        self._actions = actions
        self._next: dict[tuple[str, int], int] = {}
        self._microbatch_of: dict[object, tuple[int, int]] = {}
        self._last_forward = 0, 0
        self._last_backward = 0, 0

    @property
    def last_forward(self) -> tuple[int, int]:
        """Stage and microbatch of the forward pass that began last."""
        return self._last_forward

    @property
    def last_backward(self) -> tuple[int, int]:
        """Stage and microbatch of the backward pass that began last."""
        return self._last_backward

    def next_forward(self, stage: int) -> tuple[int, int]:
        """Return this stage, and the microbatch of its next forward pass."""
        return stage, self._next.get((events.PP_FORWARD, stage), 0)

    def named_forward(self, key: object, stage: int) -> tuple[int, int]:
        """Return stage and microbatch of the forward pass named by a key; of a key not known those of the next."""
        return self._microbatch_of.get(key) or (stage, self._next.get((events.PP_BACKWARD, stage), 0))

    def begin_step(self, plan: int, *, trains: bool) -> OpenAction | None:
        """Begin a step, of which the plan is declared."""
        self._next.clear()
        self._microbatch_of.clear()
        return self._actions.begin(events.PP_STEP if trains else events.PP_EVALUATION, -1, plan)

    def begin_forward(self, stage: int) -> OpenAction | None:
        """Begin the next forward pass of a stage."""
        self._last_forward = stage, self._count(events.PP_FORWARD, stage)
        return self._actions.begin(events.PP_FORWARD, *self._last_forward)

    def name_forward(self, key: object) -> None:
        """Name the forward pass that ended last by a key that its backward pass will have."""
        self._microbatch_of[key] = self._last_forward

    def begin_backward(self, key: object, stage: int) -> OpenAction | None:
        """Begin the backward pass of a key, of this stage where the key is not known."""
        known = self._microbatch_of.pop(key, None)
        next_one = self._count(events.PP_BACKWARD, stage if known is None else known[0])
        self._last_backward = known or (stage, next_one)
        return self._actions.begin(events.PP_BACKWARD, *self._last_backward)

    def _count(self, name: str, stage: int) -> int:
        number = self._next.get((name, stage), 0)
        self._next[name, stage] = number + 1
        return number
