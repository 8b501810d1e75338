"""Scenarios: tensor and sequence parallel, DTensor, context parallel, and their combination with FSDP2."""

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.nn.functional as nn_functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.completeness.programs.models import WIDTH, FeedForward, Scenarios, batch, mesh, train, world_mesh

SCENARIOS = Scenarios("Tensor parallel and DTensor")


def tensor_parallel(on):
    return parallelize_module(FeedForward(), on, {"into": ColwiseParallel(), "out": RowwiseParallel()})


@SCENARIOS.add("tensor parallel", ranks=(2, 4))
def tensor_parallel_alone():
    train(tensor_parallel(world_mesh("tp")))


@SCENARIOS.add("tensor and sequence parallel", ranks=(2, 4))
def sequence_parallel():
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "into": ColwiseParallel(input_layouts=Shard(0)),
        "out": RowwiseParallel(output_layouts=Replicate()),
    }
    train(parallelize_module(FeedForward(), world_mesh("tp"), plan))


@SCENARIOS.add("tensor parallel, embedding split by rows")
def embedding_parallel():
    plan = {"0": RowwiseParallel(input_layouts=Replicate())}
    model = parallelize_module(nn.Sequential(nn.Embedding(8, WIDTH)), world_mesh("tp"), plan)
    model(torch.randint(0, 8, (4,))).sum().backward()


@SCENARIOS.add("loss_parallel", ranks=(2, 4))
def parallel_loss():
    logits = distribute_tensor(torch.randn(4, WIDTH, requires_grad=True), world_mesh("tp"), [Shard(1)])
    with loss_parallel():
        nn_functional.cross_entropy(logits, torch.randint(WIDTH, (4,))).backward()


@SCENARIOS.add("activation checkpointing of tensor parallel layers")
def checkpointed_tensor_parallel():
    model = tensor_parallel(world_mesh("tp"))
    checkpoint(model, batch().requires_grad_(), use_reentrant=False).sum().backward()


@SCENARIOS.add("activation checkpointing, reentrant, of tensor parallel layers")
def checkpointed_reentrant():
    model = tensor_parallel(world_mesh("tp"))
    checkpoint(model, batch().requires_grad_(), use_reentrant=True).sum().backward()


@SCENARIOS.add("tensor parallel with FSDP2", ranks=(4,))
def two_dimensions():
    both = mesh(2, 2, "dp", "tp")
    train(fully_shard(tensor_parallel(both["tp"]), mesh=both["dp"]))


@SCENARIOS.add("tensor parallel with HSDP", ranks=(4,))
def three_dimensions():
    all_three = mesh(1, 2, 2, "replicate", "shard", "tp")
    train(fully_shard(tensor_parallel(all_three["tp"]), mesh=all_three["replicate", "shard"]))


@SCENARIOS.add("DTensor, redistribute", ranks=(2, 4))
def redistribute():
    on = world_mesh("tp")
    sharded = distribute_tensor(torch.randn(8, 8), on, [Shard(0)])
    sharded.redistribute(on, [Shard(1)]).to_local().sum()
    sharded.redistribute(on, [Replicate()]).to_local().sum()
    partial = DTensor.from_local(torch.ones(8), on, [Partial()])
    partial.redistribute(on, [Replicate()]).to_local().sum()
    partial.redistribute(on, [Shard(0)]).to_local().sum()


@SCENARIOS.add("DTensor, uneven shards", ranks=(2, 4))
def uneven_shards():
    uneven = distribute_tensor(torch.randn(7, 5), world_mesh("tp"), [Shard(0)])
    uneven.redistribute(placements=[Shard(1)]).full_tensor()


@SCENARIOS.add("DTensor, redistribute in two dimensions", ranks=(4,))
def redistribute_in_two_dimensions():
    on = mesh(2, 2, "dp", "tp")
    sharded = distribute_tensor(torch.randn(8, 8), on, [Shard(0), Shard(1)])
    sharded.redistribute(on, [Shard(1), Replicate()]).full_tensor()


@SCENARIOS.add("DTensor, full_tensor and its gradient")
def full_tensor():
    on = world_mesh("tp")
    weight = distribute_tensor(torch.randn(8, 8), on, [Shard(0)]).requires_grad_()
    (weight @ weight).full_tensor().sum().backward()


@SCENARIOS.add("DTensor, random numbers", refused="AssertionError")
def random_numbers():
    on = world_mesh("tp")
    sharded = dtensor.randn(8, 8, device_mesh=on, placements=[Shard(0)])
    nn_functional.dropout(sharded, 0.5).sum().full_tensor()


@SCENARIOS.add("DTensor, distribute_module")
def distributed_module():
    module = dtensor.distribute_module(nn.Linear(8, 8), world_mesh("tp"))
    module(distribute_tensor(torch.randn(4, 8), world_mesh("tp"), [Shard(0)])).sum().backward()


@SCENARIOS.add("DTensor, local_map")
def mapped():
    on = world_mesh("tp")
    doubled = local_map(lambda x: 2 * x, out_placements=[Partial()], in_placements=([Shard(0)],), device_mesh=on)
    doubled(distribute_tensor(torch.ones(8), on, [Shard(0)])).full_tensor()


@SCENARIOS.add("context parallel", refused="_scaled_dot_product_flash_attention_for_cpu")
def parallel_context():
    qkv = [torch.randn(1, 2, 8 * dist.get_world_size(), 8) for _ in range(3)]
    with context_parallel(world_mesh("cp"), buffers=qkv, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(qkv)):
        query, key, value = (one.requires_grad_() for one in qkv)
        nn_functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
