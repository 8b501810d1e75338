"""Jobs that end by the time limit of a group, before anybody calls them hung."""

import datetime

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy

SOON = datetime.timedelta(seconds=2)


@faulty("rank-skipped-collective", 1)
def a_skip_that_runs_into_the_limit(rank: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=SOON)
    model = nn.Linear(8, 8)
    for step in range(6):
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad, group=hasty)
        if rank == 1 and step == 3:
            continue
        dist.broadcast(model.bias.data, src=0, group=hasty)  # here


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def a_ring_that_runs_into_the_limit(rank: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=SOON)
    dist.barrier(group=hasty)
    dist.recv(torch.zeros(4), src=(rank + 1) % 3, group=hasty)  # here
    dist.send(torch.ones(4), dst=(rank - 1) % 3, group=hasty)


@faulty("group-order-inversion", 2)
def two_groups_that_run_into_the_limit(rank: int) -> None:
    a, b = (dist.new_group([0, 1, 2], timeout=SOON) for _ in range(2))
    for step in range(3):
        first, second = (b, a) if rank == 2 and step == 2 else (a, b)
        dist.all_reduce(torch.ones(4), group=first)  # here
        dist.all_reduce(torch.ones(4), group=second)


@faulty("collective-order-mismatch", 0)
def a_barrier_that_runs_into_the_limit(rank: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=SOON)
    for step in range(4):
        dist.all_reduce(torch.ones(4), group=hasty)
        if rank == 0 and step == 1:
            dist.barrier(group=hasty)  # here


@faulty("p2p-tag-mismatch", 0, 1, ranks=2)
def tags_that_run_into_the_limit(rank: int) -> None:
    hasty = dist.new_group([0, 1], timeout=SOON)
    if rank == 0:
        dist.send(torch.ones(4), dst=1, group=hasty, tag=10)  # here
    else:
        dist.recv(torch.zeros(4), src=0, group=hasty, tag=11)  # here


@faulty("root-mismatch", 2)
def a_root_that_runs_into_the_limit(rank: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=SOON)
    for step in range(4):
        dist.broadcast(torch.ones(4), src=1 if rank == 2 and step == 2 else 0, group=hasty)  # here
        dist.barrier(group=hasty)


@healthy()
def limits_that_are_kept(_: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=SOON)
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=hasty)
        dist.barrier(group=hasty)
