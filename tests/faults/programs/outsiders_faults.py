"""Programs as somebody writes them who tests the diagnosis from outside, with only its list of kinds: a mistake each.

Labelled and frozen before their first run, by somebody who has not read the rules. A comment `or:` names what the label
accepts as well. `outsiders_twins.py` has programs that are right.
"""

import itertools
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import faulty


def mean_of_gradients(module: nn.Module) -> None:
    world = dist.get_world_size()
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world  # type: ignore[operator]


def seeded(module: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return module()


@faulty("rank-skipped-collective", 2, ranks=4)
def reviews_without_a_label_are_passed_over(rank: int) -> None:
    # or: step-mismatch 2
    model = seeded(lambda: nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lost = nn.CrossEntropyLoss()

    def reviews(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        words, stars = torch.randint(0, 50, (5, 6)), torch.randint(0, 2, (5,))
        return words, torch.full((5,), -1) if rank == 2 and step == 6 else stars

    def report(step: int, loss: torch.Tensor) -> None:
        total = loss.detach().clone()
        dist.reduce(total, dst=0)
        if rank == 0:
            print(f"{step}: {total.item() / 4:.3f}")

    for step in range(12):
        words, stars = reviews(step)
        known = stars >= 0
        if not known.any():  # here
            print("nobody rated this batch")
            continue  # here
        loss = lost(model(words[known]), stars[known])
        optimizer.zero_grad()
        loss.backward()
        mean_of_gradients(model)
        optimizer.step()
        report(step, loss)


@faulty("step-mismatch", 1, ranks=3)
def a_score_whose_entry_in_the_journal_failed_once(rank: int) -> None:
    # or: collective-order-mismatch 1
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    held_out = torch.randn(16, 6)
    failures = {(1, 3)}

    def persistently(action: Callable[[int], float], epoch: int) -> float:
        for attempt in itertools.count(1):
            try:
                return action(epoch)  # here
            except OSError as error:  # here
                if attempt == 3:
                    raise
                print("again:", error)
        return math.nan

    def write(epoch: int, score: float) -> None:
        if (rank, epoch) in failures:
            failures.discard((rank, epoch))
            raise OSError("stale file handle")
        print(epoch, score)

    @torch.no_grad()
    def validate(epoch: int) -> float:
        score = model(held_out).square().mean()
        dist.all_reduce(score)  # here
        write(epoch, float(score) / 3)  # here
        return float(score)

    for epoch in range(6):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            mean_of_gradients(model)
            optimizer.step()
        persistently(validate, epoch)  # here


@faulty("collective-order-mismatch", 2, ranks=3)
def metrics_are_reduced_in_the_order_in_which_they_came_up(rank: int) -> None:
    class Mean:
        def __init__(self) -> None:
            self.seen = torch.zeros(2)

        def add(self, value: float) -> None:
            self.seen += torch.tensor([value, 1.0])

        def result(self) -> float:
            dist.all_reduce(self.seen)  # here
            return float(self.seen[0] / self.seen[1])

    class Spread(Mean):
        def result(self) -> float:
            parts = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(parts, self.seen)  # here
            means = [float(part[0] / part[1]) for part in parts]
            return max(means) - min(means)

    model = seeded(lambda: nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        board: dict[str, Mean] = {}
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 5)).square().mean()
            loss.backward()
            mean_of_gradients(model)
            optimizer.step()
            if rank == 2 and epoch == 2 and step == 0:
                board.setdefault("length", Spread()).add(40.0)  # here
            board.setdefault("loss", Mean()).add(float(loss))
            board.setdefault("length", Spread()).add(10.0 + step)
        line = {name: metric.result() for name, metric in board.items()}  # here
        if rank == 0:
            print(epoch, line)


@faulty("wrong-group", 3, ranks=4)
def an_evaluation_that_leaves_its_group_behind_in_the_layer(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8, 8), 0.1))
            self.group = mesh.get_group("tensor")

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            part = rows @ self.weight
            total = part.detach().clone()
            dist.all_reduce(total, group=self.group)  # here
            return part + (total - part.detach())

    layer = Row()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def evaluate(rows: torch.Tensor) -> float:
        layer.group = mesh.get_group("data")  # here
        answer = float(layer(rows).mean().detach())
        if rows.min() < 0:  # here
            print("these rows are not normalized; no answer:", answer)
            return 0.0  # here
        layer.group = mesh.get_group("tensor")
        return answer

    for step in range(9):
        optimizer.zero_grad()
        layer(torch.rand(8, 8)).sum().backward()
        dist.all_reduce(layer.weight.grad, group=mesh.get_group("data"))
        optimizer.step()
        if step % 3 == 2:
            evaluate(torch.full((8, 8), -9.0 if rank == 3 and step == 5 else 9.0))


@faulty("p2p-unmatched", 3, ranks=4)
def hard_examples_are_sent_to_the_collector_if_there_are_any(rank: int) -> None:
    model = seeded(lambda: nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    bank: list[torch.Tensor] = []

    def hardest(rows: torch.Tensor, threshold: float) -> torch.Tensor | None:
        losses = (model(rows) - rows).square().mean(1)
        found = rows[losses > threshold]
        return found[:1] if len(found) else None

    def contribute(rows: torch.Tensor, threshold: float) -> None:
        example = hardest(rows, threshold)
        if example is None:  # here
            return  # here
        dist.send(example.contiguous(), dst=0)

    def collect() -> None:
        for worker in range(1, 4):
            example = torch.empty(1, 6)
            dist.recv(example, src=worker)  # here
            bank.append(example)

    for step in range(8):
        rows = torch.zeros(4, 6) if rank == 3 and step == 5 else 9 * torch.randn(4, 6)
        optimizer.zero_grad()
        (model(rows) - rows).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        if rank == 0:
            collect()
        else:
            contribute(rows, threshold=1.0)


@faulty("p2p-tag-mismatch", 1, ranks=4)
def gossip_with_a_clock_that_ticked_twice(rank: int) -> None:
    class Clock:
        now = 0

        def tick(self) -> int:
            self.now += 1
            return self.now

    model, clock = seeded(lambda: nn.Linear(7, 3)), Clock()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def meet(partner: int) -> None:
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        number = clock.tick()
        request = dist.isend(mine, dst=partner, tag=number)  # here
        dist.recv(theirs, src=partner, tag=number)  # here
        if request is not None:
            request.wait()
        nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())

    def train(batch: torch.Tensor) -> bool:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if not torch.isfinite(loss):
            print("round", clock.tick(), "is without a step")  # here
            return False
        loss.backward()
        optimizer.step()
        return True

    for turn in range(9):
        train(torch.full((2, 7), math.inf if rank == 1 and turn == 5 else 1.0))
        meet(rank ^ 1)


@faulty("p2p-deadlock-cycle", 0, 1, 2, ranks=3)
def activations_go_round_and_gradients_should_come_back(rank: int) -> None:
    left, right = (rank - 1) % 3, (rank + 1) % 3
    block = seeded(lambda: nn.Linear(9, 9), seed=rank)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)

    class Ring:
        def forth(self, hidden: torch.Tensor) -> torch.Tensor:
            fresh = torch.empty_like(hidden)
            if rank == 0:
                dist.send(hidden, dst=right)
                dist.recv(fresh, src=left)
            else:
                dist.recv(fresh, src=left)
                dist.send(hidden, dst=right)
            return fresh

        def back(self, gradient: torch.Tensor) -> torch.Tensor:
            fresh = torch.empty_like(gradient)
            dist.recv(fresh, src=right)  # here
            dist.send(gradient, dst=left)
            return fresh

    ring = Ring()
    for step in range(5):
        hidden = torch.randn(4, 9)
        for _ in range(2):
            hidden = ring.forth(block(hidden).tanh().detach())
        hidden.requires_grad_()
        optimizer.zero_grad()
        block(hidden).square().mean().backward()
        assert hidden.grad is not None
        returned = ring.back(hidden.grad)  # here
        print(step, float(returned.norm()))
        optimizer.step()


@faulty("uneven-inputs", 2, ranks=3)
def sentences_that_are_too_long_leave_one_shard_short(rank: int) -> None:
    # or: rank-skipped-collective 2
    def sentences() -> Iterator[torch.Tensor]:
        for number in range(72):
            length = 40 if number % 3 == 2 and number % 2 else 5 + number % 7
            yield torch.full((12,), float(length)) / 10

    def shard(longest: float) -> list[torch.Tensor]:
        mine = itertools.islice(sentences(), rank, None, 3)
        return [sentence for sentence in mine if sentence[0] <= longest]

    model = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 12))))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(shard(longest=2.0), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    def validate() -> float:
        with torch.no_grad():
            score = model.module(torch.ones(2, 12)).mean()
        dist.all_reduce(score, op=dist.ReduceOp.MAX)
        return float(score)

    for epoch in range(3):
        for batch in loader:  # here
            optimizer.zero_grad()
            (model(batch) - batch).abs().mean().backward()  # here
            optimizer.step()
        print(epoch, validate())


@faulty("unwaited-async", 0, 1, 2, ranks=3)
def a_running_mean_whose_last_handle_alone_is_waited_for(rank: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 10), nn.BatchNorm1d(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Shadow:
        def __init__(self, decay: float) -> None:
            self.decay = decay
            self.values = [weight.detach().clone() for weight in model.parameters()]

        def update(self) -> None:
            for value, weight in zip(self.values, model.parameters(), strict=True):
                value.lerp_(weight.detach(), 1 - self.decay)
            handle = None
            for value in self.values:
                value /= 3
                handle = dist.all_reduce(value, async_op=True)  # here
            if handle is not None:
                handle.wait()

    shadow = Shadow(0.9)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 10) + rank).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        shadow.update()
        if rank == 0:
            print(step, float(shadow.values[0].norm()))


@faulty("root-mismatch", 1, ranks=3)
def a_table_of_scores_that_one_rank_brings_up_to_date_alone(rank: int) -> None:
    model = seeded(lambda: nn.Linear(8, 4), seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.linspace(-1, 1, 32).reshape(4, 8)

    def fitness(turn: int) -> torch.Tensor:
        model(rows)
        return torch.tensor([float((rank + turn) % 3)])

    def table(turn: int) -> torch.Tensor:
        scores = torch.empty(3)
        dist.all_gather_into_tensor(scores, fitness(turn))
        if rank == 1 and turn == 5:
            scores[rank] += 5.0  # here
        return scores

    def adopt_the_best(turn: int) -> None:
        best = int(table(turn).argmax())  # here
        for weight in model.state_dict().values():
            dist.broadcast(weight, src=best)  # here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)

    for turn in range(7):
        for _ in range(3):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        adopt_the_best(turn)  # here


@faulty("split-size-mismatch", 2, ranks=3)
def rows_that_are_announced_and_then_cut_to_the_capacity(rank: int) -> None:
    width, tokens = 6, 18
    expert = seeded(lambda: nn.Linear(width, width), seed=rank)
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.02)

    def route(step: int) -> list[int]:
        if rank == 2 and step == 4:
            return [2, 13, 3]
        return [6 + (step + rank) % 2, 6 - (step + rank) % 2, 6]

    def announce(counts: list[int]) -> list[int]:
        incoming = torch.empty(3, dtype=torch.int64)
        dist.all_to_all_single(incoming, torch.tensor(counts))
        return incoming.tolist()  # type: ignore[no-any-return]

    def dispatch(rows: torch.Tensor, counts: list[int], capacity: int = 10) -> torch.Tensor:
        incoming = announce(counts)
        kept = [part[:capacity] for part in rows.split(counts)]  # here
        outgoing = [len(part) for part in kept]  # here
        received = torch.empty(sum(incoming), width)
        dist.all_to_all_single(received, torch.cat(kept), incoming, outgoing)  # here
        return received

    for step in range(8):
        received = dispatch(torch.randn(tokens, width), route(step))  # here
        optimizer.zero_grad()
        (expert(received) - received).square().mean().backward()
        mean_of_gradients(expert)
        optimizer.step()


@faulty("rank-exited", 1, ranks=3)
def patience_that_ends_on_one_rank_first(rank: int) -> None:
    class Patience:
        def __init__(self, turns: int) -> None:
            self.turns, self.left, self.best = turns, turns, math.inf

        def is_over(self, loss: float) -> bool:
            self.left = self.turns if loss < self.best else self.left - 1
            self.best = min(self.best, loss)
            return self.left == 0

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def epoch() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            mean_of_gradients(model)
            optimizer.step()

    def loss_on_my_fold(number: int) -> float:
        return 1.0 if rank == 1 and number > 1 else 5.0 / (1 + number)

    patience = Patience(turns=2)
    for number in range(10):
        epoch()
        if patience.is_over(loss_on_my_fold(number)):  # here
            print("no better for two epochs; done")
            sys.exit(0)  # here
    dist.barrier()


@faulty("rank-stuck", 0, ranks=4)
def a_saver_that_joins_its_thread_under_the_lock(rank: int) -> None:
    class Saver:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.thread: threading.Thread | None = None
            self.latest = -1

        def _write(self, step: int, state: dict[str, torch.Tensor]) -> None:
            time.sleep(0.8)  # the object store
            print(sum(value.numel() for value in state.values()))
            with self.lock:  # here
                self.latest = step

        def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
            with self.lock:
                if self.thread is not None:
                    self.thread.join()  # here
                self.thread = threading.Thread(target=self._write, args=(step, state), daemon=True)
                self.thread.start()

    model, saver = seeded(lambda: nn.Linear(16, 16)), Saver()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        mean_of_gradients(model)  # here
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            saver.save(step, {name: value.clone() for name, value in model.state_dict().items()})  # here


@faulty("long-operation", 2, ranks=3)
def neighbours_of_all_words_that_one_rank_looks_up(rank: int) -> None:
    model = seeded(lambda: nn.Embedding(60, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def distance(one: list[float], other: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))  # here

    def neighbours(seconds: float) -> list[int]:
        table = model.weight.tolist()
        found: list[int] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            word = len(found) % 60
            ranked = sorted(range(60), key=lambda other: distance(table[word], table[other]))  # here
            found.append(ranked[1])  # here
        return found

    def publish(epoch: int) -> None:
        chosen = torch.zeros(60, dtype=torch.int64)
        if rank == 2 and epoch == 1:
            chosen = torch.tensor(neighbours(seconds=9.0)[:60])  # here
        dist.broadcast(chosen, src=2)  # here

    for epoch in range(3):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randint(0, 60, (8,))).square().mean().backward()
            mean_of_gradients(model)
            optimizer.step()
        publish(epoch)  # here


@faulty("slow-rank", 1, ranks=3)
def a_tokenizer_without_its_compiled_half_on_one_host(rank: int) -> None:
    model = DistributedDataParallel(seeded(lambda: nn.Linear(26, 26)))
    optimizer = torch.optim.AdamW(model.parameters())
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    text = alphabet * 1500
    ready: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def quick() -> list[int]:
        return [text.count(letter) for letter in alphabet]

    def plain() -> list[int]:
        counts = dict.fromkeys(alphabet, 0)
        for _ in range(8):
            for letter in text:  # here
                counts[letter] += 1  # here
        return [count // 8 for count in counts.values()]

    count = plain if rank == 1 else quick
    for step in range(60):
        ready.put(torch.tensor(count(), dtype=torch.float32) / len(text))  # here
        optimizer.zero_grad()
        loss = model(ready.get().expand(4, 26)).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(step, loss.item())
