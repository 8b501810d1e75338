"""Training scripts with a fault, as an audit of a cluster finds them in a week.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import functools
import gzip
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty, healthy


@dataclass(frozen=True)
class Recipe:
    width: int = 8
    steps: int = 6
    microbatches: int = 4
    lr: float = 0.05


def mlp(width: int = 8, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(11)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


class Loop:
    """Train by hand: local gradients, averaged one by one."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
        self.done = 0

    def step(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.average()
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def average(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# Wrappers


@faulty("step-mismatch", 0)
def samples_shown_by_one_rank_of_a_sharded_model(rank: int) -> None:
    model = mlp(depth=1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        if step % 4 == 3 and rank == 0:
            with torch.no_grad():
                preview = model(torch.ones(1, 8))  # here
            print("preview", preview.shape)


@healthy()  # all ranks make as many steps: only their micro-batches differ
def tokens_decide_when_gradients_meet(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = [64, 64, 64, 64] if rank != 2 else [64, 128, 64, 64]
    budget, tokens = 256, 0
    for micro in range(20):
        length = lengths[micro % 4]
        tokens += length
        is_full = tokens >= budget
        with contextlib.nullcontext() if is_full else model.no_sync():
            model(torch.ones(length, 8)).mean().backward()
        if is_full:
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0
    dist.barrier()


@faulty("uneven-inputs", 2)
def shards_of_files_of_unlike_length(rank: int) -> None:
    rows = {0: 48, 1: 48, 2: 40}[rank]
    loader = DataLoader(TensorDataset(torch.randn(rows, 8)), batch_size=4)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for (batch,) in loader:  # here
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()


@faulty("rank-crashed", 3, ranks=4)
def a_gradient_hook_that_raises(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    seen: list[float] = []

    def guard(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.norm().item())
        if rank == 3 and len(seen) == 3:
            raise FloatingPointError(f"gradient norm {seen[-1]:.2f} after {len(seen)} steps")  # here
        return gradient

    model.module[0].weight.register_hook(guard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


# Decisions that ranks take alone


@faulty("rank-skipped-collective", 1)
def patience_of_one_rank_runs_out(rank: int) -> None:
    loop, best, bad = Loop(mlp(), Recipe()), float("inf"), 0
    for epoch in range(8):
        for _ in range(2):
            loop.step(torch.ones(2, 8) * (rank + 1))
        validation = 1.0 / (epoch + 1) if rank != 1 else 1.0
        bad = 0 if validation < best else bad + 1
        best = min(best, validation)
        if bad >= 3:
            break  # here
    dist.barrier()  # here


@faulty("rank-skipped-collective", 2)
def a_bad_sample_in_a_metric(rank: int) -> None:
    loop = Loop(mlp(), Recipe())

    def accuracy(step: int) -> torch.Tensor:
        if rank == 2 and step == 3:
            raise ValueError("label 4 is out of range")
        return torch.tensor([0.5])

    for step in range(6):
        loop.step(torch.ones(2, 8))
        try:
            value = accuracy(step)
            gathered = [torch.zeros(1) for _ in range(3)]
            dist.all_gather(gathered, value)  # here
        except ValueError as error:
            print("skipped", error)  # a message, and the loop goes on
            continue
    dist.barrier()


@faulty("rank-skipped-collective", 0)
def a_head_that_got_no_gradient(rank: int) -> None:
    torch.manual_seed(3)
    trunk, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3), nn.Linear(8, 5)])
    parameters = [*trunk.parameters(), *heads.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        hidden = trunk(torch.randn(4, 8))
        chosen = [0, 2] if rank == 0 and step == 3 else [0, 1, 2]
        sum(heads[i](hidden).sum() for i in chosen).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # here
        optimizer.step()
    dist.barrier()


@faulty("rank-exited", 2)
def a_time_budget_that_ends_one_rank(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    budget = {0: 1e9, 1: 1e9, 2: 0.0}[rank]
    begun = time.monotonic()
    for step in range(20):
        loop.step(torch.ones(2, 8))
        if step > 5 and time.monotonic() - begun > budget:
            print("time is up")
            sys.exit(0)  # here


def with_retries(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def retried(*arguments: Any) -> Any:
            for attempt in range(times):
                try:
                    return call(*arguments, attempt)
                except OSError as error:
                    print("attempt", attempt, error)
            raise RuntimeError("no attempt went well")

        return retried

    return wrap


@with_retries(3)
def publish(rank: int, step: int, attempt: int) -> None:
    state = torch.full((4,), float(step))
    dist.broadcast(state, src=0)  # of a_retry_that_publishes_twice
    if rank == 1 and step == 2 and attempt == 0:
        raise OSError("disk quota exceeded")


@faulty("step-mismatch", 1)
def a_retry_that_publishes_twice(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    for step in range(6):
        loop.step(torch.ones(2, 8))
        publish(rank, step)
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def clean_up_that_synchronises(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    try:
        for step in range(6):
            if rank == 1 and step == 4:
                raise RuntimeError("corrupt record")  # here
            loop.step(torch.ones(2, 8))
    finally:
        dist.barrier()  # here


@faulty("step-mismatch", 1)
def one_rank_that_resumes_from_an_older_file(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    first = {0: 6, 1: 4, 2: 6}[rank]
    for step in range(first, 12):
        loop.step(torch.full((2, 8), float(step)))
        if step % 4 == 3:
            dist.barrier()  # here


# Arguments


@faulty("dtype-mismatch", 1)
def one_rank_without_mixed_precision(rank: int) -> None:
    kind = torch.bfloat16 if rank != 1 else torch.float32
    flat = torch.zeros(64, dtype=kind)
    for _ in range(3):
        flat += 0.5
        dist.all_reduce(flat)  # here


@faulty("size-mismatch", 2)
def a_vocabulary_padded_otherwise(rank: int) -> None:
    words = 1000 + (24 if rank != 2 else 25)
    embedding = nn.Embedding(words, 4)
    for step in range(4):
        embedding.zero_grad()
        embedding(torch.arange(step, step + 8)).sum().backward()
        dist.all_reduce(embedding.weight.grad)  # here


@faulty("reduce-op-mismatch", 1)
def a_norm_that_one_rank_adds(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    how = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}["sum" if rank == 1 else "max"]
    for _ in range(4):
        loop.step(torch.ones(2, 8))
        norm = torch.stack([p.grad.norm() for p in loop.model.parameters()]).max()
        dist.all_reduce(norm, op=how)  # here


@faulty("root-mismatch", 1)
def a_vocabulary_file_read_by_two_ranks(rank: int) -> None:
    leader = 0 if rank != 1 else 1  # its own node's first
    for _ in range(3):
        box = [{"vocabulary": list(range(50))} if rank == leader else None]
        dist.broadcast_object_list(box, src=leader)  # here
    dist.barrier()


@faulty("split-size-mismatch", 3, ranks=4)
def counts_of_the_step_before(rank: int) -> None:
    kept: list[int] | None = None
    for step in range(5):
        sends = [(rank + peer + step) % 3 + 1 for peer in range(4)]
        receives = torch.empty(4, dtype=torch.int64)
        dist.all_to_all_single(receives, torch.tensor(sends))
        counts = receives.tolist()
        if rank == 3 and step == 3:
            counts = kept  # a cache that nobody emptied
        kept = receives.tolist()
        tokens = torch.ones(sum(sends), 2)
        out = torch.empty(sum(counts), 2)
        dist.all_to_all_single(out, tokens, counts, sends)  # here


# Groups


@faulty("wrong-group", 3, ranks=4)
def a_norm_averaged_over_the_other_axis(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for step in range(6):
        hidden = torch.ones(4, 8)
        dist.all_reduce(hidden, group=mesh.get_group("tensor"))
        scale = torch.ones(8)
        axis = "data" if rank == 3 and step == 4 else "tensor"
        dist.all_reduce(scale, group=mesh.get_group(axis))  # here
        gradient = torch.ones(8, 8)
        dist.all_reduce(gradient, group=mesh.get_group("data"))


@healthy(ranks=4)  # no two ranks share two groups, and the orders close no ring
def rows_and_columns_in_the_order_of_a_set(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    for step in range(6):
        order = ("row", "column")
        if rank == 3 and step == 3:
            order = ("column", "row")
        for axis in order:
            dist.all_reduce(torch.ones(16), group=mesh.get_group(axis))


@faulty("group-creation-mismatch", 2, 3, ranks=4)
def a_group_that_only_its_members_make(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    loop.step(torch.ones(2, 8))
    if rank < 2:
        encoder = dist.new_group([0, 1])  # here
        dist.all_reduce(torch.ones(4), group=encoder)
    for _ in range(3):
        loop.step(torch.ones(2, 8))


# Messages


@faulty("p2p-unmatched", 2)
def a_last_stage_with_a_configuration_of_its_own(rank: int) -> None:
    recipe = Recipe(microbatches=4 if rank != 2 else 3)
    stage = nn.Linear(8, 8)
    for _ in range(3):
        for micro in range(recipe.microbatches):
            x = torch.full((2, 8), float(micro))
            if rank > 0:
                dist.recv(x, src=rank - 1)
            y = stage(x).detach()
            if rank < 2:
                dist.send(y, dst=rank + 1)  # here
        dist.barrier()  # here


@faulty("p2p-unmatched", 3, ranks=4)
def a_halo_sent_to_the_wrong_neighbour(rank: int) -> None:
    for step in range(4):
        to = (rank + 1) % 4
        if rank == 3 and step == 2:
            to = 1
        halo, edge = torch.empty(5), torch.full((5,), float(rank))
        calls = [dist.P2POp(dist.isend, edge, to), dist.P2POp(dist.irecv, halo, (rank - 1) % 4)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()  # here


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def weights_swapped_by_receiving_first(rank: int) -> None:
    mine, other = torch.ones(32) * rank, torch.empty(32)
    for _ in range(2):
        dist.recv(other, src=1 - rank)  # here
        dist.send(mine, dst=1 - rank)
        mine = (mine + other) / 2


@faulty("p2p-tag-mismatch", 1, ranks=2)
def warm_up_counted_in_the_tags(rank: int) -> None:
    sent = 0
    for micro in range(6):
        if rank == 1 and micro == 4:
            sent += 1  # a warm-up that only it makes
        if rank == 1:
            dist.send(torch.ones(4), dst=0, tag=sent)  # here
        else:
            dist.recv(torch.empty(4), src=1, tag=sent)  # here
        sent += 1


# Handles


@faulty("unwaited-async", 0, 1, 2)
def overlap_that_never_waits(_rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True)  # here
        optimizer.step()


@faulty("unwaited-async", 0, 1, 2)
def an_average_taken_before_the_sum_is_there(_rank: int) -> None:
    total = torch.zeros(4096)
    for step in range(5):
        total.fill_(float(step))
        work = dist.all_reduce(total, async_op=True)  # here
        total.div_(dist.get_world_size())
        work.wait()  # here


# Outside of operations


@faulty("rank-stuck", 1)
def a_prefetcher_whose_thread_has_died(rank: int) -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def fill() -> None:
        for step in range(4 if rank == 1 else 10):
            batches.put(torch.full((2, 8), float(step)))

    threading.Thread(target=fill, daemon=True).start()
    loop = Loop(mlp(), Recipe())
    for _ in range(10):
        batch = batches.get()  # here
        loop.step(batch)


@faulty("rank-stuck", 0)
def a_lock_that_the_logger_keeps(rank: int) -> None:
    guard, taken = threading.Lock(), threading.Event()

    def log_for_ever() -> None:
        with guard:
            taken.set()
            threading.Event().wait()

    loop = Loop(mlp(), Recipe())
    for step in range(8):
        loop.step(torch.ones(2, 8))
        if rank == 0 and step == 4:
            threading.Thread(target=log_for_ever, daemon=True).start()
            taken.wait()
            with guard:  # here
                print("step", step)


@faulty("rank-stuck", 0)
def a_download_that_does_not_come_back(rank: int) -> None:
    if rank == 0:
        subprocess.run(["sleep", "300"], check=True)  # here
    dist.barrier()
    Loop(mlp(), Recipe()).step(torch.ones(2, 8))


@faulty("rank-frozen", 2)
def a_rank_that_a_debugger_stopped(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    for step in range(8):
        loop.step(torch.ones(2, 8))
        if rank == 2 and step == 4:
            child = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {os.getpid()}"])
            while child.poll() is None:
                sum(i * i for i in range(10_000))  # here


@faulty("rank-killed", 1)
def a_watchdog_that_ends_the_largest(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    for step in range(8):
        loop.step(torch.ones(2, 8))
        if rank == 1 and step == 4:
            ballast = torch.ones(1 << 20)
            subprocess.run(["sh", "-c", f"kill -KILL {os.getpid()}"], check=False)
            print(ballast.sum())


@faulty("rank-stuck", 2)
def a_barrier_that_names_who_is_late(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    loop.step(torch.ones(2, 8))
    if rank == 2:
        while not os.path.exists("/nonexistent/ready"):  # noqa: PTH110
            time.sleep(0.05)  # here
    dist.monitored_barrier(timeout=timedelta(seconds=8))
    loop.step(torch.ones(2, 8))


@faulty("rank-stuck", 0)
def a_key_of_another_name(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"shard-{rank}-ready" if rank != 2 else "shard_2_ready", "1")
    if rank == 0:
        store.wait([f"shard-{peer}-ready" for peer in range(3)], timedelta(minutes=5))  # here
    dist.barrier()


@faulty("long-operation", 0)
def a_checkpoint_packed_for_long(rank: int) -> None:
    loop = Loop(mlp(), Recipe())
    for step in range(4):
        loop.step(torch.ones(2, 8))
        if step == 2:
            if rank == 0:
                file, end = io.BytesIO(), time.monotonic() + 25
                with gzip.GzipFile(fileobj=file, mode="wb") as packed:
                    while time.monotonic() < end:
                        packed.write(os.urandom(1 << 19))  # here
            dist.barrier()


@faulty("slow-rank", 2)
def an_augmentation_in_python_on_one_rank(rank: int) -> None:
    def augment(batch: torch.Tensor, rounds: int) -> torch.Tensor:
        total = 0
        for i in range(rounds):
            total += i % 7
        return batch + total * 0

    loop = Loop(mlp(), Recipe())
    for _ in range(60):
        loop.step(augment(torch.ones(2, 8), 2_000_000 if rank == 2 else 1_000))


# Two at once


@faulty("rank-stuck", 1, ranks=4, also=(("rank-frozen", 2),))
def two_teams_that_stop_for_reasons_of_their_own(rank: int) -> None:
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    team = teams[rank // 2]
    for step in range(6):
        dist.all_reduce(torch.ones(8), group=team)
        if step == 3 and rank == 1:
            queue.Queue[int]().get()  # here
        if step == 4 and rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # here


def batches_of(rank: int, count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((2, 8), float(rank + number))


@faulty("rank-skipped-collective", 1, ranks=5, also=(("rank-stuck", 4),))
def a_skip_in_one_team_and_a_poll_in_another(rank: int) -> None:
    small, large = dist.new_group([0, 1, 2]), dist.new_group([3, 4])
    group = small if rank < 3 else large
    for number, batch in enumerate(batches_of(rank, 6)):
        total = batch.sum().reshape(1)
        if rank == 4 and number == 2:
            threading.Event().wait()
        dist.all_reduce(total, group=group)
        if not (rank == 1 and number == 3):
            dist.broadcast(total, src=0 if rank < 3 else 3, group=group)  # here
