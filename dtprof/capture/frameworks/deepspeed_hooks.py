"""Record how ZeRO of DeepSpeed shards the model, its data-parallel group, and the actions of its pipeline."""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

from dtprof.capture import group_descriptions, reduction_buffers
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.copies import owner_of
from dtprof.capture.frameworks.pipeline_actions import (
    CountedActions,
    OpenAction,
    PipelineActions,
    PipelinePlan,
    describe_backward,
    describe_forward,
)
from dtprof.capture.group_descriptions import name_of

_ENGINE, _PIPELINE = "runtime.engine", "runtime.pipe.engine"
_GROUPS = ("_create_expert_and_data_parallel", "_get_expert_parallel_group")
_INSTRUCTIONS = ("ForwardPass", "BackwardPass")
_MESSAGES = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
_ZERO_3 = 3
_BUFFERS = ("ipg_buckets", "ipg_buffer")
"""Attributes of ZeRO's optimizer with its buffers: of versions with a bucket for each type of element, and of older."""


class DeepSpeed:
    """Hooks into the engine and the pipeline engine."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._actions = PipelineActions(attribution)
        self._counted = CountedActions(self._actions)

    def install(self) -> None:
        """Wait for the job to import the engines."""
        after_import = self._attribution.after_import
        after_import(f"deepspeed.{_ENGINE}", self._hook_engine, ("DeepSpeedEngine.zero_optimization_stage",))
        of_pipeline = ("PipelineEngine._exec_schedule", "PipelineEngine._INSTRUCTION_MAP")
        after_import(f"deepspeed.{_PIPELINE}", self._hook_pipeline, of_pipeline)
        self._attribution.copies.seek(
            group_descriptions.DEEPSPEED, _GROUPS, lambda module: group_descriptions.read_axes_of(module.__name__)
        )

    def _hook_engine(self, module: Any) -> None:
        if self._attribution.has_all(module.DeepSpeedEngine, ("__init__", "zero_optimization_stage")):
            declare = functools.partial(self._declare_engine, owner_of(module, _ENGINE))
            self._attribution.after(module.DeepSpeedEngine, "__init__", declare)

    def _declare_engine(self, by: str, _: Any, engine: Any, *__: Any, **___: Any) -> None:
        given = getattr(engine.optimizer, "dp_process_group", None)
        group = given if given is not None else engine.seq_data_parallel_group or engine.data_parallel_group
        # Ranks along the sequence join the ranks along the data in the group that reduces gradients.
        axis = "dp" if getattr(engine, "sequence_parallel_size", 1) == 1 else "sp_dp"
        stage = engine.zero_optimization_stage()
        # ZeRO-3 shards each parameter over a group of its own: the default group, unless it is given one.
        of_parameters = _parameter_groups(engine) if stage == _ZERO_3 else []
        for used in (group, *of_parameters):
            self._attribution.declare_use(used, axis, by)
        # ZeRO-3 gathers parameters besides, which are not counted: of it the buffer alone would be too little.
        if stage in (1, 2) and any(hasattr(engine.optimizer, name) for name in _BUFFERS):
            reduction_buffers.declare(engine.optimizer, _reduction_buffers)
        experts = (
            getattr(engine, "expert_data_parallel_group", None) if getattr(engine, "has_moe_layers", False) else None
        )
        for sharded_over in ((*of_parameters, group)[0], *(experts or {}).values()):
            self._attribution.declare_sharding(f"zero{stage}" if stage else "none", sharded_over, by)

    def _hook_pipeline(self, module: Any) -> None:
        engine = module.PipelineEngine
        if not self._attribution.has_all(engine, ("_exec_schedule", "_INSTRUCTION_MAP")):
            return
        instructions = {kind.__name__: kind for kind in engine._INSTRUCTION_MAP}
        table = f"{module.__name__}.PipelineEngine._INSTRUCTION_MAP"
        if not self._attribution.has_all(instructions, _INSTRUCTIONS, table):
            return
        self._attribution.around(
            engine,
            "_exec_schedule",
            functools.partial(self._begin_step, owner_of(module, _PIPELINE)),
            self._actions.end,
        )
        for name, begin in zip(_INSTRUCTIONS, (self._begin_forward, self._begin_backward), strict=True):
            self._wrap(engine._INSTRUCTION_MAP, instructions[name], begin, self._actions.end)
        messages = (self._label_sent, self._label_received, self._label_sent_gradient, self._label_received_gradient)
        if self._attribution.has_all(instructions, _MESSAGES, table):
            for name, label in zip(_MESSAGES, messages, strict=True):
                self._wrap(engine._INSTRUCTION_MAP, instructions[name], label)

    def _wrap(
        self,
        instructions: dict[Any, Any],
        kind: Any,
        begin: Callable[..., Any],
        end: Callable[[Any, bool], object] | None = None,
    ) -> None:
        """Replace the method of an instruction, which the engine looks up in a table."""
        original = instructions[kind]
        instructions[kind] = self._attribution.wrapped(original, original.__name__, begin, end)

    def _begin_step(self, by: str, engine: Any, pipe_schedule: Any) -> OpenAction | None:
        group = engine.grid.get_pipe_parallel_group()
        plan = self._actions.declare(
            PipelinePlan(
                schedule="1F1B",
                num_stages=engine.num_stages,
                stages=(engine.stage_id,),
                microbatches=pipe_schedule.micro_batches,
                group=name_of(group),
                group_rank=engine.stage_id,
                group_size=engine.num_stages,
                offered=("1F1B",),
            ),
            by,
        )
        return self._counted.begin_step(plan, trains=type(pipe_schedule).__name__ == "TrainSchedule")

    def _begin_forward(self, engine: Any, buffer_id: int) -> OpenAction | None:
        action = self._counted.begin_forward(engine.stage_id)
        self._counted.name_forward(buffer_id)
        return action

    def _begin_backward(self, engine: Any, buffer_id: int) -> OpenAction | None:
        return self._counted.begin_backward(buffer_id, engine.stage_id)

    # The engine sends over the default group, from which nothing tells that these messages are of the pipeline.

    def _label_sent(self, _: Any, buffer_id: int) -> int:
        del buffer_id
        return self._attribution.begin(describe_forward, *self._counted.last_forward)

    def _label_received(self, engine: Any, buffer_id: int) -> int:
        del buffer_id
        stage, microbatch = self._counted.next_forward(engine.stage_id)
        return self._attribution.begin(describe_forward, stage - 1, microbatch)

    def _label_sent_gradient(self, _: Any, buffer_id: int) -> int:
        del buffer_id
        return self._attribution.begin(describe_backward, *self._counted.last_backward)

    def _label_received_gradient(self, engine: Any, buffer_id: int) -> int:
        stage, microbatch = self._counted.named_forward(buffer_id, engine.stage_id)
        return self._attribution.begin(describe_backward, stage + 1, microbatch)


def _reduction_buffers(optimizer: Any) -> Iterator[Any]:
    """Yield the buffers into which ZeRO copies gradients to reduce them, of `reduce_bucket_size` elements each."""
    buckets, old = (getattr(optimizer, name, None) for name in _BUFFERS)
    for bucket in (buckets or {}).values():
        yield from bucket.buffer
    yield from old or ()


def _parameter_groups(engine: Any) -> list[Any]:
    """Return the groups over which ZeRO-3 shards parameters, those of most parameters first; none of experts."""
    groups = [
        parameter.ds_process_group
        for parameter in engine.module.parameters()
        if hasattr(parameter, "ds_process_group") and getattr(parameter, "allreduce", True)
    ]
    return [group for group, _ in collections.Counter(groups).most_common()]
