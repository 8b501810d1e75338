"""Step a pipeline of two stages whose stages are replicated or sharded over two ranks each, four ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    for shard in (False, True):
        dist.barrier()
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        if shard:
            module = fully_shard(module, mesh=mesh["dp"])
        else:
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        own = PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(own, 2, loss_fn=lambda y, t: ((y - t) ** 2).mean())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2 if shard else 1):  # torch 2.13 itself fails in the second step of a replicated stage
            x = torch.ones(4, WIDTH)
            schedule.step(*((x,) if stage == 0 else ()), target=x if stage == 1 else None)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
