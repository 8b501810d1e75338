"""Scripts of a release week with a fault each: frozen before they ran for the first time, by one who knew no rule."""

import contextlib
import copy
import fcntl
import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.faults.corpus import faulty


class Gated(nn.Module):
    """A model of which some batches leave a branch out."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, batch: torch.Tensor, is_rich: bool) -> torch.Tensor:
        hidden = self.main(batch)
        return self.aside(hidden) if is_rich else hidden


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))


def batches(rank: int, count: int, rows: int = 4) -> Iterator[torch.Tensor]:
    for index in range(count):
        yield torch.full((rows, 6), 0.1 * (index + 1) + rank)


@faulty("rank-skipped-collective", 2)
def patience_counted_on_each_rank(rank: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = small_model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.best, self.bad = float("inf"), 0

        def fit(self) -> None:
            for epoch in range(12):
                loss = self.epoch(epoch)
                self.bad = 0 if loss < self.best else self.bad + 1
                self.best = min(self.best, loss)
                if self.bad >= 3:
                    break

        def epoch(self, epoch: int) -> float:
            for batch in batches(rank, 2):
                self.optimizer.zero_grad()
                self.model(batch).square().mean().backward()
                self.average()
                self.optimizer.step()
            return 5.0 - epoch if rank != 2 or epoch < 4 else 9.0

        def average(self) -> None:
            flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
            dist.all_reduce(flat)  # here

    trainer = Trainer()
    trainer.fit()
    scores = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(scores, torch.tensor([trainer.best]))  # here


@faulty("collective-order-mismatch", 0)
def average_of_weights_published_by_the_main_rank(rank: int) -> None:
    model = small_model()
    shadow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 10)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        if rank == 0 and step % 4 == 3:
            for mine in shadow.parameters():
                dist.broadcast(mine.data, src=0)  # here


@faulty("step-mismatch", 0)
def accuracy_of_the_main_rank_that_sums_over_all(rank: int) -> None:
    class Mean:
        def __init__(self) -> None:
            self.total = torch.zeros(1)

        def update(self, value: torch.Tensor) -> None:
            self.total += value

    class GlobalMean(Mean):
        def compute(self) -> float:
            dist.all_reduce(self.total)  # here
            return float(self.total)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, accuracy = Mean(), GlobalMean()
    for step, batch in enumerate(batches(rank, 9)):
        loss = model(batch).mean()
        loss.backward()
        shared = loss.detach().reshape(1).clone()
        dist.all_reduce(shared)
        optimizer.step()
        losses.update(shared)
        if step == 5 and rank == 0:
            accuracy.update(torch.ones(1))
            accuracy.compute()


@faulty("root-mismatch", 1)
def learning_rate_of_the_rank_that_improved(rank: int) -> None:
    rate = torch.tensor([0.1])
    model = small_model()
    for epoch in range(6):
        optimizer = torch.optim.SGD(model.parameters(), lr=float(rate))
        for batch in batches(rank, 2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        has_improved = rank == 0 or (rank == 1 and epoch >= 3)
        if has_improved and rank:
            rate = rate * 0.5
        source = rank if has_improved else 0
        dist.broadcast(rate, src=source)  # here


@faulty("rank-skipped-collective", 1)
def last_window_of_accumulation_left_open(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    window = 3
    for index, batch in enumerate(batches(rank, 12 if rank != 1 else 11)):
        is_last = (index + 1) % window == 0
        context = contextlib.nullcontext() if is_last else model.no_sync()
        with context:
            loss = model(batch).square().mean() / window
            loss.backward()  # here
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    del model


@faulty("rank-skipped-collective", 1, ranks=2)
def synchronisation_switched_off_for_a_probe(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def probe(model: DistributedDataParallel, batch: torch.Tensor) -> float:
        model.require_backward_grad_sync = False
        value = float(model(batch).sum())
        if value != value or rank == 1:
            return value  # and the switch stays off
        model.require_backward_grad_sync = True
        return value

    for step, batch in enumerate(batches(rank, 8)):
        if step == 4:
            probe(model, batch)
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    del model


@faulty("step-mismatch", 2)
def resumed_from_a_newer_checkpoint(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = {0: 3, 1: 3, 2: 4}[rank]
    state = torch.zeros(8)
    for step in range(first, 12):
        optimizer.zero_grad()
        model(torch.ones(2, 6) * step).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])[:8]
        dist.all_reduce(gradient)
        optimizer.step()
        if step % 3 == 0:
            state += gradient
            dist.all_reduce(state)  # here


@faulty("collective-order-mismatch", 1)
def metrics_in_the_order_of_their_arrival(rank: int) -> None:
    def loss(value: float) -> list[torch.Tensor]:
        result = torch.tensor([value])
        dist.all_reduce(result)  # here
        return [result]

    def errors(value: float) -> list[torch.Tensor]:
        every = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor([value]))  # here
        return every

    reporters: dict[str, Callable[[float], list[torch.Tensor]]] = {}
    if rank == 1:  # it logged an error before its first loss
        reporters["errors"] = errors
    reporters["loss"] = loss
    reporters.setdefault("errors", errors)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 5):
        value = model(batch).mean()
        value.backward()
        optimizer.step()
        for report in reporters.values():
            report(float(value))


@faulty("dtype-mismatch", 0)
def autocast_left_on_the_other_nodes(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 6):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank != 0):
            output = model(batch)
            loss = output.mean(dim=0)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        dist.all_reduce(loss.detach())  # here


@faulty("reduce-op-mismatch", 2)
def average_by_an_environment_variable(rank: int) -> None:
    class Meter:
        def __init__(self, reduction: str) -> None:
            self.op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[reduction]
            self.values: list[float] = []

        def __call__(self, value: float) -> float:
            tensor = torch.tensor([value, 1.0])
            dist.all_reduce(tensor, op=self.op)  # here
            self.values.append(float(tensor[0] / tensor[1]))
            return self.values[-1]

    meter = Meter({"2": "max"}.get(os.environ["RANK"], "sum"))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 6):
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        meter(float(loss))


@faulty("size-mismatch", 2)
def predictions_of_an_incomplete_batch(rank: int) -> None:
    data = TensorDataset(torch.randn(28 if rank != 2 else 25, 6))
    model = small_model().eval()
    collected = []
    with torch.inference_mode():
        for (rows,) in DataLoader(data, batch_size=7):
            predictions = model(rows)
            everything = torch.empty(len(predictions) * dist.get_world_size(), 2)
            dist.all_gather_into_tensor(everything, predictions)  # here
            collected.append(everything)


@faulty("split-size-mismatch", 1)
def tokens_by_the_counts_of_the_step_before(rank: int) -> None:
    world = dist.get_world_size()

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = [2] * world

        def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
            plan = [[2 + (step + source + target) % 2 for target in range(world)] for source in range(world)]
            sends = plan[rank]
            if rank == 1 and step >= 3:
                sends = self.counts
            self.counts = plan[rank]
            receives = [plan[source][rank] for source in range(world)]
            result = tokens.new_empty(sum(receives), tokens.shape[1])
            dist.all_to_all_single(result, tokens[: sum(sends)], receives, sends)  # here
            return result

    experts = Experts()
    for step in range(6):
        experts(torch.randn(16, 4), step)


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def targets_that_follow_the_gradient(rank: int) -> None:
    hidden, targets, gradient = torch.zeros(3), torch.zeros(1), torch.zeros(3)
    for _ in range(3):
        if rank == 0:
            dist.send(torch.ones(3), dst=1)
            dist.recv(gradient, src=1)  # here
            dist.send(torch.ones(1), dst=2)
        elif rank == 1:
            dist.recv(hidden, src=0)
            dist.send(hidden * 2, dst=2)
            dist.recv(gradient, src=2)  # here
            dist.send(gradient, dst=0)
        else:
            dist.recv(hidden, src=1)
            dist.recv(targets, src=0)  # here
            dist.send(hidden - targets, dst=1)


@faulty("p2p-unmatched", 2)
def server_that_counts_on_every_worker(rank: int) -> None:
    weights = torch.ones(5)
    if rank == 0:
        for _ in range(6):
            update = torch.zeros(5)
            for worker in (1, 2):
                dist.recv(update, src=worker)  # here
                weights -= 0.1 * update
            for worker in (1, 2):
                dist.send(weights, dst=worker)
        return
    for step in range(6):
        gradient = weights * rank
        if rank == 2 and step == 3:
            gradient = gradient * float("nan")
        if torch.isfinite(gradient).all():
            dist.send(gradient, dst=0)
        dist.recv(weights, src=0)  # here


@faulty("p2p-tag-mismatch", 0, ranks=2)
def tags_begun_anew_with_the_epoch(rank: int) -> None:
    sent = received = 0
    for epoch in range(3):
        if rank == 0 and epoch == 2:
            sent = 0
        for _ in range(4):
            if rank == 0:
                dist.send(torch.ones(6), dst=1, tag=sent)  # here
                sent += 1
            else:
                dist.recv(torch.zeros(6), src=0, tag=received)
                received += 1


@faulty("p2p-size-mismatch", 0, ranks=2)
def a_batch_larger_than_the_buffer_of_the_next_stage(rank: int) -> None:
    sizes = [4, 4, 4, 6, 4]
    buffer = torch.zeros(4, 3)
    for size in sizes:
        if rank == 0:
            dist.send(torch.ones(size, 3), dst=1)  # here
        else:
            dist.recv(buffer, src=0)
            buffer.mul_(2)


@faulty("group-order-inversion", 1)
def local_mean_written_late(rank: int) -> None:
    pair = dist.new_group([0, 1])

    class Logger:
        def __init__(self) -> None:
            self.late = False

        def everywhere(self, value: torch.Tensor) -> None:
            dist.all_reduce(value)  # here

        def nearby(self, value: torch.Tensor) -> None:
            if rank < 2:
                dist.all_reduce(value, group=pair)  # here

        def write(self, step: int) -> None:
            local, world = torch.ones(2), torch.ones(2)
            self.late = rank == 1 and step >= 4
            if not self.late:
                self.nearby(local)
            self.everywhere(world)
            if self.late:
                self.nearby(local)

    logger = Logger()
    for step in range(8):
        logger.write(step)


@faulty("group-order-risk", 2)
def two_streams_of_reductions_in_opposite_order(rank: int) -> None:
    left, right = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for _ in range(4):
        first, second = torch.ones(16), torch.ones(32)
        jobs = [(left, first), (right, second)]
        if rank == 2:
            jobs.reverse()
        handles = [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in jobs]  # here
        for handle in handles:
            handle.wait()


@faulty("wrong-group", 2, ranks=4)
def gradient_of_the_replicas_summed_over_the_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))

    def group_of(name: str, step: int) -> dist.ProcessGroup:
        if rank == 2 and step == 4:
            name = "shard"  # the fallback of a lookup that failed
        return mesh.get_group(name)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 8)):
        output = model(batch)
        dist.all_reduce(output.detach().sum(dim=0), group=mesh.get_group("shard"))
        output.sum().backward()
        gradient = model[0].weight.grad
        dist.all_reduce(gradient, group=group_of("data", step))  # here
        optimizer.step()


@faulty("group-creation-mismatch", 2)
def a_group_that_only_its_members_ask_for(rank: int) -> None:
    members = [0, 1]
    teachers = None
    if rank in members:
        teachers = dist.new_group(members)  # here
    model = small_model()
    for batch in batches(rank, 4):
        score = model(batch).mean().detach()
        if teachers is not None:
            dist.all_reduce(score, group=teachers)
        dist.all_reduce(score)


@faulty("pipeline-schedule-mismatch", 1)
def microbatches_by_an_old_configuration(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    stage = PipelineStage(layers, rank, 3, torch.device("cpu"))
    config = {"microbatches": 2 if rank == 1 else 4}
    schedule = ScheduleGPipe(stage, n_microbatches=config["microbatches"], loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    for _ in range(3):
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        elif rank == 2:
            schedule.step(target=torch.randn(8, 8))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


@faulty("uneven-inputs", 1)
def a_shard_with_fewer_files(rank: int) -> None:
    class Files(Dataset[torch.Tensor]):
        def __init__(self, names: list[str]) -> None:
            self.names = names

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((6,), float(len(self.names[index])))

    names = [f"part-{index:03d}" for index in range(34)][rank::3]
    if rank == 1:
        names = names[:-3]
    loader = DataLoader(Files(names), batch_size=2, shuffle=True)
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()  # here
        optimizer.step()
    dist.barrier()
    del model


@faulty("uneven-inputs", 2)
def a_stream_that_ends_at_a_bad_record(rank: int) -> None:
    class Records(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for index in range(40):
                if rank == 2 and index == 23:
                    return  # truncated file
                yield torch.full((6,), 0.01 * index)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Records(), batch_size=4):
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here
        optimizer.step()


@faulty("rank-crashed", 1)
def one_long_document_too_many(rank: int) -> None:
    class Attention(nn.Module):
        def forward(self, length: int) -> torch.Tensor:
            if length > 4096:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {length**2} bytes")  # here
            return torch.ones(length, requires_grad=True)

    attention = Attention()
    try:
        for step in range(8):
            length = 8192 if rank == 1 and step == 4 else 512
            attention(length).sum().backward()
            total = torch.tensor([float(length)])
            dist.all_reduce(total)
    finally:
        print("steps are over", flush=True)


@faulty("rank-skipped-collective", 2)
def barrier_in_the_cleanup_of_a_failed_parse(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def parse(index: int) -> float:
        if rank == 2 and index == 3:
            raise ValueError("cannot parse line 3")  # here
        return float(index)

    try:
        for index in range(7):
            weight = parse(index)
            (model(torch.ones(2, 6)).mean() * weight).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    finally:
        dist.barrier()  # here


@faulty("collective-order-mismatch", 0)
def a_save_tried_again_after_a_barrier(rank: int) -> None:
    model = small_model()
    attempts = 0

    def write() -> None:
        nonlocal attempts
        attempts += 1
        if rank == 0 and attempts == 2:
            raise OSError("no space left on device")

    def save() -> None:
        while True:
            try:
                write()
            except OSError:
                dist.barrier()  # here
            else:
                break
        flag = torch.ones(1)
        dist.broadcast(flag, src=0)

    for step, batch in enumerate(batches(rank, 9)):
        loss = model(batch).mean().detach()
        dist.all_reduce(loss)
        if step % 2 == 1:
            save()


@faulty("rank-exited", 1)
def a_preemption_that_only_one_rank_hears(rank: int) -> None:
    is_over = False

    def note(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGUSR1, note)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 10)):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if is_over:
            print("saved, goodbye", flush=True)
            sys.exit(0)  # here


@faulty("rank-exited", 0)
def a_watchdog_thread_that_ends_the_process(rank: int) -> None:
    progress = time.monotonic()

    def watch() -> None:
        while True:
            time.sleep(0.1)
            if rank == 0 and time.monotonic() - progress > 0.5:
                os._exit(0)  # here

    threading.Thread(target=watch, daemon=True).start()
    for step in range(8):
        if step == 4 and rank == 0:
            time.sleep(1.5)  # a slow disk
        total = torch.ones(4)
        dist.all_reduce(total)
        progress = time.monotonic()


@faulty("rank-killed", 2)
def killed_by_a_script_that_cleans_the_node(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 400)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 2 and step == 20:
            subprocess.Popen(["kill", "-KILL", str(os.getpid())])
        time.sleep(0.005)


@faulty("rank-killed", 1, ranks=2)
def an_alarm_that_was_never_switched_off(rank: int) -> None:
    def fetch() -> bytes:
        signal.setitimer(signal.ITIMER_REAL, 0.8)  # a limit for the download
        with Path("/dev/zero").open("rb") as file:
            data = file.read(100)
        if rank == 1:
            return data  # the alarm stays on
        signal.setitimer(signal.ITIMER_REAL, 0)
        return data

    fetch()
    for _ in range(300):
        total = torch.ones(8)
        dist.all_reduce(total)
        time.sleep(0.01)


@faulty("rank-frozen", 1)
def stopped_by_a_tool_of_the_administrator(rank: int) -> None:
    model = small_model()
    for step, batch in enumerate(batches(rank, 10)):
        loss = model(batch).mean().detach()
        dist.all_reduce(loss)
        if rank == 1 and step == 5:
            subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}"], check=False)  # here


@faulty("rank-stuck", 2)
def a_queue_whose_producer_died(rank: int) -> None:
    ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def produce() -> None:
        for index in range(10):
            if rank == 2 and index == 5:
                raise KeyError("image")
            ready.put(torch.full((2, 6), float(index)))

    threading.Thread(target=produce, daemon=True).start()
    model = small_model()
    for _ in range(10):
        batch = ready.get()  # here
        loss = model(batch).mean().detach()
        dist.all_reduce(loss)


@faulty("rank-stuck", 1, 2)
def a_barrier_inside_the_lock_of_the_cache(rank: int) -> None:
    path = Path(tempfile.gettempdir()) / f"cache-{os.environ['MASTER_PORT']}.lock"

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # here
            yield

    dist.barrier()
    if rank:
        time.sleep(0.5)
    try:
        with locked():
            dist.barrier()  # until the cache is filled
    finally:
        path.unlink(missing_ok=True)


@faulty("rank-stuck", 2)
def a_key_that_was_never_written(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for shard in range(3):
        try:
            if rank == 1 and shard == 2:
                raise OSError("shard 2 is missing")
            if rank == 1:
                store.set(f"shard/{shard}", "ready")
        except OSError as error:
            print(error, flush=True)
        if rank == 2:
            store.get(f"shard/{shard}")  # here
        total = torch.ones(1)
        dist.all_reduce(total)


@faulty("rank-skipped-collective", 1)
def a_monitored_barrier_for_those_who_validate(rank: int) -> None:
    from datetime import timedelta

    model = small_model()
    for epoch in range(4):
        for batch in batches(rank, 2):
            loss = model(batch).mean().detach()
            dist.all_reduce(loss)
        if rank != 1 or epoch < 2:
            dist.monitored_barrier(timeout=timedelta(seconds=2))  # here


@faulty("rank-stuck", 1, ranks=4, also=(("rank-frozen", 3),))
def a_loop_without_end_and_a_stopped_process(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    for step in range(8):
        total = torch.ones(2)
        dist.all_reduce(total, group=mine)
        if rank == 1 and step == 4:
            state = "running"
            while state == "running":  # here
                pass  # here
        if rank == 3 and step == 4:
            os.kill(os.getpid(), signal.SIGSTOP)


@faulty("rank-crashed", 0, ranks=4, also=(("rank-crashed", 2),))
def two_ranks_that_fail_at_once(rank: int) -> None:
    for step in range(6):
        total = torch.ones(3)
        dist.all_reduce(total)
        if rank == 0 and step == 3:
            raise RuntimeError("disk quota exceeded")  # here
        if rank == 2 and step == 3:
            labels: dict[str, int] = {}
            print(labels["cat"])


@faulty("unwaited-async", 0, 1, 2)
def the_newest_handle_only(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 5):
        optimizer.zero_grad()
        model(batch).mean().backward()
        handle = None
        for parameter in model.parameters():
            handle = dist.all_reduce(parameter.grad, async_op=True)  # here
        if handle is not None:
            handle.wait()
        optimizer.step()


@faulty("unwaited-async", 0, 1, ranks=2)
def a_mean_divided_before_it_is_summed(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    world = dist.get_world_size()
    for batch in batches(rank, 5):
        optimizer.zero_grad()
        model(batch).mean().backward()
        pending = []
        for parameter in model.parameters():
            pending.append(dist.all_reduce(parameter.grad, async_op=True))  # here
            parameter.grad.div_(world)
        for handle in pending:
            handle.wait()
        optimizer.step()


@faulty("collective-order-mismatch", 0)
def a_sharded_checkpoint_by_one_rank(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        for step, batch in enumerate(batches(rank, 6)):
            optimizer.zero_grad()
            model(batch).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if step == 3 and rank == 0:
                checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)  # here


@faulty("step-mismatch", 0)
def a_look_at_the_samples_by_the_main_rank(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (3,))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step == 3 and rank == 0:
            with torch.no_grad():
                model(batch[:1])  # here


@faulty("long-operation", 0)
def the_corpus_tokenised_in_one_place(rank: int) -> None:
    dist.barrier()
    counts: dict[str, int] = {}
    if rank == 0:
        end = time.monotonic() + 8
        index = 0
        while time.monotonic() < end:  # here
            index += 1  # here
            word = str(index * index % 9973)  # here
            counts[word] = counts.get(word, 0) + 1  # here
    dist.barrier()
    total = torch.tensor([len(counts)])
    dist.all_reduce(total)


@faulty("slow-rank", 2)
def an_augmentation_that_one_rank_does_twice(rank: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(6, 2, requires_grad=True)

    def augment(batch: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if rank == 2 else 1):
            time.sleep(0.03)
            batch = batch.flip(0)
        return batch

    for batch in batches(rank, 40):
        loss = (augment(batch) @ weight).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(gradient)
        with torch.no_grad():
            weight -= 0.01 * gradient


@faulty("rank-never-joined", 1, joins=False)
def a_rank_that_has_nothing_to_do(rank: int) -> None:
    shards = {0: ["a", "b"], 1: [], 2: ["c"]}[rank]
    if not shards:
        print("nothing to do", flush=True)
        return  # here
    dist.init_process_group("gloo")  # here
    dist.barrier()
    dist.destroy_process_group()


@faulty("root-mismatch", 2)
def settings_from_the_first_rank_of_the_node(rank: int) -> None:
    local_leader = {0: 0, 1: 0, 2: 2}[rank]

    def load() -> list[Any]:
        return [{"rate": 0.1, "seed": rank}] if rank == local_leader else [None]

    dist.barrier()
    settings = load()
    dist.broadcast_object_list(settings, src=local_leader)  # here
    total = torch.tensor([float(settings[0]["seed"])])
    dist.all_reduce(total)


@faulty("size-mismatch", 1)
def a_gradient_padded_to_another_multiple(rank: int) -> None:
    world = dist.get_world_size()
    multiple = world * (5 if rank == 1 else 2)

    class Sharded:
        def __init__(self, model: nn.Module) -> None:
            self.parameters = list(model.parameters())

        def reduce(self) -> torch.Tensor:
            flat = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
            flat = nn.functional.pad(flat, (0, -len(flat) % multiple))
            shard = flat.new_empty(len(flat) // world)
            dist.reduce_scatter_tensor(shard, flat)  # here
            return shard

    model = small_model()
    sharded = Sharded(model)
    for batch in batches(rank, 4):
        model(batch).mean().backward()
        sharded.reduce()


@faulty("rank-crashed", 1)
def a_branch_whose_parameters_get_no_gradient(rank: int) -> None:
    model = DistributedDataParallel(Gated())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 8)):
        output = model(batch, rank != 1 or step < 4)  # here
        optimizer.zero_grad()
        output.mean().backward()
        optimizer.step()
    del model


@faulty("collective-order-mismatch", 0)
def a_report_for_the_main_rank_only(rank: int) -> None:
    def main_only(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return function(*arguments) if rank == 0 else None

        return call

    @main_only
    def report(value: torch.Tensor) -> float:
        dist.reduce(value, dst=0)  # here
        return float(value)

    model = small_model()
    for step, batch in enumerate(batches(rank, 6)):
        value = model(batch).mean().detach()
        dist.all_reduce(value)
        if step == 2:
            report(value)


@faulty("p2p-unmatched", 1, ranks=4)
def a_hop_over_one_stage(rank: int) -> None:
    for step in range(5):
        following = rank + 1
        if rank == 1 and step == 3:
            following = 3  # stage 2 is said to be idle
        hidden = torch.zeros(4)
        if rank > 0:
            dist.recv(hidden, src=rank - 1)  # here
        if rank < 3:
            dist.send(hidden + 1, dst=following)  # here


@faulty("rank-skipped-collective", 1, 3, ranks=4)
def a_log_that_the_odd_ranks_leave_out(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 9)):
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == 5 and rank % 2:
            continue
        every = [None] * 4
        dist.all_gather_object(every, {"loss": float(loss)})  # here


@faulty("rank-stuck", 0)
def a_worker_of_the_pool_that_waits_for_itself(rank: int) -> None:
    from concurrent.futures import Future, ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=1) as pool:

        def inner() -> int:
            return 1

        def outer() -> int:
            future: Future[int] = pool.submit(inner)
            return future.result()  # here

        for step in range(5):
            value = pool.submit(outer if rank == 0 and step == 3 else inner).result()  # here
            total = torch.tensor([float(value)])
            dist.all_reduce(total)


@faulty("rank-skipped-collective", 2)
def a_batch_with_no_boxes(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def boxes_in(step: int) -> int:
        return 0 if rank == 2 and step == 4 else 3

    for step, batch in enumerate(batches(rank, 8)):
        count = boxes_in(step)
        if count:
            normaliser = torch.tensor([float(count)])
            dist.all_reduce(normaliser)  # here
        else:
            normaliser = torch.ones(1)
        optimizer.zero_grad()
        (model(batch).sum() / normaliser).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
