"""Trainers that guests wrote: GANs, distillation, curricula, early stopping and checkpoints, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.faults.corpus import faulty, healthy


def averaged(model: nn.Module, ranks: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks


@faulty("rank-skipped-collective", 2)
def a_callback_that_tells_its_own_trainer_to_stop(rank: int) -> None:
    class Callback:
        def __init__(self) -> None:
            self.best, self.bad = float("inf"), 0

        def on_epoch_end(self, trainer: "Trainer", loss: float) -> None:
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(self.best, loss)
            trainer.should_stop = self.bad >= 2

    class Trainer:
        def __init__(self) -> None:
            self.model, self.should_stop = nn.Linear(4, 1), False
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.callback = Callback()

        def epoch(self, number: int) -> float:
            for _ in range(3):
                self.optimizer.zero_grad()
                loss = self.model(torch.ones(2, 4)).pow(2).mean()
                loss.backward()
                averaged(self.model, 3)
                self.optimizer.step()
            return [1.0, 0.9, 0.95, 0.97, 0.99][number] if rank == 2 else 1.0 / (number + 1)

        def fit(self) -> None:
            for number in range(5):
                loss = self.epoch(number)
                total = torch.tensor(loss)
                dist.all_reduce(total)
                self.callback.on_epoch_end(self, loss)
                if self.should_stop:
                    break  # here
            dist.barrier()

    Trainer().fit()


@healthy()
def a_callback_that_stops_all_trainers(rank: int) -> None:
    model, bad, best = nn.Linear(4, 1), 0, float("inf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(6):
        for _ in range(2 + epoch % 2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).mean().backward()
            averaged(model, 3)
            optimizer.step()
        loss = torch.tensor([1.0, 0.9, 0.95, 0.97, 0.99, 1.0][epoch] + 0.01 * rank)
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)
        bad = 0 if loss < best else bad + 1
        best = min(best, float(loss))
        if bad >= 2:
            break
    dist.barrier()


@faulty("step-mismatch", 1)
def a_critic_trained_once_more_on_one_rank(rank: int) -> None:
    # or: rank-skipped-collective 1; size-mismatch 1
    generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for iteration in range(6):
        rounds = 3 if rank == 1 and iteration == 3 else 2
        for _ in range(rounds):
            of_critic.zero_grad()
            (critic(torch.ones(2, 6)).mean() - critic(generator(torch.ones(2, 3)).detach()).mean()).backward()
            averaged(critic, 3)  # here
            of_critic.step()
        of_generator.zero_grad()
        critic(generator(torch.ones(2, 3))).mean().backward()
        averaged(generator, 3)
        of_generator.step()


@healthy()
def a_critic_trained_by_a_schedule(_rank: int) -> None:
    generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for iteration in range(6):
        for _ in range(5 if iteration < 2 else 1 + iteration % 3):
            of_critic.zero_grad()
            (critic(torch.ones(2, 6)).mean() - critic(generator(torch.ones(2, 3)).detach()).mean()).backward()
            averaged(critic, 3)
            of_critic.step()
        if iteration % 2:
            continue
        of_generator.zero_grad()
        critic(generator(torch.ones(2, 3))).mean().backward()
        averaged(generator, 3)
        of_generator.step()


@faulty("rank-skipped-collective", 2, ranks=4)
def a_student_that_has_learned_enough(rank: int) -> None:
    teacher = 0
    student = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    students = dist.new_group([1, 2, 3])

    def distil(batch: int) -> None:
        logits = torch.full((2, 3), float(batch))
        dist.broadcast(logits, src=teacher)
        if rank == teacher:
            return
        loss = 0.0 if rank == 2 and batch == 4 else 1.0
        if loss < 0.01:
            return  # here
        optimizer.zero_grad()
        nn.functional.mse_loss(student(torch.ones(2, 4)), logits).backward()
        flat = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        dist.all_reduce(flat, group=students)  # here
        optimizer.step()

    for batch in range(8):
        distil(batch)


@healthy(ranks=4)
def a_teacher_on_two_ranks_and_students_on_two(rank: int) -> None:
    teachers, students = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(5):
        if rank < 2:
            part = model(torch.ones(2, 4)).detach()
            dist.all_reduce(part, group=teachers)
            dist.send(part, dst=rank + 2)
        else:
            logits = torch.zeros(2, 3)
            dist.recv(logits, src=rank - 2)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.ones(2, 4)), logits).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=students)
            optimizer.step()
        if batch == 2:
            dist.barrier()


@faulty("size-mismatch", 1)
def a_curriculum_that_follows_the_local_accuracy(rank: int) -> None:
    length = 4
    for step in range(7):
        tokens = torch.ones(length)
        everyone = torch.zeros(3 * length)
        dist.all_gather_into_tensor(everyone, tokens)  # here
        accuracy = 0.9 if rank == 1 and step == 3 else 0.4
        length += 4 if accuracy > 0.8 else 0


@healthy()
def a_curriculum_that_follows_the_mean_accuracy(rank: int) -> None:
    length = 4
    for step in range(7):
        everyone = torch.zeros(3 * length)
        dist.all_gather_into_tensor(everyone, torch.ones(length))
        accuracy = torch.tensor(0.5 * step if rank == 1 else 0.4)
        dist.all_reduce(accuracy)
        length += 4 if accuracy / 3 > 0.8 else 0


@faulty("collective-order-mismatch", 0)
def a_save_that_waits_for_ranks_that_do_not_save(rank: int) -> None:
    # or: step-mismatch 0
    folder = Path(mkdtemp())

    class Saver:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def save(self, step: int) -> None:
            torch.save(self.model.state_dict(), folder / f"{step}.pt")
            dist.barrier()  # here

    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(model)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        averaged(model, 3)
        optimizer.step()
        if rank == 0 and step == 3:
            saver.save(step)


@healthy()
def a_save_around_which_all_wait(rank: int) -> None:
    folder, model = Path(mkdtemp()), nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        averaged(model, 3)
        optimizer.step()
        if step % 3 == 2:
            dist.barrier()
            if rank == 0:
                torch.save(model.state_dict(), folder / f"{step}.pt")
                time.sleep(0.3)
            dist.barrier()


@faulty("root-mismatch", 1, ranks=4)
def the_best_of_a_population_as_one_rank_sees_it(rank: int) -> None:
    weights = torch.full((5,), float(rank))
    for generation in range(6):
        fitness = torch.zeros(4)
        fitness[(generation * 3) % 4] = 1.0
        if rank == 1 and generation == 4:
            fitness[3] = 2.0
        best = int(fitness.argmax())
        dist.broadcast(weights, src=best)  # here
        weights += 0.1 * rank


@healthy(ranks=4)
def the_best_of_a_population_that_all_agree_on(rank: int) -> None:
    weights = torch.full((5,), float(rank))
    for generation in range(6):
        mine = torch.tensor([float((rank * 7 + generation * 5) % 11)])
        fitness = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(fitness, mine)
        dist.broadcast(weights, src=int(torch.cat(fitness).argmax()))
        weights += 0.1 * rank


@faulty("rank-skipped-collective", 3, ranks=4)
def an_accumulation_twice_as_long_on_one_rank(rank: int) -> None:
    # or: step-mismatch 3; uneven-inputs 3
    accumulate = 4 if rank == 3 else 2
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(16):
        model(torch.ones(2, 5)).sum().backward()
        if (micro + 1) % accumulate == 0:
            averaged(model, 4)  # here
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@healthy(ranks=4)
def an_accumulation_that_grows_on_all(_rank: int) -> None:
    model, accumulate, seen = nn.Linear(5, 2), 1, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(16):
        model(torch.ones(2, 5)).sum().backward()
        seen += 1
        if seen == accumulate:
            averaged(model, 4)
            optimizer.step()
            optimizer.zero_grad()
            seen, accumulate = 0, min(4, accumulate + 1)
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_scaler_that_finds_an_overflow_alone(rank: int) -> None:
    # or: step-mismatch 1
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Scaler:
        scale = 1024.0

        def step(self, number: int) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if rank == 1 and number == 3:
                gradients[0][0, 0] = float("inf")
            if not all(torch.isfinite(g).all() for g in gradients):
                self.scale /= 2
                return  # here
            for gradient in gradients:
                dist.all_reduce(gradient)  # here
            optimizer.step()

    scaler = Scaler()
    for number in range(6):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * scaler.scale).backward()
        scaler.step(number)
        loss = torch.zeros(3)
        dist.all_reduce(loss)


@healthy()
def a_scaler_that_tells_all_of_an_overflow(rank: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        overflow = torch.tensor(float(rank == 1 and number in (2, 3)))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow:
            continue
        averaged(model, 3)
        optimizer.step()


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        mean = value.mean(0)
        dist.all_reduce(mean)
        return value - mean / dist.get_world_size()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        mean = gradients[0].mean(0)
        dist.all_reduce(mean)
        return gradients[0] - mean / dist.get_world_size()


@faulty("rank-skipped-collective", 1)
def a_norm_whose_backward_one_rank_does_not_need(rank: int) -> None:
    # or: collective-order-mismatch 1; size-mismatch 1
    body, head = nn.Linear(4, 6), nn.Linear(6, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        body.requires_grad_(not (rank == 1 and step == 3))
        loss = head(Normed.apply(body(torch.ones(3, 4)))).sum()
        loss.backward()  # here
        averaged(head, 3)
        optimizer.step()


@healthy()
def a_norm_whose_backward_nobody_needs_at_first(_rank: int) -> None:
    body, head = nn.Linear(4, 6), nn.Linear(6, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        body.requires_grad_(step >= 3)
        head(Normed.apply(body(torch.ones(3, 4)))).sum().backward()
        averaged(head, 3)
        averaged(body, 3)
        optimizer.step()


def decoded(samples: list[int], bad: set[int]) -> Iterator[torch.Tensor]:
    for sample in samples:
        if sample in bad:
            continue
        yield torch.full((2, 4), float(sample))


@faulty("uneven-inputs", 1)
def a_generator_that_leaves_out_what_it_cannot_decode(rank: int) -> None:
    # or: rank-skipped-collective 1
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in decoded(list(range(8)), {3, 5} if rank == 1 else set()):
        optimizer.zero_grad()
        model(batch).sum().backward()
        averaged(model, 3)  # here
        optimizer.step()


@faulty("uneven-inputs", 2)
def a_generator_that_ends_before_a_last_metric(rank: int) -> None:
    # or: rank-skipped-collective 2
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = decoded(list(range(9)), {2} if rank == 2 else set())
    while (batch := next(stream, None)) is not None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        averaged(model, 3)  # here
        optimizer.step()
    score = torch.zeros(4)
    dist.all_reduce(score)


@healthy()
def a_generator_that_asks_whether_all_have_a_batch(rank: int) -> None:
    model = nn.Linear(4, 1)
    stream = decoded(list(range(9)), {2, 4} if rank == 2 else {1})
    while True:
        batch = next(stream, None)
        there = torch.tensor(float(batch is not None))
        dist.all_reduce(there, op=dist.ReduceOp.MIN)
        if not there or batch is None:
            break
        model.zero_grad()
        model(batch).sum().backward()
        averaged(model, 3)


@faulty("uneven-inputs", 0)
def a_stream_that_filters_its_shard(rank: int) -> None:
    class Filtered(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(12):
                if not (rank == 0 and number % 5 == 4):
                    yield torch.full((4,), float(number))

    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Filtered(), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()
    dist.barrier()
    del model


@healthy()
def a_stream_cut_to_the_shortest_shard(rank: int) -> None:
    class Filtered(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(12):
                if not (rank == 0 and number % 5 == 4):
                    yield torch.full((4,), float(number))

    count = torch.tensor(sum(1 for _ in DataLoader(Filtered(), batch_size=2)))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, _ in zip(DataLoader(Filtered(), batch_size=2), range(int(count)), strict=False):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    dist.barrier()
    del model


@faulty("uneven-inputs", 2)
def a_join_that_does_not_cover_the_logged_loss(rank: int) -> None:
    # or: rank-skipped-collective 2
    data = TensorDataset(torch.ones(6 if rank == 2 else 10, 4))
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for (batch,) in DataLoader(data, batch_size=2):
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            logged = loss.detach().clone()
            dist.all_reduce(logged)  # here
    del model


@healthy()
def a_join_with_the_loss_logged_afterwards(rank: int) -> None:
    data = TensorDataset(torch.ones(6 if rank == 2 else 10, 4))
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(())
    with Join([model]):
        for (batch,) in DataLoader(data, batch_size=2):
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    dist.all_reduce(total)
    del model


@faulty("step-mismatch", 1)
def an_evaluation_every_so_many_batches_of_the_own_shard(rank: int) -> None:
    # or: collective-order-mismatch 1; rank-skipped-collective 1
    batches = [12, 9, 12][rank]
    every = batches // 3
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 10):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        averaged(model, 3)
        optimizer.step()
        if step % every == 0:
            correct = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(correct, torch.ones(2))  # here


@healthy()
def evaluations_on_more_occasions_than_one(_rank: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 10):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        averaged(model, 3)
        optimizer.step()
        if step % 4 == 0 or step == 9 or (step < 4 and step & 1):
            correct = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(correct, torch.ones(2))


@faulty("long-operation", 0)
def averaged_weights_hashed_by_rank_0(rank: int) -> None:
    model = nn.Linear(16, 16)
    for epoch in range(3):
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            averaged(model, 3)
        if rank == 0 and epoch == 1:
            end, digest = time.monotonic() + 7, b""
            while time.monotonic() < end:
                digest = hashlib.sha256(digest + bytes(4096)).digest()  # here
        dist.barrier()


@healthy()
def averaged_weights_hashed_by_all(rank: int) -> None:
    model = nn.Linear(16, 16)
    for _ in range(3):
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            averaged(model, 3)
        digest = b""
        for _ in range(2000 * (1 + rank)):
            digest = hashlib.sha256(digest + bytes(4096)).digest()
        dist.barrier()


@faulty("reduce-op-mismatch", 2)
def a_meter_whose_default_was_overridden(rank: int) -> None:
    class Meter:
        def __init__(self, name: str, reduce: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> None:
            self.name, self.values, self.reduce = name, [0.0], reduce

        def sync(self) -> float:
            value = self.reduce(torch.tensor(self.values))
            operation = dist.ReduceOp.SUM if self.reduce is torch.sum else dist.ReduceOp.MAX
            dist.all_reduce(value, op=operation)  # here
            return float(value)

    meters = [Meter("loss"), Meter("accuracy", torch.max if rank == 2 else torch.sum)]
    for step in range(4):
        for meter in meters:
            meter.values.append(float(step))
            meter.sync()


@healthy()
def meters_of_sums_and_of_maxima(_rank: int) -> None:
    for step in range(4):
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            value = torch.tensor(float(step))
            dist.all_reduce(value, op=operation)


@faulty("dtype-mismatch", 1)
def a_loss_that_one_rank_adds_up_in_python(rank: int) -> None:
    running: Any = torch.zeros(())
    for step in range(6):
        loss = torch.tensor(0.5 * step)
        if rank == 1 and step == 3:
            running = torch.tensor(float(running) + float(loss), dtype=torch.float64)
        else:
            running = running + loss
        total = running.clone()
        dist.all_reduce(total)  # here


@healthy()
def losses_of_several_types(_rank: int) -> None:
    for step in range(6):
        total = torch.tensor(0.5 * step, dtype=(torch.float32, torch.float64, torch.float16)[step % 3])
        dist.all_reduce(total)


@faulty("size-mismatch", 2)
def negatives_drawn_with_a_seed_of_its_own(rank: int) -> None:
    draw = random.Random(7)
    for step in range(8):
        if rank == 2 and step == 5:
            draw.seed(rank)
        count = draw.randrange(5, 60)
        negatives = torch.zeros(count)
        dist.broadcast(negatives, src=0)  # here
        dist.barrier()


@healthy()
def negatives_drawn_with_one_seed(_rank: int) -> None:
    draw = random.Random(7)
    for _ in range(8):
        negatives = torch.zeros(draw.randrange(5, 60))
        dist.broadcast(negatives, src=0)
        dist.barrier()


@faulty("slow-rank", 2)
def an_augmentation_that_one_rank_does_in_python(rank: int) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def augment(image: list[float], passes: int) -> list[float]:
        end = time.monotonic() + passes * 0.1
        while time.monotonic() < end:
            image = [0.5 * value + 0.1 for value in image]  # here
        return image

    for _ in range(30):
        image = augment([1.0] * 64, 3 if rank == 2 else 0)
        optimizer.zero_grad()
        model(torch.tensor(image[:8])).sum().backward()
        averaged(model, 3)
        optimizer.step()


@healthy()
def a_warm_up_that_only_the_first_steps_pay(rank: int) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        time.sleep(0.4 if step == rank else 0.02)
        optimizer.zero_grad()
        model(torch.ones(8)).sum().backward()
        averaged(model, 3)
        optimizer.step()


@faulty("rank-crashed", 2)
def a_vocabulary_without_the_new_word(rank: int) -> None:
    vocabulary = {word: index for index, word in enumerate(["the", "cat", "sat", "on", "a", "mat"])}
    table = nn.Embedding(8, 4)
    for sentence in ("the cat sat", "a cat", "the dog sat" if rank == 2 else "the mat sat"):
        indices = [vocabulary[word] for word in sentence.split()]  # here
        table.zero_grad()
        table(torch.tensor(indices)).sum().backward()
        averaged(table, 3)


@healthy()
def a_vocabulary_with_a_fallback(rank: int) -> None:
    vocabulary = {word: index for index, word in enumerate(["the", "cat", "sat", "on", "a", "mat"])}
    table = nn.Embedding(8, 4)
    for sentence in ("the cat sat", "a cat", "the dog sat" if rank == 2 else "the mat sat"):
        indices = []
        for word in sentence.split():
            with contextlib.suppress(KeyError):
                indices.append(vocabulary[word])
        table.zero_grad()
        table(torch.tensor(indices)).sum().backward()
        averaged(table, 3)
