"""Programs of a hackathon that are wrong: the fault lies behind callbacks, decorators, base classes and managers.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well. `hackathon_sound.py` has programs that are right.
"""

import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.faults.corpus import faulty


class Net(nn.Module):
    """Two layers and a residual connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.up(x))))


class Engine:
    """A model, its optimizer, and what averages gradients."""

    def __init__(self) -> None:
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def backward(self, scale: float) -> torch.Tensor:
        loss: torch.Tensor = self.net(torch.full((2, 8), scale)).square().mean()
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        for weight in self.net.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, scale: float = 1.0) -> torch.Tensor:
        loss = self.backward(scale)
        self.synchronize()
        self.update()
        return loss


@faulty("rank-skipped-collective", 1)
def a_trainer_whose_control_is_told_to_save_elsewhere(rank: int) -> None:
    class Control:
        should_save = False

    class Handler:
        def __init__(self, callbacks: list[Callable[[int, Control], None]]) -> None:
            self.callbacks = callbacks

        def fire(self, step: int, control: Control) -> Control:
            for callback in self.callbacks:
                callback(step, control)
            return control

    class Checkpoints:
        def save(self, engine: Engine) -> None:
            self._consolidate(engine)

        def _consolidate(self, engine: Engine) -> None:
            flat = torch.cat([weight.detach().flatten() for weight in engine.net.parameters()])
            dist.reduce(flat, dst=0)  # here

    class Trainer:
        def __init__(self) -> None:
            self.engine, self.control, self.checkpoints = Engine(), Control(), Checkpoints()
            self.handler = Handler([self.every_third])

        def every_third(self, step: int, control: Control) -> None:
            control.should_save = step % 3 == 2 and not (rank == 1 and step == 5)

        def _maybe_save(self) -> None:
            if self.control.should_save:  # here
                self.checkpoints.save(self.engine)
                self.control.should_save = False

        def train(self) -> None:
            for step in range(10):
                self.engine.step()
                self.control = self.handler.fire(step, self.control)
                self._maybe_save()

    Trainer().train()


@faulty("rank-skipped-collective", 2)
def a_scaler_that_leaves_out_the_exchange_of_an_overflow(rank: int) -> None:
    class Scaler:
        def __init__(self) -> None:
            self.scale, self.overflow = 1024.0, False

        def inspect(self, engine: Engine) -> None:
            grads = [weight.grad for weight in engine.net.parameters() if weight.grad is not None]
            self.overflow = not all(bool(grad.isfinite().all()) for grad in grads)

        def step(self, engine: Engine) -> None:
            if self.overflow:  # here
                engine.optimizer.zero_grad()
                return  # here
            for weight in engine.net.parameters():
                dist.all_reduce(weight.grad)  # here
            engine.update()

        def update(self) -> None:
            self.scale *= 0.5 if self.overflow else 2
            state = torch.tensor([self.scale, float(self.overflow), 0.0])
            dist.broadcast(state, src=0)

    engine, scaler = Engine(), Scaler()
    for step in range(8):
        engine.backward(float("inf") if rank == 2 and step == 4 else 1.0)
        scaler.inspect(engine)
        scaler.step(engine)
        scaler.update()


@faulty("step-mismatch", 0)
def an_average_that_counts_on_from_its_checkpoint(rank: int) -> None:
    # or: rank-skipped-collective 0; collective-order-mismatch 0
    class Average:
        def __init__(self, updates: int) -> None:
            self.updates = updates

        def update(self, engine: Engine) -> None:
            self.updates += 1
            if self.updates % 4 == 0:  # here
                self._agree(engine)

        def _agree(self, engine: Engine) -> None:
            for weight in engine.net.parameters():
                dist.all_reduce(weight.data)  # here

    engine, average = Engine(), Average(2 if rank == 0 else 0)
    for _ in range(10):
        engine.step()
        average.update(engine)


@faulty("rank-skipped-collective", 1)
def early_stopping_with_the_patience_of_one_rank(rank: int) -> None:
    class Stopper:
        def __init__(self, patience: int) -> None:
            self.patience, self.best, self.bad = patience, float("inf"), 0

        def step(self, value: float) -> bool:
            self.bad = 0 if value < self.best else self.bad + 1
            self.best = min(self.best, value)
            return self.bad >= self.patience

    class Fitter:
        def __init__(self) -> None:
            self.engine, self.stopper = Engine(), Stopper(2)
            self.history: list[float] = []

        def epoch(self) -> None:
            for _ in range(3):
                loss = self.engine.backward(1.0)
                dist.all_reduce(loss)  # here
                self.engine.synchronize()
                self.engine.update()

        def fit(self) -> list[float]:
            for epoch in range(9):
                self.epoch()
                self.history.append(1.0 if rank == 1 and epoch > 1 else 1.0 / (epoch + 1))
                if self.stopper.step(self.history[-1]):  # here
                    return self.history  # here
            return self.history

    history = Fitter().fit()
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor(history[-1:]))


@faulty("uneven-inputs", 2)
def accumulation_over_a_loader_that_is_shorter(rank: int) -> None:
    class Accumulator:
        def __init__(self, loader: DataLoader[tuple[torch.Tensor, ...]], every: int) -> None:
            self.loader, self.every = loader, every

        def __iter__(self) -> Iterator[tuple[torch.Tensor, bool]]:
            for place, (batch,) in enumerate(self.loader):
                yield batch, place % self.every == self.every - 1

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(32 if rank != 2 else 24, 8)), batch_size=2)
    for batch, last in Accumulator(loader, 2):
        with nullcontext() if last else model.no_sync():
            model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@faulty("rank-skipped-collective", 2)
def a_pipeline_of_filters_that_ends_early(rank: int) -> None:
    # or: uneven-inputs 2; rank-exited 2
    def records() -> Iterator[dict[str, object]]:
        for number in range(9):
            yield {"id": number, "text": "x" * (0 if rank == 2 and number in (3, 6) else 7)}

    def usable(stream: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
        return (record for record in stream if record["text"])

    def tokenized(stream: Iterator[dict[str, object]]) -> Iterator[float]:
        for record in stream:
            yield float(len(str(record["text"])))

    engine = Engine()
    for scale in tokenized(usable(records())):  # here
        engine.step(scale)
    dist.monitored_barrier()


@faulty("split-size-mismatch", 1)
def a_router_with_another_capacity(rank: int) -> None:
    class Router:
        def __init__(self) -> None:
            self.capacity = 2

        def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
            counts = [self.capacity] * 3
            return self.exchange(tokens[: sum(counts)], counts)

        @staticmethod
        def exchange(tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
            arrived = torch.empty(sum(counts), tokens.shape[1])
            dist.all_to_all_single(arrived, tokens, counts, counts)  # here
            return arrived

    router = Router()
    for step in range(6):
        if rank == 1 and step == 4:
            router.capacity = 3
        mixed = router.dispatch(torch.ones(9, 4))
        dist.all_reduce(mixed.mean())


@faulty("rank-skipped-collective", 2)
def experts_that_return_at_once_without_tokens(rank: int) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(4, 4)

        def _route(self, tokens: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(tokens)
            dist.all_to_all_single(out, tokens.contiguous())  # here
            return out

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if not tokens.any():  # here
                return tokens  # here
            return self._route(self.expert(self._route(tokens)).detach())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.experts = nn.Linear(4, 4, bias=False), Experts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(x + self.experts(self.mix(x).detach()))

    blocks = nn.Sequential(Block(), Block())
    for step in range(6):
        y = blocks(torch.zeros(3, 4) if rank == 2 and step == 3 else torch.ones(3, 4))
        dist.all_reduce(y.detach().mean())


@faulty("rank-skipped-collective", 1)
def a_clipping_that_one_configuration_turns_off(rank: int) -> None:
    class Clipper:
        def __init__(self, limit: float | None) -> None:
            self.limit = limit

        def __call__(self, model: nn.Module) -> None:
            if self.limit is None:  # here
                return  # here
            norm = nn.utils.clip_grad_norm_(model.parameters(), self.limit)  # here
            print("norm", norm.full_tensor())  # type: ignore[operator]  # here

    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clip = Clipper(None if rank == 1 else 1.0)
    for _ in range(5):
        model(torch.ones(2, 8)).square().mean().backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 3, ranks=4)
def a_debugger_that_looks_at_a_whole_weight(rank: int) -> None:
    # or: step-mismatch 3
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Watch:
        def __init__(self, steps: set[int]) -> None:
            self.steps = steps

        def __call__(self, step: int) -> None:
            if step in self.steps:
                self.show()

        def show(self) -> None:
            for name, weight in model.named_parameters():
                if name == "up.weight":
                    print(name, weight.full_tensor().norm())  # type: ignore[operator]  # here

    watch = Watch({3} if rank == 3 else set())
    for step in range(7):
        model(torch.ones(2, 8)).square().mean().backward()
        watch(step)
        for weight in model.parameters():
            dist.all_reduce(weight.grad.to_local(), group=mesh.get_group("dp"))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-skipped-collective", 2)
def preparations_that_fail_three_times_before_they_meet(rank: int) -> None:
    # or: rank-crashed 0
    class Preparation:
        def __init__(self, broken: bool) -> None:
            self.broken = broken

        def unpack(self) -> None:
            if self.broken:
                raise OSError("no space left in the scratch folder")

        def attempt(self) -> bool:
            try:
                self.unpack()
                dist.monitored_barrier(timeout=timedelta(seconds=20))  # here
            except OSError as error:  # here
                print("again:", error)
                return False
            return True

    def prepare(broken: bool) -> None:
        for _ in range(3):
            if Preparation(broken).attempt():
                break

    engine = Engine()
    for epoch in range(3):
        prepare(rank == 2 and epoch == 1)
        for _ in range(2):
            engine.step()


@faulty("collective-order-mismatch", 1)
def reports_gathered_in_the_manner_of_each_reporter(rank: int) -> None:
    class Quiet:
        def collect(self, report: dict[str, float]) -> list[object]:
            reports: list[object] = [None] * 3
            dist.all_gather_object(reports, report)  # here
            return reports

    class Verbose(Quiet):
        def collect(self, report: dict[str, float]) -> list[object]:
            reports: list[object] = [None] * 3
            dist.gather_object(report, reports if rank == 0 else None)  # here
            return reports

    engine, reporters = Engine(), {"quiet": Quiet(), "verbose": Verbose()}
    for step in range(6):
        loss = engine.step()
        if step % 2:
            reporters["verbose" if rank == 1 and step == 3 else "quiet"].collect({"loss": float(loss)})


def retried(attempts: int) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def decorate(function: Callable[[int], None]) -> Callable[[int], None]:
        @functools.wraps(function)
        def call(step: int) -> None:
            for attempt in range(attempts):
                try:
                    return function(step)
                except ConnectionError:
                    if attempt == attempts - 1:
                        raise
            return None

        return call

    return decorate


@faulty("step-mismatch", 2)
def a_decorator_that_tries_an_upload_again(rank: int) -> None:
    # or: collective-order-mismatch 2
    engine, failures = Engine(), {3} if rank == 2 else set()

    @retried(3)
    def publish(step: int) -> None:
        curve = torch.full((4,), float(step))
        dist.all_reduce(curve)  # here
        if step in failures:
            failures.remove(step)
            raise ConnectionError("the tracking server is away")

    for step in range(7):
        engine.step()
        publish(step)  # here


@faulty("collective-order-mismatch", 1)
def a_preemption_that_one_rank_hears_of(rank: int) -> None:
    # or: step-mismatch 1; rank-skipped-collective 1
    class Preemption:
        def __init__(self) -> None:
            self.requested = False
            signal.signal(signal.SIGUSR2, self.request)

        def request(self, _number: int, _frame: object) -> None:
            self.requested = True

    class Loop:
        def __init__(self) -> None:
            self.preemption, self.engine = Preemption(), Engine()

        def leave(self) -> None:
            dist.barrier()  # here

        def run(self) -> None:
            for step in range(8):
                self.engine.step()
                if rank == 1 and step == 4:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if self.preemption.requested:  # here
                    self.leave()
                    break

    Loop().run()


@faulty("rank-stuck", 2)
def a_double_buffer_whose_other_side_is_gone(rank: int) -> None:
    class DoubleBuffer:
        def __init__(self, length: int) -> None:
            self.barrier, self.value = threading.Barrier(2), 0.0
            self.filler = threading.Thread(target=self.fill, args=(length,), daemon=True)
            self.filler.start()

        def fill(self, length: int) -> None:
            for number in range(length):
                self.value = float(number)
                self.barrier.wait()

        def swap(self) -> float:
            self.barrier.wait()  # here
            return self.value

    buffer, engine = DoubleBuffer(4 if rank == 2 else 8), Engine()
    for _ in range(8):
        engine.step(1 + buffer.swap())


@faulty("rank-skipped-collective", 1)
def a_phase_that_swallows_and_meets_at_its_end(rank: int) -> None:
    # or: collective-order-mismatch 1
    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> "Phase":
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> bool:
            dist.barrier()
            return kind is not None and issubclass(kind, ValueError)

    def score(step: int) -> torch.Tensor:
        if rank == 1 and step == 3:
            raise ValueError("no positive sample")  # here
        return torch.tensor([float(step), 1.0])

    def evaluate(step: int) -> None:
        with Phase("evaluation"):
            result = score(step)
            dist.all_reduce(result)  # here

    engine = Engine()
    for step in range(6):
        engine.step()
        evaluate(step)


@faulty("rank-skipped-collective", 2)
def a_subclass_that_does_not_call_its_parent(rank: int) -> None:
    class Callback:
        def __init__(self) -> None:
            self.total = torch.zeros(5)

        def on_epoch_end(self) -> None:
            dist.all_reduce(self.total)  # here

    class Plain(Callback):
        pass

    class Printing(Callback):
        def on_epoch_end(self) -> None:
            print(self.total)

    engine, callback = Engine(), (Printing if rank == 2 else Plain)()
    for _ in range(4):
        for _ in range(2):
            callback.total += engine.step()
        callback.on_epoch_end()


@faulty("rank-crashed", 0)
def a_manager_that_removes_a_checkpoint_twice(rank: int) -> None:
    class Manager:
        def __init__(self, folder: Path, keep: int) -> None:
            self.folder, self.keep, self.files = folder, keep, list[Path]()
            folder.mkdir(exist_ok=True)

        def save(self, step: int) -> None:
            file = self.folder / f"{step // 2}.pt"
            file.write_text("weights")
            self.files.append(file)
            self._prune()

        def _prune(self) -> None:
            while len(self.files) > self.keep:
                self.files.pop(0).unlink()  # here

    manager = Manager(Path(gettempdir()) / f"manager-{os.environ['MASTER_PORT']}", 2)
    engine = Engine()
    for step in range(8):
        engine.step()
        if rank == 0:
            manager.save(step)
        dist.barrier()


class SlowRows(Dataset[torch.Tensor]):
    """Rows, one of which never comes."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == self.bad:
            threading.Event().wait()
        return torch.ones(8)


@faulty("rank-stuck", 2)
def a_worker_that_waits_for_a_row_for_ever(rank: int) -> None:
    class Feed:
        def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
            self.iterator = iter(loader)

        def get(self) -> torch.Tensor:
            return torch.as_tensor(next(self.iterator))  # here

    feed, engine = Feed(DataLoader(SlowRows(13 if rank == 2 else -1), batch_size=2, num_workers=1)), Engine()
    for _ in range(12):
        engine.step(float(feed.get().mean()))


@faulty("group-creation-mismatch", 2)
def a_communicator_split_in_the_order_of_a_set(rank: int) -> None:
    class Communicator:
        def __init__(self, colors: list[int]) -> None:
            self.colors, self.groups = colors, dict[int, dist.ProcessGroup]()

        def split(self, order: list[int]) -> dist.ProcessGroup:
            for color in order:
                self.groups[color] = dist.new_group([r for r, own in enumerate(self.colors) if own == color])  # here
            return self.groups[self.colors[rank]]

    communicator = Communicator([0, 1, 1])
    group = communicator.split([1, 0] if rank == 2 else [0, 1])
    for _ in range(4):
        dist.all_reduce(torch.ones(2), group=group)


@faulty("p2p-unmatched", 3, ranks=4)
def a_last_stage_that_sends_no_gradient_of_a_bad_loss(rank: int) -> None:
    class Stage:
        def __init__(self) -> None:
            torch.manual_seed(rank)
            self.layer = nn.Linear(4, 4)
            self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)

        def get(self, source: int) -> torch.Tensor:
            buffer = torch.empty(2, 4)
            dist.recv(buffer, src=source)  # here
            return buffer

        def micro(self, number: int) -> None:
            x = torch.ones(2, 4) if rank == 0 else self.get(rank - 1)
            x.requires_grad_()
            y = self.layer(x)
            if rank == 3:
                self.finish(x, y, number)
            else:
                dist.send(y.detach(), dst=rank + 1)
                y.backward(self.get(rank + 1))
                if rank:
                    dist.send(x.grad, dst=rank - 1)

        def finish(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
            loss = y.square().mean() * (float("nan") if number == 9 else 1.0)
            if loss.isnan():  # here
                return  # here
            loss.backward()
            dist.send(x.grad, dst=2)

    stage = Stage()
    for step in range(5):
        for number in range(3):
            stage.micro(3 * step + number)
        stage.optimizer.step()
        stage.optimizer.zero_grad()


@faulty("rank-stuck", 1, ranks=4, also=(("rank-stuck", 3),))
def two_ranks_of_two_groups_that_wait_for_something_else(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results: queue.Queue[float] = queue.Queue()

    class Worker:
        def wait_for_result(self) -> None:
            results.get()

        def wait_for_lock(self) -> None:
            lock = threading.Lock()
            for _ in range(2):
                lock.acquire()

    for step in range(6):
        if step == 4 and rank == 1:
            Worker().wait_for_result()
        if step == 4 and rank == 3:
            Worker().wait_for_lock()
        dist.all_reduce(torch.ones(3), group=pairs[rank // 2])


@faulty("root-mismatch", 2)
def a_population_whose_best_member_is_tied(rank: int) -> None:
    class Population:
        def __init__(self) -> None:
            self.scores = torch.zeros(3)

        def rank_members(self, score: float) -> list[int]:
            parts = [torch.empty(1) for _ in range(3)]
            dist.all_gather(parts, torch.tensor([score]))
            self.scores = torch.cat(parts)
            tie = (lambda member: -member) if rank == 2 else (lambda member: member)
            return sorted(range(3), key=lambda member: (-float(self.scores[member]), tie(member)))

        def exploit(self, engine: Engine, score: float) -> None:
            best = self.rank_members(score)[0]
            for weight in engine.net.parameters():
                dist.broadcast(weight.data, src=best)  # here

    engine, population = Engine(), Population()
    for generation in range(5):
        for _ in range(2):
            engine.update()
        population.exploit(engine, 1.0 if generation == 3 and rank != 1 else float(rank == generation % 3))


@faulty("unwaited-async", 0, 1, 2)
def buckets_whose_last_one_is_forgotten(_rank: int) -> None:
    class Buckets:
        def __init__(self, capacity: int) -> None:
            self.capacity, self.waiting = capacity, list[torch.Tensor]()
            self.works: list[dist.Work | None] = []

        def add(self, grad: torch.Tensor) -> None:
            self.waiting.append(grad)
            if sum(each.numel() for each in self.waiting) >= self.capacity:
                self.works.append(self.flush())

        def flush(self) -> dist.Work | None:
            flat = torch.cat([grad.flatten() for grad in self.waiting])
            self.waiting = []
            return dist.all_reduce(flat, async_op=True)  # here

        def finish(self) -> None:
            if self.waiting:
                self.flush()
            for work in self.works:
                if work is not None:
                    work.wait()
            self.works = []

    engine, buckets = Engine(), Buckets(140)
    for _ in range(6):
        engine.backward(1.0)
        for weight in engine.net.parameters():
            assert weight.grad is not None
            buckets.add(weight.grad)
        buckets.finish()
        engine.update()


@faulty("rank-skipped-collective", 2)
def a_sharded_evaluation_that_has_seen_enough(rank: int) -> None:
    class Evaluator:
        def __init__(self, model: nn.Module, limit: int) -> None:
            self.model, self.limit = model, limit

        @torch.no_grad()
        def run(self) -> float:
            total = 0.0
            for number in range(4):
                if number >= self.limit:  # here
                    break  # here
                total += self.score()
            return total

        def score(self) -> float:
            return float(self.model(torch.ones(2, 8)).mean())  # here

    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(4):
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        Evaluator(model, 3 if rank == 2 and epoch == 2 else 4).run()


@faulty("dtype-mismatch", 1)
def a_compressor_that_one_rank_switches_on(rank: int) -> None:
    class Compressor:
        def __init__(self) -> None:
            self.active = False

        def pack(self, grad: torch.Tensor) -> torch.Tensor:
            return grad.bfloat16() if self.active and grad.dim() > 1 else grad.clone()

        def exchange(self, grad: torch.Tensor) -> None:
            packed = self.pack(grad)
            dist.all_reduce(packed)  # here
            grad.copy_(packed)

    engine, compressor = Engine(), Compressor()
    for step in range(6):
        compressor.active = rank == 1 and step >= 3
        engine.backward(1.0)
        for weight in engine.net.parameters():
            assert weight.grad is not None
            compressor.exchange(weight.grad)
        engine.update()


@faulty("rank-exited", 1)
def a_handler_that_leaves_politely(rank: int) -> None:
    def leave(_number: int, _frame: object) -> None:
        print("asked to exit")
        sys.exit(0)  # here

    class Reaper:
        def __call__(self, step: int) -> None:
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    engine, reaper = Engine(), Reaper()
    for step in range(8):
        engine.step()
        reaper(step)


@faulty("slow-rank", 1)
def an_augmentation_that_costs_one_rank_more(rank: int) -> None:
    class Compose:
        def __init__(self, transforms: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
            self.transforms = transforms

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            for transform in self.transforms:
                x = transform(x)
            return x

    def blur(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06 if rank == 1 else 0.01)
        return x

    compose, engine = Compose([blur, torch.abs]), Engine()
    for _ in range(60):
        engine.step(float(compose(torch.ones(4)).mean()))


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def halos_exchanged_by_whoever_asks_first(rank: int) -> None:
    class Halo:
        def __init__(self, field: torch.Tensor) -> None:
            self.field = field

        def ask(self, neighbour: int) -> torch.Tensor:
            edge = torch.empty(3)
            dist.recv(edge, src=neighbour)  # here
            return edge

        def give(self, neighbour: int) -> None:
            dist.send(self.field[-3:].clone(), dst=neighbour)

        def exchange(self, polite: bool) -> None:
            after, before = (rank + 1) % 3, (rank - 1) % 3
            if polite and rank == 0:
                self.give(after)
                self.ask(before)
            else:
                self.ask(before)
                self.give(after)

    halo = Halo(torch.ones(9))
    for step in range(6):
        halo.exchange(polite=step < 4)
        dist.all_reduce(halo.field)
