"""Exercises of a seminar that look wrong and are right: frozen together with those that are wrong."""

import asyncio
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import healthy
from tests.faults.programs.seminar_faults import Engine, Event, averaging, student


@healthy()
def handlers_that_each_rank_registers_in_its_own_order(rank: int) -> None:
    engine = Engine(averaging(*student()))
    notes: list[str] = []
    handlers = [lambda _: notes.append("a"), lambda _: notes.append("b")]
    for handler in handlers if rank else reversed(handlers):
        engine.on(Event.ROUND)(handler)

    @engine.on(Event.ROUND, every=3)
    def log(engine: Engine) -> None:
        dist.all_reduce(torch.tensor([engine.state.output]))

    engine.run(8)


@healthy()
def a_handler_registered_twice_by_all(_rank: int) -> None:
    engine = Engine(averaging(*student()))

    def log(engine: Engine) -> None:
        dist.all_gather([torch.zeros(1) for _ in range(3)], torch.tensor([engine.state.output]))

    engine.on(Event.ROUND)(log)

    @engine.on(Event.STARTED)
    def more(engine: Engine) -> None:
        engine.on(Event.ROUND)(log)

    engine.run(8)


@healthy()
def rank_0_alone_writes_in_a_handler(rank: int) -> None:
    engine = Engine(averaging(*student()))

    @engine.on(Event.ROUND, every=2)
    def write(engine: Engine) -> None:
        if rank == 0:
            with Path(os.devnull).open("w") as sink:
                sink.write(f"{engine.state.output}\n" * 2000)
        dist.barrier()

    engine.run(8)


@healthy()
def a_condition_that_all_ranks_agree_on(rank: int) -> None:
    model, optimizer = student()
    for number in range(7):
        averaging(model, optimizer)(None, 0)
        bad = torch.tensor([float(rank == 1 and number == 4)])
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            continue
        dist.all_gather([torch.zeros(1) for _ in range(3)], torch.ones(1))


@healthy()
def retries_that_all_ranks_make_together(rank: int) -> None:
    model, optimizer = student()
    for number in range(6):
        averaging(model, optimizer)(None, 0)
        for attempt in range(3):
            went_wrong = torch.tensor([int(rank == 2 and number == 3 and attempt == 0)])
            dist.all_reduce(went_wrong)
            if not went_wrong.item():
                break


def orders() -> Iterator[str]:
    for number in range(6):
        yield "train"
        if number % 2:
            yield "share"
        yield "report"


@healthy()
def a_generator_of_orders(_rank: int) -> None:
    for order in orders():
        match order:
            case "train":
                dist.all_reduce(torch.ones(12))
            case "share":
                dist.broadcast(torch.ones(5), src=1)
            case "report":
                dist.all_gather([torch.zeros(1) for _ in range(3)], torch.ones(1))


@healthy()
def a_coroutine_that_yields_between_calls(_rank: int) -> None:
    async def beat(beats: list[float]) -> None:
        while True:
            beats.append(time.time())
            await asyncio.sleep(0.01)

    async def main() -> None:
        beats: list[float] = []
        task = asyncio.create_task(beat(beats))
        for _ in range(6):
            await asyncio.to_thread(time.sleep, 0.02)
            dist.all_reduce(torch.ones(4))
        task.cancel()

    asyncio.run(main())


@healthy()
def batches_made_by_a_pool(rank: int) -> None:
    def make(number: int) -> torch.Tensor:
        time.sleep(0.01 * ((number + rank) % 3))
        return torch.full((3, 6), float(number))

    with ThreadPoolExecutor(2) as pool:
        for batch in pool.map(make, range(8)):
            dist.all_reduce(batch.sum().reshape(1))


@healthy()
def a_critic_trained_more_often_than_the_actor(_rank: int) -> None:
    critic, critic_steps = student()
    actor, actor_steps = student()
    for number in range(6):
        for _ in range(3 if number == 3 else 2):
            averaging(critic, critic_steps)(None, 0)
        averaging(actor, actor_steps)(None, 0)


@healthy()
def a_closure_that_the_optimizer_calls_as_often_as_it_likes(_rank: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= 3
        return loss

    for _ in range(3):
        optimizer.step(closure)


@healthy()
def a_loop_left_by_all_after_a_vote(rank: int) -> None:
    number = 0
    while True:
        dist.all_reduce(torch.ones(5))
        number += 1
        done = torch.tensor([int(number > 4 + rank % 2)])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            break
    dist.barrier()


@healthy()
def one_stage_that_fails_and_is_left_by_all(_rank: int) -> None:
    for number in range(4):
        try:
            dist.all_reduce(torch.ones(3))
            if number == 2:
                raise ValueError("all of them")
        except ValueError:
            dist.barrier()
        finally:
            dist.broadcast(torch.ones(2), src=0)


@healthy(ranks=4)
def a_product_of_blocks(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    total = torch.zeros(4, 4)
    for step in range(2):
        left, right = torch.ones(4, 4) * rank, torch.eye(4)
        dist.broadcast(left, src=rank // 2 * 2 + step, group=rows[rank // 2])
        dist.broadcast(right, src=step * 2 + rank % 2, group=columns[rank % 2])
        total += left @ right
    dist.barrier()


@healthy()
def a_ring_of_keys(rank: int) -> None:
    keys, values = torch.ones(6), torch.ones(6)
    for _ in range(2):
        coming = [torch.empty(6), torch.empty(6)]
        calls = [
            *(dist.P2POp(dist.isend, part, (rank + 1) % 3) for part in (keys, values)),
            *(dist.P2POp(dist.irecv, part, (rank - 1) % 3) for part in coming),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        keys, values = coming


@healthy()
def a_server_that_answers_its_workers_in_turn(rank: int) -> None:
    if rank == 1:
        for _, worker in itertools.product(range(3), (2, 0)):
            gradient = torch.empty(5)
            dist.recv(gradient, src=worker)
            dist.send(gradient, dst=worker)
    else:
        for _ in range(3):
            dist.send(torch.ones(5), dst=1)
            dist.recv(torch.empty(5), src=1)
    dist.barrier()


@healthy()
def keys_sorted_by_the_rank_that_owns_them(rank: int) -> None:
    for number in range(4):
        keys = torch.sort(torch.rand(12 + number)).values
        bounds = torch.tensor([0.3, 0.6])
        counts = torch.bincount(torch.bucketize(keys, bounds), minlength=3)
        incoming = torch.empty(3, dtype=torch.int64)
        dist.all_to_all_single(incoming, counts)
        sorted_ = torch.empty(int(incoming.sum()))
        dist.all_to_all_single(sorted_, keys, incoming.tolist(), counts.tolist())
        print(rank, number, sorted_.numel())


@healthy()
def works_that_are_waited_for_in_a_list_of_callbacks(_rank: int) -> None:
    def finish(work: Any, buffer: torch.Tensor) -> None:
        work.wait()
        buffer /= 3

    for _ in range(4):
        pending: list[Callable[[], None]] = []
        for size in (3, 5, 7):
            buffer = torch.ones(size)
            work = dist.all_reduce(buffer, async_op=True)
            pending.append(functools.partial(finish, work, buffer))
        for call in reversed(pending):
            call()


@healthy()
def a_sharded_model_sampled_by_all(_rank: int) -> None:
    model, _ = student()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        if number % 3 == 2:
            with torch.no_grad():
                for _ in range(1 + number % 2):
                    model(torch.ones(1, 6))


@healthy()
def steps_that_a_scaler_leaves_out_on_all(_rank: int) -> None:
    model = DistributedDataParallel(student()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        scale = float("inf") if number == 3 else 1.0
        (model(torch.ones(2, 6)).sum() * scale).backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()


@healthy()
def an_exit_stack_of_barriers(_rank: int) -> None:
    for number in range(4):
        with contextlib.ExitStack() as stack:
            stack.callback(dist.barrier)
            if number == 2:
                stack.enter_context(contextlib.suppress(ValueError))
                raise ValueError("all of them")
            dist.all_reduce(torch.ones(7))


@healthy()
def a_rank_that_reads_while_a_send_is_on_its_way(rank: int) -> None:
    done = threading.Event()
    threading.Timer(1.0, done.set).start()
    box = torch.ones(4)
    for number in range(3):
        if rank == 2:
            work = dist.isend(box, dst=0)
            if number == 1:
                done.wait()
            work.wait()
        elif rank == 0:
            dist.recv(box, src=2)
        dist.all_reduce(torch.ones(2))


@healthy()
def a_counter_that_starts_at_another_number_and_decides_nothing(rank: int) -> None:
    model, optimizer = student()
    number = 4 if rank == 2 else 0
    last = number + 8
    while number < last:
        averaging(model, optimizer)(None, 0)
        number += 1
        if number % 4 == 0:
            dist.all_gather([torch.zeros(1) for _ in range(3)], torch.ones(1))
