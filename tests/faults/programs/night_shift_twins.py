"""The programs of a night shift that are right: each resembles one of `night_shift_faults.py`.

Frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import healthy
from tests.faults.programs.night_shift_faults import Fit, Recall, batch, encoder, first_rank_first, tried_again


@healthy()
def validation_batches_padded_to_the_longest(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))
    held_out = [batch(2)] * (4 if rank == 2 else 3)
    for _ in range(3):
        fit.epoch(3)
        count = torch.tensor(len(held_out))
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        for number in range(int(count)):
            loss, weight = torch.zeros(()), torch.zeros(())
            if number < len(held_out):
                with torch.no_grad():
                    loss, weight = fit.model.module(held_out[number]).square().mean(), torch.ones(())
            dist.all_reduce(torch.stack([loss, weight]))


@healthy()
def a_metric_without_updates_that_is_computed(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))
    for epoch in range(4):
        fit.epoch(2)
        recall = Recall()
        if rank != 1 or epoch != 2:
            recall.update(torch.ones(2))
        recall.compute()


@healthy(ranks=2)
def a_full_state_gathered_by_all_and_saved_by_one(rank: int) -> None:
    model = encoder()
    fully_shard(model[0])
    fully_shard(model)
    fit = Fit(model)

    def save(number: int) -> None:
        if number % 2:
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                torch.save(state, Path(tempfile.mkdtemp()) / "full.pt")

    fit.callbacks.append(save)
    fit.epoch(6)


@healthy()
def a_checkpoint_saved_again_by_all(rank: int) -> None:
    class Writer(dcp.FileSystemWriter):
        """A disk that fails once, on one rank."""

        fails = rank == 1

        def write_data(self, *arguments: object, **options: object) -> object:
            if self.fails:
                type(self).fails = False
                raise OSError(28, "No space left on device")
            return super().write_data(*arguments, **options)

    fit = Fit(DistributedDataParallel(encoder()))
    folder = tempfile.mkdtemp(prefix=f"night-{rank}-")
    for _ in range(3):
        fit.epoch(2)
        for _attempt in range(2):
            try:
                dcp.save({"model": fit.model.module.state_dict()}, storage_writer=Writer(folder))
            except dcp.api.CheckpointException:
                continue
            break


@healthy()
def weights_that_all_ranks_distribute(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    pretrained = {"embedding": torch.ones(6, 4), "head": torch.ones(9, 2), "scale": torch.ones(3, 3)}
    for weight in pretrained.values():
        distribute_tensor(weight if rank == 0 else torch.empty_like(weight), mesh, [Shard(0)])
    dist.barrier()


@healthy()
def the_first_rank_first_for_each_split(rank: int) -> None:
    for split in ("train", "test"):
        with first_rank_first(rank):
            time.sleep(0.2 if rank == 0 else 0.0)
            assert split
    Fit(DistributedDataParallel(encoder())).epoch(4)


@healthy()
def a_step_tried_again_before_its_forward(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder(normalised=True)))
    failing = {(2, 3)}

    @tried_again(3)
    def step(number: int) -> None:
        if (rank, number) in failing:
            failing.clear()
            raise ValueError("labels out of range")
        fit.step(number)

    for number in range(6):
        step(number)


@healthy(ranks=4)
def ring_hops_that_all_make_under_an_empty_mask(rank: int) -> None:
    keys = torch.full((4,), float(rank))
    for _ in range(4):
        for hop in range(3):
            incoming = torch.empty(4)
            operations = [
                dist.P2POp(dist.isend, keys, (rank + 1) % 4),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if hop <= rank:
                keys = incoming.softmax(0)
            keys = incoming


@healthy()
def outer_steps_agreed_by_the_tokens_of_all(rank: int) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for _ in range(16):
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
        tokens = torch.tensor(24 if rank == 2 else 32)
        dist.all_reduce(tokens)
        seen += int(tokens)
        if seen >= 400:
            seen = 0
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)


@healthy()
def a_share_that_is_done_after_the_last_barrier(rank: int) -> None:
    Fit(DistributedDataParallel(encoder())).epoch(5)
    dist.barrier()
    if rank == 1:
        raise SystemExit
    time.sleep(0.5)


def total(value: int) -> int:
    """What a remote call computes."""
    return value + 1


@healthy()
def remote_calls_that_need_nobody_else(rank: int) -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=3)
    for number in range(4):
        dist.all_reduce(torch.ones(2))
        if rank == 0:
            assert rpc.rpc_sync("trainer1", total, args=(number,)) == number + 1
    rpc.shutdown()


@healthy()
def a_file_that_rank_0_flushes_to_the_disk(rank: int) -> None:
    fit = Fit(DistributedDataParallel(encoder()))

    def save(number: int) -> None:
        if rank == 0 and number % 2:
            with (Path(tempfile.mkdtemp()) / "state.pt").open("wb") as file:
                torch.save(fit.model.module.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.3)

    fit.callbacks.append(save)
    fit.epoch(6)
