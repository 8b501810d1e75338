"""Scenarios: DistributedDataParallel, its hooks and wrappers, optimizers that communicate."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from tests.completeness.programs.models import WIDTH, Scenarios, batch, layers, train

SCENARIOS = Scenarios("DistributedDataParallel and optimizers that communicate")


class OneBranch(nn.Module):
    """Use one layer on rank 0 and another one elsewhere."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        return self.branches[min(dist.get_rank(), 1)](x)


class Recomputed(nn.Module):
    """Recompute the activations in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def hooked(hook, state=None, width=WIDTH, steps=2):
    ddp = DistributedDataParallel(layers(width=width))
    ddp.register_comm_hook(state, hook)
    train(ddp, steps, width)


@SCENARIOS.add("DDP", ranks=(2, 4))
def ddp():
    train(DistributedDataParallel(layers()))


@SCENARIOS.add("DDP, many buckets")
def ddp_many_buckets():
    train(DistributedDataParallel(layers(6, 256), bucket_cap_mb=0.3), 3, 256)


@SCENARIOS.add("DDP, find_unused_parameters", ranks=(2, 4))
def ddp_find_unused_parameters():
    train(DistributedDataParallel(OneBranch(), find_unused_parameters=True))


@SCENARIOS.add("DDP, no_sync and gradient accumulation")
def ddp_no_sync():
    ddp = DistributedDataParallel(layers())
    with ddp.no_sync():
        ddp(batch()).sum().backward()
    train(ddp)


@SCENARIOS.add("DDP, join with uneven numbers of batches", ranks=(2, 4))
def ddp_join():
    ddp = DistributedDataParallel(layers())
    with ddp.join():
        train(ddp, 2 + dist.get_rank())


@SCENARIOS.add("DDP, static graph")
def ddp_static_graph():
    train(DistributedDataParallel(layers(), static_graph=True), 3)


@SCENARIOS.add("DDP, activation checkpointing")
def ddp_checkpointed():
    train(DistributedDataParallel(Recomputed()))


@SCENARIOS.add("DDP, buffers of batch normalisation")
def ddp_batch_norm():
    train(DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))


@SCENARIOS.add("DDP, sparse embedding")
def ddp_sparse_embedding():
    embedding = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(16, 4))
    ddp = DistributedDataParallel(embedding)
    for _ in range(2):
        ddp(torch.randint(0, 10, (4, 2))).sum().backward()


@SCENARIOS.add("DDP, gradient_as_bucket_view")
def ddp_gradient_as_bucket_view():
    train(DistributedDataParallel(layers(), gradient_as_bucket_view=True), 3)


@SCENARIOS.add("DDP, autocast to bfloat16")
def ddp_autocast():
    ddp = DistributedDataParallel(layers())
    with torch.autocast("cpu", torch.bfloat16):
        train(ddp)


@SCENARIOS.add("DDP, mixed_precision", refused="cpu backend doesn't support events")
def ddp_mixed_precision():
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    train(DistributedDataParallel(layers(), mixed_precision=policy))


@SCENARIOS.add("DDP on a subgroup", ranks=(4,))
def ddp_on_subgroup():
    half, _ = dist.new_subgroups(group_size=2)
    train(DistributedDataParallel(layers(), process_group=half))


@SCENARIOS.add("two DDP models in one step")
def ddp_two_models():
    one, other = DistributedDataParallel(layers()), DistributedDataParallel(layers())
    (one(batch()).sum() + other(batch()).sum()).backward()


@SCENARIOS.add("DDP, delayed all_reduce of parameters")
def ddp_delayed():
    model = layers()
    named = list(model.named_parameters())[:2]
    train(DistributedDataParallel(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=named[-1][1]))


@SCENARIOS.add("DDP, hook allreduce")
def ddp_allreduce_hook():
    hooked(default_hooks.allreduce_hook)


@SCENARIOS.add("DDP, hook fp16_compress")
def ddp_fp16_hook():
    hooked(default_hooks.fp16_compress_hook)


@SCENARIOS.add("DDP, hook fp16_compress in C++")
def ddp_builtin_fp16_hook():
    ddp = DistributedDataParallel(layers())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(ddp)


@SCENARIOS.add("DDP, hook bf16_compress", refused="NCCL 2.10+")
def ddp_bf16_hook():
    hooked(default_hooks.bf16_compress_hook)


@SCENARIOS.add("DDP, hook noop")
def ddp_noop_hook():
    hooked(debugging_hooks.noop_hook)


@SCENARIOS.add("DDP, hook PowerSGD", ranks=(2, 4))
def ddp_power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    hooked(powerSGD_hook.powerSGD_hook, state, 64, 4)


@SCENARIOS.add("DDP, hook batched PowerSGD", refused="AssertionError")
def ddp_batched_power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    hooked(powerSGD_hook.batched_powerSGD_hook, state, 64, 4)


@SCENARIOS.add("DDP, post-local SGD", ranks=(2, 4))
def ddp_post_local_sgd():
    subgroup, _ = dist.new_subgroups(group_size=dist.get_world_size() // 2)
    ddp = DistributedDataParallel(layers())
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, 1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, 4, optimizer=PostLocalSGDOptimizer(optim=inner, averager=averager))


@SCENARIOS.add("hierarchical model averaging", ranks=(4,))
def hierarchical_averaging():
    model = layers()
    averager = HierarchicalModelAverager(period_group_size_dict=OrderedDict([(1, 2), (2, 4)]), warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        train(model, 1, optimizer=optimizer)
        averager.average_parameters(model.parameters())


@SCENARIOS.add("composable replicate")
def composable_replicate():
    model = layers()
    replicate(model)
    train(model)


@SCENARIOS.add("SyncBatchNorm", refused="SyncBatchNorm layers only work with GPU modules")
def sync_batch_norm():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    train(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model)))


@SCENARIOS.add("ZeroRedundancyOptimizer", ranks=(2, 4))
def zero():
    ddp = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    train(ddp, optimizer=optimizer)
    optimizer.consolidate_state_dict()


@SCENARIOS.add("ZeroRedundancyOptimizer, parameters as bucket view")
def zero_bucket_view():
    ddp = DistributedDataParallel(layers())
    train(
        ddp,
        optimizer=ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, parameters_as_bucket_view=True),
    )


@SCENARIOS.add(
    "ZeroRedundancyOptimizer overlapped with DDP", refused="Gloo backend using Overlapping DDP with ZeRO may meet hangs"
)
def zero_overlapped():
    ddp = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer))
    for _ in range(4):
        ddp(batch()).sum().backward()


@SCENARIOS.add("Join([DDP, ZeroRedundancyOptimizer])")
def join_ddp_and_zero():
    ddp = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01)
    with Join([ddp, optimizer]):
        train(ddp, 2 + dist.get_rank(), optimizer=optimizer)
