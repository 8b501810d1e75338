"""Programs as an inspector writes them, who knows the list of kinds only, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules. `inspectors_faults.py` has programs
that are wrong.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import healthy

WEIGHT = torch.zeros(6)
LOCK = threading.Lock()


def pull() -> torch.Tensor:
    """Weights of the server."""
    with LOCK:
        return WEIGHT.clone()


def push(gradient: torch.Tensor) -> int:
    """Take a step on the server."""
    with LOCK:
        WEIGHT.sub_(0.1 * gradient)
    return len(gradient)


@healthy()
def a_server_of_parameters_with_workers_of_unequal_speed(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank > 0:
        for step in range(4 * rank):
            weight = rpc.rpc_sync("worker0", pull).requires_grad_()
            (weight * torch.randn(6) - step).square().sum().backward()
            future = rpc.rpc_async("worker0", push, args=(weight.grad,))
            time.sleep(0.03 * rank)
            future.wait()
    rpc.shutdown()
    dist.barrier()


@healthy(ranks=2)
def an_interleaved_pipeline_with_two_stages_a_rank(rank: int) -> None:
    torch.manual_seed(rank)
    device = torch.device("cpu")
    stages = [PipelineStage(nn.Linear(6, 6), rank + 2 * i, 4, device) for i in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([weight for stage in stages for weight in stage.submod.parameters()], lr=0.1)
    for step in range(4):
        if rank == 0:
            schedule.step(torch.randn(8, 6))
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(8, 6), losses=losses)
            print(step, float(torch.stack(losses).mean()))
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def shards_of_replicas_that_agree_on_the_shortest_loader(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(20 + 8 * rank, 8)), batch_size=4)
    shortest = torch.tensor(len(loader))
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    for _, (batch,) in zip(range(int(shortest)), loader, strict=False):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def tensors_that_are_sharded_unevenly_and_moved_about(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for rows in (5, 2, 7, 1):
        torch.manual_seed(rows)
        table = distribute_tensor(torch.randn(rows, 6), mesh, [Shard(0), Replicate()])
        turned = table.redistribute(placements=[Replicate(), Shard(1)])
        both = turned.redistribute(placements=[Shard(0), Shard(1)])
        norm = (both * both).sum().full_tensor()
        mine = float(both.to_local().square().sum()) if both.to_local().numel() else 0.0
        sums: list[float] = [0.0] * 4
        dist.all_gather_object(sums, mine)
        if rank == 0:
            print(rows, float(norm), sum(sums))


@healthy(ranks=4)
def experts_that_get_no_token_at_all_and_still_take_part(rank: int) -> None:
    expert = nn.Linear(6, 6)
    for step in range(6):
        count = 0 if (rank + step) % 3 == 0 else 4 + rank
        tokens = torch.randn(count, 6)
        outgoing = torch.bincount(torch.full((count,), step % 4), minlength=4)
        incoming = funcol.all_to_all_single(outgoing, [1] * 4, [1] * 4, dist.group.WORLD)
        incoming = funcol.wait_tensor(incoming)
        mine = funcol.all_to_all_single(tokens, incoming.tolist(), outgoing.tolist(), dist.group.WORLD)
        done = expert(funcol.wait_tensor(mine)).detach()
        back = funcol.all_to_all_single(done, outgoing.tolist(), incoming.tolist(), dist.group.WORLD)
        assert funcol.wait_tensor(back).shape == tokens.shape


@healthy()
def a_file_that_rank_0_prepares_while_the_others_wait_at_a_monitored_barrier(rank: int) -> None:
    file = Path(gettempdir()) / f"inspectors-prepared-{os.environ['MASTER_PORT']}"
    if rank == 0:
        program = f"import time; time.sleep(1); open({str(file)!r}, 'w').write('1 2 3 4 5 6')"
        subprocess.run([sys.executable, "-c", program], check=True)
    dist.monitored_barrier(timeout=timedelta(minutes=2))
    numbers = [float(word) for word in file.read_text().split()]
    total = torch.tensor(numbers[rank::3]).sum()
    dist.reduce(total, dst=2)
    found: list[str] | None = ["", "", ""] if rank == 2 else None
    dist.gather_object(file.name, found, dst=2)
    dist.barrier()
    if rank == 0:
        file.unlink()


@healthy()
def documents_taken_from_a_counter_in_the_store(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    done = 0
    while (number := store.add("next-document", 1)) <= 15:
        time.sleep(0.02 * (1 + rank))
        store.set(f"document/{number}", str(number * number))
        done += 1
    store.wait([f"document/{number}" for number in range(1, 16)])
    total = torch.tensor(done)
    dist.all_reduce(total)
    assert int(total) == 15


@healthy()
def checkpoints_written_in_the_background_by_a_group_of_their_own(rank: int) -> None:
    folder = Path(gettempdir()) / f"inspectors-async-{os.environ['MASTER_PORT']}"
    savers = dist.new_group(backend="gloo")
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saving = None
    for step in range(1, 10):
        model(torch.randn(5, 6)).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            if saving is not None:
                saving.result()
            state = {"model": model.state_dict()}
            print(rank, "begins to save", step)
            saving = dcp.async_save(state, checkpoint_id=folder / str(step), process_group=savers)
    if saving is not None:
        saving.result()
    dist.barrier()


@healthy(ranks=6)
def a_plate_of_uneven_parts_with_walls_at_both_ends(rank: int) -> None:
    rows = 6 + 3 * rank
    plate = torch.rand(rows, 5) + rank
    for step in range(12):
        plan, ghosts = [], {}
        for neighbour, edge, ghost in ((rank - 1, 1, 0), (rank + 1, rows - 2, rows - 1)):
            if 0 <= neighbour < 6:
                ghosts[ghost] = torch.empty(5)
                plan.append(dist.P2POp(dist.irecv, ghosts[ghost], neighbour))
                plan.append(dist.P2POp(dist.isend, plate[edge].clone(), neighbour))
        for work in dist.batch_isend_irecv(plan):
            work.wait()
        for ghost, row in ghosts.items():
            plate[ghost] = row
        plate[1:-1] += 0.2 * (plate[2:] - 2 * plate[1:-1] + plate[:-2])
        if step % 4 == 3:
            change = plate.std()
            dist.all_reduce(change, op=dist.ReduceOp.MAX)


@healthy()
def local_steps_between_averages_with_other_batches_on_each_rank(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    for step in range(14):
        for _ in range(1 + (rank + step) % 2):
            model(torch.randn(2 + rank, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        averager.average_parameters(model.parameters())
    if rank == 1:
        torch.save(model.state_dict(), Path(gettempdir()) / f"inspectors-model-{os.environ['MASTER_PORT']}")


@healthy()
def an_attempt_given_up_by_all_and_begun_again_with_fresh_groups(rank: int) -> None:
    def attempt(number: int) -> bool:
        weight = torch.ones(4)
        for step in range(6):
            failed = torch.tensor(int(number == 0 and rank == 1 and step == 3))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if failed:
                return False
            dist.all_reduce(weight)
            weight /= 3
        return True

    store = dist.distributed_c10d._get_default_store()
    for number in range(2):
        finished = attempt(number)
        dist.barrier()
        if finished:
            break
        dist.destroy_process_group()
        again = dist.PrefixStore(f"attempt-{number + 1}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=3)


@healthy()
def numbers_shared_by_a_thread_with_its_own_group(rank: int) -> None:
    reports = dist.new_group()
    waiting: queue.Queue[float | None] = queue.Queue()

    def report() -> None:
        while (number := waiting.get()) is not None:
            shared = torch.tensor(number)
            dist.all_reduce(shared, group=reports)
            time.sleep(0.02)

    thread = threading.Thread(target=report)
    thread.start()
    model = nn.Linear(6, 2)
    data = TensorDataset(torch.randn(24, 6))
    for step, (batch,) in enumerate(DataLoader(data, batch_size=2, num_workers=1)):
        loss = model(batch).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        if step % 2:
            waiting.put(float(loss))
    waiting.put(None)
    thread.join()
    dist.barrier()
    print(rank, "is done")
