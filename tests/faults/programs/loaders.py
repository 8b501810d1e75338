"""Data loaders: workers that hang, rows that fail, streams that end."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.corpus import faulty, healthy


class Rows(Dataset[torch.Tensor]):
    """Rows of which one hangs, on one rank."""

    def __init__(self, hang: bool) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.hang and i == 9:
            time.sleep(300)
        return torch.full((8,), float(i))


@faulty("rank-stuck", 1)
def a_worker_of_a_loader_that_hangs(rank: int) -> None:
    model = torch.nn.Linear(8, 2)
    for batch in DataLoader(Rows(rank == 1), batch_size=2, num_workers=1):  # here
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)


@faulty("rank-stuck", 2)
def a_file_system_that_hangs_in_the_loader(rank: int) -> None:
    model = torch.nn.Linear(8, 2)
    for batch in DataLoader(Rows(rank == 2), batch_size=2):
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)


@faulty("rank-crashed", 1)
def a_failing_row_of_a_loader(rank: int) -> None:
    class Broken(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> torch.Tensor:
            if rank == 1 and i == 6:
                raise KeyError("label")  # here
            return torch.ones(4)

    weight = torch.nn.Parameter(torch.ones(4))
    for batch in DataLoader(Broken(), batch_size=2):
        (weight * batch).sum().backward()
        dist.all_reduce(weight.grad)


@faulty("uneven-inputs", 1)
def a_stream_that_ends_early(rank: int) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for i in range(12 if rank == 1 else 20):
                yield torch.full((4,), float(i))

    model = torch.nn.Linear(4, 4)
    for batch in DataLoader(Stream(), batch_size=2):
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)  # here
    dist.barrier()


@healthy()
def loaders_with_workers(_: int) -> None:
    model = torch.nn.Linear(8, 2)
    for _ in range(2):
        for batch in DataLoader(Rows(hang=False), batch_size=4, num_workers=1):
            model(batch).sum().backward()
            dist.all_reduce(model.weight.grad)
