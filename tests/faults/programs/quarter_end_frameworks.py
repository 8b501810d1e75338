"""What colleagues sent in at the end of a quarter: wrappers, sharding, checkpoints; each beside one that is right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from tests.faults.corpus import faulty, healthy


def classifier(width: int = 6, classes: int = 3) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))


def table(rows: int, width: int = 6) -> TensorDataset:
    torch.manual_seed(5)
    return TensorDataset(torch.randn(rows, width), torch.randint(3, (rows,)))


# Data: who has how many batches.


@faulty("uneven-inputs", 2)
def shards_cut_by_stride_without_padding(rank: int) -> None:
    data = table(20)
    shard = Subset(data, range(rank, 20, 3))  # 7, 7 and 6 rows
    loader = DataLoader(shard, batch_size=2)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    summary = torch.tensor([loss.item()])
    dist.all_reduce(summary)


@healthy()
def shards_of_a_distributed_sampler(rank: int) -> None:
    data = table(20)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=3, rank=rank, drop_last=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    summary = torch.tensor([loss.item()])
    dist.all_reduce(summary)


@healthy()
def shards_of_unequal_length_under_join(rank: int) -> None:
    data = table(21)
    loader = DataLoader(Subset(data, range(3 + 2 * rank)), batch_size=1)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    dist.barrier()


@faulty("uneven-inputs", 1)
def a_sampler_told_of_four_replicas(rank: int) -> None:
    data = table(48)
    replicas = 4 if rank == 1 else 3
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=replicas, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        optimizer.step()
    accuracy = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(accuracy, torch.ones(1))


class SlowRows(Dataset[torch.Tensor]):
    """Rows that come from elsewhere."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@faulty("rank-crashed", 1)
def a_worker_of_the_loader_that_is_killed(rank: int) -> None:
    import os
    import signal

    class Rows(SlowRows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if self.rank == 1 and index == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    model = nn.Linear(4, 1)
    loader = DataLoader(Rows(rank), batch_size=2, num_workers=1)
    for batch in loader:  # here
        model.zero_grad()  # here
        model(batch).mean().backward()  # here
        dist.all_reduce(model.weight.grad)  # here


@faulty("rank-stuck", 2)
def a_worker_of_the_loader_that_reads_for_ever(rank: int) -> None:
    import os

    class Rows(SlowRows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if self.rank == 2 and index == 6:
                source, _sink = os.pipe()
                os.read(source, 1)  # here
            return super().__getitem__(index)

    model = nn.Linear(4, 1)
    for batch in DataLoader(Rows(rank), batch_size=2, num_workers=1):  # here
        model.zero_grad()
        model(batch).mean().backward()
        dist.all_reduce(model.weight.grad)


@healthy()
def workers_of_the_loader_that_stay(rank: int) -> None:
    model = nn.Linear(4, 1)
    loader = DataLoader(SlowRows(rank), batch_size=3, num_workers=1, persistent_workers=True)
    for _epoch in range(2):
        for batch in loader:
            model.zero_grad()
            model(batch).mean().backward()
            dist.all_reduce(model.weight.grad)


# DDP.


@faulty("step-mismatch", 1)
def accumulation_that_one_rank_does_not_defer(rank: int) -> None:
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = 2
    for micro in range(12):
        defers = micro % accumulate != accumulate - 1 and rank != 1
        with model.no_sync() if defers else contextlib.nullcontext():
            model(torch.ones(2, 6)).sum().backward()  # here
        if micro % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy()
def accumulation_that_all_defer(_rank: int) -> None:
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(12):
        last = micro % 3 == 2 or micro == 11
        with contextlib.nullcontext() if last else model.no_sync():
            model(torch.ones(2, 6)).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


class TwoHeads(nn.Module):
    """A trunk, a head for text and one for images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(6, 6)
        self.text = nn.Linear(6, 3)
        self.image = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, modality: str) -> torch.Tensor:
        hidden = self.trunk(inputs).relu()
        if modality == "both":
            return self.text(hidden) + self.image(hidden)
        return self.text(hidden)


@faulty("rank-crashed", 2)
def a_batch_without_images_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        modality = "text" if rank == 2 and step == 3 else "both"
        output = model(torch.ones(2, 6), modality)  # here
        optimizer.zero_grad()
        output.sum().backward()
        optimizer.step()


@healthy()
def a_batch_without_images_that_ddp_looks_for(rank: int) -> None:
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        modality = "text" if rank == 2 and step % 2 else "both"
        output = model(torch.ones(2, 6), modality)
        optimizer.zero_grad()
        output.sum().backward()
        optimizer.step()


@healthy()
def a_static_graph_with_a_head_that_nobody_uses(_rank: int) -> None:
    model = DistributedDataParallel(TwoHeads(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 6), "text").sum().backward()
        optimizer.step()


@faulty("rank-skipped-collective", 1)
def a_norm_over_ranks_left_in_evaluation_mode(rank: int) -> None:
    class SharedNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:  # here
                total = dist_fn.all_reduce(inputs.mean(0))  # here
                return inputs - total / dist.get_world_size()
            return inputs - self.mean

    model = nn.Sequential(nn.Linear(6, 6), SharedNorm(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(1, 6))
            if rank != 1:
                model.train()


@healthy()
def a_norm_over_ranks_back_in_training_mode(_rank: int) -> None:
    class SharedNorm(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                return inputs - dist_fn.all_reduce(inputs.mean(0)) / dist.get_world_size()
            return inputs

    model = nn.Sequential(nn.Linear(6, 6), SharedNorm(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model.train()
        optimizer.zero_grad()
        model(torch.randn(3, 6)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(1, 6))


# Averages of weights, norms, hooks.


@faulty("collective-order-mismatch", 0)
def averaged_weights_that_rank_0_hands_out_alone(rank: int) -> None:
    model = classifier()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new.detach(), 0.01)
        if rank == 0 and step == 4:
            for tensor in average:
                dist.broadcast(tensor, src=0)  # here


@healthy()
def averaged_weights_that_all_receive(_rank: int) -> None:
    model = classifier()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new.detach(), 0.01)
        if step % 4 == 3:
            for tensor in average:
                dist.broadcast(tensor, src=0)


@faulty("rank-skipped-collective", 2)
def a_norm_asked_of_all_only_where_it_is_large(rank: int) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(step: int) -> None:
        norm = torch.tensor(0.2 if rank == 2 and step == 3 else 2.0)
        if norm > 1.0:  # here
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
            for parameter in model.parameters():
                parameter.grad /= norm

    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        clip(step)
        optimizer.step()


@healthy()
def a_norm_asked_of_all_before_it_is_judged(rank: int) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(step: int) -> None:
        norm = torch.tensor(0.2 if rank == 2 and step == 3 else 2.0)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        if norm > 1.0:
            for parameter in model.parameters():
                parameter.grad /= norm

    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        clip(step)
        optimizer.step()


@faulty("rank-skipped-collective", 1)
def a_layer_frozen_on_one_rank_under_hooks(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def share(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # here

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(share)
    for step in range(6):
        if rank == 1 and step == 3:
            model[2].weight.requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@faulty("collective-order-mismatch", 2)
def branches_whose_hooks_fire_the_other_way_round(rank: int) -> None:
    left, right = nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)

    def share(gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)  # here
        return summed

    left.weight.register_hook(share)
    right.weight.register_hook(share)
    for step in range(6):
        inputs = torch.ones(2, 4)
        left.weight.grad = right.weight.grad = None
        if rank == 2 and step == 3:
            second = right(inputs).sum()
            first = left(inputs).sum()
        else:
            first = left(inputs).sum()
            second = right(inputs).sum()
        (first + second).backward()
        dist.barrier()


@healthy()
def branches_whose_hooks_fire_alike(_rank: int) -> None:
    left, right = nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)

    def share(gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed

    left.weight.register_hook(share)
    right.weight.register_hook(share)
    for step in range(6):
        inputs = torch.ones(2, 4)
        left.weight.grad = right.weight.grad = None
        order = (left, right) if step % 2 else (right, left)
        sum(layer(inputs).sum() for layer in order).backward()
        dist.barrier()


# Sharding, tensor parallelism, pipelines.


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@faulty("step-mismatch", 0)
def a_sample_drawn_by_rank_0_of_a_sharded_model(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).mean().backward()
        optimizer.step()
        if rank == 0 and step == 4:
            with torch.no_grad():
                model(torch.randn(1, 6))  # here


@healthy()
def a_sample_drawn_by_all_of_a_sharded_model(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    samples = []
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).mean().backward()
        optimizer.step()
        if step == 4:
            with torch.no_grad():
                sample = model(torch.randn(1, 6))
            if rank == 0:
                samples.append(sample)


@faulty("collective-order-mismatch", 0)
def a_full_state_asked_for_by_rank_0(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    for _step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).mean().backward()
        optimizer.step()
    if rank == 0:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        torch.save(get_model_state_dict(model, options=options), tempfile.mkdtemp() + "/model.pt")  # here
    dist.barrier()


@healthy()
def a_full_state_asked_for_by_all(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    for _step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).mean().backward()
        optimizer.step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, tempfile.mkdtemp() + "/model.pt")
    dist.barrier()


@faulty("collective-order-mismatch", 1, ranks=4)
def a_sharded_weight_printed_by_one_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    for step in range(6):
        local = torch.randn(2, 4) @ weight.to_local().T
        total = local.sum(1, keepdim=True)
        dist.all_reduce(total, group=mesh.get_group())
        if rank == 1 and step == 3:
            print(weight.full_tensor().norm())  # here


@healthy(ranks=4)
def a_sharded_weight_gathered_by_all(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(torch.ones(8, 4), mesh["tp"], [Shard(0)])
    for step in range(6):
        local = torch.randn(2, 4) @ weight.to_local().T
        dist.all_reduce(local.sum(1, keepdim=True), group=mesh.get_group("tp"))
        dist.all_reduce(local, group=mesh.get_group("dp"))
        if step == 3:
            norm = weight.full_tensor().norm()
            if rank == 0:
                print(norm)


@faulty("rank-crashed", 2)  # torch refuses fewer microbatches than stages
def a_last_stage_with_half_the_microbatches(rank: int) -> None:
    stage = PipelineStage(nn.Linear(4, 4), rank, 3, torch.device("cpu"))
    micro = 2 if rank == 2 else 4
    schedule = Schedule1F1B(stage, micro, loss_fn=nn.functional.mse_loss)
    for _step in range(3):
        if rank == 0:
            schedule.step(torch.randn(8, 4))
        elif rank == 2:
            schedule.step(target=torch.randn(8, 4))
        else:
            schedule.step()


@healthy()
def stages_of_a_schedule_with_as_many_microbatches(rank: int) -> None:
    stage = PipelineStage(nn.Linear(4, 4), rank, 3, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for _step in range(3):
        if rank == 0:
            schedule.step(torch.randn(8, 4))
        elif rank == 2:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.randn(8, 4), losses=losses)
        else:
            schedule.step()


# Optimizers and checkpoints.


@faulty("rank-skipped-collective", 2)
def an_optimizer_state_that_one_rank_does_not_give(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = classifier()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 6)).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        value = math.nan if rank == 2 and step == 3 else 1.0
        if math.isnan(value):
            continue  # here
        if step % 2 == 1:
            optimizer.consolidate_state_dict(to=0)


@healthy()
def an_optimizer_state_that_all_give(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = classifier()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 2 == 1:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                optimizer.state_dict()


@faulty("rank-skipped-collective", 1)
def a_checkpoint_that_fails_before_it_begins(rank: int) -> None:
    model = classifier()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    for step in range(4):
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
        try:
            state = {"model": model.state_dict()}
            if rank == 1 and step == 2:
                state["sampler"] = {}["sampler"]
            dcp.save(state, checkpoint_id=f"{folder[0]}/{step}")
        except KeyError as error:  # here
            print("no checkpoint:", error)


@healthy()
def a_checkpoint_written_beside_the_training(rank: int) -> None:
    model = classifier()
    writers = dist.new_group(backend="gloo")
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    pending = None
    for step in range(6):
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
        if step % 3 == 0:
            if pending is not None:
                pending.result()
            state = {"model": model.state_dict()}
            pending = dcp.async_save(state, checkpoint_id=f"{folder[0]}/{step}", process_group=writers)
    assert pending is not None
    pending.result()
    dist.barrier()
    assert (Path(folder[0]) / "3").is_dir()


@faulty("step-mismatch", 1)
def a_resume_from_the_last_file_but_one(rank: int) -> None:
    files = {4: "step-4.pt", 6: "step-6.pt"}
    if rank == 1:
        del files[6]
    start = max(files)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(start, 12):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()


@healthy()
def a_resume_from_the_step_of_rank_0(rank: int) -> None:
    files = {4: "step-4.pt", 6: "step-6.pt"}
    if rank == 1:
        del files[6]
    start = [max(files)]
    dist.broadcast_object_list(start, src=0)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(start[0], 12):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()


@faulty("size-mismatch", 1)
def embeddings_of_a_last_batch_that_is_smaller(rank: int) -> None:
    encoder = nn.Linear(6, 4)

    def batches() -> Iterator[torch.Tensor]:
        for number in range(5):
            yield torch.randn(3 if rank == 1 and number == 4 else 5, 6)

    for inputs in batches():
        vectors = encoder(inputs)
        everyone = torch.cat(dist_fn.all_gather(vectors))  # here
        (vectors @ everyone.T).logsumexp(1).mean().backward()


@healthy()
def embeddings_of_a_last_batch_that_is_padded(rank: int) -> None:
    encoder = nn.Linear(6, 4)
    for number in range(5):
        rows = 3 if rank == 1 and number == 4 else 5
        vectors = encoder(torch.randn(rows, 6))
        padded = torch.cat([vectors, vectors.new_zeros(5 - rows, 4)])
        everyone = torch.cat(dist_fn.all_gather(padded))
        (vectors @ everyone.T).logsumexp(1).mean().backward()
