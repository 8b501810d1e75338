"""Record the actions of torch.distributed.pipelining: compute, send and receive of each stage and microbatch."""

import weakref
from collections.abc import Sequence
from typing import Any

from dtprof.capture.attribution_labels import AttributionLabels
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.pipeline_actions import (
    OpenAction,
    PipelineActions,
    PipelinePlan,
    describe_backward,
    describe_forward,
    describe_setup,
)
from dtprof.capture.group_descriptions import name_of
from dtprof.records import events

_SETUP = ("_initialize_stage", "_initialize_stages")


class Pipelines:
    """Hooks into stages and schedules."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._actions = PipelineActions(attribution)
        self._begin, self._end = self._actions.begin, self._actions.end
        self._plans: weakref.WeakKeyDictionary[Any, tuple[AttributionLabels, int]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Wait for the job to import stages and schedules."""
        self._attribution.after_import("torch.distributed.pipelining.stage", self._hook_stages)
        self._attribution.after_import("torch.distributed.pipelining.schedules", self._hook_schedules)

    def _hook_stages(self, module: Any) -> None:
        stage = module._PipelineStageBase
        around = self._attribution.around
        around(stage, "forward_one_chunk", self._begin_forward, self._end)
        around(stage, "backward_one_chunk", self._begin_backward, self._end)
        around(stage, "backward_weight_one_chunk", self._begin_weights, self._end)
        around(stage, "perform_reduce_grad", self._begin_reduce, self._end)
        after = self._attribution.after
        after(stage, "get_fwd_recv_ops", self._label_forward_receives)
        after(stage, "get_fwd_send_ops", self._label_forward_sends)
        after(stage, "get_bwd_recv_ops", self._label_backward_receives)
        after(stage, "get_bwd_send_ops", self._label_backward_sends)

    def _hook_schedules(self, module: Any) -> None:
        around = self._attribution.around
        around(module, "_batch_p2p", self._begin_batch, self._end_batch)
        around(module._PipelineSchedule, "_maybe_compute_loss", self._begin_loss, self._end)
        for schedule, setup in zip((module.PipelineScheduleSingle, module.PipelineScheduleMulti), _SETUP, strict=True):
            around(schedule, "step", self._begin_step, self._end)
            around(schedule, setup, lambda *_, **__: self._attribution.begin(describe_setup))

    def _begin_forward(self, stage: Any, fwd_chunk_id: int, *_: Any, **__: Any) -> OpenAction | None:
        return self._begin(events.PP_FORWARD, stage.stage_index, fwd_chunk_id)

    def _begin_backward(
        self, stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
    ) -> OpenAction | None:
        del loss
        if not stage.has_backward:
            return None
        name = events.PP_BACKWARD if full_backward else events.PP_BACKWARD_INPUT
        return self._begin(name, stage.stage_index, bwd_chunk_id)

    def _begin_weights(self, stage: Any, bwd_chunk_id: int, *_: Any, **__: Any) -> OpenAction | None:
        if not stage.has_backward:
            return None
        return self._begin(events.PP_BACKWARD_WEIGHT, stage.stage_index, bwd_chunk_id)

    def _begin_reduce(self, stage: Any, *_: Any, **__: Any) -> OpenAction | None:
        return self._begin(events.PP_REDUCE_GRAD, stage.stage_index, -1)

    def _begin_loss(
        self, schedule: Any, stage: Any, output: Any, target_mbs: Any, mb_index: int, *_: Any, **__: Any
    ) -> OpenAction | None:
        del output, target_mbs
        if not stage.is_last or schedule._loss_fn is None:
            return None
        return self._begin(events.PP_LOSS, stage.stage_index, mb_index)

    def _label_forward_receives(self, ops: list[Any], stage: Any, fwd_chunk_id: int) -> None:
        if ops:
            sources = _sources(ops, stage.args_recv_info[fwd_chunk_id], stage.stage_index - 1)
            for op, source in zip(ops, sources, strict=True):
                op._dtprof_label = self._attribution.label(describe_forward, source, fwd_chunk_id)

    def _label_backward_receives(self, ops: list[Any], stage: Any, bwd_chunk_id: int) -> None:
        if ops:
            sources = _sources(ops, stage.grad_recv_info[bwd_chunk_id], stage.stage_index + 1)
            for op, source in zip(ops, sources, strict=True):
                op._dtprof_label = self._attribution.label(describe_backward, source, bwd_chunk_id)

    def _label_forward_sends(self, ops: list[Any], stage: Any, fwd_chunk_id: int) -> None:
        for op in ops:
            op._dtprof_label = self._attribution.label(describe_forward, stage.stage_index, fwd_chunk_id)

    def _label_backward_sends(self, ops: list[Any], stage: Any, bwd_chunk_id: int) -> None:
        for op in ops:
            op._dtprof_label = self._attribution.label(describe_backward, stage.stage_index, bwd_chunk_id)

    def _begin_batch(self, p2p_ops: Sequence[Any], *_: Any, **__: Any) -> AttributionLabels | None:
        given = [getattr(op, "_dtprof_label", 0) for op in p2p_ops]
        labels = self._attribution.labels() if any(given) else None
        if labels is not None:
            labels.recorder.label_next_p2p(given)
        return labels

    @staticmethod
    def _end_batch(labels: AttributionLabels | None, failed: bool) -> None:
        del failed
        if labels is not None:
            labels.recorder.label_next_p2p([])

    def _begin_step(self, schedule: Any, *_: Any, **__: Any) -> OpenAction | None:
        name = events.PP_STEP if schedule._has_backward else events.PP_EVALUATION
        return self._begin(name, -1, self._plan(schedule))

    def _plan(self, schedule: Any) -> int:
        """Return the id of the schedule's entry, written when it first steps; 0 beyond the limit."""
        labels = self._attribution.labels()
        if labels is None:
            return 0
        known = self._plans.get(schedule)
        if known is not None and known[0] is labels:
            return known[1]
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        first = stages[0]
        row = getattr(schedule, "rank", first.stage_index)
        order = getattr(schedule, "pipeline_order", None) or {}  # simple schedules had none before torch 2.7
        plan = self._actions.declare(
            PipelinePlan(
                schedule=type(schedule).__name__,
                num_stages=first.num_stages,
                stages=tuple(stage.stage_index for stage in stages),
                microbatches=schedule._n_microbatches,
                group=_group_name(first.group),
                group_rank=first.group_rank,
                group_size=first.group_size,
                order=tuple(_slots(order[row], schedule._n_microbatches)) if row in order else None,
            ),
            "torch.distributed.pipelining",
        )
        if plan:
            self._plans[schedule] = labels, plan
        return plan


def _group_name(group: Any) -> str:
    """Return the name of a group, for None of the default group."""
    import torch.distributed.distributed_c10d as c10d

    return name_of(group or c10d._get_default_group())


def _sources(ops: Sequence[Any], infos: Sequence[Any], neighbour: int) -> list[int]:
    """Return the source stage of each receive."""
    sources = [
        info.source
        for info in infos
        if isinstance(getattr(info, "source", None), int) and getattr(info, "buffer", None) is not None
    ]
    return sources if len(sources) == len(ops) else [neighbour] * len(ops)


def _slots(plan: Sequence[Any], num_microbatches: int) -> list[str]:
    """Return the slots of a plan.

    torch counts the forwards from 1 in the plan of the last stage of 1F1B, but runs them from 0.
    """
    forwards = [action.microbatch_index for action in plan if action and action.computation_type.value == "F"]
    first = 1 if forwards and min(forwards) == 1 and max(forwards) == num_microbatches else 0
    return [_slot(action, first) for action in plan]


def _slot(action: Any, first: int) -> str:
    """Return a slot of the plan: empty, `STAGE KIND MICROBATCH` in one word, or several such words that overlap."""
    if action is None:
        return ""
    if getattr(action, "sub_actions", None):
        return " ".join(_slot(part, first) for part in action.sub_actions)
    kind, microbatch = action.computation_type.value, action.microbatch_index
    if microbatch is None:
        return f"{action.stage_index}{kind}"
    return f"{action.stage_index}{kind}{microbatch - first if kind == 'F' else microbatch}"
