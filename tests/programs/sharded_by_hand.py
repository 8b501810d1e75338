"""Shard with DTensor by hand: tensor-parallel, data-parallel, and parameters gathered; on 4 ranks, over pairs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def train(name, placement, forward):
    """Run a forward and a backward pass with one parameter of 8 x 8, placed on a mesh of this name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"beside_{name}", name))[name]
    weight = nn.Parameter(distribute_tensor(nn.Parameter(torch.eye(8)), mesh, [placement]))
    forward(mesh, weight).backward()
    weight.grad.full_tensor()
    dist.all_reduce(torch.ones(1), group=mesh.get_group())


def sum_parts(mesh, weight):
    """Multiply along a sharded dimension: each rank has a part of every sum."""
    ids = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(1)])
    return (ids @ weight).redistribute(placements=[Replicate()]).to_local().sum()


def correlate(mesh, weight):
    """Sum up outer products over the batch, of which each rank has a part."""
    features = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)]) @ weight
    return (features.T @ features).redistribute(placements=[Replicate()]).to_local().sum()


def gather(_, weight):
    """Gather the parameter before use."""
    return (torch.ones(4, 8) @ weight.full_tensor()).sum()


def main():
    dist.init_process_group("gloo")
    train("columns", Shard(0), sum_parts)
    train("copies", Replicate(), correlate)
    train("shards", Shard(0), gather)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
