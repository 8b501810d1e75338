"""Start two ranks from Python, without a launcher.

spawned.py METHOD FOLDER [--fail]    METHOD: how torch.multiprocessing starts them, or `process` for bare Processes
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

RANKS = 2


def fail():
    raise ValueError("planned")


def train(rank, folder, fails):
    next(iter(DataLoader(torch.ones(4))))  # before the rank is known to anybody
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    take_steps(rank, fails)
    dist.destroy_process_group()


def take_steps(rank, fails):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    if fails and rank == 1:
        fail()
    if fails:
        dist.barrier()


def main(method, folder, fails):
    next(iter(DataLoader(torch.ones(4))))  # a look at the data, a first checkpoint: the parent is no rank
    torch.save({}, f"{folder}/first.pt")
    if method == "process":
        processes = [mp.get_context("fork").Process(target=train, args=(i, folder, fails)) for i in range(RANKS)]
        for process in processes:
            process.start()
        for process in reversed(processes):
            process.join()
        sys.exit(any(process.exitcode for process in processes))
    mp.start_processes(train, (folder, fails), nprocs=RANKS, start_method=method)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--fail" in sys.argv)
