"""Train with the schedule of torch.distributed.pipelining that the argument names; stages take known times."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH, MICROBATCHES = 32, 6
FORWARD_S, BACKWARD_S = 0.01, 0.02


class Slow(torch.autograd.Function):
    """Takes known times and changes nothing."""

    @staticmethod
    def forward(_, values):
        time.sleep(FORWARD_S)
        return values * 1.0

    @staticmethod
    def backward(_, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Stage(nn.Module):
    """A layer that takes known times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Slow.apply(torch.relu(self.layer(values)))


def main() -> None:
    """Train 12 steps of 6 microbatches of 2 samples."""
    kind = getattr(schedules, sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    num_stages = world if is_single else 2 * world
    numbers = range(rank, num_stages, world)
    parts = [Stage() for _ in numbers]
    stages = [PipelineStage(part, i, num_stages, torch.device("cpu")) for part, i in zip(parts, numbers, strict=True)]
    schedule = kind(stages[0] if is_single else stages, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=1e-3)
    for _ in range(12):
        inputs, targets = torch.randn(2, 2 * MICROBATCHES, WIDTH)
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
