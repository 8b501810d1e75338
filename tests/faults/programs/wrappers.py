"""Wrappers, optimizers and hooks of torch, used rightly; and two ways to use them wrongly."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import faulty, healthy


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + step)).sum().backward()
        optimizer.step()


@faulty("rank-skipped-collective", 1)
def a_sharded_layer_that_one_rank_passes_by(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(fully_shard(nn.Linear(8, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor, dropped: int | None) -> torch.Tensor:
            for i, block in enumerate(self.blocks):
                if i != dropped:
                    x = block(x)
            return x

    model = fully_shard(Blocks())
    for step in range(5):
        model(torch.ones(2, 8), 1 if rank == 1 and step == 3 else None).sum().backward()  # here


@faulty("uneven-inputs", 0)
def an_evaluation_with_collectives_on_uneven_shards(rank: int) -> None:
    model = DistributedDataParallel(two_layers())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.ones(4 if rank == 0 else 7, 8), batch_size=2):
            right = model(batch).sum()
            dist.all_reduce(right)  # here
    dist.barrier()


@faulty("rank-crashed", 0)
def a_scatter_list_of_the_wrong_length(rank: int) -> None:
    dist.barrier()
    chunks = [torch.ones(4), torch.ones(4)] if rank == 0 else None
    dist.scatter(torch.zeros(4), chunks, src=0)  # here


@faulty("rank-crashed", 2)
def a_failure_that_the_others_wrap(rank: int) -> None:
    model = two_layers()
    for step in range(5):
        if rank == 2 and step == 2:
            raise ZeroDivisionError("learning rate schedule")  # here
        try:
            dist.all_reduce(model[0].weight.data)
        except RuntimeError as error:
            raise ValueError("the step failed") from error


@faulty("rank-killed", 1)
def a_kill_that_the_others_wrap(rank: int) -> None:
    import os
    import signal

    model = two_layers()
    for step in range(5):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(model[0].weight.data)
        except RuntimeError as error:
            raise ValueError("the step failed") from error


@faulty("group-creation-mismatch", 1)
def groups_made_in_two_orders(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        dist.new_group([0, 1])  # here
        dist.new_group([0, 1, 2])
    else:
        dist.new_group([0, 1, 2])  # here
        dist.new_group([0, 1])
    dist.barrier()


@healthy()
def compressed_gradients(_: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(two_layers())
    model.register_comm_hook(None, fp16_compress_hook)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1))


@healthy()
def a_hook_of_ones_own(_: int) -> None:
    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer() / 3, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(two_layers())
    model.register_comm_hook(None, average)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1))


@healthy()
def states_of_the_optimizer_in_parts(_: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(two_layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    fit(model, optimizer)
    optimizer.consolidate_state_dict(to=0)


@healthy()
def models_averaged_now_and_then(rank: int) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())


@healthy(ranks=2)
def sharded_with_mixed_precision_and_accumulation(_: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = two_layers()
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        last = step % 3 == 2
        model.set_requires_gradient_sync(last)
        model(torch.ones(2, 8)).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=4)
def replicas_of_shards(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(two_layers(), mesh=mesh)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1))


@healthy(ranks=2)
def recomputed_activations(_: int) -> None:
    from torch.utils.checkpoint import checkpoint

    model = DistributedDataParallel(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        given = torch.ones(2, 8, requires_grad=True)
        checkpoint(model, given, use_reentrant=False).sum().backward()
        optimizer.step()


@healthy()
def functional_collectives(rank: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    for _ in range(3):
        total = functional.all_reduce(torch.full((4,), float(rank)), "sum", group)
        full = functional.all_gather_tensor(total, 0, group)
        functional.reduce_scatter_tensor(full + 1, "sum", 0, group).sum().item()


@healthy()
def shapes_sent_before_the_data(rank: int) -> None:
    for step in range(4):
        if rank == 0:
            data = torch.ones(3 + step, 2)
            dist.broadcast(torch.tensor(data.shape), src=0)
            dist.broadcast(data, src=0)
        else:
            shape = torch.zeros(2, dtype=torch.long)
            dist.broadcast(shape, src=0)
            dist.broadcast(torch.empty(shape.tolist()), src=0)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(3)]
        dist.all_gather(sizes, torch.tensor([rank + step]))
        longest = int(max(size.item() for size in sizes))
        dist.all_gather([torch.zeros(longest) for _ in range(3)], torch.zeros(longest))


@healthy()
def evaluation_on_rank_0_while_the_others_wait(rank: int) -> None:
    model = DistributedDataParallel(two_layers())
    for _ in range(3):
        fit(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                for batch in DataLoader(torch.ones(20, 8), batch_size=2):
                    model.module(batch).sum().item()
            model.train()
        dist.barrier()


@healthy()
def coalesced_and_asynchronous(rank: int) -> None:
    for _ in range(3):
        tensors = [torch.full((size,), float(rank)) for size in (4, 8, 16)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
