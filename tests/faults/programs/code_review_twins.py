"""Programs of a code review that are right, though they look like `code_review_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import asyncio
import os
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

from tests.faults.corpus import healthy
from tests.faults.programs.office_hours_tools import agreed, average_gradients, small_model


class Trainer:
    """A model trained by hand, a step at a time."""

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


@healthy()
def a_learning_rate_that_all_ranks_look_for(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(steps):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    rate = [0.0]
    for exponent in range(3):
        optimizer.param_groups[0]["lr"] = 1e-4 * 2**exponent
        rate = [train(1)]
    if rank == 0:
        with torch.no_grad():
            print("suggested rate:", rate, model.module(torch.ones(6)))
    dist.broadcast_object_list(rate, src=0)
    train(6)


@healthy()
def work_handed_out_by_each_leader_in_turn(rank: int) -> None:
    trainer = Trainer()
    for number in range(6):
        mine: list[object] = [None]
        leader = number % 3
        items = [f"{number}-{'x' * each * 9}" for each in range(3)] if rank == leader else None
        dist.scatter_object_list(mine, items, src=leader)
        print(mine[0], trainer.train_step())


@healthy()
def a_curriculum_of_lengths_that_all_ranks_share(_rank: int) -> None:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(9):
        model(torch.ones(4 + 2 * (step // 3), 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def an_event_that_a_task_sets_after_a_while(rank: int) -> None:
    async def evaluate(seconds: float) -> int:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, done.set)
        await done.wait()
        return rank

    trainer = Trainer()
    for step in range(7):
        trainer.train_step()
        if step % 2:
            print(asyncio.run(evaluate(0.8 if rank == 1 and step == 3 else 0.01)))


@healthy()
def a_trial_that_all_ranks_prune(rank: int) -> None:
    class TrialPruned(Exception):
        pass

    def objective(number: int) -> None:
        settings: list[object] = [{"width": 5 + number} if rank == 0 else None]
        dist.broadcast_object_list(settings, src=0)
        trainer = Trainer()
        for epoch in range(3):
            for _ in range(2):
                trainer.train_step()
            if agreed(rank == 0 and (number, epoch) == (2, 1)):
                raise TrialPruned(f"trial {number}")

    for number in range(4):
        try:
            objective(number)
        except TrialPruned as pruned:
            print(pruned)


@healthy()
def as_many_batches_as_the_rank_with_the_fewest(rank: int) -> None:
    batches = [torch.randn(4, 6) for _ in range(9 if rank == 1 else 7)]
    least = torch.tensor(len(batches))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    trainer = Trainer()
    for index, batch in enumerate(batches):
        if index >= least:
            break
        trainer.train_step(batch)
    dist.barrier()


@healthy()
def a_loss_reduced_to_the_rank_that_wants_it(rank: int) -> None:
    trainer = Trainer()
    for step in range(8):
        loss = torch.tensor([trainer.train_step()])
        if step % 4 == 3:
            dist.reduce(loss, dst=0)
            losses = [torch.empty(1) for _ in range(3)] if rank == 0 else None
            dist.gather(loss, losses, dst=0)
            if rank == 0:
                print(step, float(loss) / 3, losses)


@healthy()
def averaged_weights_put_in_by_all_for_an_evaluation_of_one_rank(rank: int) -> None:
    trainer = Trainer()
    shadow = [weight.detach().clone() for weight in trainer.model.parameters()]

    @contextmanager
    def applied() -> Iterator[None]:
        kept = [weight.detach().clone() for weight in trainer.model.parameters()]
        for mean, weight in zip(shadow, trainer.model.parameters(), strict=True):
            dist.all_reduce(mean)
            mean /= 3
            weight.data.copy_(mean)
        yield
        for weight, own in zip(trainer.model.parameters(), kept, strict=True):
            weight.data.copy_(own)

    for step in range(8):
        trainer.train_step()
        if step in (5, 7):
            with applied():
                if rank == 0:
                    print(trainer.model(torch.ones(6)))


@healthy()
def a_task_that_all_ranks_draw_alike(rank: int) -> None:
    trunk = small_model()
    heads = {"depth": nn.Linear(3, 2), "normals": nn.Linear(3, 5)}
    parameters = [*trunk.parameters(), *(weight for head in heads.values() for weight in head.parameters())]
    optimizer, generator = torch.optim.SGD(parameters, lr=1e-2), torch.Generator().manual_seed(7)
    for _ in range(8):
        task = [*heads][int(torch.randint(2, (), generator=generator))]
        heads[task](trunk(torch.randn(4 + rank, 6))).square().mean().backward()
        for weight in (*heads[task].parameters(), *trunk.parameters()):
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def a_group_for_each_expert_that_all_ranks_make(rank: int) -> None:
    trainer = Trainer()
    trainer.train_step()
    groups = [dist.new_group([expert, (expert + 1) % 4]) for expert in range(4)]
    mine = sorted((expert for expert in range(4) if rank in (expert, (expert + 1) % 4)), key=lambda e: (e % 2, e))
    for _ in range(3):
        for expert in mine:
            dist.all_reduce(torch.ones(3), group=groups[expert])
        trainer.train_step()


@healthy(ranks=4)
def gradients_averaged_before_or_after_the_activation_is_sent(rank: int) -> None:
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = nn.Linear(4, 4)
    for step in range(7):
        total = torch.ones(4)
        hidden = torch.ones(2, 4)
        if rank < 2:
            is_eager = rank == 1 and step == 4
            if is_eager:
                dist.all_reduce(total, group=stages[0])
            dist.send(layer(hidden).detach(), dst=rank + 2)
            if not is_eager:
                dist.all_reduce(total, group=stages[0])
        else:
            dist.recv(hidden, src=rank - 2)
            dist.all_reduce(total, group=stages[1])


@healthy()
def a_download_whose_failure_the_others_need_not_know(rank: int) -> None:
    @contextmanager
    def first_rank_first() -> Iterator[None]:
        if rank:
            dist.barrier()
        try:
            yield
        except ConnectionError as error:
            print("going on without:", error)
        if rank == 0:
            dist.barrier()

    trainer = Trainer()
    for part in range(4):
        with first_rank_first():
            if rank == 0 and part == 2:
                raise ConnectionError("the mirror does not answer")
            print("part", part)
        trainer.train_step()


@healthy()
def a_cache_of_tokens_that_one_rank_has_and_all_check(rank: int) -> None:
    folder = Path(gettempdir()) / f"review-twin-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    if rank == 1:
        (folder / "tokens-1").write_text("old")
    cached: list[object] = [None] * 3
    dist.all_gather_object(cached, (folder / f"tokens-{rank}").exists())
    if not all(cached):
        counts: list[object] = [None] * 3
        dist.all_gather_object(counts, {"rank": rank, "lines": 7 * (not cached[rank])})
        if not cached[rank]:
            (folder / f"tokens-{rank}").write_text(str(counts))
    trainer = Trainer()
    for _ in range(4):
        trainer.train_step()


@healthy()
def weights_averaged_by_a_count_of_all_batches(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    averager = PeriodicModelAverager(period=4)
    for number in range(9):
        batch = torch.randn(0 if rank == 2 and number == 5 else 4, 6)
        if len(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        averager.average_parameters(model.parameters())
    dist.barrier()


@healthy(ranks=6)
def a_budget_that_is_used_up_by_a_whole_team(rank: int) -> None:
    teams = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    trainer, budget = Trainer(teams[rank // 3]), 4 if rank < 3 else 8
    while not agreed(budget == 0, teams[rank // 3]):
        budget -= 1
        trainer.train_step()
