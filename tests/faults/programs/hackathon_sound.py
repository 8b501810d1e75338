"""Programs of a hackathon that are right, however they look: twins of `hackathon_faults.py`, and others.

Frozen with those before their first run.
"""

import contextlib
import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.hackathon_faults import Engine, Net


def agreed(flag: bool) -> bool:
    value = torch.tensor(float(flag))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


@healthy()
def a_trainer_whose_control_is_told_to_save_by_rank_0(rank: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.engine, self.should_save = Engine(), False

        def callback(self, step: int) -> None:
            wish = [step % 3 == 2 and step != 5 if rank == 0 else None]
            dist.broadcast_object_list(wish, src=0)
            self.should_save = bool(wish[0])

        def maybe_save(self) -> None:
            if self.should_save:
                flat = torch.cat([weight.detach().flatten() for weight in self.engine.net.parameters()])
                dist.reduce(flat, dst=0)

    trainer = Trainer()
    for step in range(10):
        trainer.engine.step()
        trainer.callback(step)
        trainer.maybe_save()


@healthy()
def a_scaler_that_agrees_on_an_overflow(rank: int) -> None:
    engine, scale = Engine(), 1024.0
    for step in range(8):
        engine.backward(float("inf") if rank == 2 and step == 4 else 1.0)
        grads = [weight.grad for weight in engine.net.parameters() if weight.grad is not None]
        overflow = agreed(not all(bool(grad.isfinite().all()) for grad in grads))
        if overflow:
            engine.optimizer.zero_grad()
        else:
            engine.synchronize()
            engine.update()
        scale *= 0.5 if overflow else 2


@healthy()
def an_average_of_which_each_rank_keeps_its_own_count(rank: int) -> None:
    engine, updates = Engine(), 2 if rank == 0 else 0
    average = [weight.detach().clone() for weight in engine.net.parameters()]
    for _ in range(10):
        engine.step()
        updates += 1
        if updates % 4 == 0:
            for mean, weight in zip(average, engine.net.parameters(), strict=True):
                mean.lerp_(weight.detach(), 0.1)
    for mean in average:
        dist.broadcast(mean, src=0)


@healthy()
def early_stopping_by_the_vote_of_all(rank: int) -> None:
    engine, bad = Engine(), 0
    for epoch in range(9):
        for _ in range(3):
            dist.all_reduce(engine.step())
        bad = bad + 1 if rank == 1 and epoch > 1 else 0
        if agreed(bad >= 2):
            break
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor([1.0]))


@healthy()
def unequal_loaders_under_join(rank: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(32 if rank != 2 else 20, 8)), batch_size=2)
    for _ in range(2):
        with Join([model]):
            for (batch,) in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()


@healthy()
def accumulation_over_a_distributed_sampler(rank: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(50, 8))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, 3, rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for place, (batch,) in enumerate(loader):
            last = place % 2 == 1 or place == len(loader) - 1
            with nullcontext() if last else model.no_sync():
                model(batch).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    del loader


@healthy()
def filters_that_every_rank_counts_alike(rank: int) -> None:
    def records() -> Iterator[tuple[int, str]]:
        for number in range(9):
            yield number, "" if number in (3, 6) else "x" * (rank + 1)

    engine = Engine()
    for _, text in (record for record in records() if record[1]):
        engine.step(float(len(text)))
    dist.monitored_barrier()


@healthy()
def a_router_that_exchanges_its_counts(rank: int) -> None:
    class Router:
        def dispatch(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
            expected = torch.empty(3, dtype=torch.int64)
            dist.all_to_all_single(expected, torch.tensor(counts))
            arrived = torch.empty(int(expected.sum()), tokens.shape[1])
            dist.all_to_all_single(arrived, tokens, expected.tolist(), counts)
            return arrived

    router = Router()
    for step in range(6):
        counts = [(rank + step + place) % 3 for place in range(3)]
        router.dispatch(torch.ones(sum(counts), 4), counts)
        dist.all_reduce(torch.ones(()))


@healthy()
def experts_that_send_nothing_where_there_is_nothing(rank: int) -> None:
    for step in range(6):
        counts = [0, 0, 0] if rank == 2 and step == 3 else [1, 2, 1]
        expected = torch.empty(3, dtype=torch.int64)
        dist.all_to_all_single(expected, torch.tensor(counts))
        tokens = torch.empty(int(expected.sum()), 4)
        dist.all_to_all_single(tokens, torch.ones(sum(counts), 4), expected.tolist(), counts)
        if len(tokens):
            tokens = tokens * 2
        back = torch.empty(sum(counts), 4)
        dist.all_to_all_single(back, tokens, counts, expected.tolist())


@healthy()
def sharded_with_a_limit_that_never_bites(_rank: int) -> None:
    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(torch.ones(2, 8)).square().mean().backward()
        if step % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=4)
def two_axes_and_a_weight_gathered_by_its_pair(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(7):
        model(torch.ones(2, 8)).square().mean().backward()
        if step == 3 and rank >= 2:
            print(model.up.weight.full_tensor().norm())  # type: ignore[operator]
        for weight in model.parameters():
            dist.all_reduce(weight.grad.to_local(), group=mesh.get_group("dp"))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def preparations_that_fail_before_they_meet(rank: int) -> None:
    engine = Engine()
    for epoch in range(3):
        for attempt in range(3):
            with contextlib.suppress(OSError):
                if rank == 2 and epoch == 1 and attempt < 2:
                    raise OSError("no space left in the scratch folder")
                break
        dist.monitored_barrier()
        for _ in range(2):
            engine.step()


@healthy()
def objects_of_every_kind(rank: int) -> None:
    engine = Engine()
    for step in range(5):
        loss = engine.step()
        reports: list[object] = [None] * 3
        dist.all_gather_object(reports, {"loss": float(loss), "rank": "x" * rank})
        dist.gather_object({"step": step}, reports if rank == step % 3 else None, dst=step % 3)
        mine: list[object] = [None]
        dist.scatter_object_list(mine, reports if rank == step % 3 else None, src=step % 3)


def retried(function: Callable[[int], None]) -> Callable[[int], None]:
    @functools.wraps(function)
    def call(step: int) -> None:
        while True:
            try:
                return function(step)
            except ConnectionError:
                print("again")

    return call


@healthy()
def a_decorator_that_tries_what_one_rank_does_alone(rank: int) -> None:
    engine, failures = Engine(), {3, 5} if rank == 2 else set()

    @retried
    def upload(step: int) -> None:
        if step in failures:
            failures.remove(step)
            raise ConnectionError("the tracking server is away")

    for step in range(7):
        engine.step()
        upload(step)
        dist.all_reduce(torch.full((4,), float(step)))


@healthy()
def a_preemption_that_all_ranks_hear_of(rank: int) -> None:
    requested = threading.Event()
    signal.signal(signal.SIGUSR2, lambda _number, _frame: requested.set())
    engine = Engine()
    for step in range(8):
        engine.step()
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR2)
        if agreed(requested.is_set()):
            dist.barrier()
            break


@healthy()
def a_double_buffer_filled_by_a_thread(rank: int) -> None:
    barrier, values = threading.Barrier(2), [0.0]

    def fill() -> None:
        for number in range(8):
            values[0] = float(number * rank)
            barrier.wait()

    filler = threading.Thread(target=fill)
    filler.start()
    engine = Engine()
    for _ in range(8):
        barrier.wait()
        engine.step(1 + values[0])
    filler.join()


@healthy()
def a_phase_that_meets_at_its_end(rank: int) -> None:
    class Phase:
        def __enter__(self) -> "Phase":
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> bool:
            dist.barrier()
            return kind is not None and issubclass(kind, ValueError)

    engine = Engine()
    for step in range(6):
        loss = engine.step()
        with Phase():
            if rank == 1 and step == 3:
                raise ValueError("no positive sample")
        dist.all_reduce(loss)


@healthy()
def a_subclass_that_does_nothing_of_its_own(rank: int) -> None:
    class Callback:
        def on_epoch_end(self, total: torch.Tensor) -> None:
            dist.all_reduce(total)

    class Printing(Callback):
        def on_epoch_end(self, total: torch.Tensor) -> None:
            print("epoch", total)
            super().on_epoch_end(total)

    engine, callback = Engine(), (Printing if rank == 2 else Callback)()
    for _ in range(4):
        callback.on_epoch_end(engine.step())


@healthy()
def a_manager_that_keeps_two_checkpoints(rank: int) -> None:
    folder, files = Path(gettempdir()) / f"kept-{os.environ['MASTER_PORT']}", list[Path]()
    folder.mkdir(exist_ok=True)
    engine = Engine()
    for step in range(8):
        engine.step()
        if rank == 0:
            files.append(folder / f"{step}.pt")
            torch.save(engine.net.state_dict(), files[-1])
            if len(files) > 2:
                files.pop(0).unlink()
        dist.barrier()


@healthy(ranks=4)
def a_communicator_split_by_color(rank: int) -> None:
    colors = [0, 1, 1, 0]
    groups = {color: dist.new_group([r for r, own in enumerate(colors) if own == color]) for color in (1, 0)}
    for step in range(5):
        dist.all_reduce(torch.ones(2), group=groups[colors[rank]])
        if colors[rank] == step % 2:
            dist.broadcast(torch.ones(3), src=colors.index(colors[rank]), group=groups[colors[rank]])
    dist.barrier()


@healthy(ranks=4)
def stages_that_send_zeros_of_a_bad_loss(rank: int) -> None:
    layer = nn.Linear(4, 4)

    def get(source: int) -> torch.Tensor:
        buffer = torch.empty(2, 4)
        dist.recv(buffer, src=source)
        return buffer

    for number in range(12):
        x = torch.ones(2, 4) if rank == 0 else get(rank - 1)
        x.requires_grad_()
        y = layer(x)
        if rank == 3:
            (y.square().mean() * (0.0 if number == 9 else 1.0)).backward()
        else:
            dist.send(y.detach(), dst=rank + 1)
            y.backward(get(rank + 1))
        if rank:
            dist.send(x.grad, dst=rank - 1)


@healthy()
def a_queue_between_collectives_of_one_rank(rank: int) -> None:
    results: queue.Queue[float] = queue.Queue()
    engine = Engine()
    for step in range(6):
        if rank == 1:
            threading.Timer(0.2, results.put, (float(step),)).start()
            results.get()
        engine.step()
        time.sleep(0.2 if rank == 0 else 0)
    dist.barrier()


@healthy()
def buckets_that_are_all_waited_for(_rank: int) -> None:
    engine = Engine()
    for _ in range(6):
        engine.backward(1.0)
        works: list[tuple[dist.Work | None, torch.Tensor]] = []
        for weight in engine.net.parameters():
            assert weight.grad is not None
            flat = weight.grad.flatten()
            works.append((dist.all_reduce(flat, async_op=True), flat))
        for work, flat in reversed(works):
            assert work is not None
            work.wait()
            flat /= 3
        engine.update()


@healthy()
def halos_exchanged_by_even_and_odd(rank: int) -> None:
    field = torch.ones(9)
    for _ in range(6):
        edges = [torch.empty(3), torch.empty(3)]
        ops = [
            dist.P2POp(dist.isend, field[-3:].clone(), (rank + 1) % 3),
            dist.P2POp(dist.isend, field[:3].clone(), (rank - 1) % 3, tag=1),
            dist.P2POp(dist.irecv, edges[0], (rank - 1) % 3),
            dist.P2POp(dist.irecv, edges[1], (rank + 1) % 3, tag=1),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.all_reduce(field)
