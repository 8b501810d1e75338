"""Exercises of a seminar with a fault each: engines, state machines, coroutines, numerics, in many styles.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty


class Event(Enum):
    STARTED = auto()
    ROUND = auto()
    EPOCH = auto()


class Engine:
    """A loop that knows nothing of what is done in it: handlers are registered."""

    def __init__(self, update: Callable[["Engine", int], Any]) -> None:
        self.update = update
        self.handlers: dict[Event, list[Callable[[Engine], None]]] = defaultdict(list)
        self.state = SimpleNamespace(round=0, epoch=0, output=None)

    def on(self, event: Event, *, every: int = 1) -> Callable[[Callable[["Engine"], None]], Callable[["Engine"], None]]:
        def register(handler: Callable[[Engine], None]) -> Callable[[Engine], None]:
            @functools.wraps(handler)
            def filtered(engine: Engine) -> None:
                if engine.state.round % every == 0:
                    handler(engine)

            self.handlers[event].append(filtered)
            return handler

        return register

    def fire(self, event: Event) -> None:
        for handler in self.handlers[event]:
            handler(self)

    def run(self, rounds: int, epochs: int = 1) -> None:
        self.fire(Event.STARTED)
        for self.state.epoch in range(epochs):
            for number in range(rounds):
                self.state.round += 1
                self.state.output = self.update(self, number)
                self.fire(Event.ROUND)
            self.fire(Event.EPOCH)


def student(width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Engine, int], float]:
    def update(_engine: Engine, _number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 6)).mean()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        optimizer.step()
        return loss.item()

    return update


# Engines and handlers


@faulty("rank-skipped-collective", 2)
def an_engine_whose_handler_was_registered_by_most(rank: int) -> None:
    engine = Engine(averaging(*student()))
    if rank != 2:

        @engine.on(Event.ROUND, every=3)
        def log(engine: Engine) -> None:
            value = torch.tensor([engine.state.output])
            dist.all_reduce(value)  # here

    engine.run(8)


@faulty("step-mismatch", 1)
def a_handler_registered_twice_on_one_rank(rank: int) -> None:
    engine = Engine(averaging(*student()))

    def log(engine: Engine) -> None:
        values = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(values, torch.tensor([engine.state.output]))  # here

    engine.on(Event.ROUND)(log)

    @engine.on(Event.ROUND, every=4)
    def more(engine: Engine) -> None:
        if rank == 1:
            engine.on(Event.ROUND)(log)

    engine.run(8)


@faulty("rank-stuck", 0)
def a_handler_that_waits_for_a_reader(rank: int) -> None:
    engine = Engine(averaging(*student()))

    @engine.on(Event.ROUND, every=3)
    def stream(_engine: Engine) -> None:
        if rank == 0:
            read, _write = os.pipe()
            os.read(read, 1)  # here

    engine.run(9)


@faulty("rank-crashed", 1)
def a_handler_with_a_key_that_is_not_there(rank: int) -> None:
    engine = Engine(averaging(*student()))
    table = {0: "a", 1: "b", 2: "c"}

    @engine.on(Event.ROUND)
    def look_up(engine: Engine) -> None:
        key = engine.state.round if rank == 1 else engine.state.round % 3
        print(table[key])  # here

    engine.run(8)


# Coroutines and generators


def schedule(rank: int) -> Generator[str, None, None]:
    for number in range(6):
        yield "train"
        if number % 2 and not (rank == 0 and number == 3):
            yield "share"
        yield "report"


@faulty("rank-skipped-collective", 0)
def a_generator_of_orders_that_leaves_one_out(rank: int) -> None:
    for order in schedule(rank):
        match order:
            case "train":
                dist.all_reduce(torch.ones(12))
            case "share":
                dist.broadcast(torch.ones(5), src=1)  # here
            case "report":
                dist.all_gather([torch.zeros(1) for _ in range(3)], torch.ones(1))


@faulty("collective-order-mismatch", 2)
def a_generator_of_orders_in_another_order(rank: int) -> None:
    usual = ["reduce", "gather"]
    orders: Iterator[str] = itertools.chain.from_iterable(
        reversed(usual) if rank == 2 and number == 2 else usual for number in range(5)
    )
    calls = {
        "reduce": lambda: dist.all_reduce(torch.ones(3)),  # here
        "gather": lambda: dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2)),  # here
    }
    for order in orders:
        calls[order]()


@faulty("rank-stuck", 1)
def a_coroutine_that_awaits_an_event_nobody_sets(rank: int) -> None:
    async def main() -> None:
        ready = asyncio.Event()
        for number in range(5):
            dist.all_reduce(torch.ones(4))
            if rank == 1 and number == 2:
                await ready.wait()
            await asyncio.sleep(0)

    asyncio.run(main())


@faulty("rank-stuck", 2)
def a_pool_whose_task_never_returns(rank: int) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        for number in range(5):
            task = pool.submit(release.wait if rank == 2 and number == 3 else time.time)
            task.result()  # here
            dist.all_reduce(torch.ones(4))


# Two optimizers, closures, outer loops


@faulty("step-mismatch", 1)
def a_critic_trained_once_more_by_one_rank(rank: int) -> None:
    critic, critic_steps = student()
    actor, actor_steps = student()
    for number in range(6):
        for _ in range(3 if rank == 1 and number == 3 else 2):
            averaging(critic, critic_steps)(None, 0)
        optimizer_loss = actor(torch.ones(2, 6)).sum()
        actor_steps.zero_grad()
        optimizer_loss.backward()
        for p in actor.parameters():
            dist.all_reduce(p.grad)  # here
        actor_steps.step()


@faulty("step-mismatch", 0)
def a_line_search_that_asks_once_more(rank: int) -> None:
    model, optimizer = student()

    def objective() -> float:
        value = model(torch.ones(2, 6)).sum().detach().reshape(1)
        dist.all_reduce(value)  # here
        return value.item()

    for number in range(6):
        averaging(model, optimizer)(None, 0)
        objective()
        if rank == 0 and number == 4:
            objective()  # here
        dist.broadcast(torch.ones(9), src=2)


@faulty("uneven-inputs", 1)
def an_iterator_of_ones_own_that_ends_early(rank: int) -> None:
    class Shards:
        def __init__(self, count: int) -> None:
            self.left = count

        def __iter__(self) -> "Shards":
            return self

        def __next__(self) -> torch.Tensor:
            if self.left == 0:
                raise StopIteration
            self.left -= 1
            return torch.ones(3, 6)

    loader = torch.utils.data.DataLoader(list(Shards(9 if rank == 1 else 12)), batch_size=None)
    model = DistributedDataParallel(student()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:  # here
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()


@faulty("rank-skipped-collective", 1)
def a_gradient_that_is_no_number_on_one_rank(rank: int) -> None:
    model, optimizer = student()
    for number in range(7):
        optimizer.zero_grad()
        scale = float("inf") if rank == 1 and number == 4 else 1.0
        (model(torch.ones(2, 6)).sum() * scale).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).sum()
        if not torch.isfinite(norm):
            print("left out", number)
            continue  # here
        for p in model.parameters():
            dist.all_reduce(p.grad)  # here
        optimizer.step()
        dist.all_gather([torch.zeros(1) for _ in range(3)], norm.detach().reshape(1))


# Numerics


@faulty("size-mismatch", 2)
def a_histogram_with_a_bin_more(rank: int) -> None:
    for number in range(4):
        bins = 11 if rank == 2 and number == 2 else 10
        counts = torch.histc(torch.rand(100), bins=bins)
        dist.all_reduce(counts)  # here


@faulty("dtype-mismatch", 0)
def a_centroid_in_double(rank: int) -> None:
    centroids = torch.zeros(4, 2)
    for number in range(4):
        points = torch.rand(20, 2, dtype=torch.float64 if rank == 0 and number == 3 else torch.float32)
        sums = points.new_zeros(4, 2).index_add_(0, torch.randint(4, (20,)), points)
        dist.all_reduce(sums)  # here
        centroids = sums.to(torch.float32)
    print(centroids.sum())


@faulty("root-mismatch", 2, ranks=4)
def a_pivot_chosen_from_ones_own_column(rank: int) -> None:
    for column in range(4):
        owner = column % 4 if not (rank == 2 and column == 2) else 3
        row = torch.full((8,), float(rank))
        dist.broadcast(row, src=owner)  # here


@faulty("group-order-inversion", 3, ranks=4)
def a_product_of_blocks_with_columns_first(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    row, column = rows[rank // 2], pair[rank // 2]
    for number in range(5):
        order = [column, row] if rank == 3 and number == 3 else [row, column]
        for group in order:
            block = torch.ones(4, 4)
            dist.all_reduce(block, group=group)  # here


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def a_ring_of_keys_in_which_all_receive_first(rank: int) -> None:
    keys = torch.ones(6)
    for _ in range(2):
        coming = torch.empty(6)
        dist.recv(coming, src=(rank - 1) % 3)  # here
        dist.send(keys, dst=(rank + 1) % 3)
        keys = coming


@faulty("p2p-unmatched", 1)
def a_parameter_server_that_serves_a_round_less(rank: int) -> None:
    rounds = 4
    if rank == 1:
        for _ in range(rounds - 1):
            for worker in (0, 2):
                gradient = torch.empty(5)
                dist.recv(gradient, src=worker)
                dist.send(gradient, dst=worker)
        dist.barrier()
    else:
        for _ in range(rounds):
            dist.send(torch.ones(5), dst=1)  # here
            dist.recv(torch.empty(5), src=1)  # here
        dist.barrier()


# Ends


@faulty("rank-frozen", 0)
def a_rank_suspended_from_the_terminal(rank: int) -> None:
    engine = Engine(averaging(*student()))

    @engine.on(Event.ROUND)
    def pause(engine: Engine) -> None:
        if rank == 0 and engine.state.round == 4:
            os.kill(os.getpid(), signal.SIGSTOP)  # here

    engine.run(8)


@faulty("rank-exited", 1)
def a_submission_that_leaves_when_it_has_converged(rank: int) -> None:
    engine = Engine(averaging(*student()))
    tolerance = 10.0 if rank == 1 else -1.0

    @engine.on(Event.ROUND)
    def check(engine: Engine) -> None:
        if engine.state.round > 4 and abs(engine.state.output) < tolerance:
            raise SystemExit(0)  # here

    engine.run(9)


@faulty("unwaited-async", 0, 1, 2)
def a_future_that_nobody_asks_for(_rank: int) -> None:
    weights = torch.zeros(512)
    for number in range(5):
        gradient = torch.full((512,), float(number))
        dist.all_reduce(gradient, async_op=True)  # here
        weights -= gradient
    dist.barrier()


@faulty("rank-skipped-collective", 2)
def an_exit_stack_that_meets_at_its_end(rank: int) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(dist.barrier)
        for number in range(5):
            dist.all_reduce(torch.ones(7))  # here
            if rank == 2 and number == 3:
                raise ValueError("no such file: part-3")


@faulty("step-mismatch", 2)
def a_round_counter_that_starts_at_another_number(rank: int) -> None:
    model, optimizer = student()
    number = 1 if rank == 2 else 0
    while number < 12:
        averaging(model, optimizer)(None, 0)
        number += 1
        if number % 4 == 0:
            dist.all_gather([torch.zeros(1) for _ in range(3)], torch.ones(1))  # here
