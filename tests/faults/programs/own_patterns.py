"""Ranks that leave their own pattern: a call made again, an older step, a branch past a call, a held exception.

Written for gaps that earlier batches had shown, so that they tell nothing of programs not seen; each has a sound twin.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty, healthy, train


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


class Net(nn.Module):
    """A model with a forward pass in the program's own file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Trainer:
    """One step by hand, and what surrounds it."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).sum().backward()
        average(self.model)
        self.optimizer.step()


# A call once more, an older step


def publish_config(times: int) -> None:
    for _ in range(times):
        dist.broadcast(torch.ones(4), src=0)  # of a_publication_made_again


@faulty("step-mismatch", 1)
def a_publication_made_again(rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        trainer.step()
        publish_config(2 if rank == 1 and step == 3 else 1)
    dist.barrier()


@healthy()
def a_publication_made_again_by_all(_rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        trainer.step()
        publish_config(2 if step == 3 else 1)
    dist.barrier()


@faulty("step-mismatch", 2)
def a_metric_gathered_again_after_an_error(rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        trainer.step()
        for attempt in range(3):
            parts = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(parts, torch.ones(2))  # here
            if not (rank == 2 and step == 4 and attempt == 0):
                break
    dist.barrier()


@faulty("step-mismatch", 0, 2, ranks=5)
def a_retry_on_two_of_five(rank: int) -> None:
    trainer = Trainer()
    for step in range(5):
        trainer.step()
        for attempt in range(3):
            dist.broadcast(torch.ones(4), src=0)  # here
            if not (rank in (0, 2) and step == 2 and attempt == 0):
                break
    dist.barrier()


@faulty("step-mismatch", 2)
def one_rank_resumed_three_steps_earlier(rank: int) -> None:
    trainer = Trainer()
    for step in range(5 if rank == 2 else 8, 16):
        trainer.step()
        if step % 5 == 4:
            dist.barrier()  # here


@healthy()
def all_ranks_resumed_at_one_step(_rank: int) -> None:
    trainer = Trainer()
    for step in range(8, 16):
        trainer.step()
        if step % 5 == 4:
            dist.barrier()


@faulty("step-mismatch", 1, ranks=2)
def a_metric_counted_twice_by_one_of_two(rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        trainer.step()
        for _ in range(2 if rank == 1 and step == 3 else 1):
            dist.broadcast(torch.ones(3), src=0)  # here
        dist.all_reduce(torch.ones(5))
    dist.barrier()


# A cycle of two beside a frozen rank


@faulty("group-order-inversion", 3, ranks=5, also=(("rank-frozen", 4),))
def a_ring_of_two_that_share_a_group_with_a_frozen_rank(rank: int) -> None:
    first, second = dist.new_group([2, 3]), dist.new_group([2, 3])
    for step in range(5):
        dist.all_reduce(torch.ones(2))
        if rank == 4 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        pair = (second, first) if rank == 3 and step == 3 else (first, second)
        for group in pair if rank in (2, 3) else ():
            dist.all_reduce(torch.ones(4), group=group)  # here
    dist.barrier()


@healthy(ranks=4)
def two_groups_of_two_in_one_order(rank: int) -> None:
    first, second = dist.new_group([2, 3]), dist.new_group([2, 3])
    for step in range(5):
        dist.all_reduce(torch.ones(2))
        pair = (second, first) if step == 3 else (first, second)
        for group in pair if rank in (2, 3) else ():
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


# The branch that leads past a call


@faulty("rank-skipped-collective", 1)
def a_step_left_by_continue(rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        loss = float("nan") if rank == 1 and step == 3 else 1.0
        if loss != loss:
            continue  # here
        trainer.step()
    dist.barrier()


@faulty("rank-skipped-collective", 2)
def a_report_that_returns_early(rank: int) -> None:
    def report(step: int) -> None:
        count = 0 if rank == 2 and step == 2 else 8
        if count == 0:
            return  # here
        dist.all_reduce(torch.tensor([float(count)]))

    trainer = Trainer()
    for step in range(6):
        trainer.step()
        report(step)
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_call_in_a_branch_of_the_data(rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        trainer.step()
        grows = not (rank == 1 and step == 3)
        if grows:  # here
            dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(4), src=0)
    dist.barrier()


@healthy()
def a_step_left_by_all(_rank: int) -> None:
    trainer = Trainer()
    for step in range(6):
        loss = float("nan") if step == 3 else 1.0
        if loss != loss:
            continue
        trainer.step()
    dist.barrier()


# The caller that deviates


@faulty("step-mismatch", 0)
def a_sample_of_a_sharded_model(rank: int) -> None:
    model = Net()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 3 and rank == 0:
            with torch.no_grad():
                model(torch.ones(1, 8))


@healthy()
def a_sample_of_a_sharded_model_by_all(_rank: int) -> None:
    model = Net()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                model(torch.ones(1, 8))


class Mixed(nn.Module):
    """A layer that sums over ranks in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).detach()
        dist.all_reduce(y)
        return y


@faulty("step-mismatch", 1)
def a_profile_of_a_layer_that_sums(rank: int) -> None:
    layer, other, trainer = Mixed(), torch.ones(3), Trainer()
    for step in range(6):
        trainer.step()
        layer(torch.ones(2, 8))
        dist.broadcast(other, src=0)
        if rank == 1 and step == 3:
            layer(torch.ones(2, 8))  # here
        dist.barrier()
    dist.barrier()


# Hooks of one line: of two orders one is as good as the other


@healthy()
def hooks_in_another_order_on_all(_rank: int) -> None:
    torch.manual_seed(5)
    left, right = nn.Linear(4, 8), nn.Linear(4, 2)
    for layer in (left, right):
        layer.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))
    for number in range(4):
        for layer in (right, left) if number == 2 else (left, right):
            layer(torch.randn(3, 4)).sum().backward()
    dist.barrier()


# An exception that is held


def tidy_up() -> None:
    print("tidy")
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_clean_up_called_by_a_finally(rank: int) -> None:
    trainer = Trainer()
    try:
        for step in range(6):
            if rank == 1 and step == 4:
                raise RuntimeError("corrupt record")
            trainer.step()
    finally:
        tidy_up()


@contextlib.contextmanager
def synchronised() -> Iterator[None]:
    try:
        yield
    finally:
        dist.barrier()


@faulty("rank-skipped-collective", 2)
def a_context_that_meets_at_its_end(rank: int) -> None:
    trainer = Trainer()
    with synchronised():
        for step in range(6):
            if rank == 2 and step == 4:
                raise RuntimeError("corrupt record")
            trainer.step()


@healthy()
def a_clean_up_that_all_come_to(rank: int) -> None:
    trainer = Trainer()
    for step in range(4):
        try:
            trainer.step()
            if step == 2:
                raise ValueError(f"rank {rank}: all of them raise")
        except ValueError as error:
            print(error)
        finally:
            tidy_up()


# Where a stuck rank is


@faulty("rank-stuck", 1)
def stuck_with_an_operation_in_flight(rank: int) -> None:
    trainer = Trainer()
    total = torch.ones(4)
    for step in range(6):
        work = dist.all_reduce(total, async_op=True)
        if rank == 1 and step == 3:
            threading.Event().wait()  # here
        work.wait()
        trainer.step()


@faulty("rank-stuck", 2)
def stuck_while_a_message_is_under_way(rank: int) -> None:
    box = torch.ones(4)
    for step in range(6):
        if rank == 2:
            work = dist.isend(box, dst=0)
            if step == 3:
                threading.Event().wait()  # here
            work.wait()
        elif rank == 0:
            dist.recv(box, src=2)
        dist.all_reduce(torch.ones(4))


@healthy()
def busy_while_an_operation_is_in_flight(rank: int) -> None:
    total = torch.ones(4)
    for _ in range(6):
        work = dist.all_reduce(total, async_op=True)
        if rank == 1:
            sum(i * i for i in range(200_000))
        work.wait()
    train(rank, 2)


@healthy(ranks=4)
def metrics_flushed_early_by_all_in_one_step(rank: int) -> None:
    metrics = dist.new_group(list(range(4)))
    values, gradient = torch.zeros(2), torch.full((8,), float(rank))
    for step in range(6):
        is_full = step == 3
        if is_full:
            dist.all_reduce(values, group=metrics)
        dist.all_reduce(gradient)
        if not is_full:
            dist.all_reduce(values, group=metrics)


@healthy(ranks=4)
def a_hop_that_all_leave_out_of_one_turn(rank: int) -> None:
    keys = torch.full((4,), float(rank))
    for turn in range(4):
        for hop in range(3):
            if turn == 2 and hop == 2:
                continue
            incoming = torch.empty(4)
            ends = [dist.P2POp(dist.isend, keys, (rank + 1) % 4), dist.P2POp(dist.irecv, incoming, (rank - 1) % 4)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            keys = incoming


@healthy()
def a_broadcast_whose_root_goes_on_without_a_wait(rank: int) -> None:
    sent = [torch.full((64,), float(step)) for step in range(6)]
    for buffer in sent:
        work = dist.broadcast(buffer, src=0, async_op=True)
        if rank != 0:
            work.wait()
    dist.barrier()


@healthy()
def validation_sets_of_unequal_size_between_equal_epochs(rank: int) -> None:
    train = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4)
    validation = DataLoader(TensorDataset(torch.ones(4 + 2 * rank, 4)), batch_size=2)
    for _ in range(3):
        for (batch,) in train:
            dist.all_reduce(batch)
        errors = torch.tensor([float(sum(batch.sum() for (batch,) in validation)), float(len(validation))])
        dist.all_reduce(errors)


@healthy(ranks=4)
def files_dealt_evenly_and_another_type_after_the_loop(rank: int) -> None:
    files = [f"part-{i}" for i in range(8)]
    for _ in files[rank::4]:
        dist.all_reduce(torch.ones(16))
    dist.all_reduce(torch.tensor([rank]))


@faulty("rank-skipped-collective", 0)
def a_skip_beside_a_smaller_validation_set(rank: int) -> None:
    train = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4)
    validation = DataLoader(TensorDataset(torch.ones(4 if rank == 0 else 6, 4)), batch_size=2)
    for epoch in range(3):
        for number, (batch,) in enumerate(train):
            if rank == 0 and epoch == 1 and number == 1:
                continue  # here
            dist.all_reduce(batch)  # here
        errors = torch.tensor([float(sum(batch.sum() for (batch,) in validation))])
        dist.all_reduce(errors)
