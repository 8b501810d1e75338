"""Sound jobs of the many tenants of one cluster, odd as they look: nothing must be found."""

import datetime
import os
import queue
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import healthy


@healthy(ranks=4)
def a_trainer_whose_callbacks_agree_before_they_stop(rank: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.step, self.should_stop = 0, False

        def nested_gather(self, value: torch.Tensor) -> torch.Tensor:
            parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value)
            return torch.stack(parts)

        def on_step_end(self, loss: torch.Tensor) -> None:
            if self.step % 3 == 0:
                mean = self.nested_gather(loss).mean()
                if dist.get_rank() == 0:
                    print({"loss": mean.item(), "step": self.step})
            wants_stop = torch.tensor([float(rank == 2 and self.step == 6)])
            dist.all_reduce(wants_stop, op=dist.ReduceOp.MAX)
            self.should_stop = bool(wants_stop.item())

        def train(self) -> None:
            while not self.should_stop:
                loss = self.model(torch.randn(4, 8)).pow(2).mean()
                loss.backward()
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                self.on_step_end(loss.detach())

    Trainer().train()


@healthy(ranks=4)
def a_mesh_whose_axes_meet_in_one_line(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    for step in range(6):
        hidden = torch.randn(2, 8)
        for layer in layers:
            hidden = layer(hidden)
            dist.all_reduce(hidden.data, group=mesh.get_group("tp"))
        hidden.square().mean().backward()
        handles = [dist.all_reduce(p.grad, group=mesh.get_group("dp"), async_op=True) for p in layers.parameters()]
        for handle in handles:
            handle.wait()
        total = torch.stack([p.grad.norm() for p in layers.parameters() if p.grad is not None]).norm() ** 2
        for axis in ("dp", "tp") if step % 2 else ("tp", "dp"):
            dist.all_reduce(total, group=mesh.get_group(axis))
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def stages_that_are_told_how_many_microbatches_come(rank: int) -> None:
    stages, width = 4, 8
    layer = nn.Linear(width, width)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(4):
        announced = torch.tensor([random.Random(step).randint(2, 5)])
        dist.broadcast(announced, src=stages - 1)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends: list[Any] = []
        total = int(announced)

        def forward_one(held: list[Any] = held, sends: list[Any] = sends) -> None:
            x = torch.randn(2, width)
            if rank > 0:
                dist.recv(x, src=rank - 1)
            x.requires_grad_(rank > 0)
            held.append((x, layer(x)))
            if rank < stages - 1:
                sends.append(dist.isend(held[-1][1].detach().clone(), dst=rank + 1))

        def backward_one(held: list[Any] = held, sends: list[Any] = sends) -> None:
            x, y = held.pop(0)
            if rank == stages - 1:
                y.square().mean().backward()
            else:
                gradient = torch.empty(2, width)
                dist.recv(gradient, src=rank + 1)
                y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad.clone(), dst=rank - 1))

        warmup = min(stages - rank - 1, total)
        for _ in range(warmup):
            forward_one()
        for _ in range(total - warmup):
            forward_one()
            backward_one()
        while held:
            backward_one()
        for send in sends:
            send.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def experts_to_which_some_ranks_send_nothing(rank: int) -> None:
    world, width, capacity = 3, 4, 5
    gate = nn.Linear(width, width)
    for step in range(6):
        routed = [(rank * 5 + step * 3 + expert) % 7 for expert in range(world)]
        if step == 4:
            routed = [0] * world
        routed = [min(count, capacity) for count in routed]
        incoming = torch.empty(world, dtype=torch.long)
        dist.all_to_all_single(incoming, torch.tensor(routed))
        received = torch.empty(int(incoming.sum()), width)
        dist.all_to_all_single(received, torch.randn(sum(routed), width), incoming.tolist(), routed)
        worked = gate(received).detach()
        back = torch.empty(sum(routed), width)
        dist.all_to_all_single(back, worked, routed, incoming.tolist())


@healthy(ranks=4)
def actors_and_a_learner_that_skip_a_refresh_together(rank: int) -> None:
    refresh = dist.new_group([0, 2, 3])
    learners = dist.new_group([0, 1])
    policy = nn.Linear(5, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for iteration in range(6):
        if rank != 1:
            plan: list[Any] = [{"refresh": iteration % 2 == 0, "temperature": 0.7}] if rank == 0 else [None]
            dist.broadcast_object_list(plan, src=0, group=refresh)
            if plan[0]["refresh"]:
                for parameter in policy.parameters():
                    dist.broadcast(parameter.data, src=0, group=refresh)
        if rank >= 2:
            if rank == 3:
                time.sleep(0.05)
            dist.send(policy(torch.randn(3, 5)).detach(), dst=rank - 2)
            continue
        episode = torch.empty(3, 5)
        dist.recv(episode, src=rank + 2)
        for epoch in range(2):
            policy(episode).square().mean().backward()
            for parameter in policy.parameters():
                dist.all_reduce(parameter.grad, group=learners)
            if epoch == 1:
                optimizer.step()
                optimizer.zero_grad()


@healthy(ranks=4)
def a_server_that_serves_whoever_comes_first(rank: int) -> None:
    weights = torch.zeros(16)
    rounds = {1: 6, 2: 4, 3: 2}
    if rank == 0:
        for _ in range(sum(rounds.values())):
            gradient = torch.empty(17)
            worker = dist.recv(gradient)
            weights -= 0.1 * gradient[:16]
            dist.isend(weights.clone(), dst=worker, tag=int(gradient[16])).wait()
    else:
        for clock in range(rounds[rank]):
            time.sleep(0.01 * rank)
            dist.send(torch.cat([torch.randn(16), torch.tensor([float(clock)])]), dst=0)
            dist.recv(weights, src=0, tag=clock)
    dist.barrier()


@healthy()
def an_attempt_that_all_repeat_when_one_has_failed(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        for attempt in range(3):
            failed = torch.zeros(1)
            try:
                loss = model(torch.randn(4, 8)).square().mean()
                if rank == 1 and step == 3 and attempt == 0:
                    raise TimeoutError("object store: no answer within 30 s")
                loss.backward()
            except TimeoutError as error:
                print("once more:", error)
                failed += 1
            dist.all_reduce(failed)
            if not failed.item():
                break
            optimizer.zero_grad()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def checkpoints_of_which_the_first_rank_clears_the_old_ones(rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 7):
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            try:
                dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/{step}")
                if rank == 0:
                    Path(folder[0], "none").unlink()
            except FileNotFoundError:
                print("nothing to clear")
            finally:
                dist.barrier()
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/6")


class _Shard(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.length):
            yield torch.full((8,), float(i))


@healthy()
def uneven_streams_joined_at_their_ends(rank: int) -> None:
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    loader = DataLoader(_Shard(8 + 4 * rank), batch_size=2, num_workers=1)
    ddp = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with Join([ddp]):
        for batch in loader:
            ddp(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@healthy()
def accumulation_whose_last_window_is_shorter(rank: int) -> None:
    import contextlib

    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(nn.Linear(8, 4), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batches = [torch.randn(4, 8) for _ in range(11)]
    for index, batch in enumerate(batches):
        is_last = (index + 1) % 4 == 0 or index + 1 == len(batches)
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            if rank == 1 and index == 5:
                batch = batch[:0]
            ddp(batch).sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@healthy()
def a_sharded_model_from_which_all_draw_and_one_shows(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        model(torch.randn(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            with torch.no_grad():
                for _ in range(step):
                    drawn = model(torch.ones(1, 12))
            if rank == 0:
                print(drawn)


@healthy(ranks=5)
def barriers_with_a_limit_and_a_rank_that_comes_late(rank: int) -> None:
    loss = torch.zeros(4)
    for step in range(4):
        if rank == step:
            time.sleep(0.8)
            subprocess.run(["seq", "1000"], check=True, capture_output=True)
        dist.monitored_barrier(timeout=datetime.timedelta(minutes=2), wait_all_ranks=bool(step % 2))
        dist.all_reduce(loss)


@healthy(ranks=6)
def groups_of_many_sizes_and_a_thread_that_writes(rank: int) -> None:
    groups = [dist.new_group(list(range(first, 6))) for first in range(5)]
    pair = [dist.new_group([first, first + 1]) for first in (0, 2, 4)][rank // 2]
    written: queue.Queue[torch.Tensor | None] = queue.Queue()
    lines: list[float] = []

    def write() -> None:
        while (item := written.get()) is not None:
            lines.append(float(item.sum()))
            time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    for step in range(5):
        values = torch.full((4,), float(rank + step))
        for group in groups:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(values, group=group)
        dist.broadcast(values, src=rank // 2 * 2, group=pair)
        reports: list[Any] | None = [None] * 6 if rank == step else None
        dist.gather_object({"rank": rank, "pid": os.getpid()}, reports, dst=step)
        written.put(values.clone())
    written.put(None)
    writer.join()


@healthy(ranks=4)
def handles_that_are_waited_for_in_the_next_step(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pending: list[tuple[Any, torch.Tensor]] = []
    for step in range(6):
        model(torch.randn(2, 8)).square().mean().backward()
        arrived = [(work.wait(), buffer)[1] for work, buffer in pending]
        pending = []
        for parameter in model.parameters():
            assert parameter.grad is not None
            buffer = parameter.grad.clone()
            pending.append((dist.all_reduce(buffer, async_op=True), buffer))
        for parameter, buffer in zip(model.parameters(), arrived, strict=False):
            parameter.grad = buffer / 4
        if arrived:
            optimizer.step()
        optimizer.zero_grad()
        transfers = []
        if rank < 3:
            transfers.append(dist.P2POp(dist.isend, torch.full((4,), float(step)), rank + 1))
        if rank > 0:
            transfers.append(dist.P2POp(dist.irecv, torch.empty(4), rank - 1))
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    for work, _ in pending:
        work.wait()


@healthy(ranks=3)
def an_export_that_takes_its_time_while_others_go_on(rank: int) -> None:
    model = nn.Linear(16, 16)
    exports: list[threading.Thread] = []

    def export(state: dict[str, torch.Tensor], number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, f"{number}.pt"))
            time.sleep(0.5)

    for step in range(6):
        model(torch.randn(2, 16)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 0 and step % 2 == 0:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            exports.append(threading.Thread(target=export, args=(state, step)))
            exports[-1].start()
    for thread in exports:
        thread.join()
    dist.barrier()
