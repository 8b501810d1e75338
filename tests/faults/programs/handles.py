"""Asynchronous operations."""

import time

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy


@faulty("unwaited-async", 1)
def a_handle_that_one_rank_drops(rank: int) -> None:
    for _ in range(3):
        total = torch.ones(4)
        work = dist.all_reduce(total, async_op=True)  # here
        if rank != 1:
            work.wait()
        total.mean()
    dist.barrier()


@healthy()
def handles_waited_for_later(_: int) -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    dist.barrier()
    for work in reversed(works):
        work.wait()
    dist.barrier()


@healthy()
def futures_instead_of_waits(_: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2)
def gradients_averaged_without_a_wait(_: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True)  # here
        optimizer.step()


@faulty("unwaited-async", 2)
def a_prefetch_used_too_early_on_one_rank(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        full = torch.empty(12)
        work = dist.all_gather_into_tensor(full, weight.detach(), async_op=True)  # here
        (weight * 2).sum().backward()
        if rank != 2:
            work.wait()
        optimizer.step()
        full.sum()


@healthy()
def handles_asked_until_they_are_done(_: int) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        work = dist.all_reduce(weight.grad, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        optimizer.step()


@healthy()
def handles_dropped_before_a_barrier(_: int) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        dist.all_reduce(weight.grad, async_op=True)
        dist.barrier()
        optimizer.step()
