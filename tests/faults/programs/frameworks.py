"""What frameworks do on ranks: data parallel, sharded, tensor parallel, pipelines, checkpoints, threads."""

import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def steps(wrapped: nn.Module, count: int, rank: int) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        wrapped(torch.full((2, 8), rank + 1.0)).sum().backward()
        optimizer.step()


@healthy()
def data_parallel(rank: int) -> None:
    steps(DistributedDataParallel(model()), 5, rank)


@healthy()
def data_parallel_that_joins_uneven_inputs(rank: int) -> None:
    wrapped = DistributedDataParallel(model())
    with wrapped.join():
        for _ in range(3 + rank):
            wrapped(torch.ones(2, 8)).sum().backward()


@faulty("rank-skipped-collective", 1)
def data_parallel_without_a_step(rank: int) -> None:
    wrapped = DistributedDataParallel(model())
    for step in range(5):
        if rank != 1 or step != 3:
            wrapped(torch.ones(2, 8)).sum().backward()  # here
        dist.all_reduce(torch.ones(()))


@healthy(ranks=2)
def fully_sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    steps(sharded, 4, rank)


@healthy(ranks=4)
def two_axes_of_tensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["dp"])
    steps(parallel, 3, rank)


def pipeline(rank: int, microbatches: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(8, 8), rank, dist.get_world_size(), torch.get_default_device())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        given = (torch.ones(12, 8),) if rank == 0 else ()
        wanted = {"target": torch.zeros(12, 8)} if rank == dist.get_world_size() - 1 else {}
        schedule.step(*given, **wanted)


@healthy()
def a_pipeline(rank: int) -> None:
    pipeline(rank, 4)


@faulty("pipeline-schedule-mismatch", 2)
def a_pipeline_of_which_one_stage_has_other_microbatches(rank: int) -> None:
    pipeline(rank, 3 if rank == 2 else 4)


@healthy()
def a_sharded_checkpoint(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    wrapped = DistributedDataParallel(model())
    steps(wrapped, 2, rank)
    checkpoint.save(wrapped.state_dict(), checkpoint_id=Path(str(folder[0])) / "step")
    checkpoint.load(wrapped.state_dict(), checkpoint_id=Path(str(folder[0])) / "step")


@healthy()
def threads_with_a_group_each(rank: int) -> None:
    groups = [dist.new_group(list(range(3))) for _ in range(2)]

    def work(group: dist.ProcessGroup) -> None:
        for _ in range(5):
            dist.all_reduce(torch.full((4,), float(rank)), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@healthy()
def steps_of_rank_0_before_the_others(rank: int) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(8):
        if rank == 0 or step:
            weight.sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(4))


@healthy()
def local_steps_between_averages(rank: int) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        for _ in range(2 + rank):
            weight.sum().backward()
            optimizer.step()
        dist.all_reduce(weight.data)
