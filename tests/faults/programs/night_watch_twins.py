"""Training jobs of a team on call at night, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import back_end, healthy
from tests.faults.programs.night_watch_faults import average_gradients, network, scratch


@healthy()
def remainders_of_accumulated_batches_of_other_lengths(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(36 + 6 * rank, 8)), batch_size=4)
    for _ in range(3):
        seen = torch.zeros(1)
        for number, (batch,) in enumerate(loader, start=1):
            is_last = number % 4 == 0 or number == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(batch).square().mean().div(4).backward()
            seen += len(batch)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(seen)
        print("seen", int(seen))


@healthy()
def an_overflow_on_one_rank_that_all_skip_the_step_for(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scale, good = 1024.0, 0
    for step in range(10):
        batch = torch.randn(4, 8)
        if rank == 1 and step in (4, 5):
            batch[0] *= 1e30
        (model(batch).square().mean() * scale).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        overflow = torch.tensor(float(any(not gradient.isfinite().all() for gradient in gradients)))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item():
            scale, good = scale / 2, 0
            optimizer.zero_grad()
            continue
        for gradient in gradients:
            gradient.div_(scale * 3)
            dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()
        good += 1
        scale *= 2 if good % 3 == 0 else 1


@healthy()
def a_signal_to_one_node_that_all_end_for_together(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    for step in range(40):
        if rank == 2 and step == 9:
            os.kill(os.getpid(), signal.SIGUSR1)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stop = torch.tensor([float(bool(asked))])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            print("preempted at", step)
            break
    if rank == 0:
        torch.save(model.module.state_dict(), scratch("signal") / "last.pt")
    dist.barrier()


@healthy()
def a_batch_too_large_tried_again_with_one_reduction(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def forward_backward(batch: torch.Tensor, weight: float = 1.0) -> None:
        if len(batch) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        (model(batch).square().mean() * weight).backward()

    for step in range(8):
        batch = torch.randn(32 if rank == 2 and step in (3, 6) else 16, 8)
        try:
            forward_backward(batch)
        except torch.OutOfMemoryError:
            one, two = batch.chunk(2)
            with model.no_sync():
                forward_backward(one, 0.5)
            forward_backward(two, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@healthy()
def an_evaluation_of_the_first_rank_on_a_copy_while_others_wait(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held_out = DataLoader(TensorDataset(torch.randn(120, 8)), batch_size=4)
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            model.module.eval()
            with torch.no_grad():
                losses = []
                for (batch,) in held_out:
                    time.sleep(0.01)
                    losses.append(model.module(batch).square().mean().item())
            model.module.train()
            print("held out:", sum(losses) / len(losses))
        dist.monitored_barrier(timeout=timedelta(seconds=60))


@healthy(ranks=4)
def a_patience_that_the_first_rank_keeps_and_tells(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, bad = float("inf"), 2 if rank == 0 else 0
    for epoch in range(20):
        for _ in range(3):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        decision: list[Any] = [None]
        if rank == 0:
            loss = 1.0 if epoch < 4 else model.module(torch.ones(8, 8)).square().mean().item()
            loss = max(loss, 0.2)
            best, bad = (loss, 0) if loss < best else (best, bad + 1)
            decision = [{"stop": bad == 3, "best": best}]
        dist.broadcast_object_list(decision, src=0)
        if decision[0]["stop"]:
            print("stopped after", epoch, decision[0]["best"])
            break
    total = torch.ones(1)
    dist.all_reduce(total)


@healthy()
def checkpoints_written_by_a_thread_over_a_group_of_its_own(rank: int) -> None:
    writers = dist.new_group(backend="gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = scratch("background")
    pending: Any = None
    for step in range(12):
        model(torch.randn(4 + rank, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            if pending is not None:
                pending.result()
            state = {"model": model.module.state_dict(), "step": step}
            pending = dcp.async_save(state, checkpoint_id=folder / f"step-{step}", process_group=writers)
    pending.result()
    dist.barrier()


@healthy()
def the_whole_state_that_all_gather_and_one_writes_and_all_read(rank: int) -> None:
    def sharded() -> nn.Sequential:
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        return model

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for step in range(1, 9):
        model(torch.randn(4, 8)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            whole = get_model_state_dict(model, options=options)
            if rank == 0:
                print("norm", float(norm))
                torch.save(whole, scratch("whole-twin") / "model.pt")
            dist.barrier()
    whole = torch.load(scratch("whole-twin") / "model.pt") if rank == 0 else {}
    again = sharded()
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, whole, options=from_first)
    again(torch.randn(4, 8)).square().mean().backward()


@healthy()
def a_ramp_of_the_batch_size_told_by_the_first_stage(rank: int) -> None:
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    consumed = 96
    for _ in range(8):
        plan = torch.tensor([2 + consumed // 64 if rank == 0 else 0])
        dist.broadcast(plan, 0)
        microbatches = int(plan)
        outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(microbatches):
            x = torch.randn(4, 8)
            if rank > 0:
                dist.recv(x, rank - 1)
            x.requires_grad_()
            out = stage(x)
            if rank < 2:
                dist.send(out.detach(), rank + 1)
            outs.append((x, out))
        for x, out in reversed(outs):
            gradient = torch.ones_like(out)
            if rank < 2:
                dist.recv(gradient, rank + 1)
            out.backward(gradient)
            if rank > 0 and x.grad is not None:
                dist.send(x.grad, rank - 1)
        consumed += 4 * microbatches
        optimizer.step()
        optimizer.zero_grad()


@healthy(joins=False)
def a_restart_that_resumes_from_the_step_that_all_have(rank: int) -> None:
    folder = scratch("restart") / str(rank)
    folder.mkdir(exist_ok=True)

    def attempt(number: int) -> None:
        store = dist.FileStore(str(folder.parent / f"attempt-{number}"), 3)
        dist.init_process_group(back_end(), store=store, rank=rank, world_size=3)
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        newest = torch.tensor([max((int(file.stem) for file in folder.glob("*.pt")), default=-1)])
        dist.all_reduce(newest, op=dist.ReduceOp.MIN)
        first = int(newest) + 1
        if first:
            state = torch.load(folder / f"{int(newest)}.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first, 6 if number == 0 else 12):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2 and not (rank == 1 and step == 5):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / f"{step}.pt")
        dist.barrier()
        dist.destroy_process_group()

    attempt(0)
    attempt(1)


@healthy()
def a_search_of_the_rate_in_trials_of_other_lengths(rank: int) -> None:
    rates = [0.1, 0.03, 0.01]
    start = network()

    def trial(rate: float, steps: int) -> tuple[nn.Module, float]:
        model = network()
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loss = torch.zeros(())
        for _ in range(steps):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
        return model, loss.item()

    for turn in range(6):
        model, loss = trial(rates[rank], 30 + 60 * ((rank + turn) % 3))
        losses = torch.empty(3)
        dist.all_gather_into_tensor(losses, torch.tensor([loss]))
        best = int(losses.argmin())
        for weight in model.parameters():
            dist.broadcast(weight.data, src=best)
        start.load_state_dict(model.state_dict())
        rates = [rates[best] * factor for factor in (0.5, 1.0, 2.0)]


@healthy(ranks=4)
def samples_of_an_evaluation_that_go_on_until_all_are_done(rank: int) -> None:
    vocabulary, end = 12, 0
    model = network()
    shards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(5)
    embedding = nn.Embedding(vocabulary, 8)
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, vocabulary))
    parallelize_module(block, shards["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    generator = torch.Generator().manual_seed(20 + rank // 2)
    everywhere = shards["data"].get_group()

    def sample(first: int) -> list[int]:
        tokens, is_done = [first], False
        while True:
            running = torch.tensor([float(not is_done)])
            dist.all_reduce(running, group=everywhere)
            if not running.item() or len(tokens) > 30:
                return tokens
            with torch.no_grad():
                logits = block(embedding(torch.tensor(tokens[-1:])))
            token = int(torch.multinomial(logits[0].softmax(-1), 1, generator=generator))
            is_done = is_done or token == end
            tokens.append(end if is_done else token)

    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)
        texts = [sample(first) for first in (1, 2, 3)]
        lengths: list[Any] = [None] * 4
        dist.all_gather_object(lengths, [len(text) for text in texts])


@healthy()
def a_spike_of_one_rank_that_the_average_leaves_out(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random.seed(rank)
    for step in range(12):
        is_spike = random.random() < 0.25 and step > 1
        loss = model(torch.randn(4, 8) * (100 if is_spike else 1)).square().mean()
        counts = torch.tensor([0.0 if loss > 50 else 1.0])
        if loss > 50:
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
        else:
            loss.backward()
        dist.all_reduce(counts)
        flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        dist.all_reduce(flat)
        flat /= counts.clamp(min=1)
        nn.utils.vector_to_parameters(flat, [weight.grad for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_long_upload_that_others_ask_after_with_short_timeouts(rank: int) -> None:
    store = dist.PrefixStore("uploads", dist.distributed_c10d._get_default_store())
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 != 3:
            continue
        if rank == 0:
            for part in range(4):
                (scratch("upload") / f"{step}-{part}.bin").write_bytes(os.urandom(1 << 20))
                time.sleep(0.3)
            store.set(f"step-{step}", "done")
        while True:
            try:
                store.wait([f"step-{step}"], timedelta(seconds=0.25))
                break
            except dist.DistStoreError:
                print("not uploaded yet")


@healthy()
def averages_of_weights_summed_in_the_background_for_a_step(rank: int) -> None:
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank))
    under_way: list[tuple[nn.Parameter, torch.Tensor, dist.Work | None]] = []

    @torch.no_grad()
    def begin() -> None:
        for target, weight in zip(average.parameters(), model.parameters(), strict=True):
            summed = weight.detach().clone()
            under_way.append((target, summed, dist.all_reduce(summed, async_op=True)))

    @torch.no_grad()
    def finish() -> None:
        while under_way:
            target, summed, work = under_way.pop()
            if work is not None:
                work.wait()
            target.lerp_(summed / 3, 0.1)

    for step in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            begin()
    finish()


@healthy(ranks=6)
def pipelines_of_which_all_stop_when_the_last_stage_says_so(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data", "stage"))
    stages, replicas = mesh["stage"].get_group(), mesh["data"].get_group()
    place = rank % 3
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    stage = PipelineStage(block, place, 3, torch.device("cpu"), group=stages)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for step in range(30):
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(torch.randn(8, 8))
        elif place == 2:
            schedule.step(target=torch.zeros(8, 8), losses=losses)
        else:
            schedule.step()
        average_gradients(block, replicas)
        optimizer.step()
        optimizer.zero_grad()
        stop = torch.tensor([float(bool(losses) and step >= 5 + rank // 3)])
        dist.all_reduce(stop)
        if stop.item():
            break
    dist.barrier()
