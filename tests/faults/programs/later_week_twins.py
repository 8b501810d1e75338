"""Scripts of a later week that are right: frozen together with those of the release week, run after the mending."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import healthy
from tests.faults.programs.release_week_faults import batches


@healthy()
def an_evaluation_of_an_empty_list(rank: int) -> None:
    model = nn.Linear(6, 2)

    def evaluate(examples: list[torch.Tensor]) -> float:
        total = torch.zeros(2)
        for example in examples:
            total += torch.tensor([float(model(example).sum()), 1.0])
        dist.all_reduce(total)
        if not total[1]:
            return 0.0
        return float(total[0] / total[1])

    for epoch in range(4):
        for batch in batches(rank, 2):
            dist.all_reduce(model(batch).mean().detach())
        evaluate([] if rank == 1 and epoch == 2 else list(batches(rank, 3)))


@healthy()
def an_evaluation_of_the_bare_model_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step == 3 and rank == 0:
            bare = model.module.eval()
            with torch.no_grad():
                for other in batches(rank, 40):
                    bare(other)
            model.train()
    del model


@healthy(ranks=4)
def sums_by_pairs_then_leaders_then_pairs(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    leader = rank - rank % 2
    for _ in range(4):
        value = torch.ones(6) * rank
        dist.reduce(value, dst=leader, group=pairs[rank // 2])
        if rank == leader:
            dist.all_reduce(value, group=leaders)
        dist.broadcast(value, src=leader, group=pairs[rank // 2])
        assert float(value[0]) == 6.0


@healthy()
def keys_and_values_around_the_ring(rank: int) -> None:
    for _ in range(3):
        block, spare = torch.full((4, 4), float(rank)), torch.zeros(4, 4)
        seen = [float(block[0, 0])]
        for _ in range(2):
            work = [
                dist.P2POp(dist.isend, block, (rank + 1) % 3),
                dist.P2POp(dist.irecv, spare, (rank - 1) % 3),
            ]
            for handle in dist.batch_isend_irecv(work):
                handle.wait()
            block, spare = spare, torch.zeros(4, 4)
            seen.append(float(block[0, 0]))
        assert sorted(seen) == [0.0, 1.0, 2.0]


@healthy()
def owners_that_update_and_publish(rank: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    owned = [parameter for index, parameter in enumerate(parameters) if index % 3 == rank]
    optimizer = torch.optim.SGD(owned, lr=0.01)
    for batch in batches(rank, 5):
        model(batch).mean().backward()
        for index, parameter in enumerate(parameters):
            dist.reduce(parameter.grad, dst=index % 3)
        optimizer.step()
        for index, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=index % 3)
        model.zero_grad()


@healthy()
def models_averaged_every_few_steps(rank: int) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1))
    for step, batch in enumerate(batches(rank, 14)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step % 4 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(3)


@healthy()
def gradients_compressed_by_a_hook(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(nn.Linear(6, 2))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 5):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    del model


@healthy()
def a_child_whose_output_is_read(rank: int) -> None:
    for step in range(4):
        if rank == 0 and step == 2:
            command = [sys.executable, "-c", "import time; time.sleep(1); print('x' * 1_000_000)"]
            assert len(subprocess.run(command, capture_output=True, check=True).stdout) > 1_000_000
        dist.all_reduce(torch.ones(4))


@healthy()
def an_archive_packed_for_a_while(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 1:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                zlib.compress(os.urandom(500_000), 6)
    dist.barrier()


@healthy()
def a_worker_thread_that_calls_back(rank: int) -> None:
    finished = threading.Condition()
    is_done = False

    def work() -> None:
        nonlocal is_done
        time.sleep(0.5 * rank)
        with finished:
            is_done = True
            finished.notify_all()

    threading.Thread(target=work).start()
    with finished:
        finished.wait_for(lambda: is_done)
    dist.barrier()


@healthy(joins=False)
def ranks_that_join_one_after_the_other(rank: int) -> None:
    time.sleep(0.8 * rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    dist.barrier()
    dist.destroy_process_group()


@healthy()
def a_download_with_a_limit_of_time(rank: int) -> None:
    def expire(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expire)
    for step in range(4):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            time.sleep(5 if rank == step else 0.01)
        except TimeoutError:
            print("again", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        dist.all_reduce(torch.ones(4))


@healthy(ranks=4)
def microbatches_whose_number_is_announced(rank: int) -> None:
    for batch in range(4):
        count = torch.tensor([4 if batch < 3 else 1])
        dist.broadcast(count, src=0)
        for _ in range(int(count)):
            hidden = torch.zeros(2, 5)
            if rank:
                dist.recv(hidden, src=rank - 1)
            if rank < 3:
                dist.send(hidden, dst=rank + 1)
        for _ in range(int(count)):
            gradient = torch.zeros(2, 5)
            if rank < 3:
                dist.recv(gradient, src=rank + 1)
            if rank:
                dist.send(gradient, dst=rank - 1)


@healthy(ranks=4)
def ranks_outside_the_group_go_around_it(rank: int) -> None:
    few = dist.new_group([1, 3])
    for step in range(4):
        if few is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(torch.ones(step + 1), group=few)
        elif rank == 0:
            dist.send(torch.ones(7), dst=2)
        else:
            dist.recv(torch.zeros(7), src=0)
    dist.barrier()


@healthy()
def coroutines_that_take_turns(rank: int) -> None:
    async def produce(box: asyncio.Queue[int]) -> None:
        for item in range(5):
            await asyncio.sleep(0.02 * rank)
            await box.put(item)

    async def consume(box: asyncio.Queue[int]) -> None:
        for _ in range(5):
            total = torch.tensor([await box.get()])
            work = dist.all_reduce(total, async_op=True)
            while not work.is_completed():
                await asyncio.sleep(0.001)

    async def both() -> None:
        box: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        await asyncio.gather(produce(box), consume(box))

    asyncio.run(both())


@healthy()
def barriers_begun_early_and_waited_for_late(rank: int) -> None:
    for _ in range(3):
        work = dist.barrier(async_op=True)
        time.sleep(0.05 * rank)
        work.wait()
        dist.all_reduce(torch.ones(2))


@healthy()
def the_norm_of_the_gradient_as_a_maximum(rank: int) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 5):
        optimizer.zero_grad()
        model(batch).mean().backward()
        norm = torch.stack([parameter.grad.abs().max() for parameter in model.parameters()]).max()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        for parameter in model.parameters():
            parameter.grad.div_(norm.clamp(min=1.0))
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()


@healthy(ranks=2)
def receives_begun_long_before_their_messages(rank: int) -> None:
    boxes = [torch.zeros(8) for _ in range(4)]
    pending: list[Any] = []
    if rank == 1:
        pending = [dist.irecv(box, src=0, tag=index) for index, box in enumerate(boxes)]
    dist.barrier()
    for index in range(4):
        if rank == 0:
            time.sleep(0.2)
            dist.send(torch.full((8,), float(index)), dst=1, tag=index)
        else:
            pending[index].wait()
            assert float(boxes[index][0]) == index


@healthy()
def running_statistics_of_an_evaluation_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step == 3 and rank == 0:
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
    del model
