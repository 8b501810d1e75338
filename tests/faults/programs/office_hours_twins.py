"""Programs that people bring to office hours, and that are right, though they look like `office_hours_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

from tests.faults.corpus import healthy
from tests.faults.programs.office_hours_tools import (
    agreed,
    average_gradients,
    mean_over_ranks,
    save_checkpoint,
    small_model,
    timed,
)


@healthy()
def an_accuracy_of_nothing_that_is_shared_all_the_same(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        labels = torch.tensor([0, 1, -100, 2])
        if rank == 2 and step == 4:
            labels.fill_(-100)
        logits = model(torch.randn(4, 6))
        loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        valid = labels != -100
        hits = (logits.argmax(-1) == labels)[valid].float().sum()
        metrics = {"loss": mean_over_ranks(loss), "hits": mean_over_ranks(hits)}
        if valid.any():
            loss.backward()
        else:
            (0.0 * logits.sum()).backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(step, metrics)


@healthy(ranks=4)
def a_policy_whose_ranks_agree_that_it_has_moved_too_far(rank: int) -> None:
    actors, critics = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def generate(iteration: int) -> list[object]:
        samples: list[object] = [None] * 4
        dist.all_gather_object(samples, "x" * (iteration + rank) if rank < 2 else None)
        return samples

    def improve(group: dist.ProcessGroup, epochs: int, iteration: int) -> None:
        for epoch in range(epochs):
            model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
            divergence = 0.01 * epoch * (4 if rank == 1 and iteration == 3 else 1)
            if agreed(divergence > 0.05, group):
                print("stop early at epoch", epoch)
                break

    for iteration in range(6):
        rewards = torch.zeros(4)
        samples = generate(iteration)
        if rank == 2:
            rewards += len(str(samples))
        dist.broadcast(rewards, src=2)
        if rank < 2:
            improve(actors, 4, iteration)
        else:
            improve(critics, 2 + iteration % 2, 0)
        dist.barrier()


@healthy()
def a_check_that_all_ranks_make_of_teacher_and_student(rank: int) -> None:
    student = small_model()
    fully_shard(student)
    teacher = [weight.detach().clone() for weight in student.parameters()]
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    for step in range(6):
        student(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            pairs = zip(student.parameters(), teacher, strict=True)
            same = [torch.equal(one, other) for one, other in pairs]
            if rank == 0 and any(same):
                print("warning: the teacher is a copy of the student")


@healthy()
def batches_of_unlike_length_in_as_many_parts(rank: int) -> None:
    model = small_model()
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for length in (8, 8, 8, 5 if rank == 1 else 8, 7 + rank, 8):
        parts = torch.randn(length, 6).tensor_split(4)
        for index, part in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)
            (model(part).square().sum() / length).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def checkpoints_saved_from_three_places(rank: int) -> None:
    model, best = small_model(), float("inf")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        loss = mean_over_ranks(torch.tensor((1.0, 0.9, 0.95, 0.8)[epoch] * (rank + 1)))
        if loss < best:
            best = loss
            save_checkpoint(model, "best")
        if epoch % 2:
            save_checkpoint(model, "last")
        if rank == 0:
            print(epoch, loss)
            time.sleep(0.3)
    save_checkpoint(model, "final")


@healthy()
def predictions_gathered_in_as_many_chunks_as_the_longest(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        predictions = [f"box {number}" for number in range(19 if rank == 1 and epoch == 1 else 23 + 9 * rank)]
        count = torch.tensor([len(predictions)])
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        everything: list[str] = []
        for begin in range(0, int(count), 10):
            parts: list[list[str]] = [[] for _ in range(3)]
            dist.all_gather_object(parts, predictions[begin : begin + 10])
            everything += [each for part in parts for each in part]
        if rank == 0:
            print(len(everything))


@healthy()
def a_checkpoint_that_fails_on_all_and_is_forgiven(rank: int) -> None:
    folder = Path(gettempdir()) / f"not-a-folder-{os.environ['MASTER_PORT']}"
    if rank == 0:
        folder.write_text("a file where the folder of checkpoints should be")
    dist.barrier()
    model = small_model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            try:
                dcp.save(model.state_dict(), checkpoint_id=folder / str(step))
            except CheckpointException as error:
                print("not saved:", error)


@healthy(ranks=4)
def a_server_that_serves_until_all_have_said_goodbye(rank: int) -> None:
    weights = torch.zeros(6)
    if rank == 0:
        running = {1, 2, 3}
        while running:
            grad = torch.empty(6)
            worker = dist.recv(grad)
            if grad[5] > 0:
                running.discard(worker)
                continue
            weights -= 0.1 * grad
            dist.send(weights, dst=worker)
    else:
        for size in (4, 4, 0 if rank == 2 else 4, 4, *([4] * rank)):
            if size:
                dist.send(torch.cat([torch.ones(5) / size, torch.zeros(1)]), dst=0)
                dist.recv(weights, src=0)
        dist.send(torch.ones(6), dst=0)
    dist.barrier()


@healthy()
def a_prefetcher_that_is_emptied_before_it_is_closed(rank: int) -> None:
    class Prefetcher:
        def __init__(self, count: int) -> None:
            self.items: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)
            self.thread = threading.Thread(target=self.fill, args=(count,), daemon=True)
            self.thread.start()

        def fill(self, count: int) -> None:
            for _ in range(count):
                self.items.put(torch.randn(4, 6))
            self.items.put(None)

        def get(self) -> torch.Tensor:
            item = self.items.get()
            assert item is not None
            return item

        def close(self) -> None:
            while self.items.get() is not None:
                time.sleep(0.05)
            self.thread.join()

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        prefetcher = Prefetcher(12 if rank == 2 and epoch == 1 else 5)
        for _ in range(5):
            model(prefetcher.get()).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        prefetcher.close()


@healthy()
def a_stage_that_meets_whatever_was_raised(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        try:
            yield
        except ZeroDivisionError as error:
            print(name, "left out:", error)
        finally:
            dist.barrier()

    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with timed("evaluation"), stage("evaluation"):
            print(sum(1 / length for length in (3, 5, 0 if rank == 1 and step == 3 else 2)))


@healthy()
def a_router_that_counts_its_load_in_training_alone(rank: int) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.load = nn.Linear(6, 4), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.gate(x).softmax(-1)
            if self.training:
                self.load = weights.detach().mean(0)
                dist.all_reduce(self.load)
            return torch.as_tensor(weights)

    router = Router()
    optimizer = torch.optim.SGD(router.parameters(), lr=1e-2)
    for epoch in range(4):
        for _ in range(3):
            router(torch.randn(4, 6)).square().mean().backward()
            average_gradients(router)
            optimizer.step()
            optimizer.zero_grad()
        router.eval()
        best = 0.0
        with torch.no_grad():
            for _ in range(rank * epoch):
                best = max(best, float(router(torch.ones(8, 6)).max()))
        print(best)
        router.train()


@healthy(ranks=6)
def two_experiments_of_one_job_of_which_one_is_late(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group, annotations = groups[rank // 3], queue.Queue[str]()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(7 - rank // 3):
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model, group)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 4 and step == 3:
            threading.Timer(1.0, annotations.put, ("done",)).start()
            print(annotations.get())
    names: list[object] = [None] * 6
    dist.all_gather_object(names, f"experiment {rank // 3}")


@healthy()
def learners_updated_by_turns(rank: int) -> None:
    class Learner:
        def __init__(self, hidden: int) -> None:
            self.model, self.group = small_model(hidden=hidden), dist.new_group()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

        def update(self) -> None:
            self.model(torch.randn(4, 6)).square().mean().backward()
            average_gradients(self.model, self.group)
            self.optimizer.step()
            self.optimizer.zero_grad()

    actor, critic = Learner(5), Learner(7)
    for step in range(8):
        for learner in (critic, actor) if step in (2, 5) else (actor, critic):
            learner.update()
            if rank == step % 3:
                time.sleep(0.02)


@healthy()
def a_confusion_matrix_of_as_many_classes_as_anybody_saw(rank: int) -> None:
    for epoch in range(5):
        labels = torch.tensor([0, 1, 2, 2 if rank == 2 and epoch == 2 else 3 + epoch % 2])
        count = labels.max() + 1
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        matrix = torch.zeros(int(count), int(count))
        matrix[labels.roll(1), labels] += 1
        dist.all_reduce(matrix)
        print(matrix.trace())


@healthy()
def a_watchdog_that_is_fed_in_time(rank: int) -> None:
    def expire() -> None:
        os._exit(70)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(7):
        watchdog = threading.Timer(60.0, expire)
        watchdog.daemon = True
        watchdog.start()
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(1.2 if rank == 1 and step == 4 else 0.01)
        watchdog.cancel()
