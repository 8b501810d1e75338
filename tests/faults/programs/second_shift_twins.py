"""Programs that look like those of `second_shift_faults.py`, and are right.

Labelled and frozen before their first run, by somebody who has not read the rules.
"""

import contextlib
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.second_shift_faults import EarlyStopping, Trainer, average_gradients, mlp


class AgreedStopping(EarlyStopping):
    def on_validation_end(self, trainer: Trainer, loss: float) -> None:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        stop = torch.tensor([int(self.bad >= self.patience)])
        dist.broadcast(stop, src=0)  # the first rank decides for all
        trainer.should_stop = bool(stop)


@healthy(ranks=4)
def early_stopping_that_the_first_rank_decides_for_all(rank: int) -> None:
    losses = [0.9, 0.8, 0.85, 0.86, 0.5, 0.4] if rank in (0, 2) else [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    stopping = AgreedStopping(patience=2)
    trainer = Trainer(mlp(), [stopping])
    trainer.fit([torch.randn(4, 8) for _ in range(3)], losses)
    if rank == 0:
        time.sleep(0.6)
        print("saved; best", stopping.best)


@healthy(ranks=4)
def a_pipeline_by_hand_whose_sends_are_awaited_after_the_last_backward(rank: int) -> None:
    layer, last = nn.Linear(6, 6), 3
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(4):
        sends, kept = [], list[tuple[torch.Tensor, torch.Tensor]]()
        warm_up = last - rank

        def forward() -> None:
            x = torch.randn(2, 6)
            if rank > 0:
                dist.recv(x, rank - 1)
            x.requires_grad_()
            kept.append((x, layer(x)))  # noqa: B023  # called in this round only
            if rank < last:
                sends.append(dist.isend(kept[-1][1].detach(), rank + 1))  # noqa: B023

        def backward() -> None:
            x, y = kept.pop(0)  # noqa: B023
            gradient = torch.ones(2, 6)
            if rank < last:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1))  # noqa: B023

        for _ in range(warm_up):
            forward()
        for _ in range(6 - warm_up):
            forward()
            backward()
        for _ in range(warm_up):
            backward()
        for send in sends:
            if send is not None:
                send.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def a_parameter_server_that_serves_whoever_comes_first(rank: int) -> None:
    weights = torch.zeros(8)
    if rank == 0:
        working = {1, 2, 3}
        while working:
            message = torch.empty(9)
            worker = dist.recv(message)
            if message[0] < 0:
                working.discard(worker)
                continue
            weights -= 0.1 * message[1:]
            dist.send(weights, worker)
    else:
        for _ in range(3 * rank):  # workers have other numbers of batches
            time.sleep(0.02)
            gradient = (weights - rank).sign()
            dist.send(torch.cat([torch.ones(1), gradient]), 0)
            dist.recv(weights, 0)
        dist.send(torch.full((9,), -1.0), 0)
    dist.barrier()


@healthy()
def keys_that_go_round_the_ring_while_the_block_before_is_computed(rank: int) -> None:
    queries = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(queries.parameters(), lr=0.01)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    for _ in range(5):
        block, out = torch.randn(5, 4), torch.zeros(5, 4)
        q = queries(torch.randn(5, 4))
        for turn in range(3):
            works, coming = [], torch.empty(5, 4)
            if turn < 2:
                plan = [dist.P2POp(dist.isend, block, after), dist.P2POp(dist.irecv, coming, before)]
                works = dist.batch_isend_irecv(plan if rank % 2 else plan[::-1])
            out = out + (q @ block.T).softmax(-1) @ block
            for work in works:
                work.wait()
            block = coming
        out.square().mean().backward()
        average_gradients(queries)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_sharded_model_that_all_ranks_sample_from_and_the_first_one_prints(rank: int) -> None:
    model = mlp(8, deep=3)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = [mkdtemp()] if rank == 0 else [""]
    dist.broadcast_object_list(folder, src=0)
    for step in range(6):
        model(torch.randn(2 + rank, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            with torch.no_grad():
                sample = model(torch.zeros(1, 8))
            if rank == 0:
                print(step, sample.tolist())
        if step == 3:
            checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=Path(folder[0]) / "step-3")


@healthy(ranks=6)
def an_all_reduce_by_way_of_the_leaders_of_the_nodes(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    leaders = dist.new_group([0, 3])
    node, leader = nodes[rank // 3], 3 * (rank // 3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        dist.reduce(flat, leader, group=node)
        if rank == leader:
            dist.all_reduce(flat, group=leaders)
            if rank == 3 and step == 4:
                print("mean", float(flat.mean()) / 6)
        dist.broadcast(flat, leader, group=node)
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad.copy_(flat[: weight.numel()].view_as(weight) / 6)
            flat = flat[weight.numel() :]
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def shards_that_ranks_take_from_a_counter_in_the_store(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    model = mlp()
    taken = 0
    while (shard := store.add("next_shard", 1)) <= 13:
        time.sleep(0.04 + 0.03 * rank)
        with torch.no_grad():
            model(torch.full((2, 8), float(shard)))
        store.set(f"shard/{shard}", str(rank))
        taken += 1
    if rank == 0:
        store.wait([f"shard/{shard}" for shard in range(1, 14)], timedelta(seconds=20))
    counts = torch.tensor([taken])
    dist.all_reduce(counts)
    assert int(counts) == 13


@healthy()
def a_thread_that_saves_and_agrees_with_the_others_in_a_group_of_its_own(rank: int) -> None:
    savers = dist.new_group([0, 1, 2])
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    queue: Queue[dict[str, torch.Tensor] | None] = Queue()

    def save() -> None:
        while (state := queue.get()) is not None:
            time.sleep(0.3 if rank == 1 else 0.05)  # its disk is slow
            size = torch.tensor([sum(value.numel() for value in state.values())])
            dist.all_reduce(size, group=savers)

    thread = threading.Thread(target=save)
    thread.start()
    for step in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            queue.put({name: value.detach().clone() for name, value in model.module.state_dict().items()})
    queue.put(None)
    thread.join()
    dist.barrier()


@healthy()
def a_tensor_parallel_block_whose_weights_are_gathered_by_all(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    torch.manual_seed(2)
    block = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(block.parameters())
    for step in range(5):
        block(torch.ones(2, 6) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms = {
            name: float((weight.full_tensor() if isinstance(weight, DTensor) else weight).norm())
            for name, weight in block.named_parameters()
        }
        if rank == 0:
            print(step, norms)


@healthy(ranks=2)
def a_pipeline_of_the_library_that_is_evaluated_between_two_steps(rank: int) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 6)
    stage = PipelineStage(layer, rank, 2, torch.get_default_device())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(5):
        if rank == 0:
            schedule.step(torch.randn(8, 6))
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(8, 6), losses=losses)
            print(step, float(torch.stack(losses).mean()))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                layer(torch.randn(2, 6))
            dist.barrier()


@healthy(ranks=4)
def checkpoints_of_different_steps_of_which_all_take_the_oldest(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = torch.tensor([4 if rank == 3 else 6])
    time.sleep(0.9 if rank == 1 else 0.0)  # reads from a slow disk
    dist.all_reduce(start, op=dist.ReduceOp.MIN)
    for step in range(int(start), 14):
        accumulates = step % 3 != 2 and step < 13
        with model.no_sync() if accumulates else contextlib.nullcontext():
            model(torch.randn(4, 8)).square().mean().backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    losses: list[object] = [None] * 4
    dist.all_gather_object(losses, {"rank": rank, "steps": 14 - int(start)})


@healthy()
def rows_of_a_sharded_table_that_are_asked_for_in_any_number(rank: int) -> None:
    shard = nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(shard.parameters(), lr=0.1)
    torch.manual_seed(rank)
    data = DataLoader(TensorDataset(torch.randint(30, (36,))), batch_size=6, num_workers=1)
    for (ids,) in data:
        wanted = ids.unique()
        asked = torch.bincount(wanted // 10, minlength=3)
        served = torch.empty_like(asked)
        dist.all_to_all_single(served, asked)
        questions = torch.empty(int(served.sum()), dtype=torch.long)
        dist.all_to_all_single(questions, wanted, served.tolist(), asked.tolist())
        answers = shard(questions - 10 * rank)
        rows = torch.empty(len(wanted), 4)
        dist.all_to_all_single(rows, answers.detach(), asked.tolist(), served.tolist())
        back = torch.empty_like(answers)
        dist.all_to_all_single(back, 2 * rows, served.tolist(), asked.tolist())
        answers.backward(back)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
