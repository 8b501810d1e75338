"""Trainers ported from one device to many, with the faults that such a port brings.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import ctypes
import enum
import fcntl
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty


class Phase(enum.Enum):
    WARM = "warm"
    TRAIN = "train"
    DONE = "done"


@dataclass
class Settings:
    """What a configuration file would hold."""

    features: int = 6
    classes: int = 3
    rounds: int = 5
    extras: dict[str, Any] = field(default_factory=dict)


def classifier(settings: Settings, *, extra_buffer: bool = False) -> nn.Module:
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(settings.features, 12), nn.ReLU(), nn.Linear(12, settings.classes))
    if extra_buffer:
        model.register_buffer("steps_seen", torch.zeros(1))
    return model


def reduce_gradients(model: nn.Module) -> None:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    offset = 0
    for parameter in model.parameters():
        size = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size


def fit(
    rounds: int, before: Callable[[int], None] = lambda _: None, after: Callable[[int], None] = lambda _: None
) -> None:
    model = classifier(Settings())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(rounds):
        before(number)
        optimizer.zero_grad()
        model(torch.full((3, 6), float(number))).logsumexp(1).mean().backward()
        reduce_gradients(model)
        optimizer.step()
        after(number)


# Sharded state


@faulty("rank-skipped-collective", 1)
def an_owner_without_parameters_that_gathers_nothing(rank: int) -> None:
    owned = {0: 8, 1: 0, 2: 8}[rank]
    for _ in range(4):
        gradient = torch.ones(24)
        mine = torch.empty(8)
        dist.reduce_scatter_tensor(mine, gradient)
        if owned:
            dist.all_gather_into_tensor(torch.empty(24), mine)  # here
    dist.barrier()


@faulty("collective-order-mismatch", 0)
def an_optimizer_state_consolidated_on_one_rank(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = DistributedDataParallel(classifier(Settings()))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        if number == 3 and rank == 0:
            optimizer.consolidate_state_dict(to=0)  # here


@faulty("collective-order-mismatch", 0)
def a_distributed_checkpoint_saved_by_one_rank(rank: int) -> None:
    model = classifier(Settings())
    fit(2)
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)  # here
    fit(3)


@faulty("collective-order-mismatch", 1)
def clipping_where_the_loss_is_large(rank: int) -> None:
    model = classifier(Settings())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(7):
        optimizer.zero_grad()
        loss = model(torch.full((3, 6), 1.0 + number * rank)).square().mean()
        loss.backward()
        if rank == 1 and number == 4:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
            print(norm.full_tensor())
        optimizer.step()


@faulty("step-mismatch", 2)
def weights_averaged_at_other_intervals(rank: int) -> None:
    model = classifier(Settings())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = {0: 4, 1: 4, 2: 3}[rank]
    for number in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        if number % every == 0:
            flat = torch.nn.utils.parameters_to_vector(model.parameters())
            dist.all_reduce(flat)  # here
            torch.nn.utils.vector_to_parameters(flat / 3, model.parameters())


@faulty("rank-skipped-collective", 1)
def a_loss_that_is_no_number(rank: int) -> None:
    model = DistributedDataParallel(classifier(Settings()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        batch = torch.randn(3, 6)
        if rank == 1 and number == 4:
            batch[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model(batch).sum()
        if torch.isnan(loss):
            continue
        loss.backward()  # here
        optimizer.step()


@faulty("rank-skipped-collective", 2, ranks=4)
def fewer_evaluation_batches(rank: int) -> None:
    def evaluate(number: int) -> None:
        if number % 3 != 2:
            return
        batches = 4 if rank != 2 else 3
        for _ in range(batches):
            scores = torch.zeros(4, 2)
            dist.all_gather_into_tensor(scores, torch.rand(1, 2))  # here

    fit(6, after=evaluate)


@faulty("collective-order-mismatch", 0)
def a_barrier_inside_the_branch_of_the_first(rank: int) -> None:
    def save(number: int) -> None:
        if rank == 0 and number == 2:
            Path(os.devnull).write_text("state")
            dist.barrier()  # here

    fit(5, after=save)
    dist.barrier()


@faulty("collective-order-mismatch", 1)
def a_buffer_that_one_model_has_more(rank: int) -> None:
    model = classifier(Settings(), extra_buffer=rank == 1)
    for _ in range(3):
        for _, tensor in sorted(model.state_dict().items()):
            dist.broadcast(tensor, src=0)  # here
        dist.barrier()


# Before and after the job


@faulty("rank-crashed", 1, joins=False)
def a_data_set_that_is_not_there(rank: int) -> None:
    shards = {0: "a", 2: "c"}
    name = shards[rank]  # here
    dist.init_process_group("gloo")
    fit(3)
    print(name)
    dist.destroy_process_group()


@faulty("rank-never-joined", 2, joins=False)
def a_file_that_one_rank_awaits_before_it_joins(rank: int) -> None:
    while rank == 2 and not Path("/nonexistent/tokenised").exists():
        time.sleep(0.05)
    dist.init_process_group("gloo")  # here
    fit(3)
    dist.destroy_process_group()


@faulty("rank-exited", 1)
def a_preemption_of_one_rank(rank: int) -> None:
    def leave(number: int, _frame: object) -> None:
        print("signal", number)
        sys.exit(0)  # here

    signal.signal(signal.SIGTERM, leave)

    def preempt(number: int) -> None:
        if rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    fit(6, after=preempt)


@faulty("rank-killed", 2)
def a_native_library_that_reads_beyond(rank: int) -> None:
    def decode(number: int) -> None:
        if rank == 2 and number == 3:
            ctypes.string_at(8)  # here

    fit(6, before=decode)


@faulty("rank-killed", 0)
def an_abort_between_two_rounds(rank: int) -> None:
    def check(number: int) -> None:
        if rank == 0 and number == 2:
            os.abort()  # here

    fit(6, after=check)


@faulty("rank-crashed", 1)
def an_output_of_the_wrong_length(rank: int) -> None:
    for number in range(4):
        places = 3 if not (rank == 1 and number == 2) else 2
        out = torch.empty(places, 4)
        dist.all_gather_into_tensor(out, torch.ones(1, 4))  # here


@faulty("rank-crashed", 1, ranks=4, also=(("rank-crashed", 3),))
def two_ranks_that_raise_for_different_reasons(rank: int) -> None:
    def prepare(number: int) -> None:
        if number == 3 and rank == 1:
            raise ValueError("sequence of 5000 tokens, at most 4096")  # here
        if number == 3 and rank == 3:
            raise KeyError("image_id")

    fit(6, before=prepare)


# Hooks and handles


@faulty("size-mismatch", 1)
def hooks_that_run_in_another_order(rank: int) -> None:
    torch.manual_seed(5)
    left, right = nn.Linear(4, 8), nn.Linear(4, 2)
    for layer in (left, right):
        layer.bias.requires_grad_(False)
        layer.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))  # here
    for number in range(4):
        x = torch.randn(3, 4)
        if rank == 1 and number == 2:
            first, second = right(x).sum(), left(x).sum()
        else:
            first, second = left(x).sum(), right(x).sum()
        first.backward()
        second.backward()
    dist.barrier()


@faulty("unwaited-async", 1)
def a_message_used_before_it_came(rank: int) -> None:
    for number in range(4):
        if rank == 0:
            for peer in (1, 2):
                dist.send(torch.full((4,), float(number)), dst=peer)
        else:
            weights = torch.empty(4)
            work = dist.irecv(weights, src=0)  # here
            if rank == 2:
                work.wait()
            print(weights.sum())
    time.sleep(0.2)


@faulty("group-order-risk", 2)
def two_groups_started_in_another_order(rank: int) -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])

    def overlap(number: int) -> None:
        pair = [first, second]
        if rank == 2 and number == 3:
            pair.reverse()
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in pair]  # here
        for work in works:
            work.wait()

    fit(6, after=overlap)


# Groups


@faulty("group-order-inversion", 0, 1, 2)
def a_ring_of_pairs_each_begun_with_the_next(rank: int) -> None:
    pairs = {edge: dist.new_group(list(edge)) for edge in ((0, 1), (1, 2), (0, 2))}
    following = tuple(sorted((rank, (rank + 1) % 3)))
    preceding = tuple(sorted((rank, (rank - 1) % 3)))
    for _ in range(3):
        for edge in (following, preceding):
            dist.all_reduce(torch.ones(3), group=pairs[edge])  # here


@faulty("wrong-group", 3, ranks=4)
def a_replica_wrapped_over_all(rank: int) -> None:
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = teams[rank // 2] if rank != 3 else None
    model = DistributedDataParallel(classifier(Settings()), process_group=group)  # here
    model(torch.randn(3, 6)).sum().backward()
    dist.barrier()


@faulty("root-mismatch", 2)
def results_collected_by_another(rank: int) -> None:
    collector = int(Settings(extras={"collector": 1 if rank == 2 else 0}).extras["collector"])
    for number in range(3):
        into: list[object] | None = [None] * 3 if rank == collector else None
        dist.gather_object({"rank": rank, "score": number}, into, dst=collector)  # here
    dist.barrier()


@faulty("rank-skipped-collective", 5, ranks=8)
def one_of_eight_that_omits_a_sum(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    tensor, data = mesh.get_group("tp"), mesh.get_group("dp")
    for step, micro in itertools.product(range(3), range(3)):
        hidden = torch.ones(4)
        dist.all_reduce(hidden, group=tensor)
        is_cached = rank == 5 and (step, micro) == (1, 1)
        if not is_cached:
            dist.all_reduce(hidden, group=tensor)  # here
        if micro == 2:
            dist.all_reduce(torch.ones(9), group=data)


@faulty("unequal-timeouts", 1)
def one_rank_with_a_short_limit(rank: int) -> None:
    limit = timedelta(seconds=3 if rank == 1 else 120)
    group = dist.new_group([0, 1, 2], timeout=limit)
    dist.all_reduce(torch.ones(2), group=group)
    if rank == 0:
        end = time.monotonic() + 6
        while time.monotonic() < end:
            sum(range(50_000))
    dist.all_reduce(torch.ones(2), group=group)  # here


# Messages


@faulty("p2p-size-mismatch", 2)
def chunks_of_a_ring_cut_otherwise(rank: int) -> None:
    for number in range(4):
        size = 5 if rank == 2 and number == 2 else 4
        sent = dist.isend(torch.ones(size), dst=(rank + 1) % 3)  # here
        dist.recv(torch.empty(4), src=(rank - 1) % 3)
        sent.wait()
    dist.barrier()


@faulty("p2p-unmatched", 2)
def a_worker_that_does_not_say_goodbye(rank: int) -> None:
    if rank == 0:
        open_workers = {1, 2}
        while open_workers:
            for worker in sorted(open_workers):
                message = torch.empty(1)
                dist.recv(message, src=worker)  # here
                if message.item() < 0:
                    open_workers.discard(worker)
    else:
        for _ in range(4):
            dist.send(torch.ones(1), dst=0)
        if rank == 1:
            dist.send(torch.tensor([-1.0]), dst=0)
    dist.barrier()  # here


@faulty("pipeline-schedule-mismatch", 1, ranks=2)
def microbatches_of_two_configurations(rank: int) -> None:
    torch.manual_seed(1)
    stage = PipelineStage(nn.Linear(6, 6), rank, 2, torch.device("cpu"))
    count = 4 if rank == 0 else 2
    schedule = ScheduleGPipe(stage, n_microbatches=count, loss_fn=lambda out, target: (out - target).square().mean())
    batch = torch.randn(8, 6)
    for _ in range(2):
        if rank == 0:
            schedule.step(batch)  # here
        else:
            schedule.step(target=batch)  # here


# Elsewhere


@faulty("rank-stuck", 1)
def an_iteration_that_never_converges(rank: int) -> None:
    def balance(number: int) -> None:
        delta = float("nan") if rank == 1 and number == 3 else 0.0
        while not delta <= 1e-6:  # here
            delta = abs(delta - 0.0)  # here

    fit(6, before=balance)


def fail_in_worker(number: int) -> int:
    if number == 2:
        os._exit(7)
    return number


@faulty("rank-stuck", 0)
def a_pool_whose_worker_has_died(rank: int) -> None:
    fit(2)
    if rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(fail_in_worker, range(4))  # here
    fit(2)


@faulty("rank-stuck", 1)
def a_cache_locked_by_a_process_that_stays(rank: int) -> None:
    with tempfile.NamedTemporaryFile() as cache:
        fit(2)
        if rank == 1:
            holder = os.open(cache.name, os.O_RDWR)
            fcntl.flock(holder, fcntl.LOCK_EX)
            again = os.open(cache.name, os.O_RDWR)
            fcntl.flock(again, fcntl.LOCK_EX)  # here
        fit(2)


@faulty("slow-rank", 3, ranks=4)
def an_inference_loop_with_a_long_prompt(rank: int) -> None:
    tokens = deque(maxlen=8)
    weights = torch.randn(64, 64)
    for _ in range(50):
        x = torch.randn(64, 64)
        for _ in range(60 if rank != 3 else 1500):
            x = torch.tanh(x @ weights)
        scores = x.sum().reshape(1)
        dist.all_reduce(scores)
        tokens.append(scores.item())


@faulty("rank-stuck", 0, ranks=4, also=(("rank-stuck", 3),))
def two_ranks_blocked_at_two_places(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def refill(number: int) -> None:
        if number == 3 and rank == 0:
            queue.Queue[int](maxsize=1).get()  # here
        if number == 3 and rank == 3:
            threading.Event().wait()

    for number in range(6):
        refill(number)
        dist.all_reduce(torch.ones(3), group=halves[rank // 2])
