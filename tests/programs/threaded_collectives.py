"""Two ranks that issue collectives from four threads at once, then train: threaded_collectives.py STORE."""

import multiprocessing
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROUNDS = 200


def issue(group):
    """Issue operations of one group, half of them asynchronous."""
    for number in range(ROUNDS):
        work = dist.all_reduce(torch.ones(8), group=group, async_op=bool(number % 2))
        if work is not None:
            work.wait()
        if number % 10 == 0:
            dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.ones(4), group=group)


def be_rank(rank, store):
    """Issue from threads, train with DDP, exchange messages."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    threads = [threading.Thread(target=issue, args=(dist.new_group([0, 1]),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    issue(None)
    for thread in threads:
        thread.join()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()
    if rank == 0:
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.ones(5), 0)
    del model
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=be_rank, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
