"""Data parallelism: the whole model on every rank (DDP, ZeRO-1), or shards of it (FSDP, HSDP)."""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from reference_trainer.models import layer_lists
from reference_trainer.options import Options
from reference_trainer.parallelism.axes import DATA_AXES, Axes

POWERSGD_RANK = 4


def apply_data_parallelism(model: nn.Module, options: Options, axes: Axes, device: torch.device) -> nn.Module:
    """Let every backward pass average the gradients over all ranks that see other tokens."""
    layout = options.layout
    if axes.find(*DATA_AXES) is None:
        return model
    if layout.has_plain_parameters:
        return _wrap_in_ddp(model, options, axes, device)
    # Both work on whole layers of any kind of tensor: also on what tensor parallelism has divided, in a pipeline.
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [*(layer for layers in layer_lists(model) for layer in layers.values()), model]
    for unit in units:
        if layout.dp_mode in ("fsdp", "hsdp"):
            mesh = axes.find_shards()
            fully_shard(unit, mesh=mesh, reshard_after_forward=layout.zero_stage == 3, mp_policy=policy)
        else:
            replicate(unit, mesh=axes.find(*DATA_AXES), mp_policy=policy)
    return model


def synchronise_gradients(model: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
    """Hold back the averaging of gradients in all but the last microbatch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def _wrap_in_ddp(model: nn.Module, options: Options, axes: Axes, device: torch.device) -> nn.Module:
    layout = options.layout
    group = axes.group(*DATA_AXES)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=layout.bucket_mb,
        find_unused_parameters=layout.find_unused_parameters,
        static_graph=layout.static_graph,
        gradient_as_bucket_view=True,
    )
    if layout.compression == "fp16":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if layout.compression == "powersgd":
        wrapped.register_comm_hook(
            powerSGD_hook.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=max(2, options.preset.warmup_steps),
                random_seed=options.seed,
            ),
            powerSGD_hook.powerSGD_hook,
        )
    if layout.local_sgd:
        wrapped.register_comm_hook(
            post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
                process_group=group,
                subgroup=cast(distributed.ProcessGroup, None),  # never used: gradients stay where they are
                start_localSGD_iter=options.preset.warmup_steps,
                post_local_gradient_allreduce=False,
            ),
            post_localSGD_hook.post_localSGD_hook,
        )
    return wrapped
