"""Sharded models of which a rank makes a pass too many or too few: gathers of one pass meet those of another.

Written beside the rules that they show; they tell nothing of programs not seen.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.faults.corpus import faulty, healthy


class Sharded:
    """A sharded model, one training step, and an evaluation that averages its loss."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()

    def evaluate(self) -> float:
        loss = self.model(torch.ones(2, 16)).mean().detach()
        dist.all_reduce(loss)
        return float(loss)


BATCH = torch.ones(4, 16)


@faulty("rank-skipped-collective", 2, ranks=4)
def an_evaluation_that_one_of_four_takes_from_its_cache(rank: int) -> None:
    trainer = Sharded()
    for step in range(12):
        trainer.step(BATCH)
        is_cached = rank == 2
        if step == 7 and not is_cached:  # here
            trainer.evaluate()


@faulty("rank-skipped-collective", 2, ranks=4)
def an_evaluation_that_returns_at_once_on_one_of_four(rank: int) -> None:
    def evaluate() -> float:
        if rank == 2:
            return 0.0  # here
        return trainer.evaluate()

    trainer = Sharded()
    for step in range(12):
        trainer.step(BATCH)
        if step == 7:
            evaluate()


@faulty("step-mismatch", 1)
def an_evaluation_on_one_rank_alone(rank: int) -> None:
    trainer = Sharded()
    for step in range(12):
        trainer.step(BATCH)
        if rank == 1 and step == 7:
            trainer.evaluate()  # here


@faulty("step-mismatch", 0)
def an_evaluation_at_a_step_of_its_own(rank: int) -> None:
    trainer = Sharded()
    for step in range(16):
        trainer.step(BATCH)
        if step % 5 == 4 or (rank == 0 and step == 12):
            trainer.evaluate()  # here


@faulty("rank-skipped-collective", 1)
def an_epoch_that_one_rank_leaves_early(rank: int) -> None:
    trainer = Sharded()
    for epoch in range(2):
        for step in range(10):
            trainer.step(BATCH)
            if rank == 1 and epoch == 1 and step == 6:
                break  # here
        trainer.evaluate()


@faulty("rank-skipped-collective", 2)
def a_batch_more_on_one_of_three(rank: int) -> None:
    trainer = Sharded()
    loader = DataLoader(torch.ones(36 if rank == 2 else 32, 16), batch_size=4)
    for _ in range(2):
        for x in loader:
            trainer.step(x)
        trainer.evaluate()


@healthy()
def evaluations_by_all_at_every_fifth_step(_rank: int) -> None:
    trainer = Sharded()
    for step in range(12):
        trainer.step(BATCH)
        if step % 5 == 4:
            trainer.evaluate()


@healthy()
def an_epoch_that_all_leave_early(_rank: int) -> None:
    trainer = Sharded()
    for epoch in range(2):
        for step in range(10):
            trainer.step(BATCH)
            if epoch == 1 and step == 6:
                break
        trainer.evaluate()
