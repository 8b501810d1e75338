"""Asynchronous operations."""

import threading
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


@faulty("unwaited-async", 0, 1, 2)
def a_buffer_scaled_before_its_wait(_: int) -> None:
    for _ in range(3):
        total = torch.ones(4)
        work = dist.all_reduce(total, async_op=True)  # here
        total.div_(3)
        work.wait()


@faulty("unwaited-async", 0, 1, 2, check="handles")
def a_step_taken_before_the_waits(_: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        optimizer.step()  # here
        for work in works:
            work.wait()


@faulty("unwaited-async", 1, check="handles")
def a_message_read_before_its_wait(rank: int) -> None:
    for step in range(3):
        buffer = torch.zeros(8)
        if rank == 0:
            dist.send(torch.full((8,), float(step)), 1)
        elif rank == 1:
            work = dist.irecv(buffer, 0)
            buffer.sum()  # here
            work.wait()


@healthy(check="handles")
def parts_of_one_buffer(rank: int) -> None:
    flat = torch.ones(6, 6)
    for _ in range(3):
        work = dist.all_reduce(flat[2], async_op=True)
        flat[3:].add_(1)
        flat[::3].mul_(2)
        flat[2].shape, torch.empty_like(flat), flat[2].detach().view(2, 3)
        work.wait()
        sent = flat[2].clone()
        others = [dist.isend(sent, peer) for peer in (1, 2)] if rank == 0 else [dist.irecv(sent, 0)]
        if rank == 0:
            sent.sum()  # what is sent may be read
        for other in others:
            other.wait()
        sent.add_(1)


@healthy(check="handles")
def waits_in_other_ways(_: int) -> None:
    for _ in range(3):
        total = torch.ones(4)
        waiter = threading.Thread(target=dist.all_reduce(total, async_op=True).wait)
        waiter.start()
        waiter.join()
        total.add_(1)
        dist.all_reduce(total, async_op=True).get_future().then(lambda done: done.value()[0].div_(3)).wait()
        total.add_(1)
        work = dist.all_reduce(total, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        total.add_(1)
        work = dist.all_reduce(total, async_op=True)
        dist.barrier()
        total.add_(1)
        work.wait()


@healthy(check="handles")
def gradients_of_wrapped_models(_: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    del model
