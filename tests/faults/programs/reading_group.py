"""Programs of a reading group: generation, rings, recomputation, buses, plug-ins and clocks, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.faults.corpus import faulty, healthy


@dataclass
class Session:
    """A small model that is trained by hand."""

    width: int = 6
    net: nn.Sequential = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(self.width, 4), nn.Tanh(), nn.Linear(4, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)

    def train_step(self, scale: float = 1.0) -> float:
        loss = self.net(torch.full((2, self.width), scale)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
        self.optimizer.step()
        return float(loss)


class Sharded(nn.Module):
    """A layer whose weight is gathered for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(2 * dist.get_world_size(), 4)
        dist.all_gather_into_tensor(whole, self.shard.detach())
        return x @ whole.T @ whole


@faulty("rank-skipped-collective", 1)
def a_generation_that_ends_with_the_sequence_of_its_rank(rank: int) -> None:
    class Generator:
        def __init__(self, layer: Sharded) -> None:
            self.layer = layer

        def finished(self, tokens: list[int]) -> bool:
            return len(tokens) >= (3 if rank == 1 else 5)

        def next(self, tokens: list[int]) -> int:
            return int(self.layer(torch.ones(1, 4) * len(tokens)).sum() > 0)  # here

        def generate(self) -> list[int]:
            tokens = [0]
            while not self.finished(tokens):  # here
                tokens.append(self.next(tokens))
            return tokens

    session, generator = Session(), Generator(Sharded())
    for _ in range(4):
        rollout = generator.generate()
        rewards = torch.tensor([float(len(rollout)), 1.0, 0.0])
        dist.all_reduce(rewards)
        session.train_step()


@healthy()
def a_generation_that_goes_on_for_the_longest(rank: int) -> None:
    session, layer = Session(), Sharded()
    for _ in range(4):
        length, running = 0, True
        while running:
            layer(torch.ones(1, 4))
            length += 1
            flag = torch.tensor(float(length < rank + 2))
            dist.all_reduce(flag)
            running = bool(flag)
        session.train_step()


class Clock:
    """Seconds of a rank, which this program chooses."""

    def __init__(self, ticks: list[float]) -> None:
        self.ticks = ticks

    def now(self) -> float:
        return self.ticks.pop(0)


@faulty("rank-skipped-collective", 2)
def a_report_every_few_seconds_of_the_own_clock(rank: int) -> None:
    class Reporter:
        def __init__(self, clock: Clock, period: float) -> None:
            self.clock, self.period, self.last = clock, period, 0.0

        def _is_due(self) -> bool:
            now = self.clock.now()
            if now - self.last < self.period:
                return False
            self.last = now
            return True

        def maybe_report(self, loss: float) -> None:
            if self._is_due():  # here
                self._report(torch.tensor([loss, 1.0]))

        def _report(self, values: torch.Tensor) -> None:
            dist.reduce(values, dst=0)  # here

    ticks = [1.0, 3.1, 4.0, 6.2, 7.0, 9.3, 10.0, 12.4]
    if rank == 2:
        ticks[3], ticks[4] = 6.0, 6.05
    session, reporter = Session(), Reporter(Clock(ticks), 3.0)
    for _ in range(8):
        reporter.maybe_report(session.train_step())


@healthy()
def a_report_every_few_seconds_of_one_clock(rank: int) -> None:
    session = Session()
    for now in [1.0, 3.1, 4.0, 6.2, 7.0, 9.3]:
        session.train_step()
        due = torch.tensor(float(now % 3 < 1 and rank == 0))
        dist.broadcast(due, src=0)
        if due:
            dist.reduce(torch.ones(2), dst=0)


@faulty("rank-skipped-collective", 0)
def a_resume_from_a_file_that_one_rank_sees(rank: int) -> None:
    # or: step-mismatch 0; rank-exited 0
    class Progress:
        def __init__(self, seen: bool) -> None:
            self.seen = seen

        def first_step(self) -> int:
            return 3 if self.seen else 0

    def run(session: Session, progress: Progress, total: int) -> None:
        for step in range(progress.first_step(), total):  # here
            session.train_step(1.0 + step)

    session = Session()
    run(session, Progress(rank == 0), 9)
    dist.barrier()


@healthy()
def a_resume_that_rank_0_announces(rank: int) -> None:
    first = [3 if rank == 0 else None]
    dist.broadcast_object_list(first, src=0)
    session = Session()
    for step in range(first[0] or 0, 9):
        session.train_step(1.0 + step)
    dist.barrier()


@faulty("step-mismatch", 1)
def a_block_that_one_rank_computes_again_in_its_backward_pass(rank: int) -> None:
    # or: size-mismatch 1; collective-order-mismatch 1
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)  # here
            return torch.as_tensor(self.linear(x - mean))

    class Tower(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.block, self.recompute = Block(), recompute

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.recompute:
                return torch.as_tensor(checkpoint(self.block, x, use_reentrant=False))
            return torch.as_tensor(self.block(x))

    tower = Tower(recompute=False)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.01)
    for step in range(6):
        tower.recompute = rank == 1 and step >= 3
        tower(torch.ones(2, 6)).square().sum().backward()  # here
        for weight in tower.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_block_that_all_ranks_compute_again(_rank: int) -> None:
    layer = nn.Linear(6, 6)

    def block(x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return torch.as_tensor(layer(x - mean))

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(6):
        x = torch.ones(2, 6)
        y = torch.as_tensor(checkpoint(block, x, use_reentrant=False)) if step % 2 else block(x)
        y.square().sum().backward()
        for weight in layer.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("dtype-mismatch", 2)
def a_hook_for_compression_that_one_rank_registers(rank: int) -> None:
    @dataclass
    class Options:
        compress: bool

        def apply(self, model: DistributedDataParallel) -> None:
            if self.compress:
                model.register_comm_hook(None, fp16_compress_hook)

    model = DistributedDataParallel(nn.Linear(6, 6))
    Options(compress=rank == 2).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        model(torch.ones(2, 6)).sum().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_hook_for_compression_that_all_register(_rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 6))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Bus:
    """Functions by the event at which they are called."""

    def __init__(self) -> None:
        self.handlers: dict[str, list[Callable[[Session], None]]] = defaultdict(list)

    def on(self, event: str, handler: Callable[[Session], None]) -> None:
        self.handlers[event].append(handler)

    def emit(self, event: str, session: Session) -> None:
        for handler in self.handlers[event]:
            handler(session)


@faulty("collective-order-mismatch", 0)
def a_handler_of_the_first_rank_that_gathers(rank: int) -> None:
    # or: step-mismatch 0
    def save(session: Session) -> None:
        flat = nn.utils.parameters_to_vector(session.net.parameters()).detach()
        parts = [torch.empty_like(flat) for _ in range(3)]
        dist.all_gather(parts, flat)  # here

    bus, session = Bus(), Session()
    bus.on("epoch", lambda session: session.optimizer.zero_grad())
    if rank == 0:
        bus.on("epoch", save)
    for _ in range(4):
        for _ in range(3):
            session.train_step()
        bus.emit("epoch", session)


@healthy()
def a_handler_of_the_first_rank_that_writes(rank: int) -> None:
    file = Path(gettempdir()) / f"reading-{os.environ['MASTER_PORT']}.pt"
    bus, session = Bus(), Session()
    if rank == 0:
        bus.on("epoch", lambda session: torch.save(session.net.state_dict(), file))
    bus.on("epoch", lambda _: dist.barrier())
    for _ in range(4):
        for _ in range(3):
            session.train_step()
        bus.emit("epoch", session)


def hop(block: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    arrived = torch.empty_like(block)
    ops = [
        dist.P2POp(dist.isend, block, (rank + 1) % world),
        dist.P2POp(dist.irecv, arrived, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arrived


@faulty("p2p-unmatched", 3, ranks=4)
def a_ring_of_attention_that_one_rank_cuts_short(rank: int) -> None:
    class Ring:
        def __init__(self, causal: bool) -> None:
            self.causal = causal

        def attend(self, block: torch.Tensor) -> torch.Tensor:
            total = block.clone()
            for turn in range(3):
                if self.causal and turn == 2:  # here
                    break  # here
                block = hop(block, rank, 4)
                total += block
            return total

    session = Session()
    for step in range(5):
        Ring(causal=rank == 3 and step == 3).attend(torch.full((2, 5), float(rank)))
        session.train_step()


@healthy(ranks=4)
def a_ring_of_attention_with_fewer_turns_for_all(rank: int) -> None:
    session = Session()
    for step in range(5):
        block = torch.full((2, 5), float(rank))
        for turn in range(3):
            if turn == 2 and step == 3:
                break
            block = hop(block, rank, 4)
        session.train_step()


@faulty("collective-order-mismatch", 2)
def plug_ins_in_the_order_of_their_import(rank: int) -> None:
    plug_ins: dict[str, Callable[[], None]] = {}

    def register(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def add(function: Callable[[], None]) -> Callable[[], None]:
            plug_ins[name] = function
            return function

        return add

    def import_losses() -> None:
        @register("losses")
        def average() -> None:
            dist.all_reduce(torch.ones(3))  # here

    def import_seeds() -> None:
        @register("seeds")
        def share() -> None:
            dist.broadcast(torch.ones(3), src=0)  # here

    for load in (import_seeds, import_losses) if rank == 2 else (import_losses, import_seeds):
        load()
    session = Session()
    for _ in range(4):
        session.train_step()
        for plug_in in plug_ins.values():
            plug_in()


@faulty("rank-skipped-collective", 1)
def a_batch_without_labels_that_is_left_out(rank: int) -> None:
    # or: rank-exited 1; uneven-inputs 1; step-mismatch 1
    @dataclass
    class Batch:
        values: torch.Tensor
        mask: torch.Tensor

    def batches() -> Iterator[Batch]:
        for number in range(8):
            yield Batch(torch.ones(2, 6), torch.zeros(2) if rank == 1 and number == 4 else torch.ones(2))

    class Learner:
        def __init__(self) -> None:
            self.model = DistributedDataParallel(nn.Linear(6, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def learn(self) -> None:
            for batch in batches():
                losses = self.model(batch.values).square().mean(1)
                if not batch.mask.any():  # here
                    continue  # here
                (losses * batch.mask).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    Learner().learn()


@healthy()
def a_batch_without_labels_that_weighs_nothing(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(8):
        mask = torch.zeros(2) if rank == 1 and number == 4 else torch.ones(2)
        (model(torch.ones(2, 6)).square().mean(1) * mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-skipped-collective", 2)
def a_runner_of_callbacks_that_logs_what_they_raise(rank: int) -> None:
    class Metrics:
        def __init__(self) -> None:
            self.names = ["loss", "norm"]

        def read(self, values: dict[str, float]) -> list[float]:
            return [values[name] for name in self.names]  # here

        def __call__(self, values: dict[str, float]) -> None:
            dist.all_reduce(torch.tensor(self.read(values)))  # here

    class Runner:
        def __init__(self, callbacks: list[Callable[[dict[str, float]], None]]) -> None:
            self.callbacks = callbacks

        def run(self, values: dict[str, float]) -> None:
            for callback in self.callbacks:
                try:
                    callback(values)
                except LookupError as error:  # here
                    print("a callback failed:", error)

    session, runner = Session(), Runner([print, Metrics()])
    for step in range(6):
        values = {"loss": session.train_step(), "norm": 1.0}
        if rank == 2 and step == 3:
            del values["norm"]
        runner.run(values)


@faulty("collective-order-mismatch", 0)
def an_optimizer_consolidated_by_the_first_rank(rank: int) -> None:
    # or: step-mismatch 0; rank-skipped-collective 1 2
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def checkpoint_if(due: bool) -> None:
        if due:
            write()

    def write() -> None:
        optimizer.consolidate_state_dict(to=0)  # here

    for step in range(6):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint_if(rank == 0 and step == 3)


@healthy()
def an_optimizer_consolidated_by_all(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(6):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                print(len(optimizer.state_dict()["state"]))


@faulty("rank-stuck", 1)
def a_tool_that_waits_for_its_input(rank: int) -> None:
    class Scorer:
        def __init__(self, interactive: bool) -> None:
            self.interactive = interactive

        def score(self, text: str) -> int:
            command = [sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                return self._read(child, text)

        def _read(self, child: "subprocess.Popen[str]", text: str) -> int:
            if not self.interactive:
                return int(child.communicate(text)[0])
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(text)
            return int(child.stdout.readline())  # here

    session = Session()
    for step in range(4):
        session.train_step()
        Scorer(interactive=rank == 1 and step == 2).score("an answer")
        dist.barrier()


@faulty("rank-stuck", 0)
def two_locks_taken_in_two_orders(rank: int) -> None:
    metrics, cache = threading.Lock(), threading.Lock()
    taken = threading.Event()

    @contextmanager
    def both(first: threading.Lock, second: threading.Lock) -> Iterator[None]:
        with first:
            taken.wait(1)
            with second:  # here
                yield

    def refresh() -> None:
        with cache:
            taken.set()
            time.sleep(1)
            with metrics:
                pass

    session = Session()
    for step in range(6):
        session.train_step()
        if rank == 0 and step == 3:
            threading.Thread(target=refresh, daemon=True).start()
            with both(metrics, cache):
                pass


@faulty("rank-crashed", 0)
def a_table_whose_row_does_not_fit(rank: int) -> None:
    class Table:
        def __init__(self, columns: list[str]) -> None:
            self.columns = columns

        def row(self, values: dict[str, Any]) -> str:
            return " ".join(self._cell(name, values) for name in self.columns)

        def _cell(self, name: str, values: dict[str, Any]) -> str:
            return format(values[name], ".3f")  # here

    session, table = Session(), Table(["step", "loss"])
    for step in range(6):
        values: dict[str, Any] = {"step": step, "loss": session.train_step()}
        if rank == 0:
            print(table.row(values | ({"loss": "nan"} if step == 4 else {})))


@faulty("group-order-inversion", 1, ranks=4)
def a_hierarchy_reduced_from_the_outside(rank: int) -> None:
    class Hierarchy:
        def __init__(self) -> None:
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            self.levels = [pairs[rank // 2], dist.new_group([0, 1, 2, 3])]

        def reduce(self, value: torch.Tensor, inner_first: bool) -> None:
            for level in self.levels if inner_first else reversed(self.levels):
                self._reduce_in(level, value)

        def _reduce_in(self, level: dist.ProcessGroup, value: torch.Tensor) -> None:
            dist.all_reduce(value, group=level)  # here

    hierarchy = Hierarchy()
    for step in range(6):
        hierarchy.reduce(torch.ones(4), inner_first=not (rank == 1 and step == 4))


@healthy(ranks=4)
def a_hierarchy_whose_leaders_reduce_alone(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    for _ in range(6):
        value, pair = torch.ones(4), pairs[rank // 2]
        dist.reduce(value, dst=rank // 2 * 2, group=pair)
        if rank % 2 == 0:
            dist.all_reduce(value, group=leaders)
        dist.broadcast(value, src=rank // 2 * 2, group=pair)


@faulty("uneven-inputs", 1)
def two_loaders_of_which_one_is_shorter(rank: int) -> None:
    class Mixture:
        def __init__(self, texts: DataLoader[Any], images: DataLoader[Any]) -> None:
            self.loaders = texts, images

        def __iter__(self) -> Iterator[float]:
            for text, image in zip(*self.loaders, strict=False):
                yield float(text.mean() + image.mean())

    texts = DataLoader(torch.ones(16, 3), batch_size=2)  # type: ignore[arg-type]
    images = DataLoader(torch.ones(12 if rank == 1 else 16, 3), batch_size=2)  # type: ignore[arg-type]
    session = Session()
    for scale in Mixture(texts, images):
        session.train_step(scale)


@healthy()
def two_loaders_both_of_which_are_used_up(_rank: int) -> None:
    session = Session()
    for _ in range(2):
        texts = DataLoader(torch.ones(16, 3), batch_size=2)  # type: ignore[arg-type]
        images = DataLoader(torch.ones(12, 3), batch_size=2)  # type: ignore[arg-type]
        for text, image in zip(texts, images, strict=False):
            session.train_step(float(text.mean() + image.mean()))


@faulty("rank-killed", 1)
def an_address_that_was_never_mapped(rank: int) -> None:
    class Decoder:
        def decode(self, address: int) -> bytes:
            return self._read(address)

        def _read(self, address: int) -> bytes:
            return ctypes.string_at(address, 4)  # here

    session, buffer = Session(), ctypes.create_string_buffer(b"abcd")
    for step in range(6):
        session.train_step()
        Decoder().decode(8 if rank == 1 and step == 3 else ctypes.addressof(buffer))


@faulty("long-operation", 0)
def an_archive_that_the_first_rank_packs(rank: int) -> None:
    class Archive:
        def __init__(self, seconds: float) -> None:
            self.end = time.monotonic() + seconds

        def blocks(self) -> Iterator[bytes]:
            while time.monotonic() < self.end:
                yield os.urandom(1 << 16)

        def pack(self) -> int:
            size = 0
            for block in self.blocks():
                size += len(zlib.compress(block, 9))  # here
            return size

    session = Session()
    for step in range(4):
        session.train_step()
        if rank == 0 and step == 2:
            Archive(20).pack()
    dist.barrier()


@healthy()
def a_checkpoint_written_by_all_ranks(rank: int) -> None:
    folder = Path(gettempdir()) / f"reading-{os.environ['MASTER_PORT']}"
    session = Session()
    for step in range(4):
        session.train_step()
        if step % 2:
            dcp.save({"net": session.net.state_dict(), f"own{rank}": torch.ones(rank + 1)}, checkpoint_id=folder)
    dist.barrier()


@healthy()
def a_checkpoint_written_by_a_thread_of_the_first_rank(rank: int) -> None:
    session, writers = Session(), list[threading.Thread]()
    for step in range(8):
        session.train_step()
        if rank == 0 and step % 3 == 0:
            state = {name: value.clone() for name, value in session.net.state_dict().items()}
            writers.append(threading.Thread(target=torch.save, args=(state, os.devnull)))
            writers[-1].start()
    for writer in writers:
        writer.join()
    dist.barrier()
