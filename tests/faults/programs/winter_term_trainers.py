"""Trainers of a winter term: callbacks, teachers, accumulation, custom gradients and checkpoints, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from tests.faults.corpus import faulty, healthy


class Student:
    """A model, its optimizer, and a step that averages gradients by hand."""

    def __init__(self, *, width: int = 6, lr: float = 0.05) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.width = width

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = self.net(torch.full((3, self.width), scale)).square().mean()
        return loss

    def update(self) -> None:
        for weight in self.net.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, scale: float = 1.0) -> float:
        loss = self.loss(scale)
        loss.backward()
        self.update()
        return loss.item()


class Control:
    """What callbacks ask of their trainer."""

    def __init__(self) -> None:
        self.should_stop, self.should_save = False, False


def fit(student: Student, steps: int, callbacks: list[Callable[[int, Control], None]]) -> None:
    control = Control()
    for step in range(steps):
        student.step(1.0 + step)
        for callback in callbacks:
            callback(step, control)
        if control.should_stop:
            break  # the end
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_callback_that_stops_on_the_loss_of_its_rank(rank: int) -> None:
    def stop(step: int, control: Control) -> None:
        control.should_stop = rank == 1 and step == 4

    fit(Student(), 9, [stop])


@healthy()
def a_callback_that_stops_on_the_loss_of_the_worst_rank(rank: int) -> None:
    def stop(step: int, control: Control) -> None:
        flag = torch.tensor(float(rank == 1 and step == 4))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        control.should_stop = bool(flag)

    fit(Student(), 9, [stop])


@faulty("rank-skipped-collective", 2)
def a_best_score_that_one_rank_does_not_see(rank: int) -> None:
    student, best = Student(), 0.0
    scores = [0.2, 0.5, 0.6, 0.7]
    for epoch in range(4):
        for _ in range(3):
            student.step()
        score = 0.4 if rank == 2 and epoch == 2 else scores[epoch]
        if score > best:  # here
            best = score
            state = [student.net.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(state, src=0)  # here
    dist.barrier()


@healthy()
def a_best_score_of_all_ranks(rank: int) -> None:
    student, best = Student(), 0.0
    for epoch in range(4):
        for _ in range(3):
            student.step()
        score = torch.tensor(0.4 if rank == 2 and epoch == 2 else 0.2 + 0.1 * epoch)
        dist.all_reduce(score)
        if score > best:
            best = float(score)
            state = [student.net.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(state, src=0)
    dist.barrier()


class GatherRows(torch.autograd.Function):
    """All ranks' rows, with gradients that come back to their rank."""

    @staticmethod
    def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())  # of contrastive losses
        return torch.cat(parts)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def contrast(student: Student, step: int) -> torch.Tensor:
    rows = student.net[0](torch.full((2, student.width), 1.0 + step))
    everybody = GatherRows.apply(rows)
    return (rows @ everybody.T).logsumexp(1).mean()


@faulty("rank-skipped-collective", 0)
def a_contrastive_loss_left_out_for_a_batch_without_pairs(rank: int) -> None:
    student = Student()
    for step in range(6):
        loss = student.loss()
        if not (rank == 0 and step == 3):  # here
            loss = loss + contrast(student, step)  # here
        loss.backward()
        student.update()


@healthy()
def a_contrastive_loss_weighted_with_nothing(rank: int) -> None:
    student = Student()
    for step in range(6):
        weight = 0.0 if rank == 0 and step == 3 else 1.0
        (student.loss() + weight * contrast(student, step)).backward()
        student.update()


@faulty("rank-skipped-collective", 1)
def a_contrastive_loss_whose_gradient_one_rank_does_not_want(rank: int) -> None:
    student = Student()
    for step in range(6):
        extra = contrast(student, step)
        if rank == 1 and step == 2:
            extra = extra.detach()  # here
        (student.loss() + extra).backward()  # here
        student.update()


@faulty("rank-skipped-collective", 2)
def an_average_of_weights_that_one_rank_begins_late(rank: int) -> None:
    # or: step-mismatch 2
    student = Student()
    average = copy.deepcopy(student.net)
    begin = 4 if rank == 2 else 3
    for step in range(7):
        student.step()
        if step >= begin:  # here
            for mean, weight in zip(average.parameters(), student.net.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.1)
                dist.broadcast(mean.data, src=0)  # here


@healthy()
def an_average_of_weights_begun_halfway(_rank: int) -> None:
    student = Student()
    average = copy.deepcopy(student.net)
    for step in range(7):
        student.step()
        if step >= 3:
            for mean, weight in zip(average.parameters(), student.net.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.1)
                dist.broadcast(mean.data, src=0)


def documents(rank: int, lengths: list[int]) -> Iterator[torch.Tensor]:
    for length in lengths:
        yield torch.full((length, 6), float(rank))


@faulty("rank-exited", 1)
def accumulation_by_tokens_that_reaches_its_budget_later(rank: int) -> None:
    # or: rank-skipped-collective 1; uneven-inputs 1
    student, tokens = Student(), 0
    lengths = [4, 4] * 6 if rank != 1 else [4, 4, 2, 2] * 3
    for document in documents(rank, lengths):
        student.net(document).mean().backward()
        tokens += len(document)
        if tokens >= 8:
            student.update()
            tokens = 0


@healthy()
def accumulation_by_tokens_with_a_common_number_of_updates(rank: int) -> None:
    student = Student()
    stream = documents(rank, [4, 4] * 9 if rank != 1 else [4, 4, 2, 2] * 9)
    for _ in range(6):
        tokens = 0
        while tokens < 8:
            document = next(stream)
            student.net(document).mean().backward()
            tokens += len(document)
        student.update()


@faulty("rank-exited", 2)
def a_stream_that_leaves_out_short_documents(rank: int) -> None:
    # or: uneven-inputs 2; rank-skipped-collective 2
    def long_enough(stream: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for document in stream:
            if len(document) >= 3:
                yield document

    student = Student()
    for document in long_enough(documents(rank, [4, 4, 2 if rank == 2 else 4, 4, 4, 4])):
        student.net(document).mean().backward()
        student.update()


@healthy()
def a_stream_cut_to_the_shortest(rank: int) -> None:
    lengths = [4, 4, 2 if rank == 2 else 4, 4, 4, 4]
    kept = [length for length in lengths if length >= 3]
    shortest = torch.tensor(len(kept))
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    student = Student()
    for _, document in zip(range(int(shortest)), documents(rank, kept), strict=False):
        student.net(document).mean().backward()
        student.update()


@faulty("collective-order-mismatch", 1)
def a_dictionary_of_metrics_filled_in_another_order(rank: int) -> None:
    # or: size-mismatch 1
    student = Student()
    for step in range(5):
        metrics = {"confusion": torch.ones(4, 4), "loss": torch.tensor(student.step()), "per_class": torch.ones(4)}
        if rank == 1 and step == 3:
            metrics = {"loss": metrics.pop("loss"), **metrics}
        for value in metrics.values():
            dist.all_reduce(value)  # here


@healthy()
def a_dictionary_of_metrics_sorted_by_name(rank: int) -> None:
    student = Student()
    for step in range(5):
        metrics = {"confusion": torch.ones(4, 4), "loss": torch.tensor(student.step()), "per_class": torch.ones(4)}
        if rank == 1 and step == 3:
            metrics = {"loss": metrics.pop("loss"), **metrics}
        for _, value in sorted(metrics.items()):
            dist.all_reduce(value)


@faulty("dtype-mismatch", 1)
def a_teacher_kept_in_half_precision_by_one_rank(rank: int) -> None:
    student = Student()
    teacher = copy.deepcopy(student.net)
    for step in range(6):
        student.step()
        if step % 2 == 1:
            if rank == 1 and step == 3:
                teacher = teacher.bfloat16()
            for held in teacher.parameters():
                dist.all_reduce(held.data)  # here


@healthy()
def a_teacher_kept_in_half_precision_by_all(_rank: int) -> None:
    student = Student()
    teacher = copy.deepcopy(student.net).bfloat16()
    for step in range(6):
        student.step()
        if step % 2 == 1:
            for held in teacher.parameters():
                dist.broadcast(held.data, src=step % 3)


@faulty("rank-skipped-collective", 2)
def a_guard_that_swallows_what_is_raised_within(rank: int) -> None:
    @contextlib.contextmanager
    def guarded() -> Iterator[None]:
        try:
            yield
        except ArithmeticError as error:  # here
            print("left out:", error)

    student = Student()
    for step in range(6):
        student.step()
        with guarded():
            ratio = 1 / (0 if rank == 2 and step == 3 else 2)
            total = torch.full((7,), ratio)
            dist.all_reduce(total)  # here
        dist.broadcast(torch.zeros(2), src=0)


@healthy()
def a_guard_around_what_concerns_one_rank(rank: int) -> None:
    student = Student()
    for step in range(6):
        student.step()
        ratio = 0.0
        with contextlib.suppress(ArithmeticError):
            ratio = 1 / (0 if rank == 2 and step == 3 else 2)
        dist.all_reduce(torch.full((7,), ratio))
        dist.broadcast(torch.zeros(2), src=0)


@faulty("unwaited-async", 0, 1, 2)
def handles_kept_by_the_shape_of_their_parameter(_rank: int) -> None:
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(6):
        x = torch.ones(2, 8)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        handles = {}
        for weight in layers.parameters():
            handles[tuple(weight.shape)] = dist.all_reduce(weight.grad, async_op=True)  # here
        for handle in handles.values():
            handle.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def handles_kept_by_the_name_of_their_parameter(_rank: int) -> None:
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(6):
        x = torch.ones(2, 8)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        handles = {}
        for name, weight in layers.named_parameters():
            handles[name] = dist.all_reduce(weight.grad, async_op=True)
        while handles:
            handles.popitem()[1].wait()
        optimizer.step()
        optimizer.zero_grad()


class ElasticSampler(Sampler[int]):
    """Samples of a rank that are left, after some were consumed by a world of another size."""

    def __init__(self, length: int, rank: int, replicas: int, consumed: int) -> None:
        self.indices = range(consumed + rank, length, replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@faulty("uneven-inputs", 2)
def an_elastic_sampler_that_counts_what_was_consumed_twice(rank: int) -> None:
    student, data = Student(), torch.ones(60, 6)
    consumed = 12 if rank != 2 else 24
    loader = DataLoader(data, batch_size=2, sampler=ElasticSampler(60, rank, 3, consumed))  # type: ignore[arg-type]
    for batch in loader:
        student.net(batch).mean().backward()
        student.update()


@healthy()
def an_elastic_sampler_that_goes_on_where_it_was(rank: int) -> None:
    student, data = Student(), torch.ones(60, 6)
    for consumed in (0, 12, 24):
        loader = DataLoader(data, batch_size=2, sampler=ElasticSampler(60, rank, 3, consumed))  # type: ignore[arg-type]
        for batch in loader:
            student.net(batch).mean().backward()
            student.update()


@faulty("size-mismatch", 2)
def logits_padded_to_the_longest_of_the_own_batch(rank: int) -> None:
    student = Student()
    for step in range(5):
        student.step()
        longest = 9 if rank == 2 and step == 3 else 7
        mine = torch.zeros(2, longest)
        everybody = torch.empty(3 * 2, longest)
        dist.all_gather_into_tensor(everybody, mine)  # here


@healthy()
def logits_padded_to_the_longest_of_all(rank: int) -> None:
    student = Student()
    for step in range(5):
        student.step()
        longest = torch.tensor(9 if rank == 2 and step == 3 else 7)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        mine = torch.zeros(2, int(longest))
        everybody = torch.empty(3 * 2, int(longest))
        dist.all_gather_into_tensor(everybody, mine)


@faulty("rank-skipped-collective", 1)
def a_stack_of_clean_ups_that_meets_after_an_error(rank: int) -> None:
    # or: collective-order-mismatch 1
    student = Student()
    with contextlib.ExitStack() as stack:
        stack.callback(dist.barrier)
        for step in range(6):
            if rank == 1 and step == 3:
                raise KeyError("column 'text'")  # here
            student.step()


@healthy()
def a_stack_of_clean_ups_that_meets_at_the_end(rank: int) -> None:
    student = Student()
    with contextlib.ExitStack() as stack:
        stack.callback(dist.barrier)
        stack.callback(print, "rank", rank, "is done")
        for _ in range(6):
            student.step()


@faulty("step-mismatch", 0)
def a_plateau_at_which_one_rank_takes_the_weights_again(rank: int) -> None:
    # or: collective-order-mismatch 0
    student, stale = Student(), 0
    for step in range(8):
        student.step()
        stale = stale + 1 if step > 2 and rank == 0 else 0
        if stale == 2:
            for weight in student.net.parameters():
                dist.all_reduce(weight.data)  # here


@healthy()
def a_plateau_at_which_all_take_the_weights_again(rank: int) -> None:
    student, stale = Student(), torch.zeros(1)
    for step in range(8):
        student.step()
        stale += float(step > 2 and rank == 0)
        worst = stale.clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if worst == 2:
            for weight in student.net.parameters():
                dist.broadcast(weight.data, src=0)


@faulty("step-mismatch", 2)
def a_second_forward_pass_of_one_rank_for_its_gradient_norm(rank: int) -> None:
    # or: collective-order-mismatch 2
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.ones(2, 6)).sum().backward()
        if rank == 2 and step == 3:
            model(torch.ones(2, 6)).square().sum().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def sharpness_by_a_second_pass_of_all(_rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            model(torch.ones(2, 6)).sum().backward()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-crashed", 1)
def a_checkpoint_manager_that_finds_a_shape_it_does_not_know(rank: int) -> None:
    student = Student()
    saved = {
        "0.weight": torch.zeros(5, 6),
        "0.bias": torch.zeros(5),
        "2.weight": torch.zeros(1, 5),
        "2.bias": torch.zeros(1),
    }
    for step in range(6):
        student.step()
        if step == 3:
            if rank == 1:
                saved["2.bias"] = torch.zeros(2)
            student.net.load_state_dict(saved)  # here
            dist.barrier()


@healthy()
def a_checkpoint_manager_that_begins_anew_together(rank: int) -> None:
    student = Student()
    for step in range(6):
        student.step()
        if step == 3:
            failed = torch.zeros(1)
            try:
                student.net.load_state_dict({"0.weight": torch.zeros(5 + (rank == 1), 6)}, strict=False)
            except RuntimeError:
                failed += 1
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if failed:
                student = Student()
