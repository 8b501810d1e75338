"""Asynchronous operations."""

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
