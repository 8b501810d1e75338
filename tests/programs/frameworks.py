"""Let frameworks communicate on the user's behalf, two ranks: frameworks.py FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8


class Block(nn.Module):
    """A norm and two linear layers."""

    def __init__(self):
        """Make them."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        """Apply them."""
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 2 * WIDTH))
    plan = {
        "0.norm": SequenceParallel(),
        "0.up": ColwiseParallel(input_layouts=Shard(1)),
        "0.down": RowwiseParallel(output_layouts=Shard(1)),
        "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    output = model(torch.ones(2, 4, WIDTH))
    with loss_parallel():
        labels = torch.zeros(2 * 4, dtype=torch.int64)
        nn.functional.cross_entropy(output.flatten(0, 1), labels).backward()


def main(folder):
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mark = torch.ones(1)

    dist.all_reduce(mark)
    tensor_parallel()
    dist.all_reduce(mark)
    line = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4, 2), line, [Shard(0)]).full_tensor()

    dist.all_reduce(mark)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(2 + rank):
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
    optimizer.consolidate_state_dict()
    dist.all_reduce(mark)
    PeriodicModelAverager(period=2).average_parameters(model.parameters())

    dist.all_reduce(mark)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dcp.save(state, checkpoint_id=str(Path(folder) / "sync"))
    dcp.async_save(state, checkpoint_id=str(Path(folder) / "async")).result()
    dcp.load(state, checkpoint_id=str(Path(folder) / "sync"))

    dist.all_reduce(mark)
    ring = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    context_parallel_unshard(ring, [torch.ones(1, 2, WIDTH)], [1])
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
