"""Programs that a code review should have stopped, and that are wrong; `office_hours_tools.py` is their `utils.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well. `code_review_twins.py` has programs that are right.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty
from tests.faults.programs.office_hours_tools import average_gradients, small_model


class Trainer:
    """A model trained by hand, an epoch at a time."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.group = small_model(), group
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train_step(self, batch: torch.Tensor | None = None) -> float:
        loss = self.model(torch.randn(4, 6) if batch is None else batch).square().mean()
        loss.backward()
        average_gradients(self.model, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


@faulty("step-mismatch", 0)
def a_learning_rate_that_the_first_rank_looks_for(rank: int) -> None:
    # or: rank-skipped-collective 1, 2
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def find_learning_rate(steps: int) -> float:
        losses = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 * 2**step
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return 1e-4 * 2.0 ** losses.index(min(losses))

    if rank == 0:  # here
        print("suggested rate:", find_learning_rate(3))  # here
    for _ in range(9):
        model(torch.randn(4, 6)).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("root-mismatch", 2)
def work_handed_out_by_another_leader(rank: int) -> None:
    class Queue:
        def __init__(self, leader: int) -> None:
            self.leader = leader

        def next(self, number: int) -> object:
            mine: list[object] = [None]
            items = [f"{number}-{each}" for each in range(3)] if rank == self.leader else None
            dist.scatter_object_list(mine, items, src=self.leader)  # here
            return mine[0]

    queue, trainer = Queue(0), Trainer()
    for number in range(6):
        if rank == 2 and number == 4:
            queue = Queue(1)
        print(queue.next(number), trainer.train_step())


@faulty("size-mismatch", 1)
def a_curriculum_of_lengths_under_tensor_parallelism(rank: int) -> None:
    class Curriculum:
        def __init__(self) -> None:
            self.length, self.losses = 4, list[float]()

        def update(self, loss: float) -> None:
            self.losses.append(loss)
            if len(self.losses) % 3 == 0:
                self.length += 2 if rank != 1 or len(self.losses) < 6 else 1

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, curriculum = torch.optim.SGD(model.parameters(), lr=1e-2), Curriculum()
    for _ in range(9):
        loss = model(torch.ones(curriculum.length, 6)).square().mean()  # here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curriculum.update(float(loss))


@faulty("rank-stuck", 1)
def an_event_that_no_task_sets(rank: int) -> None:
    async def evaluate(requests: int) -> int:
        served, done = 0, asyncio.Event()

        async def serve() -> None:
            nonlocal served
            for _ in range(requests):
                await asyncio.sleep(0.01)
                served += 1
            if served >= 3:
                done.set()

        task = asyncio.create_task(serve())
        await done.wait()  # here
        await task
        return served

    trainer = Trainer()
    for step in range(7):
        trainer.train_step()
        if step % 2:
            print(asyncio.run(evaluate(2 if rank == 1 and step == 3 else 3)))  # here


@faulty("rank-skipped-collective", 0)
def a_trial_that_the_first_rank_prunes(rank: int) -> None:
    class TrialPruned(Exception):
        pass

    class Study:
        def __init__(self) -> None:
            self.values: list[float] = []

        def report(self, number: int, epoch: int, value: float) -> None:
            self.values.append(value)
            if rank == 0 and (number, epoch) == (2, 1):
                raise TrialPruned(f"trial {number} is worse than the median")  # here

    study = Study()

    def objective(number: int) -> None:
        settings: list[object] = [{"width": 5 + number} if rank == 0 else None]
        dist.broadcast_object_list(settings, src=0)
        trainer = Trainer()
        for epoch in range(3):
            for _ in range(2):
                loss = trainer.train_step()
            study.report(number, epoch, loss)

    for number in range(4):
        try:
            objective(number)  # here
        except TrialPruned as pruned:  # here
            print(pruned)


@faulty("step-mismatch", 1)
def one_batch_more_than_all_have_agreed_on(rank: int) -> None:
    # or: collective-order-mismatch 1; rank-skipped-collective 1
    batches = [torch.randn(4, 6) for _ in range(9 if rank == 1 else 7)]
    least = torch.tensor(len(batches))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index, batch in enumerate(batches):
        if index > least:  # here
            break  # here
        model(batch).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("collective-order-mismatch", 0)
def a_loss_reduced_by_the_rank_that_wants_it(rank: int) -> None:
    # or: step-mismatch 0; size-mismatch 0
    trainer = Trainer()
    for step in range(8):
        loss = torch.tensor([trainer.train_step()])
        if step % 4 == 3 and rank == 0:  # here
            dist.reduce(loss, dst=0)  # here
            print(step, float(loss) / 3)


@faulty("step-mismatch", 0)
def averaged_weights_put_in_for_an_evaluation_of_one_rank(rank: int) -> None:
    # or: collective-order-mismatch 0; size-mismatch 0
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.shadow = model, [weight.detach().clone() for weight in model.parameters()]

        def update(self) -> None:
            for mean, weight in zip(self.shadow, self.model.parameters(), strict=True):
                mean.lerp_(weight.detach(), 0.1)

        @contextmanager
        def applied(self) -> Iterator[None]:
            kept = [weight.detach().clone() for weight in self.model.parameters()]
            for mean, weight in zip(self.shadow, self.model.parameters(), strict=True):
                dist.all_reduce(mean)  # here
                weight.data.copy_(mean / 3)
            yield
            for weight, own in zip(self.model.parameters(), kept, strict=True):
                weight.data.copy_(own)

    trainer = Trainer()
    average = Average(trainer.model)
    for step in range(8):
        trainer.train_step()
        average.update()
        if rank == 0 and step == 5:  # here
            with average.applied():  # here
                print(trainer.model(torch.ones(6)))


@faulty("size-mismatch", 1)
def a_task_that_each_rank_draws_for_itself(rank: int) -> None:
    # or: step-mismatch 1; rank-skipped-collective 1; collective-order-mismatch 1
    trunk = small_model()
    heads = {"depth": nn.Linear(3, 2), "normals": nn.Linear(3, 5)}
    parameters = [*trunk.parameters(), *(weight for head in heads.values() for weight in head.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)

    def draw(step: int) -> str:
        names = [*heads]
        return names[(step + (rank == 1 and step == 5)) % 2]

    for step in range(8):
        task = draw(step)
        heads[task](trunk(torch.randn(4, 6))).square().mean().backward()
        for weight in (*heads[task].parameters(), *trunk.parameters()):
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-creation-mismatch", 3, ranks=4)
def a_group_for_each_expert_that_a_rank_knows_of(rank: int) -> None:
    class Experts:
        def __init__(self, count: int) -> None:
            self.groups = []
            for expert in range(count):  # here
                self.groups.append(dist.new_group([expert, (expert + 1) % 4]))  # here

    trainer = Trainer()
    for _ in range(2):
        trainer.train_step()
    experts = Experts(3 if rank == 3 else 4)
    for _ in range(3):
        for group in experts.groups:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(torch.ones(3), group=group)
        trainer.train_step()


@faulty("p2p-unmatched", 1, ranks=4)
def gradients_averaged_before_the_last_activation_is_sent(rank: int) -> None:
    # or: p2p-deadlock-cycle 1
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = nn.Linear(4, 4)

    def average(stage: int) -> None:
        total = torch.ones(4)
        dist.all_reduce(total, group=stages[stage])  # here

    def first_stage(eager: bool) -> None:
        hidden = layer(torch.ones(2, 4)).detach()
        if eager:  # here
            average(0)  # here
        dist.send(hidden, dst=rank + 2)
        grad = torch.empty(2, 4)
        dist.recv(grad, src=rank + 2)
        if not eager:
            average(0)

    def last_stage() -> None:
        hidden = torch.empty(2, 4)
        dist.recv(hidden, src=rank - 2)  # here
        average(1)
        dist.send(layer(hidden).detach(), dst=rank - 2)

    for step in range(7):
        if rank < 2:
            first_stage(eager=rank == 1 and step == 4)
        else:
            last_stage()


@faulty("rank-skipped-collective", 0)
def a_download_that_fails_where_the_others_wait_for_it(rank: int) -> None:
    @contextmanager
    def first_rank_first() -> Iterator[None]:
        if rank:
            dist.barrier()  # here
        yield
        if rank == 0:
            dist.barrier()  # here

    def fetch(part: int) -> str:
        if rank == 0 and part == 2:
            raise ConnectionError("the mirror does not answer")  # here
        return f"part {part}"

    trainer = Trainer()
    for part in range(4):
        try:
            with first_rank_first():
                print(fetch(part))
        except ConnectionError as error:  # here
            print("going on without:", error)
        trainer.train_step()


@faulty("rank-skipped-collective", 1)
def a_cache_of_tokens_that_one_rank_has_already(rank: int) -> None:
    # or: collective-order-mismatch 1
    folder = Path(gettempdir()) / f"review-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    if rank == 1:
        (folder / "tokens-1").write_text("old")

    def tokenized() -> str:
        cache = folder / f"tokens-{rank}"
        if cache.exists():  # here
            return cache.read_text()  # here
        counts: list[object] = [None] * 3
        dist.all_gather_object(counts, {"rank": rank, "lines": 7})  # here
        cache.write_text(str(counts))
        return cache.read_text()

    print(tokenized())
    trainer = Trainer()
    for _ in range(4):
        trainer.train_step()


@faulty("rank-skipped-collective", 2)
def weights_averaged_by_a_count_of_the_batches_that_were_used(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    averager = PeriodicModelAverager(period=4)
    for number in range(9):
        batch = torch.randn(0 if rank == 2 and number == 5 else 4, 6)
        if len(batch) == 0:  # here
            print("nothing in batch", number)
            continue  # here
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())  # here
    dist.barrier()


@faulty("rank-exited", 2, ranks=6)
def a_budget_that_is_used_up_in_one_of_two_teams(rank: int) -> None:
    # or: rank-skipped-collective 2
    class Budget:
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def spend(self) -> None:
            self.steps -= 1
            if self.steps < 0:
                print("budget used up")
                sys.exit(0)  # here

    teams = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    trainer, budget = Trainer(teams[rank // 3]), Budget(4 if rank == 2 else 20)
    for _ in range(8):
        budget.spend()  # here
        trainer.train_step()
