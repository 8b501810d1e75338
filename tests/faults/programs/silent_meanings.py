"""Operations that match in form and differ in meaning: other parameters, other steps, other groups; and sound programs.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


class Branches(nn.Module):
    """Layers of one shape, registered in the order given."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum((self.branches[name](batch) for name in sorted(self.branches)), torch.zeros(()))


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def checkpoints(model: nn.Module, folder: Path, steps: tuple[int, ...]) -> dict[int, Path]:
    """Write a checkpoint after each of these steps, without any communication."""
    optimizer = torch.optim.AdamW(model.parameters())
    written = {}
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step in steps:
            written[step] = folder / f"step-{step}.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, written[step])
    return written


def resume(model: nn.Module, file: Path) -> torch.optim.Optimizer:
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


@faulty("step-mismatch", 1)
def a_rank_that_resumes_from_an_older_checkpoint(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints(model, Path(folder), (3, 5))
        optimizer = resume(model, files[3 if rank == 1 else 5])
    train_steps(model, optimizer, 4)


@faulty("step-mismatch", 2)
def a_rank_that_finds_no_checkpoint_and_begins_anew(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints(model, Path(folder), (4,))
        optimizer = resume(model, files[4]) if rank != 2 else torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 4)


@faulty("step-mismatch", 1)
def layers_registered_in_another_order(rank: int) -> None:
    names = ("image", "text", "audio") if rank != 1 else ("text", "image", "audio")
    model = DistributedDataParallel(Branches(names))  # here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@faulty("step-mismatch", 2)
def layers_sharded_in_another_order(rank: int) -> None:
    names = ("image", "text") if rank != 2 else ("text", "image")
    model = fully_shard(Branches(names))  # here
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()


@faulty("size-mismatch", 0)  # weights lie between biases
def gradients_averaged_in_another_order(rank: int) -> None:
    model = Branches(("image", "text"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        named = dict(model.named_parameters())
        for name in sorted(named, reverse=rank == 0 and step == 2):
            dist.all_reduce(named[name].grad)  # here
        optimizer.step()


@faulty("wrong-group", 2, 3, ranks=4)
def the_pair_of_others(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=pairs[rank // 4])  # here
        dist.barrier()


@healthy()
def ranks_that_resume_together(_: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints(model, Path(folder), (3, 5))
        optimizer = resume(model, files[5])
    train_steps(model, optimizer, 4)


@healthy(ranks=4)
def stages_of_which_one_is_new(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints(model, Path(folder), (4,))
        optimizer = resume(model, files[4]) if rank < 2 else torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas[rank // 2])
        optimizer.step()


@healthy()
def two_optimizers_of_different_age(_: int) -> None:
    torch.manual_seed(0)
    model, head = nn.Linear(8, 8), nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoints(model, Path(folder), (3,))
        optimizers = [resume(model, files[3]), torch.optim.AdamW(head.parameters())]
    for step in range(4):
        head(model(torch.ones(2, 8))).sum().backward()
        for part, optimizer in zip((model, head), optimizers, strict=True):
            if step % 2 == 0 or part is model:
                for parameter in part.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()


@healthy()
def layers_registered_in_an_odd_order_on_all_ranks(_: int) -> None:
    model = DistributedDataParallel(Branches(("text", "audio", "image")))
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()


@healthy()
def a_wrapped_model_beside_one_that_only_rank_0_keeps(rank: int) -> None:
    model = DistributedDataParallel(Branches(("image", "text")))
    average = Branches(("text", "image")) if rank == 0 else None
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        if average is not None:
            average(torch.ones(2, 8))


@healthy(ranks=4)
def a_call_of_all_on_a_group_of_some(_: int) -> None:
    some = dist.new_group([0, 1])
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=some)
        dist.barrier()


@healthy(ranks=4)
def the_own_pair_of_each(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        dist.barrier()
