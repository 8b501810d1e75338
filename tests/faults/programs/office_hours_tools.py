"""What the programs of office hours share: the `utils.py` of a project, without a program of its own."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn


def small_model(width: int = 6, hidden: int = 5) -> nn.Sequential:
    torch.manual_seed(21)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 3))


def mean_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    total = value.detach().clone().reshape(1)
    dist.all_reduce(total, group=group)
    return float(total / dist.get_world_size(group))


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    size = dist.get_world_size(group)
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= size


def save_checkpoint(model: nn.Module, name: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), Path(gettempdir()) / f"office-{name}.pt")
    dist.barrier()


@contextmanager
def timed(name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        longest = torch.tensor([time.monotonic() - begin])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: {float(longest):.3f} s")


def agreed(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any rank says so."""
    vote = torch.tensor([float(flag)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
    return bool(vote > 0)


def sum_over_ranks(number: float) -> float:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return float(total)


def reduced(value: torch.Tensor, how: str) -> torch.Tensor:
    result = value.detach().clone()
    dist.all_reduce(result, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
    return result


def rank_zero_only(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*arguments: object) -> None:
        if dist.get_rank() == 0:
            function(*arguments)

    return call
