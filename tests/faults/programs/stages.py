"""Pipelines and exchanges written by hand with send and recv."""

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy

MICROBATCHES = 4


def run_stage(rank: int, microbatches: int, size: int = 8) -> None:
    """Run one step of a pipeline: all forwards, then all backwards."""
    world = dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(size, size)
    kept = []
    for _ in range(microbatches):
        given = torch.ones(2, size)
        if rank > 0:
            dist.recv(given, src=rank - 1)
        given.requires_grad_()
        output = layer(given)
        kept.append((given, output))
        if rank < world - 1:
            dist.send(output.detach(), dst=rank + 1)
    for given, output in kept:
        gradient = torch.ones(2, size)
        if rank < world - 1:
            dist.recv(gradient, src=rank + 1)
        output.backward(gradient)
        if rank > 0:
            dist.send(given.grad, dst=rank - 1)


@faulty("p2p-unmatched", 0)
def a_stage_that_sends_one_microbatch_too_few(rank: int) -> None:
    layer = nn.Linear(8, 8)
    for step in range(3):
        count = MICROBATCHES - 1 if rank == 0 and step == 2 else MICROBATCHES
        for _ in range(count):
            value = torch.ones(2, 8)
            if rank > 0:
                dist.recv(value, src=rank - 1)  # here
            if rank < 2:
                dist.send(layer(value).detach(), dst=rank + 1)
        dist.barrier()


@faulty("p2p-unmatched", 2)
def the_last_stage_drops_a_microbatch(rank: int) -> None:
    for _ in range(2):
        for i in range(MICROBATCHES):
            value = torch.ones(1 << 18)
            if rank > 0:
                if rank == 2 and i == MICROBATCHES - 1:
                    continue
                dist.recv(value, src=rank - 1)
            if rank < 2:
                dist.send(value, dst=rank + 1)  # here
        dist.barrier()


@faulty("p2p-tag-mismatch", 1)
def tags_by_step_that_one_stage_counts_otherwise(rank: int) -> None:
    for step in range(5):
        value = torch.ones(4)
        if rank == 0:
            dist.send(value, dst=1, tag=step)
            dist.recv(value, src=1, tag=step)
        elif rank == 1:
            dist.recv(value, src=0, tag=step + (step == 3))  # here
            dist.send(value, dst=0, tag=step)
    dist.barrier()


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def a_ring_of_large_blocking_sends(rank: int) -> None:
    block = torch.ones(1 << 20)
    for _ in range(3):
        dist.send(block, dst=(rank + 1) % 4)  # here
        dist.recv(block, src=(rank - 1) % 4)


@faulty("p2p-deadlock-cycle", 0, 1, ranks=4)
def neighbours_that_both_wait_for_a_reply(rank: int) -> None:
    dist.barrier()
    if rank < 2:
        request = dist.irecv(torch.zeros(4), src=1 - rank)  # here
        request.wait()
        dist.isend(torch.ones(4), dst=1 - rank).wait()
    dist.barrier()


@faulty("p2p-unmatched", 1)
def a_server_that_serves_one_request_too_few(rank: int) -> None:
    if rank == 1:
        for peer in (0, 2, 0):
            dist.recv(torch.zeros(4), src=peer)
            dist.send(torch.ones(4), dst=peer)
    else:
        for _ in range(2):
            dist.send(torch.ones(4), dst=1)  # here
            dist.recv(torch.zeros(4), src=1)
    dist.barrier()


@faulty("p2p-size-mismatch", 1, 2)
def a_stage_with_another_hidden_size(rank: int) -> None:
    for _ in range(2):
        hidden = torch.ones(4, 8)
        if rank == 1:
            dist.recv(hidden, src=0)
            dist.send(torch.ones(4, 16), dst=2)  # here
        elif rank == 0:
            dist.send(hidden, dst=1)
        else:
            dist.recv(hidden, src=1)  # here
    dist.barrier()


@faulty("p2p-unmatched", 1)
def a_receive_from_the_wrong_neighbour(rank: int) -> None:
    value = torch.ones(4)
    for step in range(4):
        if rank == 0:
            dist.send(value, dst=1)
        elif rank == 1:
            dist.recv(value, src=2 if step == 3 else 0)  # here
    dist.barrier()


@faulty("pipeline-schedule-mismatch", 1)
def schedules_of_two_kinds(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    kind = ScheduleGPipe if rank == 1 else Schedule1F1B
    stage = PipelineStage(nn.Linear(8, 8), rank, 3, torch.get_default_device())
    schedule = kind(stage, 6, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        given = (torch.ones(12, 8),) if rank == 0 else ()
        wanted = {"target": torch.zeros(12, 8)} if rank == 2 else {}
        schedule.step(*given, **wanted)
    dist.barrier()


@faulty("rank-stuck", 1)
def a_stage_that_waits_for_input(rank: int) -> None:
    import os

    read, _ = os.pipe()
    for step in range(4):
        value = torch.ones(4)
        if rank > 0:
            dist.recv(value, src=rank - 1)
        if rank == 1 and step == 2:
            os.read(read, 1)  # here
        if rank < 2:
            dist.send(value, dst=rank + 1)


@healthy()
def a_pipeline_by_hand(rank: int) -> None:
    for _ in range(3):
        run_stage(rank, MICROBATCHES)
        dist.barrier()


@healthy(ranks=4)
def attention_in_a_ring(rank: int) -> None:
    world = dist.get_world_size()
    for _ in range(2):
        block = torch.full((16, 8), float(rank))
        for _ in range(world - 1):
            coming = torch.empty_like(block)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, block, (rank + 1) % world),
                    dist.P2POp(dist.irecv, coming, (rank - 1) % world),
                ]
            )
            for work in works:
                work.wait()
            block = coming
        dist.all_reduce(block)


@healthy()
def warm_up_of_a_pipeline_with_outstanding_sends(rank: int) -> None:
    pending = []
    for i in range(6):
        value = torch.full((4,), float(i))
        if rank > 0:
            dist.recv(value, src=rank - 1)
        if rank < 2:
            pending.append((dist.isend(value, dst=rank + 1), value))
        if len(pending) > 2:
            pending.pop(0)[0].wait()
    for work, _ in pending:
        work.wait()
    dist.barrier()


@healthy(ranks=4)
def halves_that_exchange_in_pairs(rank: int) -> None:
    peer = rank ^ 1
    for size in (4, 1 << 18):
        value, other = torch.ones(size), torch.zeros(size)
        if rank < peer:
            dist.send(value, dst=peer)
            dist.recv(other, src=peer)
        else:
            dist.recv(other, src=peer)
            dist.send(value, dst=peer)
    dist.barrier()


@healthy()
def a_parameter_server(rank: int) -> None:
    if rank == 0:
        weights = torch.zeros(8)
        for _ in range(8):
            gradient = torch.zeros(8)
            worker = dist.recv(gradient)
            weights += gradient
            dist.send(weights, dst=worker)
    else:
        for _ in range(4):
            dist.send(torch.ones(8), dst=0)
            dist.recv(torch.zeros(8), src=0)


@healthy()
def two_tags_taken_out_of_order(rank: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.ones(4), dst=1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(torch.zeros(4), src=0, tag=2)
        dist.recv(torch.zeros(4), src=0, tag=1)
    dist.barrier()


@healthy(ranks=2)
def an_interleaved_pipeline(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.manual_seed(0)
    stages = [PipelineStage(nn.Linear(8, 8), rank + 2 * i, 4, torch.get_default_device()) for i in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        given = (torch.ones(8, 8),) if rank == 0 else ()
        wanted = {"target": torch.zeros(8, 8)} if rank == 1 else {}
        schedule.step(*given, **wanted)
