"""Jobs in which several things go on: meshes, messages, threads and signals beside training."""

import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.faults.corpus import faulty, healthy, train


@faulty("rank-skipped-collective", 3, ranks=4)
def a_row_of_a_tensor_that_is_not_summed(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weight = torch.ones(8, 8)
    for step in range(5):
        partial = torch.full((2, 8), 0.0 if rank == 3 and step == 2 else 1.0) @ weight
        if partial.any():
            dist.all_reduce(partial, group=pairs[rank // 2])  # here
        dist.all_reduce(weight)


@faulty("wrong-group", 2, ranks=4)
def an_axis_of_the_mesh_taken_for_the_other(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(4):
        axis = "dp" if rank == 2 and step == 2 else "tp"
        dist.all_reduce(torch.ones(16), group=mesh.get_group(axis))  # here
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))
        dist.barrier()


@faulty("p2p-unmatched", 0)
def activations_for_the_stage_after_the_next(rank: int) -> None:
    for microbatch in range(4):
        if rank == 0:
            to = 2 if microbatch == 2 else 1
            dist.send(torch.ones(64), to)  # here
        else:
            dist.recv(torch.zeros(64), rank - 1)  # here
            if rank == 1:
                dist.send(torch.ones(64), 2)
    dist.barrier()


@faulty("size-mismatch", 2)
def a_list_of_objects_of_another_length(rank: int) -> None:
    dist.barrier()
    settings: list[object] = [{"lr": 0.1}, "adam", 3] if rank == 0 else [None] * (2 if rank == 2 else 3)
    dist.broadcast_object_list(settings, src=0)  # here
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_sharded_checkpoint_without_one_rank(rank: int) -> None:
    import tempfile

    import torch.distributed.checkpoint as checkpoint

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = nn.Linear(8, 8)

    def save(step: int) -> None:
        if step == 2 and rank != 1:
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/{step}")  # here

    train(rank, 5, save)


@faulty("collective-order-mismatch", 0)
def a_heartbeat_thread_with_a_barrier(rank: int) -> None:
    def beat() -> None:
        dist.barrier()  # here

    def each(step: int) -> None:
        if rank == 0 and step == 2:
            thread = threading.Thread(target=beat)
            thread.start()
            thread.join(timeout=0.2)

    train(rank, 6, each)


@faulty("collective-order-mismatch", 1)
def a_signal_that_one_rank_alone_gets(rank: int) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    parameter = torch.ones(32)
    for step in range(6):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop.is_set():
            break
        dist.all_reduce(parameter)
    dist.barrier()  # here


@faulty("rank-killed", 2)
def a_rank_that_is_preempted(rank: int) -> None:
    def each(step: int) -> None:
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    train(rank, 6, each)


@faulty("uneven-inputs", 2)
def a_sampler_told_of_too_many_replicas(rank: int) -> None:
    data = torch.ones(24, 8)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, 6 if rank == 2 else 3, rank)  # type: ignore[arg-type]
    model = DistributedDataParallel(nn.Linear(8, 8))
    for rows in DataLoader(data, batch_size=2, sampler=sampler):  # type: ignore[arg-type]
        model(rows).sum().backward()  # here
    dist.barrier()


class Stalls(torch.utils.data.Dataset[torch.Tensor]):
    """Its fourth row takes for ever on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.rank == 1 and i == 3:
            time.sleep(100)
        return torch.ones(8)


@faulty("rank-crashed", 1)
def a_loader_that_gives_up(rank: int) -> None:
    for rows in DataLoader(Stalls(rank), batch_size=1, num_workers=1, timeout=2):  # here
        dist.all_reduce(rows)


@faulty("size-mismatch", 2)
def shards_of_a_sum_that_do_not_add_up(rank: int) -> None:
    for step in range(4):
        whole = torch.ones(7 if rank == 2 and step == 2 else 6)
        dist.reduce_scatter_tensor(torch.zeros(2), whole)  # here


@faulty("rank-skipped-collective", 0)
def a_step_that_one_rank_does_not_average(rank: int) -> None:
    import contextlib

    model = DistributedDataParallel(nn.Linear(8, 8))
    for step in range(5):
        alone = model.no_sync() if rank == 0 and step == 3 else contextlib.nullcontext()
        with alone:
            model(torch.ones(2, 8)).sum().backward()  # here
        dist.broadcast(torch.zeros(3), src=0)


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def large_messages_awaited_before_the_answer(rank: int) -> None:
    big = torch.ones(4_000_000)
    for step in range(2):
        if step:
            dist.isend(big, 1 - rank).wait()  # here
            dist.recv(torch.zeros(4_000_000), 1 - rank)
        else:
            dist.barrier()


@faulty("split-size-mismatch", 0, 1)
def experts_that_count_otherwise(rank: int) -> None:
    for step in range(3):
        given = [2, 2, 2]
        taken = [3 if rank == 1 and step == 1 else 2, 2, 2]
        dist.all_to_all_single(torch.zeros(sum(taken)), torch.ones(6), taken, given)  # here
    dist.barrier()


@faulty("root-mismatch", 3, ranks=4)
def metrics_gathered_at_another_rank(rank: int) -> None:
    some = dist.new_group([1, 2, 3])
    for step in range(3):
        if rank:
            to = 2 if rank == 3 and step == 1 else 1
            rows = [torch.zeros(4) for _ in range(3)] if rank == to else None
            dist.gather(torch.ones(4), rows, dst=to, group=some)  # here
    dist.barrier()


@faulty("reduce-op-mismatch", 2, ranks=4)
def a_product_for_a_sum_in_a_subgroup(rank: int) -> None:
    half = dist.new_group([0, 2, 3])
    for step in range(4):
        if rank != 1:
            op = dist.ReduceOp.PRODUCT if rank == 2 and step == 1 else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(4), op=op, group=half)  # here
        dist.barrier()


@faulty("group-creation-mismatch", 1)
def a_group_made_one_call_too_late(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(4))  # here
        dist.new_group([0, 1, 2])
    else:
        dist.new_group([0, 1, 2])  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 2)
def a_thread_that_is_awaited_for_ever(rank: int) -> None:
    never = threading.Event()

    def each(step: int) -> None:
        if rank == 2 and step == 2:
            writer = threading.Thread(target=never.wait, daemon=True)
            writer.start()
            writer.join()  # here

    train(rank, 5, each)


@faulty("rank-stuck", 0)
def a_pipe_that_is_full(rank: int) -> None:
    def each(step: int) -> None:
        if rank == 0 and step == 1:
            tool = subprocess.Popen([sys.executable, "-c", "print('x' * 1_000_000)"], stdout=subprocess.PIPE)
            tool.wait()  # here

    train(rank, 5, each)


@faulty("rank-exited", 1)
def a_rank_that_tidies_up_early(rank: int) -> None:
    for step in range(6):
        if rank == 1 and step == 3:
            break
        dist.all_reduce(torch.ones(8))  # here


@faulty("slow-rank", 3, ranks=4)
def a_rank_that_checks_every_row(rank: int) -> None:
    def check(_: int) -> None:
        until = time.monotonic() + (0.06 if rank == 3 else 0.002)
        while time.monotonic() < until:
            sum(range(200))

    train(rank, 50, check)


@faulty("unwaited-async", 1, ranks=2)
def a_message_read_before_it_came(rank: int) -> None:
    for _ in range(3):
        if rank == 0:
            dist.send(torch.ones(8), 1)
        else:
            rows = torch.zeros(8)
            dist.irecv(rows, 0)  # here
            rows.sum().item()
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_sharded_step_left_out_for_a_bad_loss(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    for step in range(4):
        loss = model(torch.full((2, 6), float("inf") if rank == 1 and step == 2 else 1.0)).sum()
        if not torch.isfinite(loss):
            dist.all_reduce(torch.zeros(1))
            continue
        loss.backward()  # here
        dist.all_reduce(torch.zeros(1))


@faulty("rank-crashed", 2)
def a_hook_that_fails_in_backward(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 8))
    for step in range(4):
        out = model(torch.ones(2, 8))

        def check(_: torch.Tensor, step: int = step) -> None:
            if rank == 2 and step == 2:
                raise FloatingPointError("gradient of rank 2 is not finite")

        out.register_hook(check)
        out.sum().backward()  # here


@healthy(ranks=2)
def sharded_training_clipped_and_evaluated(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        model(torch.ones(2, 6)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            model.eval()
            with torch.no_grad():
                model(torch.ones(rank + 1, 6))
            model.train()
            if rank == 0:
                print("evaluated", step)


@healthy(ranks=2)
def layers_split_in_columns_and_rows(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _step in range(4):
        model(torch.ones(2, 8)).sum().backward()


@healthy(ranks=4)
def two_pipelines_that_average_their_gradients(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "pp"))
    stage_number = mesh.get_local_rank("pp")
    module = nn.Linear(8, 8)
    stage = PipelineStage(module, stage_number, 2, torch.get_default_device(), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    for _step in range(3):
        if stage_number == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.ones(8, 8), losses=[])
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        module.zero_grad()


@healthy()
def a_preemption_that_all_hear_of(rank: int) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: stop.set())
    for step in range(8):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR2)
        told = torch.tensor([float(stop.is_set())])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if told.item():
            dist.barrier()
            break
        dist.all_reduce(torch.ones(64))


@healthy(ranks=4)
def messages_of_many_sizes_awaited_backwards(rank: int) -> None:
    for step in range(3):
        works = []
        for other in range(4):
            if other != rank:
                works.append(dist.isend(torch.ones(1 + 10 * rank + other), other, tag=step))
                works.append(dist.irecv(torch.zeros(1 + 10 * other + rank), other, tag=step))
        for work in reversed(works):
            work.wait()


@healthy(ranks=4)
def objects_within_halves(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, first = halves[rank // 2], rank // 2 * 2
    for step in range(3):
        row: list[object] = [{"step": step, "text": "x" * (100 * step + rank)}]
        dist.broadcast_object_list(row, src=first, group=own)
        rows: list[object] = [None, None]
        dist.all_gather_object(rows, "y" * (rank + 1), group=own)
    dist.barrier()


@healthy()
def turns_at_long_batches_with_workers(rank: int) -> None:
    class Uneven(Stalls):
        def __getitem__(self, i: int) -> torch.Tensor:
            time.sleep(0.05 if (i + self.rank) % 3 == 0 else 0.001)
            return torch.ones(8)

    loader = DataLoader(Uneven(rank), batch_size=1, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for rows in loader:
            dist.all_reduce(rows)


@healthy()
def reading_that_is_tried_again(rank: int) -> None:
    for step in range(5):
        for attempt in range(3):
            try:
                if rank == step % 3 and attempt < 2:
                    raise OSError("slow disk")
                break
            except OSError:
                time.sleep(0.01)
        dist.all_reduce(torch.ones(8))
    dist.monitored_barrier()


@healthy()
def a_thread_for_statistics_with_its_own_group(rank: int) -> None:
    own = dist.new_group([0, 1, 2])

    def gather() -> None:
        for _ in range(5):
            rows: list[object] = [None] * 3
            dist.all_gather_object(rows, rank, group=own)

    thread = threading.Thread(target=gather)
    thread.start()
    train(rank, 5)
    thread.join()


@healthy()
def batches_of_which_some_ranks_have_none(rank: int) -> None:
    left = [3, 5, 4][rank]
    while True:
        more = torch.tensor([float(left > 0)])
        dist.all_reduce(more, op=dist.ReduceOp.MAX)
        if not more.item():
            break
        grad = torch.ones(8) if left > 0 else torch.zeros(8)
        dist.all_reduce(grad)
        left -= 1


@healthy()
def uneven_rows_with_empty_ones(rank: int) -> None:
    counts = [[0, 2, 1], [3, 0, 0], [1, 1, 0]]
    for _ in range(3):
        taken = [counts[source][rank] for source in range(3)]
        given = counts[rank]
        dist.all_to_all_single(torch.zeros(sum(taken), 2), torch.ones(sum(given), 2), taken, given)
        rows = [torch.zeros(3) for _ in range(3)]
        dist.all_gather(rows, torch.ones(3))
