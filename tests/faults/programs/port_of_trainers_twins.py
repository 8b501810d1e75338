"""Trainers ported from one device to many that look odd and are right, beside those of `port_of_trainers_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import concurrent.futures
import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import healthy


@dataclass(frozen=True)
class Shape:
    features: int = 6
    classes: int = 3


def classifier(shape: Shape | None = None) -> nn.Module:
    shape = shape or Shape()
    torch.manual_seed(23)
    return nn.Sequential(nn.Linear(shape.features, 12), nn.ReLU(), nn.Linear(12, shape.classes))


def reduce_gradients(model: nn.Module) -> None:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def fit(
    rounds: int, before: Callable[[int], None] = lambda _: None, after: Callable[[int], None] = lambda _: None
) -> None:
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(rounds):
        before(number)
        optimizer.zero_grad()
        model(torch.full((3, 6), float(number))).logsumexp(1).mean().backward()
        reduce_gradients(model)
        optimizer.step()
        after(number)


# Sharded state


@healthy()
def an_owner_with_an_empty_shard(rank: int) -> None:
    owned = {0: 8, 1: 0, 2: 8}[rank]
    for _ in range(4):
        mine = torch.empty(8)
        dist.reduce_scatter_tensor(mine, torch.ones(24))
        if owned:
            mine += 1
        dist.all_gather_into_tensor(torch.empty(24), mine)


@healthy()
def an_optimizer_state_consolidated_by_all(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = DistributedDataParallel(classifier())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        if number == 3:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                print(len(optimizer.state_dict()["state"]))


@healthy()
def a_distributed_checkpoint_of_all(rank: int) -> None:
    model = classifier()
    fully_shard(model)
    name = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(name, src=0)
    model(torch.randn(3, 6)).sum().backward()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=name[0])
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=name[0])
    fit(3)


@healthy()
def a_plain_state_saved_by_one_while_others_go_on(rank: int) -> None:
    def save(number: int) -> None:
        if rank == 0 and number % 2 == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"number": number, "weights": torch.ones(1 << 16)}, Path(folder) / "x.pt")
                time.sleep(0.4)

    fit(7, after=save)


@healthy()
def clipping_by_all_where_any_is_large(rank: int) -> None:
    model = classifier()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(7):
        optimizer.zero_grad()
        loss = model(torch.full((3, 6), 1.0 + number * rank)).square().mean()
        loss.backward()
        largest = loss.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if largest > 0.5:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()


@healthy()
def local_steps_of_unlike_number_between_averages(rank: int) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.randn(3, 6)).sum().backward()
            optimizer.step()
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat.detach() / 3, model.parameters())


@healthy()
def losses_that_are_no_numbers_are_zeroed(rank: int) -> None:
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        batch = torch.randn(3, 6)
        if rank == 1 and number == 4:
            batch[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model(batch).sum()
        if torch.isnan(loss):
            loss = sum(p.sum() for p in model.parameters()) * 0 + model(torch.zeros(3, 6)).sum() * 0
        loss.backward()
        optimizer.step()


@healthy(ranks=4)
def an_evaluation_shared_unevenly(rank: int) -> None:
    def evaluate(number: int) -> None:
        if number % 3 == 2:
            correct, seen = torch.zeros(1), torch.zeros(1)
            for _ in range(2 + rank):
                correct += (torch.rand(4) > 0.5).sum()
                seen += 4
            both = torch.cat([correct, seen])
            dist.all_reduce(both)

    fit(6, after=evaluate)


@healthy()
def a_buffer_of_one_model_not_published(rank: int) -> None:
    model = classifier()
    if rank == 1:
        model.register_buffer("steps_seen", torch.zeros(1), persistent=False)
    for _ in range(3):
        for _, tensor in sorted(model.state_dict().items()):
            dist.broadcast(tensor, src=0)
        dist.barrier()


# Before, after, beside


@healthy(joins=False)
def a_data_set_prepared_by_the_first(rank: int) -> None:
    store_folder = Path(tempfile.gettempdir()) / f"prepared-{os.environ['MASTER_PORT']}"
    if rank == 0:
        time.sleep(1.5)
        store_folder.mkdir()
    while not store_folder.exists():
        time.sleep(0.05)
    dist.init_process_group("gloo")
    fit(3)
    dist.barrier()
    if rank == 0:
        store_folder.rmdir()
    dist.destroy_process_group()


@healthy()
def a_preemption_flag_that_all_read(rank: int) -> None:
    asked = False

    def note(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, note)
    for number in range(20):
        if rank == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        flag = torch.tensor([int(asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            break
        dist.all_reduce(torch.ones(4))
    print("left at", number)
    sys.exit(0)


@healthy()
def an_end_of_which_the_order_does_not_matter(rank: int) -> None:
    fit(4)
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        print("the last one out")


@healthy()
def an_exception_that_is_caught_and_means_nothing(rank: int) -> None:
    def parse(number: int) -> None:
        with contextlib.suppress(ValueError):
            int("4x" if rank == number % 3 else "4")

    fit(6, before=parse)


@healthy(ranks=2)
def groups_made_and_destroyed_in_rounds(_rank: int) -> None:
    for number in range(4):
        group = dist.new_group([0, 1], group_desc=f"round {number}")
        dist.all_reduce(torch.ones(number + 1), group=group)
        dist.destroy_process_group(group)
    dist.barrier()


# Hooks and handles


@healthy()
def a_hook_that_compresses(_rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(classifier())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()


@healthy()
def handles_of_which_only_the_last_is_awaited(_rank: int) -> None:
    for _ in range(5):
        works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (4, 16, 2)]
        for work in reversed(works):
            work.wait()


@healthy()
def messages_begun_early_and_read_late(rank: int) -> None:
    for number in range(5):
        if rank == 0:
            works = [dist.isend(torch.full((4,), float(number)), dst=peer) for peer in (1, 2)]
        else:
            weights = torch.empty(4)
            works = [dist.irecv(weights, src=0)]
        time.sleep(0.02 * rank)
        for work in works:
            work.wait()


@healthy()
def two_groups_of_the_same_ranks_at_once(_rank: int) -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])

    def overlap(number: int) -> None:
        pair = [first, second] if number % 2 else [second, first]
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in pair]
        for work in works:
            work.wait()

    fit(6, after=overlap)


@healthy()
def a_ring_of_pairs_in_a_sorted_order(rank: int) -> None:
    pairs = {edge: dist.new_group(list(edge)) for edge in ((0, 1), (1, 2), (0, 2))}
    for _ in range(4):
        for edge in sorted(pairs):
            if rank in edge:
                dist.all_reduce(torch.ones(3), group=pairs[edge])


@healthy(ranks=4)
def replicas_wrapped_over_their_teams(rank: int) -> None:
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(classifier(), process_group=teams[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3 if rank < 2 else 5):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    dist.barrier()
    del model


@healthy(ranks=4)
def tensors_distributed_by_a_mesh(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    for number in range(4):
        x = distribute_tensor(torch.full((8, 8), float(number)), mesh, [Replicate()])
        y = x @ weight
        assert isinstance(y, DTensor)
        y.full_tensor()
        if number % 2:
            y.redistribute(mesh, [Shard(1)])


@healthy(ranks=8)
def eight_that_sum_over_three_axes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    tensor, data, stage = mesh.get_group("tp"), mesh.get_group("dp"), mesh.get_local_rank("pp")
    for step, micro in itertools.product(range(3), range(3)):
        hidden = torch.ones(4)
        peer = (rank + 4) % 8
        if stage == 0:
            dist.all_reduce(hidden, group=tensor)
            dist.send(hidden, dst=peer)
        else:
            dist.recv(hidden, src=peer)
            for _ in range(1 + (step == 2)):
                dist.all_reduce(hidden, group=tensor)
        if micro == 2:
            dist.all_reduce(torch.ones(9 + stage), group=data)


@healthy()
def unlike_limits_for_unlike_groups(rank: int) -> None:
    patient = dist.new_group([0, 1, 2], timeout=timedelta(minutes=10))
    quick = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))
    if rank == 0:
        time.sleep(1)
    dist.barrier(group=patient)
    for _ in range(4):
        dist.all_reduce(torch.ones(3), group=quick)


# Messages


@healthy()
def chunks_of_a_ring_that_fit(rank: int) -> None:
    total = torch.arange(11.0)
    chunks = list(total.tensor_split(3))
    for hop in range(2):
        out, back = (rank - hop) % 3, (rank - hop - 1) % 3
        sent = dist.isend(chunks[out].clone(), dst=(rank + 1) % 3)
        arrived = torch.empty_like(chunks[back])
        dist.recv(arrived, src=(rank - 1) % 3)
        sent.wait()
        chunks[back] = chunks[back] + arrived
    dist.barrier()


@healthy()
def workers_of_unlike_numbers_of_jobs(rank: int) -> None:
    if rank == 0:
        open_workers = {1, 2}
        while open_workers:
            for worker in sorted(open_workers):
                message = torch.empty(1)
                dist.recv(message, src=worker)
                if message.item() < 0:
                    open_workers.discard(worker)
    else:
        for _ in range(2 + 3 * rank):
            time.sleep(0.02)
            dist.send(torch.ones(1), dst=0)
        dist.send(torch.tensor([-1.0]), dst=0)
    dist.barrier()


@healthy(ranks=2)
def microbatches_of_one_configuration(rank: int) -> None:
    torch.manual_seed(1)
    module = nn.Linear(6, 6)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = torch.randn(8, 6)
    for _ in range(4):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        optimizer.step()


@healthy()
def objects_sent_from_rank_to_rank(rank: int) -> None:
    for number in range(3):
        if rank == 0:
            for peer in (1, 2):
                dist.send_object_list([{"n": number, "text": "x" * peer * 50}], dst=peer)
        else:
            box: list[object] = [None]
            dist.recv_object_list(box, src=0)
        out: list[object] = [None]
        dist.scatter_object_list(out, [{"r": r} for r in range(3)] if rank == 1 else None, src=1)


# Elsewhere


def square(number: int) -> int:
    return number * number


@healthy()
def a_pool_beside_the_training(rank: int) -> None:
    fit(2)
    if rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(sum(pool.map(square, range(40))))
    fit(2)


@healthy()
def a_cache_that_ranks_lock_in_turn(_rank: int) -> None:
    with open(Path(tempfile.gettempdir()) / f"lock-{os.environ['MASTER_PORT']}", "w") as cache:  # noqa: PTH123
        fit(2)
        fcntl.flock(cache, fcntl.LOCK_EX)
        time.sleep(0.4)
        fcntl.flock(cache, fcntl.LOCK_UN)
        fit(2)


@healthy()
def threads_that_only_compute(rank: int) -> None:
    results: queue.Queue[float] = queue.Queue()

    def compute(number: int) -> float:
        return float(torch.randn(64, 64).matmul(torch.randn(64, 64)).sum()) + number

    def prepare(_number: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for value in pool.map(compute, range(rank + 2)):
                results.put(value)

    fit(5, before=prepare)
    done = threading.Event()
    threading.Timer(0.2, done.set).start()
    done.wait()


@healthy(ranks=4)
def an_inference_loop_whose_prompts_change_places(rank: int) -> None:
    weights = torch.randn(32, 32)
    for number in range(24):
        x = torch.randn(32, 32)
        for _ in range(400 if (rank * 5 + number * 3) % 4 == 0 else 100):
            x = torch.tanh(x @ weights)
        scores = x.sum().reshape(1)
        dist.all_reduce(scores)
