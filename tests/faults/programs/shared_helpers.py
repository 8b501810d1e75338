"""Programs whose collectives are in helpers that several places call: who called tells the fault, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


def mean_of_all(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def total(count: float) -> float:
    value = torch.tensor([count])
    dist.all_reduce(value)
    return float(value)


def small_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 1))


class Fitting:
    """A data-parallel model with its optimizer."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(small_model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, scale: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.full((4, 6), scale)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@healthy(ranks=3)
def loss_and_accuracy_in_one_order_in_two_branches(rank: int) -> None:
    fitting = Fitting()
    for _ in range(6):
        loss, accuracy = fitting.step(), torch.tensor(0.5)
        if rank == 1:
            mean_of_all(loss)
            mean_of_all(accuracy)
        else:
            mean_of_all(loss)
            mean_of_all(accuracy)


@faulty("rank-skipped-collective", 2, ranks=3)
def report_that_one_rank_leaves_out(rank: int) -> None:
    fitting = Fitting()

    def report(step: int) -> None:
        if step % 2 == 1:
            return
        mean_of_all(torch.tensor(float(step)))

    for step in range(8):
        fitting.step()
        if rank == 2 and step == 4:  # here
            continue  # here
        report(step)  # here


@healthy(ranks=3)
def report_of_even_steps_on_all_ranks(_rank: int) -> None:
    fitting = Fitting()
    for step in range(8):
        loss = fitting.step()
        if step % 2:
            continue
        mean_of_all(loss)


@faulty("step-mismatch", 0, ranks=2)
def best_model_is_announced_on_rank_zero_alone(rank: int) -> None:
    # or: collective-order-mismatch 0, rank-skipped-collective 1
    fitting, best = Fitting(), 1e9
    for step in range(7):
        loss = float(mean_of_all(fitting.step()))
        if loss < best and rank == 0 and step == 3:
            best = float(mean_of_all(torch.tensor(loss)))  # here
        total(4.0)


@healthy(ranks=2)
def best_model_is_announced_on_both_ranks(rank: int) -> None:
    fitting, best = Fitting(), 1e9
    for _ in range(7):
        loss = float(mean_of_all(fitting.step()))
        if loss < best:
            best = float(mean_of_all(torch.tensor(loss)))
        if rank == 0:
            print(best)


@faulty("rank-skipped-collective", 1, ranks=2)
def sharded_evaluation_that_one_rank_leaves_early(rank: int) -> None:
    # or: rank-exited 1, step-mismatch 1, collective-order-mismatch 1
    model = small_model()
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(batches: int, *, train: bool) -> None:
        for number in range(batches):
            loss = model(torch.ones(2, 6)).sum()  # here
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            elif rank == 1 and number == 2:
                break  # here

    for _ in range(2):
        run(4, train=True)
        with torch.no_grad():
            run(5, train=False)


@healthy(ranks=2)
def sharded_evaluation_in_full(rank: int) -> None:
    model = small_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            losses = [model(torch.ones(2 + rank, 6)).sum() for _ in range(3)]
        mean_of_all(torch.stack(losses).mean())

    for _ in range(3):
        train()
        evaluate()


@faulty("rank-skipped-collective", 3, ranks=4)
def count_of_tokens_of_an_empty_shard(rank: int) -> None:
    def tokens_of(texts: list[str]) -> float:
        if not texts:  # here
            return 0.0  # here
        return total(float(sum(map(len, texts))))  # here

    fitting = Fitting()
    for step in range(5):
        fitting.step()
        tokens_of([] if rank == 3 and step == 2 else ["a b", "c"])


@healthy(ranks=4)
def count_of_tokens_of_all_shards(rank: int) -> None:
    fitting = Fitting()
    for step in range(5):
        fitting.step()
        texts = [] if rank == 3 and step == 2 else ["a b", "c"]
        total(float(sum(map(len, texts))))


@faulty("step-mismatch", 2, ranks=3)
def metrics_sorted_by_a_set(rank: int) -> None:
    # or: collective-order-mismatch 2
    def loss() -> torch.Tensor:
        return mean_of_all(torch.tensor(1.0))  # here

    def recall() -> torch.Tensor:
        return mean_of_all(torch.tensor(2.0))  # here

    metrics = [recall, loss] if rank == 2 else [loss, recall]
    for _ in range(8):
        for metric in metrics:
            metric()


@healthy(ranks=3)
def master_and_workers_share_a_loop(rank: int) -> None:
    def loop() -> None:
        fitting = Fitting()
        for _ in range(6):
            mean_of_all(fitting.step())

    def master() -> None:
        loop()
        print("done")

    def worker() -> None:
        loop()

    if rank == 0:
        master()
    else:
        worker()


@faulty("rank-skipped-collective", 0, ranks=2)
def timer_that_synchronises_on_exit_alone(rank: int) -> None:
    # or: size-mismatch 0, collective-order-mismatch 0, step-mismatch 0
    @contextmanager
    def timed(*, quick: bool) -> Iterator[None]:
        yield
        if not quick:  # here
            mean_of_all(torch.tensor(0.1))  # here

    fitting = Fitting()
    for step in range(6):
        with timed(quick=rank == 0 and step == 3):
            fitting.step()


@healthy(ranks=2)
def timer_that_synchronises_on_both(rank: int) -> None:
    @contextmanager
    def timed(name: str) -> Iterator[None]:
        yield
        print(name, float(mean_of_all(torch.tensor(0.1 * rank))))

    fitting = Fitting()
    for step in range(6):
        with timed(f"step {step}"):
            fitting.step()


@faulty("rank-skipped-collective", 1, ranks=3)
def retry_that_skips_the_second_average(rank: int) -> None:
    fitting = Fitting()

    def average(values: list[float]) -> list[float]:
        return [float(mean_of_all(torch.tensor(value))) for value in values]  # here

    def log(step: int) -> None:
        average([1.0])
        if step == 3 and rank == 1:  # here
            return  # here
        average([2.0, 3.0])  # here

    for step in range(6):
        fitting.step()
        log(step)


@healthy(ranks=3)
def log_with_as_many_values_everywhere(rank: int) -> None:
    fitting = Fitting()

    def average(values: list[float]) -> list[float]:
        return [float(mean_of_all(torch.tensor(value))) for value in values]

    for step in range(6):
        loss = float(fitting.step())
        average([loss] if step % 2 else [loss, float(rank)])
        if rank:
            average([2.0, 3.0])
        else:
            average([3.0, 2.0])


@faulty("step-mismatch", 1, ranks=2)
def evaluation_that_starts_a_step_earlier(rank: int) -> None:
    # or: collective-order-mismatch 1, rank-skipped-collective 1
    model = small_model()

    def averaged_step() -> None:
        model(torch.ones(2, 6)).sum().backward()
        for weight in model.parameters():
            weight.grad = mean_of_all(weight.grad)

    def evaluate() -> None:
        model.zero_grad()
        for weight in model.parameters():
            mean_of_all(weight)

    for step in range(9):
        averaged_step()
        if (step + rank) % 3 == 2:
            evaluate()  # here


@healthy(ranks=2)
def evaluation_at_the_same_step(rank: int) -> None:
    model = small_model()

    def averaged_step() -> None:
        model(torch.ones(2, 6)).sum().backward()
        for weight in model.parameters():
            weight.grad = mean_of_all(weight.grad)

    for step in range(9):
        averaged_step()
        if step % 3 == 2:
            for weight in model.parameters():
                mean_of_all(weight * (1 + rank))


@healthy(ranks=3)
def main_rank_hands_over_a_writer(rank: int) -> None:
    def train(*, lines: list[float] | None = None) -> None:
        fitting = Fitting()
        for step in range(8):
            loss = mean_of_all(fitting.step())
            if step % 4 == 3:
                loss = mean_of_all(loss)
            if lines is not None:
                lines.append(float(loss))

    if rank == 0:
        train(lines=[])
    else:
        train()


@faulty("step-mismatch", 2, ranks=3)
def two_metrics_the_other_way_round_beside_a_writer(rank: int) -> None:
    def average(values: dict[str, float]) -> None:
        if "loss" in values:  # here
            mean_of_all(torch.tensor(values["loss"]))  # here
        if "recall" in values:
            mean_of_all(torch.tensor(values["recall"]))  # here

    def train(*, writes: bool = False) -> None:
        for step in range(8):
            for name in ("recall", "loss") if rank == 2 and step > 3 else ("loss", "recall"):
                average({name: float(step + writes)})

    if rank == 0:
        train(writes=True)
    else:
        train()
