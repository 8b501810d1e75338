"""Scripts of a week in a lab: rounds that are left, repeated, counted, in other styles; half of them right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import collections
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


class Lab:
    """A model, its optimizer, and what a run keeps."""

    def __init__(self, width: int = 5) -> None:
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.log: collections.deque[float] = collections.deque(maxlen=4)
        self.width = width

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def fit(self, samples: int = 3) -> float:
        self.opt.zero_grad()
        loss = self.net(torch.ones(samples, self.width)).pow(2).mean()
        loss.backward()
        for gradient in self.gradients():
            dist.all_reduce(gradient)
        self.opt.step()
        self.log.append(loss.item())
        return loss.item()

    def share(self) -> None:
        for tensor in self.net.state_dict().values():
            dist.broadcast(tensor, src=0)

    def table(self, value: float) -> list[float]:
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.tensor([value]))
        return [part.item() for part in parts]


@faulty("rank-skipped-collective", 1)
def a_table_left_out_by_a_swallowed_error(rank: int) -> None:
    lab = Lab()
    for number in range(6):
        loss = lab.fit()
        try:
            if rank == 1 and number == 3:
                raise LookupError("no column of that name")
            lab.table(loss)
        except LookupError:  # here
            pass


@healthy()
def a_table_left_out_by_an_error_on_all(_rank: int) -> None:
    lab = Lab()
    for number in range(6):
        loss = lab.fit()
        try:
            if number == 3:
                raise LookupError("no column of that name")
            lab.table(loss)
        except LookupError:
            pass


@faulty("step-mismatch", 2)
def a_checkpoint_restored_with_an_older_counter(rank: int) -> None:
    lab = Lab()
    start = {"step": 7 if rank == 2 else 9}["step"]
    for step in range(start, 20):
        lab.fit()
        if step % 5 == 4:  # here
            lab.table(0.0)


@healthy()
def a_checkpoint_restored_alike(_rank: int) -> None:
    lab = Lab()
    start = {"step": 9}["step"]
    for step in range(start, 20):
        lab.fit()
        if step % 5 == 4:
            lab.table(0.0)


@faulty("step-mismatch", 0)
def a_table_asked_for_again_when_it_looked_odd(rank: int) -> None:
    lab = Lab()
    for number in range(6):
        values = lab.table(lab.fit())
        if rank == 0 and number == 3 and values:
            values = lab.table(lab.log[-1])  # here


@healthy()
def a_table_asked_for_again_by_all(_rank: int) -> None:
    lab = Lab()
    for number in range(6):
        values = lab.table(lab.fit())
        if number == 3 and values:
            lab.table(lab.log[-1])


@faulty("rank-skipped-collective", 0, ranks=4)
def a_share_in_every_other_round_but_one(rank: int) -> None:
    lab = Lab()
    due = [number % 2 == 1 for number in range(8)]
    if rank == 0:
        due[5] = False
    for is_due in due:
        lab.fit()
        if is_due:
            dist.barrier()  # here
        lab.table(1.0)


@healthy(ranks=4)
def a_share_in_rounds_of_a_list(_rank: int) -> None:
    lab = Lab()
    for is_due in [False, True, True, False, True]:
        lab.fit()
        if is_due:
            lab.share()
        lab.table(1.0)


@faulty("rank-stuck", 1)
def a_choice_that_waits_for_a_key(rank: int) -> None:
    lab = Lab()
    for number in range(6):
        lab.fit()
        if rank == 1 and number == 2:
            read, _write = os.pipe()
            select.select([read], [], [])  # here
        lab.table(0.0)


@healthy()
def a_choice_with_a_limit_of_time(rank: int) -> None:
    lab = Lab()
    for number in range(5):
        lab.fit()
        if rank == 1 and number == 2:
            read, _write = os.pipe()
            select.select([read], [], [], 0.4)
        lab.table(0.0)


@faulty("group-order-inversion", 1, ranks=5, also=(("rank-stuck", 4),))
def two_that_swap_beside_one_that_sleeps(rank: int) -> None:
    means, spreads = dist.new_group([0, 1]), dist.new_group([0, 1])
    rest = dist.new_group([2, 3, 4])
    for number in range(6):
        if rank < 2:
            both = [means, spreads]
            if rank == 1 and number == 3:
                both.reverse()
            for group in both:
                dist.all_reduce(torch.ones(3), group=group)
        else:
            if rank == 4 and number == 2:
                signal.pause()
            dist.all_reduce(torch.ones(3), group=rest)


@healthy(ranks=5)
def two_teams_of_unlike_pace(rank: int) -> None:
    means, spreads = dist.new_group([0, 1]), dist.new_group([0, 1])
    rest = dist.new_group([2, 3, 4])
    for _ in range(6):
        if rank < 2:
            for group in (means, spreads):
                dist.all_reduce(torch.ones(3), group=group)
        else:
            time.sleep(0.1)
            dist.all_reduce(torch.ones(3), group=rest)


@faulty("rank-skipped-collective", 2)
def a_round_given_up_in_a_helper(rank: int) -> None:
    lab = Lab()

    def assess(number: int) -> float | None:
        score = -1.0 if rank == 2 and number == 4 else 1.0
        if score < 0:
            return None  # here
        return lab.table(score)[0]

    for number in range(6):
        lab.fit()
        assess(number)


@healthy()
def a_round_given_up_after_a_vote(rank: int) -> None:
    lab = Lab()

    def assess(number: int) -> float | None:
        score = -1.0 if rank == 2 and number == 4 else 1.0
        if min(lab.table(score)) < 0:
            return None
        return lab.table(score)[0]

    for number in range(6):
        lab.fit()
        assess(number)


@faulty("collective-order-mismatch", 0)
def a_share_before_the_table(rank: int) -> None:
    lab = Lab()
    plan: list[Callable[[], Any]] = [lambda: lab.table(0.0), lambda: dist.barrier()]
    for number in range(6):
        lab.fit()
        for call in plan[::-1] if rank == 0 and number == 3 else plan:
            call()


@healthy()
def plans_turned_round_by_all(_rank: int) -> None:
    lab = Lab()
    plan: list[Callable[[], Any]] = [lambda: lab.table(0.0), lambda: dist.barrier()]
    for number in range(6):
        lab.fit()
        for call in plan[::-1] if number == 3 else plan:
            call()


@faulty("step-mismatch", 1)
def a_forward_pass_with_buffers_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(7):
        opt.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        opt.step()
        if rank == 1 and number == 3:
            model(torch.randn(4, 5))  # here


@healthy()
def a_forward_pass_with_buffers_on_all(_rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(7):
        opt.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        opt.step()
        if number == 3:
            model(torch.randn(4, 5))


@faulty("rank-skipped-collective", 1, ranks=2)
def one_of_two_that_breaks_off(rank: int) -> None:
    lab = Lab()
    for number in range(8):
        loss = lab.fit()
        if rank == 1 and number == 4:
            break  # here
        lab.table(loss)
    lab.share()


@healthy(ranks=2)
def two_that_break_off(_rank: int) -> None:
    lab = Lab()
    for number in range(8):
        loss = lab.fit()
        if number == 4:
            break
        lab.table(loss)
    lab.share()
