"""Faulty jobs of the many tenants of one cluster, each written in the manner of its trade.

Trainers with callbacks, meshes, pipelines by hand, experts, actors and learners, servers of parameters. Kind, culprits
and line were written down from the fault alone, before the programs ran once.
"""

import datetime
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.corpus import faulty


@faulty("collective-order-mismatch", 0, ranks=4)
def a_trainer_that_gathers_its_loss_on_the_process_that_prints(rank: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.global_step = 0

        def nested_gather(self, value: torch.Tensor) -> torch.Tensor:
            parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value)  # here
            return torch.stack(parts)

        def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
            loss = self.model(inputs).pow(2).mean()
            loss.backward()
            return loss.detach()

        def maybe_log(self, loss: torch.Tensor) -> None:
            if self.global_step % 3 == 0 and dist.get_rank() == 0:
                print({"loss": self.nested_gather(loss).mean().item(), "step": self.global_step})

        def train(self, max_steps: int) -> None:
            while self.global_step < max_steps:
                loss = self.training_step(torch.randn(4, 8))
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.global_step += 1
                self.maybe_log(loss)

    del rank
    Trainer().train(max_steps=8)


@faulty("rank-skipped-collective", 2, ranks=4)
def patience_that_is_counted_on_the_shard_of_each_rank(rank: int) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fit_one_epoch() -> None:
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            dist.all_reduce(flat)  # here
            optimizer.step()
            optimizer.zero_grad()

    def validation_loss(epoch: int) -> float:
        return 1.0 + 0.1 * epoch if rank == 2 else 1.0 / (1 + epoch)

    best, bad_epochs = float("inf"), 0
    for epoch in range(8):
        fit_one_epoch()
        loss = validation_loss(epoch)
        if loss < best:
            best, bad_epochs = loss, 0
        else:
            bad_epochs += 1
        if bad_epochs >= 3:
            print(f"rank {rank}: no better for {bad_epochs} epochs, stop")
            break  # here
    dist.barrier()
    if rank == 0:
        print("best", best)


class _ReduceOutput(torch.autograd.Function):
    """The sum over the ranks of a tensor-parallel group, as row-parallel layers make it."""

    @staticmethod
    def forward(_: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the sum of what the ranks have."""
        summed = partial.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hand the gradient through."""
        return gradients[0], None


@faulty("wrong-group", 3, ranks=4)
def a_norm_that_one_rank_sums_along_the_other_axis_of_the_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tp = mesh.get_group("tp")
    block = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    for step in range(6):
        hidden = torch.randn(2, 8)
        for layer in block:
            hidden = _ReduceOutput.apply(layer(hidden), tp)
        hidden.square().mean().backward()
        total = torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm() ** 2
        axis = "tp" if rank == 3 and step >= 4 else "dp_shard"
        dist.all_reduce(total, group=mesh.get_group(axis))  # here
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-unmatched", 3, ranks=4)
def a_last_stage_whose_labels_come_one_microbatch_short(rank: int) -> None:
    stages, width = 4, 8
    layer = nn.Linear(width, width)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def labels_of(step: int) -> list[torch.Tensor]:
        count = 3 if rank == stages - 1 and step == 2 else 4
        return [torch.randn(2, width) for _ in range(count)]

    for step in range(4):
        labels = labels_of(step)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends: list[Any] = []

        def forward_one(held: list[Any] = held, sends: list[Any] = sends) -> None:
            x = torch.randn(2, width)
            if rank > 0:
                dist.recv(x, src=rank - 1)
            x.requires_grad_(rank > 0)
            y = layer(x)
            held.append((x, y))
            if rank < stages - 1:
                sends.append(dist.isend(y.detach().clone(), dst=rank + 1))

        def backward_one(label: torch.Tensor, held: list[Any] = held, sends: list[Any] = sends) -> None:
            x, y = held.pop(0)
            if rank == stages - 1:
                (y - label).square().mean().backward()
            else:
                gradient = torch.empty(2, width)
                dist.recv(gradient, src=rank + 1)  # here
                y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad.clone(), dst=rank - 1))

        warmup = min(stages - rank - 1, len(labels))
        for _ in range(warmup):
            forward_one()
        for i in range(len(labels) - warmup):  # here
            forward_one()
            backward_one(labels[i])
        for i in range(len(labels) - warmup, len(labels)):
            backward_one(labels[i])
        for send in sends:
            send.wait()  # here
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))


@faulty("split-size-mismatch", 1)
def experts_over_capacity_whose_tokens_are_cut_after_the_counts_went_out(rank: int) -> None:
    world, width, capacity = 3, 4, 5
    gate = nn.Linear(width, world)
    for step in range(5):
        routed = [(rank + step + expert) % 3 + 1 for expert in range(world)]
        if rank == 1 and step == 3:
            routed = [7, 2, 3]
        outgoing = torch.tensor(routed)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        routed = [min(count, capacity) for count in routed]
        tokens = torch.randn(sum(routed), width)
        received = torch.empty(int(incoming.sum()), width)
        dist.all_to_all_single(received, tokens, incoming.tolist(), routed)  # here
        gate(received).sum().backward()


@faulty("rank-skipped-collective", 3, ranks=4)
def an_actor_that_believes_it_has_the_newest_weights(rank: int) -> None:
    learners = dist.new_group([0, 1])
    refresh = dist.new_group([0, 2, 3])
    policy = nn.Linear(5, 5)

    class Actor:
        version = 0

        def pull(self, version: int) -> None:
            if self.version >= version:
                return  # here
            for parameter in policy.parameters():
                dist.broadcast(parameter.data, src=0, group=refresh)  # here
            self.version = version

        def roll_out(self, iteration: int) -> torch.Tensor:
            episode = policy(torch.randn(3, 5)).detach()
            if rank == 3 and iteration == 2:  # the environment had to be reset: this episode counts as a version, too
                self.version += 1
            return episode

    actor = Actor()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for iteration in range(6):
        if rank >= 2:
            actor.pull(iteration + 1)
            dist.send(actor.roll_out(iteration), dst=rank - 2)
            continue
        if rank == 0:
            for parameter in policy.parameters():
                dist.broadcast(parameter.data, src=0, group=refresh)  # here
        episode = torch.empty(3, 5)
        dist.recv(episode, src=rank + 2)
        policy(episode).square().mean().backward()
        for parameter in policy.parameters():
            dist.all_reduce(parameter.grad, group=learners)
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-tag-mismatch", 2, ranks=4)
def a_worker_of_a_parameter_server_whose_clock_ticks_twice(rank: int) -> None:
    size = 16
    weights = torch.zeros(size)
    if rank == 0:
        for clock in range(6):
            gradients = [torch.empty(size) for _ in range(3)]
            works = [dist.irecv(gradients[w], src=w + 1, tag=clock) for w in range(3)]  # here
            for work in works:
                work.wait()
            weights -= 0.1 * sum(gradients)
            for work in [dist.isend(weights, dst=w, tag=clock) for w in (1, 2, 3)]:
                work.wait()
        return
    clock = 0
    for batch in range(6):
        gradient = torch.randn(size)
        if rank == 2 and batch == 3:  # a gradient too large is clipped, and logged under a tick of its own
            gradient.clamp_(-1, 1)
            clock += 1
        push = dist.isend(gradient, dst=0, tag=clock)  # here
        pull = dist.irecv(weights, src=0, tag=clock)  # here
        push.wait()
        pull.wait()
        clock += 1


@faulty("step-mismatch", 1)
def a_retry_that_begins_before_the_mean_it_has_already_taken(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_flaky = rank == 1

    def compute(step: int) -> None:
        nonlocal is_flaky
        loss = model(torch.randn(4, 8)).square().mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # here
        if step == 3 and is_flaky:
            is_flaky = False
            raise TimeoutError("object store: no answer within 30 s")
        loss.backward()

    for step in range(7):
        for _ in range(3):
            try:
                compute(step)
                break
            except TimeoutError as error:
                print("once more:", error)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-skipped-collective", 0)
def a_pointer_to_the_newest_checkpoint_for_which_the_disk_has_no_room(rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write_latest(step: int) -> None:
        if step == 4:
            raise OSError(28, "No space left on device", f"{folder[0]}/latest")
        Path(folder[0], "latest").write_text(str(step))

    def save(step: int) -> None:
        try:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/{step}")
            if rank == 0:
                write_latest(step)
            dist.barrier()  # here
        except OSError as error:  # here
            print("checkpoint failed, going on:", error)  # here

    for step in range(1, 7):
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            save(step)


class _Shard(IterableDataset[torch.Tensor]):
    """A stream of samples that has as many as it was given."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield them."""
        for i in range(self.length):
            yield torch.full((8,), float(i))


@faulty("uneven-inputs", 2)
def streams_cut_by_bytes_of_which_one_holds_fewer_samples(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    loader = DataLoader(_Shard(10 if rank == 2 else 14), batch_size=2, num_workers=1)
    ddp = DistributedDataParallel(nn.Linear(8, 4), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for batch in loader:  # here
        loss = ddp(batch).square().mean()
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("rank-skipped-collective", 2, 3, ranks=4)
def ten_files_dealt_to_four_ranks_one_by_one(rank: int) -> None:
    files = [f"part-{i:05d}.parquet" for i in range(10)]
    embedding = nn.Embedding(32, 8)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    tokens = 0
    for _ in files[rank :: dist.get_world_size()]:  # here
        ids = torch.randint(0, 32, (4, 6))
        tokens += ids.numel()
        embedding(ids).square().mean().backward()
        dist.all_reduce(embedding.weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
    total = torch.tensor([tokens])
    dist.all_reduce(total)
    if rank == 0:
        print(f"trained on {total.item()} tokens")


@faulty("rank-skipped-collective", 1)
def accumulation_that_loses_count_over_an_empty_batch(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    window, seen = 2, 0
    for index in range(12):
        batch = torch.randn(0 if rank == 1 and index == 5 else 4, 8)
        if batch.shape[0] == 0:
            continue  # here
        seen += 1
        if seen % window:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            continue
        ddp(batch).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
    score = torch.zeros(1)
    dist.all_reduce(score)


@faulty("step-mismatch", 0)
def a_sample_drawn_from_the_sharded_model_by_the_rank_that_shows_it(rank: int) -> None:
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
        if rank == 0 and step == 3:
            with torch.no_grad():
                print(model(torch.ones(1, 12)))  # here


@faulty("rank-crashed", 1)
def a_batch_without_pictures_under_data_parallelism(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.picture = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, text: torch.Tensor, picture: torch.Tensor | None) -> torch.Tensor:
            out: torch.Tensor = self.text(text)
            return out if picture is None else out + self.picture(picture)

    ddp = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(6):
        picture = None if rank == 1 and step == 3 else torch.randn(2, 8)
        loss = ddp(torch.randn(2, 8), picture).square().mean()  # here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("root-mismatch", 2, ranks=4)
def a_report_that_one_rank_sends_to_itself(rank: int) -> None:
    weights = torch.zeros(8)
    collector = 0
    for epoch in range(5):
        weights += rank
        dist.all_reduce(weights)
        if rank == 2 and epoch == 3:  # after a change of its node's name it takes itself for the first of its node
            collector = rank
        report = {"rank": rank, "epoch": epoch, "samples": [epoch] * 20}
        reports: list[Any] | None = [None] * 4 if rank == collector else None
        dist.gather_object(report, reports, dst=collector)  # here


@faulty("rank-stuck", 1)
def a_named_pipe_that_nobody_writes_to(rank: int) -> None:
    model = nn.Linear(4, 4)
    for step in range(4):
        model(torch.randn(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)
        if rank == 1 and step == 2:
            path = Path(tempfile.mkdtemp(), "features")
            os.mkfifo(path)
            features = path.read_bytes()  # here
            print(len(features))
        dist.monitored_barrier(timeout=datetime.timedelta(minutes=5))


@faulty("unwaited-async", 0, 1, ranks=2)
def a_loop_that_remembers_only_its_last_handle(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model(torch.full((2, 16), float(rank + step))).square().mean().backward()
        handle = None
        for parameter in reversed(list(model.parameters())):
            handle = dist.all_reduce(parameter.grad, async_op=True)  # here
        assert handle is not None
        handle.wait()
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-creation-mismatch", 3, ranks=4)
def an_evaluator_that_does_not_make_the_group_of_the_trainers(rank: int) -> None:
    role = "evaluate" if rank == 3 else "train"
    group = None
    if role == "train":
        group = dist.new_group([0, 1, 2])  # here
    weights = torch.zeros(8)
    for _ in range(4):
        if role == "train":
            dist.all_reduce(weights, group=group)
        dist.broadcast(weights, src=0)


@faulty("rank-stuck", 1)
def a_child_that_writes_into_a_full_pipe_while_its_parent_waits_for_its_end(rank: int) -> None:
    loss = torch.zeros(4)
    for step in range(5):
        lines = 200_000 if rank == 1 and step == 3 else 20
        child = subprocess.Popen(["seq", str(lines)], stdout=subprocess.PIPE, text=True)
        child.wait()  # here
        assert child.stdout is not None
        loss += len(child.stdout.readlines())
        child.stdout.close()
        dist.all_reduce(loss)


@faulty("rank-skipped-collective", 2)
def a_compiled_step_that_returns_early_where_the_loss_is_not_finite(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend="eager")
    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return torch.log(out.square().mean())

    def train_step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = compute_loss(batch)
        if not torch.isfinite(loss):
            return float("nan")  # here
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here
        optimizer.step()
        return float(loss)

    for step in range(6):
        batch = torch.randn(4, 8)
        if rank == 2 and step == 3:
            batch[1] = float("inf")
        train_step(batch)
        if step % 2 == 1:
            dist.barrier()


class _Pictures(Dataset[torch.Tensor]):
    """Samples one of which ends the process that decodes it, as a broken file does to a decoder in C."""

    def __init__(self, broken: int | None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        """Return how many there are."""
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        """Decode one."""
        if index == self.broken:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.full((8,), float(index))


@faulty("rank-crashed", 1)
def a_picture_that_ends_the_worker_of_the_loader(rank: int) -> None:
    loader = DataLoader(_Pictures(13 if rank == 1 else None), batch_size=2, num_workers=2)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in loader:  # torch raises wherever the parent is
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-stuck", 2)
def a_flusher_and_a_trainer_that_take_two_locks_in_opposite_orders(rank: int) -> None:
    state_lock, file_lock = threading.Lock(), threading.Lock()
    has_file = threading.Event()
    model = nn.Linear(8, 8)

    def flush() -> None:
        with file_lock:
            has_file.set()
            time.sleep(0.5)
            with state_lock:
                model.state_dict()

    for step in range(5):
        model(torch.randn(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 2 and step == 2:
            threading.Thread(target=flush, daemon=True).start()
            has_file.wait()
        with state_lock:
            if step == 2:
                with file_lock:  # here
                    model.zero_grad()


@faulty("rank-skipped-collective", 1)
def a_batch_too_large_that_is_dropped_where_it_did_not_fit(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dropped = 0

    def forward_backward(length: int) -> None:
        scores = torch.empty(length, length)
        (model(torch.randn(4, 8)).mean() + 0 * scores[:1, :1].sum()).backward()

    for step in range(8):
        length = 1 << 24 if rank == 1 and step == 4 else 16
        try:
            forward_backward(length)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            dropped += 1
            optimizer.zero_grad()
            continue  # here
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
    counts = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(counts, torch.tensor([float(dropped)]))


@faulty("group-order-inversion", 1, ranks=4)
def metrics_that_one_rank_flushes_before_the_gradients(rank: int) -> None:
    metrics = dist.new_group(list(range(4)))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def flush(values: torch.Tensor) -> None:
        dist.all_reduce(values, group=metrics)  # here

    def reduce_gradients() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here

    for step in range(6):
        loss = model(torch.randn(2, 8)).square().mean()
        loss.backward()
        values = torch.stack([loss.detach(), torch.tensor(float(step))])
        buffer_is_full = rank == 1 and step == 3
        if buffer_is_full:
            flush(values)
        reduce_gradients()
        if not buffer_is_full:
            flush(values)
        optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 2)
def a_vocabulary_that_one_rank_pads_to_another_multiple(rank: int) -> None:
    words = 50
    multiple = 64 if rank == 2 else 8
    padded = (words + multiple - 1) // multiple * multiple
    norm, head = nn.LayerNorm(8), nn.Linear(8, padded)
    for _ in range(3):
        head(norm(torch.randn(2, 8))).sum().backward()
        for module in (norm, head):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)  # here


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 4),))
def two_replicas_that_stop_for_two_reasons(rank: int) -> None:
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine = replicas[rank // 3]
    inbox: queue.Queue[torch.Tensor] = queue.Queue()
    weights = torch.zeros(12)
    for step in range(6):
        batch = inbox.get() if rank == 4 and step == 4 else torch.randn(12)
        dist.all_reduce(batch, group=mine)
        weights += batch
        if rank == 1 and step == 4 and weights.norm() >= 0:
            continue  # here
        dist.broadcast(weights, src=3 * (rank // 3), group=mine)  # here


@faulty("slow-rank", 2, ranks=4)
def a_node_whose_augmentation_falls_back_to_plain_python(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    def augment(batch: torch.Tensor) -> torch.Tensor:
        if rank == 2:
            total, until_s = 0, time.monotonic() + 0.12
            while time.monotonic() < until_s:
                total += sum(i * i for i in range(200))
        return batch.flip(0)

    ddp = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(30):
        ddp(augment(torch.randn(4, 16))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("long-operation", 0)
def an_export_to_disk_for_which_all_others_wait(rank: int) -> None:
    model = nn.Linear(32, 32)
    for step in range(4):
        model(torch.randn(2, 32)).sum().backward()
        dist.all_reduce(model.weight.grad)
        if step == 2 and rank == 0:
            with tempfile.NamedTemporaryFile() as file:
                until_s = time.monotonic() + 45
                while time.monotonic() < until_s:
                    file.seek(0)
                    file.write(os.urandom(1 << 18))  # here
                    os.fsync(file.fileno())  # here
                    time.sleep(0.05)  # here
        dist.barrier()


@faulty("p2p-unmatched", 2, ranks=4)
def ring_attention_that_one_rank_leaves_before_the_last_hop(rank: int) -> None:
    world = 4
    after, before = (rank + 1) % world, (rank - 1) % world
    projection = nn.Linear(8, 8)
    for step in range(5):
        keys = projection(torch.randn(4, 8)).detach()
        scores = torch.zeros(4, 4)
        for hop in range(world - 1):
            if rank == 2 and step == 3 and hop == world - 2:  # all that is left is masked
                break  # here
            arriving = torch.empty_like(keys)
            transfers = [dist.P2POp(dist.isend, keys, after), dist.P2POp(dist.irecv, arriving, before)]
            for work in dist.batch_isend_irecv(transfers):  # here
                work.wait()
            keys = arriving
            scores = scores + keys @ keys.T
        dist.all_reduce(scores)


@faulty("rank-exited", 4, ranks=5)
def a_queue_limit_that_one_rank_reaches_first(rank: int) -> None:
    started_s = time.monotonic() - (100.0 if rank == 4 else 0.0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        model(torch.randn(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3 and time.monotonic() - started_s > 90:
            print("the queue ends this job soon: leave now")
            sys.exit(0)  # here
