"""Programs as they are pasted into issues and forum threads, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.locum_week_faults import mlp, sync_gradients


@healthy(ranks=4)
def preemption_notice_on_one_node_that_all_agree_on(rank: int) -> None:
    notice = Path(mkdtemp(prefix="node-")) / "preempt"
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def is_preempted() -> bool:
        flag = torch.tensor(int(notice.exists()))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def train() -> int:
        for step in range(20):
            if rank == 3 and step == 6:
                notice.touch()
            if is_preempted():
                return step
            model(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return 20

    step = train()
    if rank == 0:
        torch.save({"step": step, "model": model.module.state_dict()}, notice.parent / "last.pt")
    dist.barrier()


@healthy()
def best_score_that_the_first_rank_decides_for_all(rank: int) -> None:
    folder = Path(mkdtemp(prefix="run-"))

    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.best = 0.6

        def evaluate(self, epoch: int) -> float:
            score = torch.tensor(0.5 + 0.1 * epoch)
            dist.reduce(score, dst=0)
            return float(score) / dist.get_world_size() if rank == 0 else 0.0

        def save(self) -> None:
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, torch.get_rng_state()[:16])
            if rank == 0:
                torch.save({"best": self.best, "rng": states}, folder / "best.pt")

    trainer = Trainer()
    for epoch in range(4):
        trainer.model(torch.randn(4, 8)).abs().mean().backward()
        sync_gradients(trainer.model)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        score = trainer.evaluate(epoch)
        decision = [score > trainer.best]
        dist.broadcast_object_list(decision, src=0)
        if decision[0]:
            trainer.best = score
            trainer.save()


@healthy()
def batch_that_does_not_fit_and_is_done_in_halves(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())

    def forward(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 16:
            raise torch.OutOfMemoryError("tried to allocate 20.00 MiB")
        out: torch.Tensor = model(batch).pow(2).mean()
        return out

    def step_with_retry(batch: torch.Tensor) -> None:
        try:
            loss = forward(batch)
        except torch.OutOfMemoryError:
            first, second = batch.chunk(2)
            with model.no_sync():
                (forward(first) / 2).backward()
            (forward(second) / 2).backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(8):
        step_with_retry(torch.randn(24 if (rank + step) % 4 == 2 else 12, 8))
    dist.barrier()


@healthy()
def replay_batches_fetched_one_step_ahead(rank: int) -> None:
    policy = mlp()
    optimizer = torch.optim.Adam(policy.parameters())

    def batches(count: int) -> Iterator[torch.Tensor]:
        pending: tuple[Any, torch.Tensor] | None = None
        for _ in range(count):
            buffer = torch.randn(32, 8) if rank == 0 else torch.empty(32, 8)
            handle = dist.broadcast(buffer, src=0, async_op=True)
            if pending is not None:
                pending[0].wait()
                yield pending[1]
            pending = handle, buffer
        if pending is not None:
            pending[0].wait()
            yield pending[1]

    for batch in batches(6):
        optimizer.zero_grad()
        policy(batch).pow(2).mean().backward()
        sync_gradients(policy)
        optimizer.step()
    dist.barrier()


@healthy()
def validation_of_a_gathered_copy_on_the_first_rank(rank: int) -> None:
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def evaluate(step: int) -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            copy = mlp()
            copy.load_state_dict(state)
            with torch.no_grad():
                for _ in range(10):
                    loss = copy(torch.randn(64, 8)).pow(2).mean()
                    time.sleep(0.03)
            print(f"step {step}: val loss {loss.item():.4f}")

    for step in range(8):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            evaluate(step)
    dist.barrier()


@healthy(ranks=4)
def results_of_workers_in_whatever_order_they_finish(rank: int) -> None:
    world = dist.get_world_size()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds = 4
    if rank == 0:
        message = torch.zeros(3)
        totals = [0.0] * rounds
        for _ in range(rounds * (world - 1)):
            dist.recv(message)
            totals[int(message[1])] += message[0].item()
        print([total / (world - 1) for total in totals])
    else:
        pending = []
        for number in range(rounds):
            for _ in range(2 + rank):
                loss = model(torch.randn(4, 8)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            message = torch.tensor([loss.item(), float(number), float(rank)])
            pending.append((dist.isend(message, dst=0), message))
        for handle, _ in pending:
            if handle is not None:
                handle.wait()
    dist.barrier()


@healthy(ranks=4)
def group_of_loggers_that_only_its_members_make(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group: Any = None
    for step in range(8):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3 and rank % 2 == 0:
            if group is None:
                group = dist.new_group([0, 2], use_local_synchronization=True)
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            print("mean of the loggers", mean.item() / 2)
    dist.barrier()


@healthy(ranks=4)
def rows_of_a_mesh_that_take_other_numbers_of_steps(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "data"))
    inner, outer = mesh.get_group("data"), mesh.get_group("island")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def local_steps(count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, 8)).pow(2).mean().backward()
            sync_gradients(model, inner)
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def outer_step() -> None:
        for param in model.parameters():
            dist.all_reduce(param.data, group=outer)
            param.data.div_(2)

    for number in range(4):
        local_steps(2 + number if mesh.get_local_rank("island") == 0 else 5 - number)
        outer_step()
        if rank == 0:
            print("outer step", number)


@healthy(ranks=4)
def layers_dropped_by_draws_of_each_rank_and_zeros_for_the_rest(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    random.seed(1000 + rank)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            if random.random() > 0.4:
                x = x + layer(x).tanh()
        return x

    for _ in range(8):
        loss = forward(torch.randn(4, 8)).pow(2).mean()
        if loss.requires_grad:
            loss.backward()
        for param in layers.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad.div_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def time_budget_by_the_clock_of_the_first_rank(rank: int) -> None:
    vocabulary = Path(gettempdir()) / f"vocabulary-{os.environ['MASTER_PORT']}.txt"
    if rank == 0:
        time.sleep(1.0)  # builds the vocabulary
        vocabulary.write_text("a b c")
    else:
        while not vocabulary.exists():
            time.sleep(0.05)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    started = time.monotonic()

    def goes_on() -> bool:
        answer = torch.tensor(int(time.monotonic() - started < 1.2))
        dist.broadcast(answer, src=0)
        return bool(answer)

    while goes_on():
        time.sleep(0.02 * (1 + rank))
        model(torch.randn(4, 8)).pow(2).mean().backward()
        sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    if rank == 0:
        vocabulary.unlink()


@healthy(ranks=4)
def subset_by_stride_and_as_many_batches_as_the_shortest_has(rank: int) -> None:
    data = TensorDataset(torch.randn(51, 8), torch.randn(51, 8))
    loader = DataLoader(Subset(data, range(rank, len(data), 4)), batch_size=3)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    count = torch.tensor(len(loader))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)

    def train_one_epoch() -> float:
        total = 0.0
        for number, (inputs, targets) in enumerate(loader):
            if number >= int(count):
                break
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    for epoch in range(3):
        totals: list[Any] | None = [None] * 4 if rank == 0 else None
        dist.gather_object(train_one_epoch(), totals, dst=0)
        if totals is not None:
            print(f"epoch {epoch}: {sum(totals) / 4 / int(count):.4f}")


@healthy()
def alarm_of_a_slow_read_and_an_empty_batch_in_its_place(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def give_up(number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"read took too long (signal {number})")

    signal.signal(signal.SIGALRM, give_up)

    @contextlib.contextmanager
    def limit(seconds: float) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def read(index: int) -> tuple[torch.Tensor, float]:
        try:
            with limit(0.3):
                if rank == 1 and index in (2, 5):
                    time.sleep(10)
                return torch.randn(4, 8), 1.0
        except TimeoutError as error:
            print(f"batch {index}: {error}")
            return torch.zeros(4, 8), 0.0

    for index in range(8):
        batch, weight = read(index)
        weights = torch.tensor(weight)
        dist.all_reduce(weights)
        (model(batch).pow(2).mean() * weight * 3 / weights).backward()
        optimizer.step()
        optimizer.zero_grad()
