"""Step every schedule of torch.distributed.pipelining twice, then evaluate: pipelines.py MICROBATCHES."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH = 4
SCHEDULES = {  # stages a rank, and whether they lie along a V
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}


def stage_numbers(rank, num_ranks, chunks, is_v):
    """Return the stages of a rank: in rounds over the ranks, or there and back again."""
    if is_v:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + chunk * num_ranks for chunk in range(chunks)]


def main(num_microbatches):
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, (chunks, is_v) in SCHEDULES.items():
        num_stages = num_ranks * chunks
        numbers = stage_numbers(rank, num_ranks, chunks, is_v)
        modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in numbers]
        stages = [
            PipelineStage(module, number, num_stages, torch.device("cpu"))
            for module, number in zip(modules, numbers, strict=True)
        ]
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
        schedule = getattr(schedules, name)(
            stages[0] if chunks == 1 else stages, num_microbatches, loss_fn=lambda y, t: ((y - t) ** 2).mean()
        )
        inputs = (torch.ones(2 * num_microbatches, WIDTH),) if 0 in numbers else ()
        target = torch.zeros(2 * num_microbatches, WIDTH) if num_stages - 1 in numbers else None
        for _ in range(2):
            schedule.step(*inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
        if name == "ScheduleGPipe":
            with torch.no_grad():
                schedule.eval(*inputs, target=target)
        dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    dist.destroy_process_group()
