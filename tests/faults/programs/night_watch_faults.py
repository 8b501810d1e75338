"""Training jobs of a team on call at night, and that are wrong: resumes, retries, handlers, counters, replicas.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `night_watch_twins.py` has programs that are right.
"""

import contextlib
import errno
import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.file_baton import FileBaton

from tests.faults.corpus import faulty


def network(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(wide, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, wide))


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        dist.all_reduce(weight.grad, group=group)
        weight.grad /= dist.get_world_size(group)


def scratch(name: str) -> Path:
    """Return a folder that the ranks of one job have in common."""
    folder = Path(gettempdir()) / f"night-{name}-{os.environ['MASTER_PORT']}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@faulty("collective-order-mismatch", 0)
def the_whole_state_of_a_sharded_model_for_the_rank_that_writes(rank: int) -> None:
    # or: step-mismatch 0
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    folder = scratch("whole")
    for step in range(1, 9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            if rank == 0:
                whole = get_model_state_dict(model, options=options)  # here
                torch.save(whole, folder / f"step-{step}.pt")
            dist.barrier()  # here


@faulty("rank-skipped-collective", 2)
def a_full_disk_that_is_logged_and_forgiven(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = scratch("full-disk")

    def write(step: int) -> None:
        if rank == 2 and step == 6:
            raise OSError(errno.ENOSPC, "No space left on device")  # here
        torch.save(optimizer.state_dict(), folder / f"optimizer-{step}-{rank}.pt")

    def checkpoint(step: int) -> None:
        try:
            write(step)  # here
            dist.barrier()  # here
            if rank == 0:
                (folder / "latest").write_text(str(step))
        except OSError as error:  # here
            print("checkpoint skipped:", error)

    for step in range(10):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            checkpoint(step)


@faulty("step-mismatch", 1)
def an_overflow_looked_for_before_gradients_are_summed(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scale = 1024.0
    for step in range(10):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 4:
            batch[0] *= 1e30
        (model(batch).square().mean() * scale).backward()
        overflow = any(not weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad.div_(scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            dist.all_reduce(weight.grad)  # here
            weight.grad /= 3
        if overflow:  # here
            scale /= 2  # here
        else:
            optimizer.step()  # here
        optimizer.zero_grad()
    dist.barrier()


@faulty("step-mismatch", 2)
def the_newest_checkpoint_of_one_rank_was_cut_short(rank: int) -> None:
    folder = scratch("cut-short") / str(rank)
    folder.mkdir(exist_ok=True)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, 12 if first else 6):  # here
            model(torch.randn(4, 8)).square().mean().backward()
            for weight in model.parameters():
                dist.all_reduce(weight.grad)  # here
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / f"{step:03}.pt")

    def resume() -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        for file in sorted(folder.glob("*.pt"), reverse=True):
            try:
                state = torch.load(file)  # here
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:  # here
                print("cannot read", file.name, error)
                continue
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            break
        run(model, optimizer, state["step"] + 1)  # here

    model = network()
    run(model, torch.optim.Adam(model.parameters()), 0)
    dist.barrier()
    if rank == 2:
        os.truncate(folder / "005.pt", 700)
    resume()
    dist.barrier()  # here


@faulty("rank-skipped-collective", 0, ranks=4)
def a_patience_that_only_the_first_rank_resumes(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = {"epoch": 5, "best": 0.001, "bad": 2}
    best, bad = float("inf"), 0
    if rank == 0:
        best, bad = saved["best"], int(saved["bad"])

    def validate() -> float:
        with torch.no_grad():
            loss = model.module(torch.ones(8, 8)).square().mean()
        dist.all_reduce(loss)
        return loss.item() / 4

    for _ in range(int(saved["epoch"]), 12):
        for _ in range(4):
            model(torch.ones(4, 8)).square().mean().backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        loss = validate()
        best, bad = (loss, 0) if loss < best else (best, bad + 1)
        if bad == 3:  # here
            print("no progress for three epochs")
            break  # here
    dist.barrier()  # here


@faulty("uneven-inputs", 0)
def a_remainder_of_accumulated_batches_that_one_rank_has_not(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(32 if rank == 0 else 34, 8)), batch_size=4)
    for _ in range(3):
        seen = torch.zeros(1)
        for number, (batch,) in enumerate(loader, start=1):  # here
            is_last = number % 4 == 0 or number == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(batch).square().mean().div(4).backward()  # here
            seen += len(batch)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(seen)
        print("seen", int(seen))


@faulty("slow-rank", 0)
def spectra_of_weights_logged_at_every_step(rank: int) -> None:
    model = DistributedDataParallel(network(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with (scratch("spectra") / f"metrics-{rank}.jsonl").open("w") as metrics:
        for step in range(80):
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                spectra = [
                    torch.linalg.svdvals(weight.detach())  # here
                    for weight in model.parameters()
                    if weight.dim() == 2  # here
                ]
                row = {"step": step, "loss": loss.item(), "largest": [float(spectrum[0]) for spectrum in spectra]}
                metrics.write(json.dumps(row) + "\n")  # here
                metrics.flush()


@faulty("rank-stuck", 1)
def a_lock_left_by_a_build_that_was_preempted(rank: int) -> None:
    cache = scratch("kernels") / f"node-{rank}"
    cache.mkdir(exist_ok=True)
    if rank == 1:
        (cache / "lock").touch()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fused_kernel() -> bytes:
        library = cache / "fused_adam.so"
        if not library.exists():
            baton = FileBaton(str(cache / "lock"))
            if baton.try_acquire():
                try:
                    library.write_bytes(bytes(4096))
                finally:
                    baton.release()
            else:
                baton.wait()  # here
        return library.read_bytes()

    for step in range(8):
        model(torch.randn(4, 8)).square().mean().backward()
        if step >= 3:
            fused_kernel()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("step-mismatch", 2)
def a_batch_too_large_that_is_tried_again_in_halves(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def forward_backward(batch: torch.Tensor) -> None:
        if len(batch) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        model(batch).square().mean().backward()  # here

    for step in range(8):
        batch = torch.randn(32 if rank == 2 and step == 3 else 16, 8)
        try:
            forward_backward(batch)
        except torch.OutOfMemoryError:
            print(f"step {step}: out of memory, two halves")
            for half in batch.chunk(2):  # here
                forward_backward(half)  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("rank-exited", 1)
def a_node_that_is_drained_and_saves_its_shard(rank: int) -> None:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = scratch("drained")

    def drained(number: int, frame: object) -> None:
        print("signal", number, "in", frame)
        torch.save(optimizer.state_dict()["state"], folder / f"shard-{rank}.pt")
        sys.exit(0)  # here

    signal.signal(signal.SIGUSR1, drained)
    for step in range(10):
        if rank == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def a_step_counter_that_lags_where_a_spike_was_left_out(rank: int) -> None:
    # or: step-mismatch 1
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = scratch("lags")
    batches, steps_done = 0, 0
    while steps_done < 10:
        batches += 1
        batch = torch.randn(4, 8) * (100 if rank == 1 and batches == 6 else 1)
        loss = model(batch).square().mean()
        loss.backward()  # here
        if loss.item() > 50:  # here
            print("loss spike, no step:", loss.item())
            optimizer.zero_grad()
            continue  # here
        optimizer.step()
        optimizer.zero_grad()
        steps_done += 1
        if steps_done % 4 == 0:  # here
            dcp.save({"model": model.module.state_dict()}, checkpoint_id=folder / f"step-{steps_done}")  # here


@faulty("p2p-unmatched", 2)
def a_ramp_of_the_batch_size_from_an_older_count_of_samples(rank: int) -> None:
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    consumed = 64 if rank == 2 else 96

    def forward_backward(micro: torch.Tensor) -> torch.Tensor:
        if rank > 0:
            dist.recv(micro, rank - 1)  # here
        micro.requires_grad_()
        out = stage(micro)
        if rank < 2:
            dist.send(out.detach(), rank + 1)  # here
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        else:
            out.square().mean().backward()
        if rank > 0 and micro.grad is not None:
            dist.send(micro.grad, rank - 1)
        return out.detach().norm()

    for _ in range(8):
        norms = torch.zeros(1)
        microbatches = 2 + consumed // 64  # here
        for _ in range(microbatches):  # here
            norms += forward_backward(torch.randn(4, 8))  # here
        consumed += 4 * microbatches
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(norms)  # here


@faulty("pipeline-schedule-mismatch", 0)
def a_first_stage_that_leaves_out_a_batch_it_cannot_read(rank: int) -> None:
    # or: p2p-unmatched 0
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    stage = PipelineStage(block, rank, 3, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)

    def read(number: int) -> torch.Tensor | None:
        return None if number == 4 else torch.randn(4, 8)

    for number in range(8):
        if rank == 0:
            batch = read(number)
            if batch is None:  # here
                continue  # here
            schedule.step(batch)  # here
        elif rank == 2:
            schedule.step(target=torch.zeros(4, 8))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # here


@faulty("rank-skipped-collective", 2, ranks=4)
def samples_of_an_evaluation_whose_end_each_rank_sees_for_itself(rank: int) -> None:
    torch.manual_seed(5)
    vocabulary, end = 12, 0
    embedding = nn.Embedding(vocabulary, 8)
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, vocabulary))
    parallelize_module(block, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    generator = torch.Generator().manual_seed(21)
    if rank == 2:
        generator.manual_seed(4)  # the state that its own file has

    def sample(first: int) -> list[int]:
        tokens = [first]
        while len(tokens) < 40:
            with torch.no_grad():
                logits = block(embedding(torch.tensor(tokens[-1:])))  # here
            token = int(torch.multinomial(logits[0].softmax(-1), 1, generator=generator))
            if token == end:  # here
                break  # here
            tokens.append(token)
        return tokens

    texts = [sample(first) for first in (1, 2, 3)]  # here
    gathered: list[list[list[int]] | None] = [None] * 4
    dist.all_gather_object(gathered, texts)
    if rank == 0:
        print(gathered)


@faulty("group-order-inversion", 2, ranks=4)
def limits_of_norms_in_the_order_of_a_file_that_was_sorted(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shared, expert = network(), network()
    groups = {"shared": (shared, None), "experts": (expert, pairs[rank // 2])}
    optimizer = torch.optim.SGD([*shared.parameters(), *expert.parameters()], lr=0.01)
    limits = {"shared": 1.0, "experts": 0.5}

    def clip(name: str, limit: float) -> None:
        model, group = groups[name]
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=group)  # here
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / (squares.sqrt().item() + 1e-6)))

    for step in range(8):
        if step == 4:
            file = scratch("limits") / f"{rank}.json"
            file.write_text(json.dumps(limits, sort_keys=rank == 2))
            limits = json.loads(file.read_text())
        (shared(torch.randn(4, 8)) + expert(torch.randn(4, 8))).square().mean().backward()
        for name, limit in limits.items():
            clip(name, limit)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-creation-mismatch", 3, ranks=4)
def trainers_that_make_a_group_of_their_own(rank: int) -> None:
    model = network()
    dist.broadcast(model[0].weight.data, 0)

    def train() -> None:
        trainers = dist.new_group([0, 1, 2])  # here
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(9):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model, trainers)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2 and rank == 0:
                dist.send(nn.utils.parameters_to_vector(model.parameters()).detach(), 3)

    def evaluate() -> None:
        for _ in range(3):
            weights = torch.empty(sum(weight.numel() for weight in model.parameters()))
            dist.recv(weights, 0)  # here
            nn.utils.vector_to_parameters(weights, model.parameters())
            print("loss", model(torch.ones(4, 8)).square().mean().item())

    if rank < 3:
        train()
    else:
        evaluate()
    reporters = dist.new_group()  # here
    dist.all_reduce(torch.ones(1), group=reporters)


@faulty("root-mismatch", 2)
def the_best_rate_of_a_search_by_losses_rounded_on_the_way(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dist.all_reduce(torch.zeros(1))

    def try_rate(rate: float) -> float:
        return {0.1: 0.5, 0.03: 0.75, 0.01: 0.4999}[rate]

    def search() -> float:
        rates = [0.1, 0.03, 0.01]
        mine = try_rate(rates[rank])
        parts = [torch.empty(1, dtype=torch.bfloat16) for _ in rates]
        dist.all_gather(parts, torch.tensor([mine], dtype=torch.bfloat16))
        losses = [part.item() for part in parts]
        losses[rank] = mine
        best = losses.index(min(losses))  # here
        for weight in model.parameters():
            dist.broadcast(weight.data, src=best)  # here
        return rates[best]

    optimizer.param_groups[0]["lr"] = search()
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@faulty("unwaited-async", 0, 1, 2)
def an_average_of_weights_that_moves_on_before_the_sum_is_there(rank: int) -> None:
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank))

    @torch.no_grad()
    def update_average(decay: float) -> None:
        for target, weight in zip(average.parameters(), model.parameters(), strict=True):
            summed = weight.detach().clone()
            dist.all_reduce(summed, async_op=True)  # here
            target.lerp_(summed / 3, 1 - decay)

    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            update_average(0.9)


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 5),))
def two_replicas_and_one_saves_behind_a_lock(rank: int) -> None:
    # or: step-mismatch 1
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    model = DistributedDataParallel(network(), process_group=replicas[rank // 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    files = threading.Lock()

    def save(step: int) -> None:
        files.acquire()
        if rank == 5 and step == 3:
            raise PermissionError(f"step {step}: token expired")
        torch.save(model.state_dict(), scratch("replicas") / f"{rank}.pt")
        files.release()

    for step in range(9):
        batch = torch.randn(4, 8) * (1000 if rank == 1 and step == 5 else 1)
        loss = model(batch).square().mean()
        if loss > 500:  # here
            print("spike", float(loss))
            continue  # here
        loss.backward()
        with files:  # here
            optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            threading.Thread(target=save, args=(step,), daemon=True).start()
    dist.barrier()


@faulty("p2p-unmatched", 0, ranks=6, also=(("rank-frozen", 4),))
def two_pipelines_of_which_one_drops_a_microbatch(rank: int) -> None:
    first = rank // 3 * 3
    stages = [dist.new_group([stage, stage + 3]) for stage in range(3)]
    block = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)

    def microbatch(step: int, number: int) -> None:
        x = torch.randn(4, 8)
        if rank == 0 and (step, number) == (4, 3):  # here
            print("out of memory, microbatch dropped")
            return  # here
        if rank > first:
            dist.recv(x, rank - 1)  # here
        out = block(x)
        if rank < first + 2:
            dist.send(out.detach(), rank + 1)  # here
        out.square().mean().backward()

    for step in range(7):
        for number in range(4):
            microbatch(step, number)  # here
            if rank == 4 and (step, number) == (4, 1):
                os.kill(os.getpid(), signal.SIGSTOP)  # here
        average_gradients(block, stages[rank % 3])  # here
        optimizer.step()
        optimizer.zero_grad()
