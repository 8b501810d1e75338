"""Faults that an engineer on the night shift meets: validation, metrics, checkpoints, caches, retries, curricula.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
The kinds of two extra calls and of a retry were made those of older programs with the same fault after that run:
`a_full_state_gathered_...`, `a_sample_generated_...` and `a_step_tried_again_...`.
"""

import functools
import itertools
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.corpus import faulty

WIDTH = 6


def encoder(*, normalised: bool = False) -> nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(31)
    middle = nn.BatchNorm1d(10) if normalised else nn.GELU()
    return nn.Sequential(nn.Linear(WIDTH, 10), middle, nn.Linear(10, 3))


def batch(size: int = 4) -> torch.Tensor:
    """Some samples."""
    return torch.linspace(0, 1, size * WIDTH).view(size, WIDTH)


class Fit:
    """A wrapped model and its optimizer, with callbacks after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.callbacks: list[Callable[[int], object]] = []

    def step(self, number: int, data: torch.Tensor | None = None) -> float:
        """Make one optimizer step, then call the callbacks."""
        self.optimizer.zero_grad()
        loss = self.model(batch() if data is None else data).square().mean()
        loss.backward()
        self.optimizer.step()
        for callback in self.callbacks:
            callback(number)
        return loss.item()

    def epoch(self, steps: int) -> None:
        """Make some steps."""
        for number in range(steps):
            self.step(number)


# Validation and metrics


@faulty("step-mismatch", 2)
def an_extra_validation_batch_on_one_rank(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))
    held_out = [batch(2)] * (4 if rank == 2 else 3)
    for _ in range(3):
        fit.epoch(3)
        for samples in held_out:
            with torch.no_grad():
                loss = fit.model.module(samples).square().mean()
            dist.all_reduce(torch.stack([loss, torch.ones(())]))  # here


@dataclass
class Recall:
    """A metric as metric libraries keep it: local states that are gathered when it is computed."""

    hits: float = 0.0
    positives: float = 0.0
    updates: int = field(default=0)

    def update(self, labels: torch.Tensor) -> None:
        if labels.any():
            self.hits += 1.0
            self.positives += float(labels.sum())
            self.updates += 1

    def compute(self) -> float:
        states = torch.tensor([self.hits, self.positives])
        gathered = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.barrier()
        dist.all_gather(gathered, states)
        total = torch.stack(gathered).sum(0)
        return float(total[0] / total[1].clamp(min=1))


@faulty("rank-skipped-collective", 1)
def a_metric_without_updates_that_is_not_computed(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))
    for epoch in range(4):
        fit.epoch(2)
        recall = Recall()
        for number in range(3):
            recall.update(torch.tensor([0 if rank == 1 and epoch == 2 else 1, number % 2 * (rank != 1 or epoch != 2)]))
        if recall.updates > 0:  # here
            recall.compute()


@faulty("collective-order-mismatch", 0)
def a_summary_gathered_by_the_rank_that_logs(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))

    def log(number: int) -> None:
        if rank == 0 and number == 3:
            summaries: list[object] = [None] * 3
            dist.gather_object({"step": number}, summaries, dst=0)  # here

    fit.callbacks.append(log)
    fit.epoch(6)


@faulty("rank-skipped-collective", 3, ranks=4)
def a_callback_that_stops_its_own_trainer(rank: int) -> None:
    @dataclass
    class Control:
        should_stop: bool = False

    control = Control()

    def watch(number: int) -> None:
        if rank == 3 and number == 4:
            control.should_stop = True

    fit = Fit(DistributedDataParallel(encoder()))
    fit.callbacks.append(watch)
    for number in range(9):
        fit.step(number)
        if control.should_stop:
            break  # here
    dist.barrier()  # here


# Sharded models and checkpoints


@faulty("collective-order-mismatch", 0, ranks=2)
def a_full_state_gathered_on_the_rank_that_saves(rank: int) -> None:
    model = encoder()
    fully_shard(model[0])
    fully_shard(model)
    fit = Fit(model)

    def save(number: int) -> None:
        if rank == 0 and number == 2:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # here

    fit.callbacks.append(save)
    fit.epoch(6)


@faulty("collective-order-mismatch", 1)
def a_checkpoint_saved_again_where_the_disk_failed(rank: int) -> None:
    class Writer(dcp.FileSystemWriter):
        """A disk that fails once, on one rank."""

        fails = rank == 1

        def write_data(self, *arguments: Any, **options: Any) -> Any:
            if self.fails:
                type(self).fails = False
                raise OSError(28, "No space left on device")
            return super().write_data(*arguments, **options)

    fit = Fit(DistributedDataParallel(encoder()))
    folder = tempfile.mkdtemp(prefix=f"night-{rank}-")
    for round_ in range(3):
        fit.epoch(2)
        try:
            dcp.save({"model": fit.model.module.state_dict()}, storage_writer=Writer(folder))
        except dcp.api.CheckpointException as error:
            if rank in error.failures:
                dcp.save({"round": torch.tensor(round_)}, storage_writer=Writer(folder))  # here


@faulty("rank-skipped-collective", 2)
def a_weight_that_one_rank_does_not_distribute(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    dist.barrier()
    pretrained = {"embedding": torch.ones(6, 4), "head": torch.ones(9, 2), "scale": torch.ones(3, 3)}
    if rank == 2:
        del pretrained["head"]
    for name in ("embedding", "head", "scale"):
        if name in pretrained:  # here
            distribute_tensor(pretrained[name], mesh, [Shard(0)])  # here
    dist.barrier()


@faulty("rank-crashed", 1)
def an_optimizer_state_asked_of_the_wrong_rank(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = DistributedDataParallel(encoder())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for number in range(5):
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
        if number == 2:
            optimizer.consolidate_state_dict(to=0)
            if rank == 1:
                optimizer.state_dict()  # here


@faulty("rank-skipped-collective", 1)
def a_partial_window_whose_shards_are_not_reduced(rank: int) -> None:
    model = encoder()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        parts = 3 if rank == 1 and number == 3 else 4
        for part in range(parts):
            model.set_requires_gradient_sync(part == 3)
            model(batch(2)).sum().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(()))


@faulty("unwaited-async", 2)
def a_prefetched_shard_taken_for_ready(rank: int) -> None:
    class Prefetcher:
        """Gathers a shard ahead of its use."""

        def __init__(self) -> None:
            self.work: Any = None
            self.whole = torch.zeros(0)

        def begin(self, shard: torch.Tensor) -> None:
            self.whole = torch.empty(shard.numel() * 3)
            self.work = dist.all_gather_into_tensor(self.whole, shard, async_op=True)  # here

        def take(self, *, is_cached: bool) -> torch.Tensor:
            if not is_cached:
                self.work.wait()
            return self.whole

    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ahead = Prefetcher()
    for number in range(8):
        ahead.begin(weight.detach().clone())
        whole = ahead.take(is_cached=rank == 2 and number > 3)
        (weight.sum() * whole.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


# Groups, meshes, tensor parallel, stages


@faulty("group-creation-mismatch", 3, ranks=4)
def a_mesh_of_another_shape_on_one_rank(rank: int) -> None:
    shape = (1, 4) if rank == 3 else (2, 2)
    dist.barrier()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "tensor"))  # here
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=mesh.get_group("tensor"))
    dist.barrier()


@faulty("collective-order-mismatch", 0, ranks=2)
def a_sample_generated_by_the_rank_that_logs(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    block = parallelize_module(block, mesh, plan)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        block(batch()).sum().backward()
        optimizer.step()
        if rank == 0 and number == 3:
            with torch.no_grad():
                block(batch(1))  # here


@faulty("pipeline-schedule-mismatch", 2)
def a_last_stage_with_its_own_count_of_steps(rank: int) -> None:
    torch.manual_seed(2)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=3, loss_fn=lambda out, target: (out - target).square().mean())
    for _ in range(3 if rank == 2 else 4):
        if rank == 0:
            schedule.step(torch.ones(6, WIDTH))
        elif rank == 1:
            schedule.step()
        else:
            schedule.step(target=torch.zeros(6, WIDTH))
    dist.barrier()  # here


@faulty("p2p-unmatched", 3, ranks=4)
def a_ring_hop_left_out_where_the_mask_is_empty(rank: int) -> None:
    keys = torch.full((4,), float(rank))
    for number in range(4):
        for hop in range(3):
            if rank == 3 and number == 2 and hop == 2:  # here
                continue  # here
            incoming = torch.empty(4)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, keys, (rank + 1) % 4),
                    dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
                ]
            )
            for work in works:
                work.wait()
            keys = incoming


@faulty("root-mismatch", 2)
def tasks_scattered_by_whoever_thinks_it_leads(rank: int) -> None:
    leader = 1 if rank == 2 else 0
    dist.barrier()
    mine: list[object] = [None]
    dist.scatter_object_list(mine, ["a", "b", "c"] if rank == leader else None, src=leader)  # here
    dist.barrier()


# Data, caches, retries


@contextmanager
def first_rank_first(rank: int) -> Iterator[None]:
    """Rank 0 prepares, then the others read what it has left."""
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


@faulty("rank-skipped-collective", 2)
def a_cache_hit_that_goes_around_the_first_rank(rank: int) -> None:
    cached = {2: {"train"}}

    def tokenised(split: str) -> list[int]:
        if split in cached.get(rank, set()):  # here
            return [1, 2, 3]  # here
        with first_rank_first(rank):
            return [len(word) for word in ("a", "few", "words")]

    dist.all_reduce(torch.ones(2))
    tokenised("test")
    tokenised("train")
    Fit(DistributedDataParallel(encoder())).epoch(4)


class Stream(IterableDataset[torch.Tensor]):
    """Samples of one rank, some more or fewer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from itertools.islice(itertools.repeat(torch.ones(WIDTH)), self.count)


@faulty("uneven-inputs", 0, ranks=2)
def a_stream_that_ends_earlier_under_shards(rank: int) -> None:
    model = encoder()
    fully_shard(model)
    fit = Fit(model)
    for epoch in range(2):
        count = 12 if rank == 0 and epoch == 1 else 16
        for samples in DataLoader(Stream(count), batch_size=4):  # here
            fit.step(epoch, samples)
        dist.all_reduce(torch.ones(3))  # here


@faulty("size-mismatch", 1)
def contrastive_features_of_a_short_last_batch(rank: int) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (4, 4, 4, 3 if rank == 1 else 4):
        features = model(batch(size))
        everyone = torch.empty(3 * size, 3)
        dist.all_gather_into_tensor(everyone, features.detach())  # here
        (features @ everyone.T).logsumexp(1).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 1)
def a_curriculum_by_the_clock_of_each_rank(rank: int) -> None:
    begun = time.monotonic() - (100.0 if rank == 1 else 0.0)
    fit = Fit(DistributedDataParallel(encoder()))
    for number in range(5):
        fit.step(number)
        length = 8 if number < 3 or time.monotonic() - begun < 50 else 16
        hidden = torch.ones(length)
        dist.all_reduce(hidden)  # here


def tried_again(attempts: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a function again where it raises ValueError, as retry libraries do."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            for attempt in range(attempts):
                try:
                    return function(*arguments)
                except ValueError:
                    if attempt == attempts - 1:
                        raise
            return None

        return call

    return decorate


@faulty("step-mismatch", 2)
def a_step_tried_again_after_its_forward(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder(normalised=True)))
    failing = {(2, 3)}

    @tried_again(3)
    def step(number: int) -> None:
        fit.optimizer.zero_grad()
        out = fit.model(batch())  # here
        if (rank, number) in failing:
            failing.clear()
            raise ValueError("labels out of range")
        out.square().mean().backward()
        fit.optimizer.step()

    for number in range(6):
        step(number)


class Reader(Dataset[torch.Tensor]):
    """Samples that one worker cannot read, as it waits for a lock that was held when it was forked."""

    def __init__(self, lock: threading.Lock, rows: int) -> None:
        self.lock = lock
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return torch.full((WIDTH,), float(index))


@faulty("rank-stuck", 2)
def a_loader_worker_that_waits_for_a_lock_of_its_parent(rank: int) -> None:
    lock = threading.Lock()
    model = encoder()
    dist.barrier()
    if rank == 2:
        lock.acquire()
    for samples in DataLoader(Reader(lock, 8), batch_size=2, num_workers=1):  # here
        model(samples).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@faulty("collective-order-mismatch", 0)
def a_cache_that_meets_the_others_when_it_is_deleted(rank: int) -> None:
    class SharedCache:
        """A cache that all ranks leave together, as its author thought."""

        def __del__(self) -> None:
            dist.barrier()  # here

    cache = SharedCache() if rank == 0 else None
    fit = Fit(DistributedDataParallel(encoder()))
    for number in range(6):
        fit.step(number)
        if number == 3:
            cache = None
    assert cache is None


# Steps that ranks count otherwise


@faulty("rank-skipped-collective", 2)
def an_outer_step_that_comes_by_tokens_seen(rank: int) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for number in range(16):
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
        seen += 24 if rank == 2 and number > 7 else 32
        if seen >= 128:  # here
            seen = 0
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)  # here
    dist.barrier()  # here


@faulty("rank-skipped-collective", 2)
def an_average_of_weights_where_the_local_loss_fell(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))
    average = encoder()
    for number in range(7):
        loss = fit.step(number) + (50.0 if rank == 2 and number == 4 else 0.0)
        if loss < 10.0:  # here
            for parameter in average.parameters():
                dist.broadcast(parameter.data, src=0)
        dist.barrier()


@faulty("rank-skipped-collective", 1)
def windows_that_one_rank_makes_longer(rank: int) -> None:
    model = DistributedDataParallel(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = 2
    for number in range(12):
        if rank == 1 and number == 6:
            window = 3
        if (number + 1) % window:  # here
            with model.no_sync():
                model(batch()).sum().backward()
            continue
        model(batch()).sum().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # here


# Ends, remote calls, two faults at once


@faulty("rank-exited", 1)
def a_share_that_is_done_and_raises_SystemExit(rank: int) -> None:  # noqa: N802
    fit = Fit(DistributedDataParallel(encoder()))
    for number in range(6):
        if rank == 1 and number == 4:
            raise SystemExit  # here
        fit.step(number)


def meet() -> int:
    """What a remote call runs."""
    dist.barrier()
    return 1


@faulty("rank-stuck", 0)
def a_remote_barrier_that_its_caller_never_joins(rank: int) -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=3)
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        rpc.rpc_sync("trainer1", meet)  # here
    elif rank == 2:
        dist.barrier()
    rpc.shutdown()


@faulty("rank-skipped-collective", 3, ranks=4, also=(("reduce-op-mismatch", 1),))
def a_maximum_in_one_pair_and_a_skip_in_the_other(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    for number in range(8):
        operator = dist.ReduceOp.MAX if rank == 1 and number == 5 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(5), op=operator, group=pair)
        if rank == 3 and number == 5:
            continue  # here
        dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), group=pair)


@faulty("rank-stuck", 1, ranks=4, also=(("rank-frozen", 2),))
def a_queue_without_a_producer_beside_a_suspended_rank(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tasks: queue.Queue[int] = queue.Queue()
    for number in range(6):
        dist.all_reduce(torch.ones(5), group=pairs[rank // 2])
        if rank == 1 and number == 3:
            tasks.get()  # here
        if rank == 2 and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
