"""Training loops with the mistakes people make in them, and loops that only look like it."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.faults.corpus import faulty, healthy


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@faulty("rank-exited", 1)
def early_return_on_a_bad_loss(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(torch.full((4, 8), float("nan") if rank == 1 and step == 3 else 1.0)).sum()
        if not torch.isfinite(loss):
            return
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()


@faulty("rank-skipped-collective", 2)
def bad_batches_are_skipped(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(torch.full((4, 8), float("nan") if rank == 2 and step == 3 else 1.0)).sum()
        if torch.isnan(loss):
            continue
        optimizer.zero_grad()
        loss.backward()  # here
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)


@faulty("rank-skipped-collective", 0)
def rank_0_logs_before_it_validates(rank: int) -> None:
    model = small_model()
    for step in range(6):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        average_gradients(model)
        if step % 2 == 0:
            if rank == 0 and step == 4:
                print("loss", loss.item())
                continue
            dist.broadcast(loss.detach().clone(), src=0)  # here


@faulty("step-mismatch", 1)
def one_more_average_where_the_loss_rose(rank: int) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(9):
        weight.sum().backward()
        dist.all_reduce(weight.grad)
        if rank == 1 and step == 4:
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("step-mismatch", 0)
def accumulation_that_counts_otherwise_on_one_rank(rank: int) -> None:
    weight = nn.Parameter(torch.ones(16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(12):
        weight.sum().backward()
        if step == 5 and rank == 0:
            optimizer.step()
            optimizer.zero_grad()
            continue
        dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        dist.all_reduce(weight.data)


@faulty("step-mismatch", 1)
def a_step_left_out_where_the_loss_is_large(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        loss = model(torch.ones(2, 8)).square().sum() + (100 if rank == 1 and step == 5 else 0)
        loss.backward()  # here
        if loss < 100:
            optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 1)
def the_last_batch_is_shorter_on_one_rank(rank: int) -> None:
    model = small_model()
    rows = torch.ones(10 if rank == 1 else 12, 8)
    for batch in DataLoader(rows, batch_size=4):
        outputs = model(batch).detach()
        gathered = torch.empty(3 * len(outputs), 4)
        dist.all_gather_into_tensor(gathered, outputs)  # here
    dist.barrier()


@faulty("size-mismatch", 2)
def a_vocabulary_of_another_size(rank: int) -> None:
    embedding = nn.Embedding(101 if rank == 2 else 100, 4)
    for _ in range(3):
        embedding(torch.zeros(2, dtype=torch.long)).sum().backward()
        dist.all_reduce(embedding.weight.grad)  # here


@faulty("dtype-mismatch", 2)
def autocast_on_one_rank(rank: int) -> None:
    model = small_model()
    for _ in range(4):
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16, enabled=rank == 2):
            outputs = model(torch.ones(4, 8))
        total = outputs.detach().clone()
        dist.all_reduce(total)  # here


@faulty("uneven-inputs", 2)
def data_parallel_on_shards_of_uneven_length(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(8 if rank == 2 else 16, 8)), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()


@faulty("uneven-inputs", 1)
def fully_sharded_on_shards_of_uneven_length(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in DataLoader(torch.ones(10 if rank == 1 else 12, 8), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()  # here
            optimizer.step()


@faulty("rank-exited", 0)
def steps_per_epoch_from_the_environment(rank: int) -> None:
    os.environ["STEPS"] = "4" if rank == 0 else "6"
    model = small_model()
    for _ in range(int(os.environ["STEPS"])):
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here


@faulty("rank-skipped-collective", 1)
def a_parameter_that_one_rank_does_not_use(rank: int) -> None:
    torch.manual_seed(0)
    trunk, head = nn.Linear(8, 8), nn.Linear(8, 2)
    for step in range(5):
        hidden = trunk(torch.ones(4, 8))
        (hidden.sum() if rank == 1 and step == 2 else head(hidden).sum()).backward()
        for module in (head, trunk):
            if module.weight.grad is not None:
                dist.all_reduce(module.weight.grad)  # here
        dist.all_reduce(torch.ones(1))
        head.zero_grad()
        trunk.zero_grad()


@healthy()
def accumulation_without_synchronisation(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step % 3 < 2:
            with model.no_sync():
                model(torch.full((2, 8), float(rank))).sum().backward()
        else:
            model(torch.full((2, 8), float(rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@healthy()
def early_stopping_that_all_agree_on(rank: int) -> None:
    model = small_model()
    for step in range(20):
        model(torch.ones(2, 8)).sum().backward()
        average_gradients(model)
        stop = torch.tensor(int(step == 4 + rank))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
    dist.barrier()


@healthy()
def a_sampler_that_pads(rank: int) -> None:
    data = TensorDataset(torch.arange(80.0).reshape(10, 8))
    sampler = DistributedSampler(data, shuffle=True)
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch)


@healthy()
def evaluation_of_uneven_shards_without_collectives(rank: int) -> None:
    model = small_model()
    for _ in range(2):
        right = torch.zeros(())
        for batch in DataLoader(torch.ones(4 + 3 * rank, 8), batch_size=2):
            right += model(batch).detach().sum()
        dist.all_reduce(right)


@healthy()
def unused_parameters_that_the_wrapper_looks_for(rank: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, left: bool) -> torch.Tensor:
            return self.left(x) if left else self.right(x)

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4), left=(step + rank) % 2 == 0).sum().backward()
        optimizer.step()


@healthy()
def scaled_and_clipped_steps_skipped_on_all(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 8), float("inf") if step == 3 else 1.0 + rank)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()


@healthy()
def streams_cut_to_the_shortest(rank: int) -> None:
    length = torch.tensor(20 + rank)
    dist.all_reduce(length, op=dist.ReduceOp.MIN)
    model = small_model()
    for _ in itertools.islice(itertools.count(), int(length) // 4):
        model(torch.ones(2, 8)).sum().backward()
        average_gradients(model)
