"""Evaluation, saving and start of jobs: what is done on some ranks only; and more that is right."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.faults.corpus import back_end, faulty, healthy, train


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@faulty("rank-skipped-collective", 2, ranks=4)
def an_empty_shard_that_returns_early(rank: int) -> None:
    def evaluate(rows: int) -> None:
        if rows == 0:
            return
        total = torch.tensor([float(rows)])
        dist.all_reduce(total)  # here

    for epoch in range(4):
        evaluate(0 if rank == 2 and epoch == 2 else 5)
        dist.broadcast(torch.zeros(6), src=0)


@faulty("collective-order-mismatch", 0)
def wrapped_model_evaluated_on_rank_0_alone(rank: int) -> None:
    model = DistributedDataParallel(normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))  # here
    dist.barrier()


@faulty("collective-order-mismatch", 0)
def broadcast_by_the_source_alone(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 0 and step == 1:
            dist.broadcast(torch.ones(2), src=0)  # here


@faulty("collective-order-mismatch", 3, ranks=4)
def a_clock_that_tells_one_rank_to_save(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(16))
        if rank == 3 and step == 4:  # its minute is over before that of the others
            dist.gather(torch.ones(2), dst=0)  # here
        dist.all_gather([torch.zeros(3) for _ in range(4)], torch.ones(3))


@faulty("rank-never-joined", 3, joins=False)
def a_world_larger_than_what_was_started(rank: int) -> None:
    dist.init_process_group(back_end(), rank=rank, world_size=4)  # here


@faulty("rank-crashed", 0, 1, 2)
def the_same_error_everywhere(_: int) -> None:
    train(0, 2)
    raise ValueError("no checkpoint to resume from")  # here


@faulty("rank-crashed", 1)
def a_worker_of_a_loader_that_dies(rank: int) -> None:
    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> torch.Tensor:
            if rank == 1 and i == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.ones(4)

    weight = nn.Parameter(torch.ones(4))
    for batch in DataLoader(Rows(), batch_size=2, num_workers=1):
        (weight * batch).sum().backward()
        dist.all_reduce(weight.grad)


@faulty("rank-crashed", 3, ranks=4)
def memory_that_runs_out(rank: int) -> None:
    def hold(step: int) -> None:
        if rank == 3 and step == 2:
            torch.empty(1 << 50)  # here

    train(rank, 5, hold)


@faulty("p2p-unmatched", 1)
def objects_sent_to_the_wrong_rank(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.recv_object_list([None], src=1)  # here
    elif rank == 1:
        dist.barrier()
    else:
        dist.barrier()


@faulty("p2p-deadlock-cycle", 0, 2)
def two_of_three_that_greet_first(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(2))
        if step == 2 and rank != 1:
            peer = 2 - rank
            dist.recv(torch.zeros(1 << 10), src=peer)  # here
            dist.send(torch.zeros(1 << 10), dst=peer)


@healthy()
def wrapped_model_with_buffers(_: int) -> None:
    model = DistributedDataParallel(normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
        model.train()


@healthy(ranks=2)
def a_static_graph(_: int) -> None:
    model = DistributedDataParallel(normalised(), static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


@healthy()
def uneven_evaluation_inside_a_join(rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Join([model]):
            for batch in DataLoader(torch.ones(4 + 2 * rank, 8), batch_size=2):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()


@healthy(ranks=4)
def exchanges_in_halves_by_their_own_ranks(rank: int) -> None:
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for tag in range(3):
        if dist.get_rank(half) == 0:
            dist.send(torch.ones(4), group=half, group_dst=1, tag=tag)
            dist.recv(torch.zeros(4), group=half, group_src=1, tag=tag)
        else:
            dist.recv(torch.zeros(4), group=half, group_src=0, tag=tag)
            dist.send(torch.ones(4), group=half, group_dst=0, tag=tag)
    dist.barrier()


@healthy()
def experts_of_which_one_gets_nothing(rank: int) -> None:
    for step in range(3):
        sends = [0, 3, step]
        takes = [sends[rank]] * 3
        dist.all_to_all_single(torch.zeros(sum(takes), 2), torch.ones(sum(sends), 2), takes, sends)
        parts = [torch.zeros(2) for _ in range(3)]
        dist.all_to_all(parts, [torch.ones(2) for _ in range(3)]) if step > 5 else None


@healthy(ranks=2)
def sharded_parameters_of_the_first_kind(_: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.get_default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@healthy(ranks=2)
def tensors_laid_out_anew(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    for _ in range(3):
        whole = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        other = whole.redistribute(mesh, [Replicate()])
        (other @ whole).full_tensor()


@healthy(ranks=2)
def a_pipeline_that_trains_and_evaluates(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.get_default_device())
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        if rank == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.zeros(8, 8))
        dist.barrier()


@healthy()
def a_job_resumed_from_its_checkpoint(rank: int) -> None:
    import tempfile

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    for part in range(2):
        model = DistributedDataParallel(nn.Linear(8, 8))
        if part:
            model.load_state_dict(torch.load(f"{folder[0]}/last.pt", weights_only=True))
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        if rank == 0:
            torch.save(model.state_dict(), f"{folder[0]}/last.pt")
        dist.barrier()
