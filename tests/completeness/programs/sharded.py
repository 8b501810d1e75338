"""Scenarios: FSDP1, FSDP2, hybrid sharding, and what saves and loads their state."""

import functools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as state
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from tests.completeness.programs.models import Scenarios, batch, layers, mesh, train, world_mesh

SCENARIOS = Scenarios("FSDP and checkpoints")
CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16


def fsdp1(**options):
    return FullyShardedDataParallel(layers(), device_id=CPU, **options)


def fsdp2(**options):
    """Shard every linear layer, then the rest."""
    model = layers()
    options.setdefault("mesh", world_mesh("shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):

    @SCENARIOS.add(f"FSDP1, {strategy.name}", ranks=(2, 4))
    def fsdp1_strategy(strategy=strategy):
        train(fsdp1(sharding_strategy=strategy))


for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):

    @SCENARIOS.add(f"FSDP1, {strategy.name.strip('_')}", ranks=(4,))
    def fsdp1_hybrid(strategy=strategy):
        train(fsdp1(sharding_strategy=strategy, device_mesh=mesh(2, 2, "replicate", "shard")))


@SCENARIOS.add("FSDP1, auto-wrapped, use_orig_params, clip_grad_norm_, summon_full_params")
def fsdp1_wrapped():
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = fsdp1(auto_wrap_policy=policy, use_orig_params=True)
    train(model)
    model.clip_grad_norm_(1.0)
    with FullyShardedDataParallel.summon_full_params(model):
        pass


@SCENARIOS.add("FSDP1, mixed precision and no_sync")
def fsdp1_mixed_precision():
    model = fsdp1(mixed_precision=MixedPrecision(param_dtype=BFLOAT16, reduce_dtype=BFLOAT16))
    with model.no_sync():
        model(batch()).sum().backward()
    train(model)


@SCENARIOS.add("FSDP1, full and sharded state dict")
def fsdp1_state():
    model = fsdp1()
    train(model, 1)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())


@SCENARIOS.add("FSDP2, one module", ranks=(2, 4))
def fsdp2_one_module():
    train(fully_shard(layers(), mesh=world_mesh("shard")))


@SCENARIOS.add("FSDP2, several modules", ranks=(2, 4))
def fsdp2_several_modules():
    train(fsdp2())


@SCENARIOS.add("FSDP2, reshard_after_forward=False")
def fsdp2_kept():
    train(fsdp2(reshard_after_forward=False))


@SCENARIOS.add("FSDP2, reshard_after_forward=2", ranks=(4,))
def fsdp2_resharded_to_two():
    train(fsdp2(reshard_after_forward=2))


@SCENARIOS.add("FSDP2, mixed precision")
def fsdp2_mixed_precision():
    train(fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32)))


@SCENARIOS.add("FSDP2, CPU offload")
def fsdp2_offloaded():
    train(fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@SCENARIOS.add("FSDP2, gradient accumulation without sync")
def fsdp2_accumulated():
    model = fsdp2()
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    model.set_requires_gradient_sync(True)
    train(model)


@SCENARIOS.add("FSDP2, explicit prefetching and unshard")
def fsdp2_prefetched():
    model = fsdp2()
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    linear[0].set_modules_to_forward_prefetch(linear[1:2])
    linear[2].set_modules_to_backward_prefetch(linear[1:2])
    model.unshard(async_op=True).wait()
    train(model)


@SCENARIOS.add("FSDP2, clip_grad_norm_ of sharded parameters")
def fsdp2_clipped():
    model = fsdp2()
    train(model, 1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


@SCENARIOS.add("HSDP", ranks=(2, 4))
def hsdp():
    train(fsdp2(mesh=mesh(dist.get_world_size() // 2, 2, "replicate", "shard")))


def shared_folder():
    """Return a new folder that all ranks name alike."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    return Path(names[0])


@SCENARIOS.add("DCP save and load of FSDP2 and its optimizer", ranks=(2, 4))
def dcp_save_and_load():
    model = fsdp2()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, 1, optimizer=optimizer)
    folder = shared_folder()
    model_state, optimizer_state = state.get_state_dict(model, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(saved, checkpoint_id=folder)
    state.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


@SCENARIOS.add("DCP async_save", ranks=(2, 4))
def dcp_async_save():
    model = fsdp2()
    dcp.async_save({"model": state.get_model_state_dict(model)}, checkpoint_id=shared_folder()).result()


@SCENARIOS.add("DCP save and load of DDP")
def dcp_of_ddp():
    ddp = DistributedDataParallel(layers())
    folder = shared_folder()
    dcp.save({"model": ddp.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": ddp.state_dict()}, checkpoint_id=folder)


@SCENARIOS.add("full state dict, gathered and broadcast")
def full_state_dict():
    model = fsdp2()
    gathered = state.get_model_state_dict(model, options=state.StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state.set_model_state_dict(model, gathered, options=options)
