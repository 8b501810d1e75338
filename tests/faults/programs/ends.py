"""Ranks that end, stop, or are stuck; loaders that run out."""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.faults.corpus import back_end, faulty, healthy, train


@faulty("rank-crashed", 1)
def an_exception(rank: int) -> None:
    def fail(step: int) -> None:
        if rank == 1 and step == 2:
            raise ValueError("bad sample")  # here

    train(rank, 6, fail)


@faulty("rank-killed", 2)
def killed(rank: int) -> None:
    def die(step: int) -> None:
        if rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(rank, 6, die)


@faulty("rank-exited", 0)
def left_with_status_0(rank: int) -> None:
    def leave(step: int) -> None:
        if rank == 0 and step == 2:
            sys.exit(0)  # here

    train(rank, 6, leave)


@faulty("rank-frozen", 1)
def stopped(rank: int) -> None:
    def stop(step: int) -> None:
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    train(rank, 6, stop)


@faulty("rank-stuck", 2)
def a_lock_nobody_gives_back(rank: int) -> None:
    def wait(step: int) -> None:
        if rank == 2 and step == 2:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # here

    train(rank, 6, wait)


@faulty("uneven-inputs", 0)
def fewer_batches(rank: int) -> None:
    model = torch.nn.Linear(4, 4)
    for batch in DataLoader(torch.ones(6 if rank == 0 else 10, 4), batch_size=2):
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)  # here
    if rank == 0:
        return


@faulty("rank-never-joined", 1, joins=False)
def one_that_never_joins(rank: int) -> None:
    if rank != 1:
        dist.init_process_group(back_end())  # here
    time.sleep(600)


@healthy()
def work_of_rank_0_alone(rank: int) -> None:
    def save(step: int) -> None:
        if rank == 0 and step == 3:
            time.sleep(1.0)

    train(rank, 6, save)


@healthy()
def a_rank_that_ends_early_with_nothing_left_to_do(rank: int) -> None:
    some = dist.new_group([0, 1])
    dist.barrier()
    if rank < 2:
        for _ in range(5):
            dist.all_reduce(torch.ones(4), group=some)


@healthy()
def even_batches(_: int) -> None:
    model = torch.nn.Linear(4, 4)
    for _ in range(2):
        for batch in DataLoader(torch.ones(6, 4), batch_size=2):
            model(batch).sum().backward()
            dist.all_reduce(model.weight.grad)
    dist.barrier()


@faulty("rank-killed", 1)
def a_null_pointer_that_native_code_reads(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 1:
            ctypes.string_at(0)  # here
