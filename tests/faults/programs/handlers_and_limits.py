"""Collectives in handlers and `finally` blocks, and limits that differ between ranks; and sound programs beside them.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. Three
labels were wrong: who raises leaves a call out, and comes to the next one that all make; and a call in a handler may be
meant for the one that it meets. Sends that only buffers let pass are in `tests/diagnosis/rules/test_buffered_sends.py`:
gloo's wait for their receives.
"""

import contextlib
import datetime
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.corpus import back_end, faulty, healthy

SOON, LATE = datetime.timedelta(seconds=2), datetime.timedelta(seconds=60)


def read_sample(rank: int, step: int, *, bad: tuple[int, int] = (-1, -1)) -> torch.Tensor:
    if (rank, step) == bad:
        raise ValueError("a sample without a label")
    return torch.full((8,), float(step))


def work_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64).sum()


@faulty("collective-order-mismatch", 1)
def a_barrier_for_those_who_failed(rank: int) -> None:
    for step in range(5):
        try:
            sample = read_sample(rank, step, bad=(1, 2))
            dist.all_reduce(sample)
        except ValueError:
            dist.barrier()  # here


@faulty("rank-skipped-collective", 2)
def a_finally_that_holds_an_exception_back(rank: int) -> None:
    for step in range(5):
        try:
            sample = read_sample(rank, step, bad=(2, 3))
            dist.all_reduce(sample)
        finally:
            dist.broadcast(torch.ones(1), src=0)  # here


@contextlib.contextmanager
def together() -> Iterator[None]:
    try:
        yield
    finally:
        dist.barrier()


@faulty("rank-skipped-collective", 0)
def a_context_whose_end_is_a_barrier(rank: int) -> None:
    def one_step(step: int) -> None:
        with together():
            dist.all_reduce(read_sample(rank, step, bad=(0, 2)))

    for step in range(5):
        one_step(step)


@faulty("rank-crashed", 1, also=(("collective-in-except", 1),))
def metrics_that_a_failing_rank_adds_to_a_gradient(rank: int) -> None:
    for step in range(4):
        try:
            sample = read_sample(rank, step, bad=(1, 3))
            dist.all_reduce(sample)
        finally:
            dist.all_reduce(torch.ones(8))


@healthy()
def a_flag_that_meets_the_last_average(rank: int) -> None:
    total = torch.zeros(8)
    for step in range(4):
        try:
            total += read_sample(rank, step, bad=(2, 3))
        except ValueError:
            dist.all_reduce(torch.zeros(8))
            break
        if step < 3:
            dist.all_reduce(total)
    else:
        dist.all_reduce(total)


@faulty("unequal-timeouts", 1)
def a_rank_with_less_patience(rank: int) -> None:
    group = dist.new_group([0, 1, 2], timeout=SOON if rank == 1 else LATE)
    for step in range(4):
        if rank == 0 and step == 2:
            work_for(6)
        dist.all_reduce(torch.ones(4), group=group)  # here


@faulty("unequal-timeouts", 2, joins=False)
def a_default_limit_that_one_rank_sets(rank: int) -> None:
    if rank == 2:
        dist.init_process_group(back_end(), timeout=SOON)
    else:
        dist.init_process_group(back_end())
    model = torch.nn.Linear(8, 8)
    for step in range(4):
        dist.all_reduce(model.weight.data)  # here
        if rank == 0 and step == 1:
            with tempfile.TemporaryDirectory() as folder:
                work_for(6)
                torch.save(model.state_dict(), Path(folder, "model.pt"))
    dist.destroy_process_group()


@faulty("rank-stuck", 0)
def a_rank_with_less_patience_that_was_right(rank: int) -> None:
    group = dist.new_group([0, 1, 2], timeout=SOON if rank == 1 else LATE)
    for step in range(4):
        if rank == 0 and step == 2:
            time.sleep(600)  # here
        dist.all_reduce(torch.ones(4), group=group)


@healthy()
def a_handler_that_makes_the_call_left_out(rank: int) -> None:
    for step in range(5):
        try:
            sample = read_sample(rank, step, bad=(1, 2))
            dist.all_reduce(sample)
        except ValueError:
            dist.all_reduce(torch.zeros(8))


@healthy()
def a_finally_that_all_ranks_reach(rank: int) -> None:
    for step in range(4):
        try:
            dist.all_reduce(read_sample(rank, step))
        finally:
            dist.broadcast(torch.ones(1), src=0)


@healthy()
def failures_that_all_learn_of(rank: int) -> None:
    for step in range(5):
        failed = torch.zeros(1)
        try:
            sample = read_sample(rank, step, bad=(1, 2))
        except ValueError:
            sample = torch.zeros(8)
            failed += 1
        dist.all_reduce(failed)
        if not failed:
            dist.all_reduce(sample)


@healthy()
def an_exception_of_all_ranks(_: int) -> None:
    for step in range(4):
        try:
            if step == 2:
                raise ValueError("the data of this step are bad")
            dist.all_reduce(torch.ones(8))
        except ValueError:
            dist.barrier()


@healthy()
def limits_that_differ_and_are_kept(rank: int) -> None:
    group = dist.new_group([0, 1, 2], timeout=LATE if rank else datetime.timedelta(seconds=90))
    for step in range(4):
        if rank == 0 and step == 2:
            work_for(1)
        dist.all_reduce(torch.ones(4), group=group)


@healthy()
def a_context_that_ends_in_a_barrier(rank: int) -> None:
    for step in range(4):
        with together():
            dist.all_reduce(read_sample(rank, step))
