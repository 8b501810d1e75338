"""Record the pipeline actions of Megatron-Core, 1F1B and its interleaved form, and how its optimizer shards."""

import functools
from typing import Any

from dtprof.capture import group_descriptions
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.copies import owner_of
from dtprof.capture.frameworks.pipeline_actions import (
    CountedActions,
    OpenAction,
    PipelineActions,
    PipelinePlan,
    describe_messages,
)
from dtprof.capture.group_descriptions import name_of

_SCHEDULES_MODULE = "megatron.core.pipeline_parallel.schedules"
_MESSAGES_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_COMMUNICATOR = "P2PCommunicator"
_EXCHANGE = "_communicate"
"""A method of the communicator; a function of the module before Megatron-Core 0.14."""
_OPTIMIZER_MODULE = "megatron.core.optimizer.distrib_optimizer"
_OPTIMIZER = ("DistributedOptimizer", "DistributedOptimizer._build_gbuf_range_map")
_STATE = ("initialize_model_parallel", "get_data_parallel_group")
"""Of a module whose variables hold the groups, as Megatron's and what was made after it."""
_PASSES = ("forward_step", "backward_step")
_SCHEDULES = {
    "forward_backward_pipelining_without_interleaving": "1F1B",
    "forward_backward_pipelining_with_interleaving": "Interleaved1F1B",
}


class Megatron:
    """Hooks into the schedules, which call `forward_step` and `backward_step`, and into the distributed optimizer."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._actions = PipelineActions(attribution)
        self._counted = CountedActions(self._actions)
        self._first_stage = 0
        self._num_ranks = 1

    def install(self) -> None:
        """Wait for the job to import the schedules and the optimizer."""
        after_import = self._attribution.after_import
        after_import(_SCHEDULES_MODULE, self._hook, (*_SCHEDULES, *_PASSES))
        after_import(_MESSAGES_MODULE, self._hook_messages, (f"{_COMMUNICATOR}.{_EXCHANGE}",))
        after_import(_OPTIMIZER_MODULE, self._hook_optimizer, _OPTIMIZER)
        self._attribution.copies.seek(
            group_descriptions.MEGATRON, _STATE, lambda module: group_descriptions.read_axes_of(module.__name__)
        )

    def _hook(self, module: Any) -> None:
        if not self._attribution.has_all(module, (*_SCHEDULES, *_PASSES)):
            return
        around, end = self._attribution.around, self._actions.end
        for function, schedule in _SCHEDULES.items():
            around(module, function, functools.partial(self._begin_step, module, schedule), end)
        around(module, "forward_step", self._begin_forward, end)
        self._attribution.after(module, "forward_step", self._end_forward)
        around(module, "backward_step", self._begin_backward, end)

    def _hook_messages(self, module: Any) -> None:
        owner = getattr(module, _COMMUNICATOR, module)
        if self._attribution.has_all(owner, (_EXCHANGE,)):
            self._attribution.around(owner, _EXCHANGE, self._label_messages)

    def _label_messages(
        self,
        *_: Any,
        tensor_send_next: Any = None,
        tensor_send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        **__: Any,
    ) -> int:
        # With two stages, Megatron sends half of them over the default group, which does not say what for.
        forward, backward = tensor_send_next is not None or recv_prev, tensor_send_prev is not None or recv_next
        what = "activations and gradients" if forward and backward else "activations" if forward else "gradients"
        return self._attribution.begin(describe_messages, what)

    def _hook_optimizer(self, module: Any) -> None:
        declare = functools.partial(self._declare_optimizer, owner_of(module, "distrib_optimizer"))
        self._attribution.after(module.DistributedOptimizer, "__init__", declare)

    def _declare_optimizer(self, by: str, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        group = getattr(optimizer, "data_parallel_group", None)
        if group is not None:  # neither a stub for frozen models nor Megatron's FSDP
            # Buffers of gradients stay whole: what it shards is the optimizer's state, as ZeRO-1.
            self._attribution.declare_sharding("zero1", group, by)

    def _begin_step(
        self,
        module: Any,
        schedule: str,
        *,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **options: Any,
    ) -> OpenAction | None:
        group = _pipeline_group(module, options)
        chunks = len(model) if isinstance(model, list) else 1
        self._first_stage, self._num_ranks = group.rank(), group.size()
        plan = self._actions.declare(
            PipelinePlan(
                schedule=schedule,
                num_stages=chunks * group.size(),
                stages=tuple(range(group.rank(), chunks * group.size(), group.size())),
                microbatches=num_microbatches,
                group=name_of(group),
                group_rank=group.rank(),
                group_size=group.size(),
                offered=tuple(_SCHEDULES.values()),
            ),
            owner_of(module, "schedules"),
        )
        return self._counted.begin_step(plan, trains=not forward_only)

    def _begin_forward(self, *_: Any, vp_stage: int | None = None, **__: Any) -> OpenAction | None:
        return self._counted.begin_forward(self._first_stage + (vp_stage or 0) * self._num_ranks)

    def _end_forward(self, result: Any, *_: Any, **__: Any) -> None:
        output, *_ = result
        self._counted.name_forward(id(output))  # the schedule holds it until its backward pass

    def _begin_backward(self, _: Any, output_tensor: Any, *__: Any, **___: Any) -> OpenAction | None:
        return self._counted.begin_backward(id(output_tensor), self._first_stage)


def _pipeline_group(module: Any, options: dict[str, Any]) -> Any:
    """Return the group of the stages: from the arguments of the schedule, else from the parallel state it imported."""
    given = getattr(options.get("pg_collection"), "pp", None) or getattr(
        options.get("p2p_communicator"), "pp_group", None
    )
    if given is not None:
        return given
    return module.parallel_state.get_pipeline_model_parallel_group()
