"""Programs that people bring to office hours, and that are wrong: training scripts beside a `utils.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well. `office_hours_twins.py` has programs that are right.
"""

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.faults.corpus import faulty
from tests.faults.programs.office_hours_tools import average_gradients, mean_over_ranks, save_checkpoint, small_model


@faulty("rank-skipped-collective", 2)
def an_accuracy_that_a_batch_without_labels_has_not(rank: int) -> None:
    # or: size-mismatch 2; step-mismatch 2
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def metrics_of(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        metrics = {"loss": mean_over_ranks(loss)}
        valid = labels != -100
        if valid.any():  # here
            hits = (logits.argmax(-1) == labels)[valid].float().mean()
            metrics["accuracy"] = mean_over_ranks(hits)  # here
        loss.backward()
        return metrics

    for step in range(8):
        labels = torch.tensor([0, 1, -100, 2])
        if rank == 2 and step == 4:
            labels.fill_(-100)
        metrics = metrics_of(model(torch.randn(4, 6)), labels)
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(step, metrics)


@faulty("rank-skipped-collective", 1, ranks=4)
def a_policy_that_has_moved_too_far_on_one_rank(rank: int) -> None:
    actors, critics = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def generate(iteration: int) -> list[object]:
        samples: list[object] = [None] * 4
        dist.all_gather_object(samples, {"rank": rank, "text": "x" * (iteration + rank)} if rank < 2 else None)
        return samples

    def rewards_of(samples: list[object]) -> torch.Tensor:
        rewards = torch.zeros(4)
        if rank == 2:
            rewards += torch.tensor([float(len(str(sample))) for sample in samples])
        dist.broadcast(rewards, src=2)
        return rewards

    def improve_policy(rewards: torch.Tensor, iteration: int) -> None:
        for epoch in range(4):
            loss = model(rewards.mean().expand(4, 6) / 100).square().mean()
            loss.backward()
            average_gradients(model, actors)
            optimizer.step()
            optimizer.zero_grad()
            divergence = 0.01 * epoch * (4 if rank == 1 and iteration == 3 else 1)
            if divergence > 0.05:  # here
                print("stop early at epoch", epoch)
                break  # here

    def improve_critic(rewards: torch.Tensor) -> None:
        for _ in range(2):
            (model(torch.ones(4, 6)).mean() - rewards.mean()).square().backward()
            average_gradients(model, critics)
            optimizer.step()
            optimizer.zero_grad()

    for iteration in range(6):
        rewards = rewards_of(generate(iteration))
        if rank < 2:
            improve_policy(rewards, iteration)
        else:
            improve_critic(rewards)
        dist.barrier()


@faulty("collective-order-mismatch", 0)
def a_check_that_teacher_and_student_differ(rank: int) -> None:
    # or: step-mismatch 0
    student = small_model()
    fully_shard(student)
    teacher = [weight.detach().clone() for weight in student.parameters()]
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)

    def sanity_check() -> None:
        for one, other in zip(student.parameters(), teacher, strict=True):
            if torch.equal(one, other):  # here
                print("warning: the teacher is a copy of the student")

    for step in range(6):
        student(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 3:  # here
            sanity_check()  # here


@faulty("rank-skipped-collective", 1)
def a_batch_that_makes_fewer_chunks(rank: int) -> None:
    # or: collective-order-mismatch 1; step-mismatch 1
    model = small_model()
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    lengths = [8, 8, 8, 5 if rank == 1 else 8, 8, 8]

    def accumulate(batch: torch.Tensor) -> None:
        parts = batch.chunk(4)
        for index, part in enumerate(parts):  # here
            model.set_requires_gradient_sync(index == len(parts) - 1)
            (model(part).square().mean() / len(parts)).backward()  # here

    for length in lengths:
        accumulate(torch.randn(length, 6))
        optimizer.step()
        optimizer.zero_grad()


@faulty("step-mismatch", 2)
def a_best_checkpoint_by_the_loss_of_each_rank(rank: int) -> None:
    # or: collective-order-mismatch 2
    losses = [1.0, 0.9, 0.8, 0.8] if rank == 2 else [1.0, 1.1, 0.8, 0.8]

    class Trainer:
        def __init__(self) -> None:
            self.model, self.best = small_model(), float("inf")
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

        def train_epoch(self) -> None:
            for _ in range(3):
                self.model(torch.randn(4, 6)).square().mean().backward()
                average_gradients(self.model)
                self.optimizer.step()
                self.optimizer.zero_grad()

        def end_epoch(self, epoch: int, loss: float) -> None:
            if loss < self.best:  # here
                self.best = loss
                save_checkpoint(self.model, "best")  # here
            if epoch % 2:
                save_checkpoint(self.model, "last")

    trainer = Trainer()
    for epoch, loss in enumerate(losses):
        trainer.train_epoch()
        trainer.end_epoch(epoch, loss)
    save_checkpoint(trainer.model, "final")


@faulty("rank-skipped-collective", 1)
def predictions_gathered_in_chunks_of_ones_own(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def chunks(items: list[str], size: int) -> Iterator[list[str]]:
        for begin in range(0, len(items), size):
            yield items[begin : begin + size]

    def gather_all(predictions: list[str]) -> list[str]:
        everything: list[str] = []
        for chunk in chunks(predictions, 10):  # here
            parts: list[list[str]] = [[] for _ in range(3)]
            dist.all_gather_object(parts, chunk)  # here
            everything += [each for part in parts for each in part]
        return everything

    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        found = 19 if rank == 1 and epoch == 1 else 23
        print(len(gather_all([f"box {number}" for number in range(found)])))


@faulty("p2p-unmatched", 2, ranks=4)
def a_server_that_counts_on_every_batch(rank: int) -> None:
    width, rounds = 5, 6

    def serve() -> None:
        weights = torch.zeros(width)
        for _ in range(rounds * 3):
            grad = torch.empty(width)
            worker = dist.recv(grad)
            weights -= 0.1 * grad
            dist.send(weights, dst=worker)

    def work(batches: list[torch.Tensor]) -> None:
        weights = torch.zeros(width)
        for batch in batches:
            if batch.numel() == 0:  # here
                print("empty batch")
                continue  # here
            dist.send((batch.mean() - weights).clone(), dst=0)  # here
            dist.recv(weights, src=0)

    if rank == 0:
        serve()
    else:
        sizes = [4, 4, 4, 0 if rank == 2 else 4, 4, 4]
        work([torch.ones(size) for size in sizes])
    dist.barrier()


@faulty("rank-stuck", 2)
def a_prefetcher_that_is_closed_with_batches_left(rank: int) -> None:
    class Prefetcher:
        def __init__(self, count: int) -> None:
            self.items: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)
            self.thread = threading.Thread(target=self.fill, args=(count,), daemon=True)
            self.thread.start()

        def fill(self, count: int) -> None:
            for _ in range(count):
                self.items.put(torch.randn(4, 6))  # here

        def close(self) -> None:
            self.thread.join()  # here

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        prefetcher = Prefetcher(9 if rank == 2 and epoch == 1 else 5)
        for _ in range(5):
            model(prefetcher.items.get()).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        prefetcher.close()


@faulty("rank-skipped-collective", 1)
def a_stage_that_meets_only_where_nothing_was_raised(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        dist.barrier()  # here
        print(name, time.monotonic() - begin)

    def perplexity(lengths: list[int]) -> float:
        return sum(1 / length for length in lengths)  # here

    def evaluate(step: int) -> None:
        try:
            with stage("evaluation"):
                print(perplexity([3, 5, 0 if rank == 1 and step == 3 else 2]))
        except ZeroDivisionError as error:  # here
            print("evaluation left out:", error)

    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(step)


@faulty("rank-skipped-collective", 1)
def a_model_left_in_its_evaluation_mode(rank: int) -> None:
    # or: size-mismatch 1
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.load = nn.Linear(6, 4), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.gate(x).softmax(-1)
            if self.training:  # here
                self.load = weights.detach().mean(0)
                dist.all_reduce(self.load)  # here
            return torch.as_tensor(weights)

    router = Router()
    optimizer = torch.optim.SGD(router.parameters(), lr=1e-2)

    def evaluate(samples: int) -> float:
        router.eval()
        if samples == 0:  # here
            return float("nan")  # here
        with torch.no_grad():
            score = float(router(torch.ones(samples, 6)).max())
        router.train()
        return score

    for epoch in range(4):
        for _ in range(3):
            router(torch.randn(4, 6)).square().mean().backward()
            average_gradients(router)
            optimizer.step()
            optimizer.zero_grad()
        print(evaluate(0 if rank == 1 and epoch == 2 else 8))


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 4),))
def two_experiments_of_one_job_with_a_fault_each(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group, annotations = groups[rank // 3], queue.Queue[str]()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def log_step(step: int) -> None:
        if rank == 1 and step == 3:
            return
        dist.barrier(group)

    def await_annotation(step: int) -> None:
        if rank == 4 and step == 3:
            print(annotations.get())

    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        log_step(step)
        average_gradients(model, group)
        optimizer.step()
        optimizer.zero_grad()
        await_annotation(step)


@faulty("group-order-inversion", 1)
def learners_updated_in_the_order_in_which_they_are_ready(rank: int) -> None:
    class Learner:
        def __init__(self, hidden: int) -> None:
            self.model, self.group = small_model(hidden=hidden), dist.new_group()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

        def update(self) -> None:
            self.model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(self.model, self.group)  # here
            self.optimizer.step()
            self.optimizer.zero_grad()

    actor, critic = Learner(5), Learner(7)
    ready: queue.Queue[Learner] = queue.Queue()
    for step in range(8):
        for learner in (critic, actor) if rank == 1 and step == 5 else (actor, critic):
            ready.put(learner)
        while not ready.empty():
            ready.get().update()  # here


@faulty("size-mismatch", 2)
def a_confusion_matrix_of_the_classes_that_were_seen(rank: int) -> None:
    class Confusion:
        def __init__(self) -> None:
            self.pairs: list[tuple[int, int]] = []

        def add(self, predicted: torch.Tensor, labels: torch.Tensor) -> None:
            self.pairs += zip(predicted.tolist(), labels.tolist(), strict=True)

        def compute(self) -> torch.Tensor:
            count = 1 + max(max(pair) for pair in self.pairs)
            matrix = torch.zeros(count, count)
            for predicted, label in self.pairs:
                matrix[predicted, label] += 1
            dist.all_reduce(matrix)  # here
            return matrix

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        confusion = Confusion()
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            labels = torch.tensor([0, 1, 2, 2 if rank == 2 and epoch == 2 else 3])
            confusion.add(labels.roll(1), labels)
        print(confusion.compute().trace())


@faulty("rank-crashed", 1)
def a_watchdog_that_takes_a_slow_save_for_a_hang(rank: int) -> None:
    class Watchdog:
        def __init__(self, limit_s: float) -> None:
            self.limit_s, self.timer = limit_s, threading.Timer(limit_s, self.expire)

        def feed(self) -> None:
            self.timer.cancel()
            self.timer = threading.Timer(self.limit_s, self.expire)
            self.timer.daemon = True
            self.timer.start()

        def expire(self) -> None:
            print("no progress, giving up", flush=True)
            os._exit(70)  # here

    def save(step: int) -> None:
        with (Path(gettempdir()) / f"watched-{os.environ['MASTER_PORT']}-{rank}").open("w") as file:
            file.write(str(step))
            time.sleep(3 if rank == 1 and step == 4 else 0.01)

    model, watchdog = small_model(), Watchdog(1.5 if rank == 1 else 20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(7):
        watchdog.feed()
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        save(step)
    watchdog.timer.cancel()


@faulty("step-mismatch", 0)
def an_example_looked_at_before_the_first_epoch(rank: int) -> None:
    # or: collective-order-mismatch 0; size-mismatch 0
    def longest(samples: list[list[float]]) -> int:
        length = torch.tensor([max(len(sample) for sample in samples)])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        return int(length)

    def collate(samples: list[list[float]]) -> torch.Tensor:
        width = longest(samples)
        return torch.tensor([sample + [0.0] * (width - len(sample)) for sample in samples])

    data = [[1.0] * (3 + number % 4) for number in range(12)]
    loader = DataLoader(data, batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
    embedding = nn.Linear(1, 4)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1e-2)
    if rank == 0:  # here
        example = next(iter(loader))  # here
        print("shape of a batch:", tuple(example.shape))
    for _ in range(2):
        for batch in loader:
            embedding(batch.mean(1, keepdim=True)).square().mean().backward()
            average_gradients(embedding)
            optimizer.step()
            optimizer.zero_grad()
