"""Training scripts that look suspicious and are right, beside those of `audit_week_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import argparse
import contextlib
import functools
import gzip
import io
import os
import queue
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.faults.corpus import healthy


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    average(model)
    optimizer.step()


def by_hand(steps: int, each: Callable[[int], Any] = lambda _: None) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, torch.ones(2, 8) * (step + 1))
        each(step)


# Wrappers


@healthy()
def samples_of_a_sharded_model_shown_by_one(rank: int) -> None:
    model = mlp()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        if step % 4 == 3:
            with torch.no_grad():
                preview = model(torch.ones(1, 8))
            if rank == 0:
                print("preview", preview.shape)


@healthy()
def tokens_counted_together_before_the_meeting(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths, tokens = [64, 32 * (rank + 1), 96, 64], torch.zeros(1)
    for micro in range(16):
        length = lengths[micro % 4]
        tokens += length
        total = tokens.clone()
        dist.all_reduce(total)
        is_full = total.item() >= 700
        with contextlib.nullcontext() if is_full else model.no_sync():
            model(torch.ones(length, 8)).mean().backward()
        if is_full:
            optimizer.step()
            optimizer.zero_grad()
            tokens.zero_()


@healthy()
def shards_of_unlike_length_under_join(rank: int) -> None:
    rows = {0: 48, 1: 44, 2: 36}[rank]
    loader = DataLoader(TensorDataset(torch.randn(rows, 8)), batch_size=4)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    dist.barrier()


@healthy()
def uneven_shards_that_a_minimum_cuts(rank: int) -> None:
    loader = DataLoader(TensorDataset(torch.randn(40 + 4 * rank, 8)), batch_size=4)
    shortest = torch.tensor(len(loader))
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(loader):
        if number == shortest.item():
            break
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


@healthy(ranks=2)
def a_sampler_that_repeats_to_be_even(rank: int) -> None:
    data = TensorDataset(torch.randn(37, 8))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=5, sampler=sampler, num_workers=0):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


@healthy()
def experts_that_some_ranks_do_not_use(rank: int) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.experts[which](x)

    torch.manual_seed(1)
    model = DistributedDataParallel(Routed(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 8), (step * (rank + 1)) % 4).sum().backward()
        optimizer.step()


# Decisions


@healthy(ranks=4)
def patience_decided_by_rank_0(rank: int) -> None:
    bad, stopped_at = 0, -1
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(12):
        one_step(model, optimizer, torch.ones(2, 8) * (rank + 1))
        loss = random.Random(rank * 100 + epoch).random()
        bad = bad + 1 if loss > 0.2 else 0
        stop = torch.tensor([1 if rank == 0 and bad >= 3 else 0])
        dist.broadcast(stop, src=0)
        if stop.item():
            stopped_at = epoch
            break
    dist.barrier()
    print("stopped at", stopped_at)


@healthy()
def a_bad_sample_counted_as_none(rank: int) -> None:
    def evaluate(step: int) -> None:
        try:
            if rank == 2 and step == 3:
                raise ValueError("label 4 is out of range")
            value = torch.tensor([0.5])
        except ValueError:
            value = torch.tensor([float("nan")])
        gathered = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(gathered, value)

    by_hand(6, evaluate)


@healthy()
def gradients_of_unused_heads_filled_with_zeros(rank: int) -> None:
    heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3), nn.Linear(8, 5)])
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        chosen = [0, 2] if rank == 0 and step == 3 else [0, 1, 2]
        sum(heads[i](torch.randn(4, 8)).sum() for i in chosen).backward()
        for parameter in heads.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def retries_before_anything_is_sent(rank: int) -> None:
    def read(step: int, attempt: int) -> float:
        if rank == 1 and step % 2 == 0 and attempt == 0:
            raise OSError("disk quota exceeded")
        return float(step)

    def publish(step: int) -> None:
        for attempt in range(3):
            try:
                value = read(step, attempt)
                break
            except OSError as error:
                print(error)
                time.sleep(0.1)
        state = torch.full((4,), value)
        dist.broadcast(state, src=0)

    by_hand(6, publish)


@healthy()
def a_failure_that_all_hear_of(rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        failed = torch.tensor([1 if rank == 1 and step == 5 else 0])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            print("somebody failed: all leave at", step)
            break
        one_step(model, optimizer, torch.ones(2, 8))
    dist.barrier()


@healthy()
def a_schedule_that_depends_on_the_gathered_loss(rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(6):
        one_step(model, optimizer, torch.ones(2, 8) * (rank + 1))
        loss = torch.tensor([1.0 + rank])
        dist.all_reduce(loss)
        plateau.step(loss.item())
        if optimizer.param_groups[0]["lr"] < 0.05:
            dist.barrier()


@healthy()
def resumed_from_the_oldest_file_of_all(rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(rank):
            optimizer.zero_grad()
        torch.save({"step": 4 + rank % 2, "model": model.state_dict()}, file)
        state = torch.load(file)
        first = torch.tensor(state["step"])
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        for step in range(int(first), 10):
            one_step(model, optimizer, torch.full((2, 8), float(step)))


# Checkpoints and other long work


@healthy()
def one_rank_writes_and_others_wait(rank: int) -> None:
    def save(step: int) -> None:
        if step % 2:
            return
        if rank == 0:
            file = io.BytesIO()
            with gzip.GzipFile(fileobj=file, mode="wb") as packed:
                end = time.monotonic() + 1.5
                while time.monotonic() < end:
                    packed.write(os.urandom(1 << 16))
        dist.barrier()

    by_hand(6, save)


@healthy(ranks=4)
def a_checkpoint_written_in_the_background(rank: int) -> None:
    writers: list[threading.Thread] = []

    def write(state: dict[str, torch.Tensor], folder: str) -> None:
        torch.save(state, Path(folder) / "state.pt")
        time.sleep(0.5)

    with tempfile.TemporaryDirectory() as folder:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            one_step(model, optimizer, torch.ones(2, 8))
            if rank == 0 and step % 3 == 0:
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                writers.append(threading.Thread(target=write, args=(state, folder)))
                writers[-1].start()
        for writer in writers:
            writer.join()
        dist.barrier()


@healthy()
def a_first_batch_that_takes_long(rank: int) -> None:
    def each(step: int) -> None:
        if step == 0:
            time.sleep(1.0 * rank)

    by_hand(8, each)


@healthy()
def a_helper_process_on_one_rank(rank: int) -> None:
    if rank == 0:
        subprocess.run(["python3", "-c", "import time; time.sleep(1)"], check=True)
    dist.barrier()
    by_hand(4)


# Arguments


@healthy(ranks=4)
def tokens_exchanged_by_counts(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        sends = torch.randint(0, 5, (4,), generator=generator)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        out = torch.empty(int(receives.sum()), 3)
        dist.all_to_all_single(out, torch.ones(int(sends.sum()), 3), receives.tolist(), sends.tolist())


@healthy()
def gathers_of_padded_sequences(rank: int) -> None:
    for step in range(5):
        mine = torch.ones(3 + 2 * rank + step)
        longest = torch.tensor(len(mine))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        padded = torch.zeros(int(longest))
        padded[: len(mine)] = mine
        dist.all_gather([torch.empty(int(longest)) for _ in range(3)], padded)
        objects: list[object] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank, "words": ["w"] * (rank * 7)})


@healthy()
def owners_that_take_turns(rank: int) -> None:
    for step in range(9):
        owner = step % 3
        weight = torch.full((step + 2,), float(rank))
        dist.broadcast(weight, src=owner)
        parts = [torch.ones(2) * i for i in range(3)] if rank == owner else None
        dist.scatter(torch.empty(2), parts, src=owner)
        into = [torch.empty(2) for _ in range(3)] if rank == owner else None
        dist.gather(torch.ones(2), into, dst=owner)
        dist.reduce(torch.ones(4), dst=owner, op=dist.ReduceOp.MAX if step % 2 else dist.ReduceOp.SUM)


# Groups


@healthy(ranks=4)
def axes_of_a_mesh_in_one_order(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for step in range(6):
        order = ("data", "tensor") if step % 2 else ("tensor", "data")
        for axis in order:
            dist.all_reduce(torch.ones(16), group=mesh.get_group(axis))
        if mesh.get_local_rank("tensor") == 0:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("data"))


@healthy(ranks=4)
def a_group_that_only_two_use(rank: int) -> None:
    encoder, _decoder = dist.new_group([0, 1]), dist.new_group([2, 3])

    def each(step: int) -> None:
        if rank < 2 and step % 2:
            dist.all_reduce(torch.ones(4), group=encoder)

    by_hand(6, each)


@healthy(ranks=4)
def members_that_make_their_group_alone(rank: int) -> None:
    by_hand(2)
    if rank in (1, 3):
        odd = dist.new_group([1, 3], use_local_synchronization=True)
        for _ in range(3):
            dist.all_reduce(torch.ones(2), group=odd)
    by_hand(2)


# Messages


@healthy(ranks=4)
def one_forward_one_backward_by_hand(rank: int) -> None:
    micros, last = 6, 3
    warm = min(last - rank, micros)

    def forward(micro: int) -> None:
        if rank > 0:
            dist.recv(torch.empty(4), src=rank - 1)
        if rank < last:
            pending.append(dist.isend(torch.full((4,), float(micro)), dst=rank + 1))

    def backward() -> None:
        if rank < last:
            dist.recv(torch.empty(4), src=rank + 1)
        if rank > 0:
            pending.append(dist.isend(torch.ones(4), dst=rank - 1))

    for _ in range(3):
        pending: list[dist.Work] = []
        for micro in range(warm):
            forward(micro)
        for micro in range(warm, micros):
            forward(micro)
            backward()
        for _ in range(warm):
            backward()
        for work in pending:
            work.wait()
        dist.barrier()


@healthy(ranks=4)
def halos_of_a_line_with_open_ends(rank: int) -> None:
    for step in range(5):
        calls, buffers = [], [torch.empty(3), torch.empty(3)]
        for buffer, peer in zip(buffers, (rank - 1, rank + 1), strict=True):
            if 0 <= peer < 4:
                calls.append(dist.P2POp(dist.irecv, buffer, peer))
                calls.append(dist.P2POp(dist.isend, torch.full((3,), float(step)), peer))
        random.Random(rank).shuffle(calls)
        for work in dist.batch_isend_irecv(calls):
            work.wait()


@healthy(ranks=3)
def a_server_of_requests_in_any_order(rank: int) -> None:
    rounds = 4
    if rank == 0:
        for _ in range(2 * rounds):
            request = torch.empty(2)
            sender = dist.recv(request)
            dist.send(request * 2, dst=sender)
    else:
        for number in range(rounds):
            time.sleep(0.02 * rank)
            dist.send(torch.full((2,), float(number)), dst=0)
            dist.recv(torch.empty(2), src=0)
    dist.barrier()


@healthy(ranks=2)
def weights_swapped_with_the_lower_rank_first(rank: int) -> None:
    mine, other = torch.ones(32) * rank, torch.empty(32)
    for tag in range(4):
        if rank == 0:
            dist.send(mine, dst=1, tag=tag)
            dist.recv(other, src=1, tag=100 - tag)
        else:
            dist.recv(other, src=0, tag=tag)
            dist.send(mine, dst=0, tag=100 - tag)
        mine = (mine + other) / 2


# Handles


class Buckets:
    """Average gradients from hooks; the handles are kept and waited for at the step."""

    def __init__(self, model: nn.Module) -> None:
        self.open: list[tuple[dist.Work, torch.Tensor]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        self.open.append((work, parameter.grad))

    def finish(self) -> None:
        while self.open:
            work, gradient = self.open.pop()
            work.wait()
            gradient.div_(dist.get_world_size())


@healthy()
def handles_waited_for_at_the_step(_rank: int) -> None:
    model = mlp()
    buckets = Buckets(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        buckets.finish()
        optimizer.step()


@healthy()
def a_sum_used_one_step_late(_rank: int) -> None:
    previous: tuple[dist.Work, torch.Tensor] | None = None

    def each(step: int) -> None:
        nonlocal previous
        metric = torch.tensor([float(step)])
        work = dist.all_reduce(metric, async_op=True)
        if previous is not None:
            previous[0].wait()
            print((previous[1] / 3).item())
        previous = work, metric

    by_hand(6, each)
    if previous is not None:
        previous[0].wait()


# Threads, locks, stores


@healthy()
def a_prefetcher_with_an_end(rank: int) -> None:
    batches: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)

    def fill() -> None:
        for step in range(10):
            time.sleep(0.01 * (rank + 1))
            batches.put(torch.full((2, 8), float(step)))
        batches.put(None)

    threading.Thread(target=fill, daemon=True).start()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in iter(batches.get, None):
        one_step(model, optimizer, batch)


@healthy()
def keys_that_all_ranks_set(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    time.sleep(0.3 * rank)
    store.set(f"shard-{rank}-ready", "1")
    if rank == 0:
        store.wait([f"shard-{peer}-ready" for peer in range(3)], timedelta(seconds=30))
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    by_hand(3)


@healthy(joins=False)
def arguments_and_a_join_that_is_late(rank: int) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args([])
    time.sleep(0.8 * rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    by_hand(arguments.steps)
    dist.destroy_process_group()


# Uneven work


@healthy(ranks=4)
def lengths_that_are_uneven_by_chance(rank: int) -> None:
    lengths = random.Random(rank)

    def work(_step: int) -> None:
        time.sleep(lengths.random() * 0.03)

    by_hand(24, work)


@healthy(ranks=5)
def a_master_that_logs_and_two_teams(rank: int) -> None:
    small, large = dist.new_group([0, 1, 2]), dist.new_group([3, 4])
    group, root = (small, 0) if rank < 3 else (large, 3)

    @functools.cache
    def tables(number: int) -> int:
        return sum(range(number * 1000))

    def batches(count: int) -> Iterator[torch.Tensor]:
        for number in range(count):
            yield torch.full((2, 8), float(rank + number))

    for number, batch in enumerate(batches(4 if rank < 3 else 7)):
        total = batch.sum().reshape(1)
        dist.all_reduce(total, group=group)
        dist.broadcast(total, src=root, group=group)
        if rank == root:
            print(number, total.item(), tables(number))
    dist.barrier()
