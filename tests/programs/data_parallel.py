"""Train with every kind of data parallelism that acts on the user's behalf, four ranks: data_parallel.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


class Block(nn.Module):
    """A linear layer, and one with buffers."""

    def __init__(self):
        """Make them."""
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        """Apply both."""
        return self.norm(torch.relu(self.linear(x)))


class Model(nn.Module):
    """Four blocks, one unused layer."""

    def __init__(self, unused):
        """Make them."""
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(WIDTH, 1) if unused else None

    def forward(self, x):
        """Apply the blocks and the head."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model, steps=4, accumulate=None):
    """Step a few times; where a context is given, each step has three backward passes inside it first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        if accumulate is not None:
            with accumulate():
                for _ in range(3):
                    model(torch.ones(2, WIDTH)).sum().backward()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    ddp = {"bucket_cap_mb": 0.02}
    mark = torch.ones(1)
    unused, static = {"find_unused_parameters": True}, {"static_graph": True}
    for number, options in enumerate((ddp, ddp | unused, ddp | static, ddp, ddp, ddp)):
        dist.all_reduce(mark)  # a call of the user's own between the models
        model = DistributedDataParallel(Model(unused=number == 1), **options)
        if number == 3:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if number == 4:  # knows its bucket from torch
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        train(model, accumulate=model.no_sync if number == 5 else None)

    dist.all_reduce(mark)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for given in (mesh["dp_shard"], mesh):
        model = Model(unused=False)
        for layer in model.layers:
            fully_shard(layer, mesh=given)
        train(fully_shard(model, mesh=given), steps=2)
        dist.all_reduce(mark)
    groups = mesh.get_group("dp_shard"), mesh.get_group("dp_replicate")
    for strategy, group in (
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, groups),
        (ShardingStrategy.NO_SHARD, None),
    ):
        model = Model(unused=False)
        options = {"device_id": torch.device("cpu"), "sharding_strategy": strategy, "process_group": group}
        model.layers[0] = FullyShardedDataParallel(model.layers[0], **options)
        model = FullyShardedDataParallel(model, **options)
        train(model, steps=2)
        model.clip_grad_norm_(1.0)
        dist.all_reduce(mark)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
