"""Train with DDP in processes that are started in some way, measured by the oracle.

python -m tests.completeness.programs.workers FOLDER spawn|fork|forkserver      starts two ranks
torchrun ... -m tests.completeness.programs.workers FOLDER elastic              is one; rank 1 fails at first

Each attempt writes FOLDER/ATTEMPT/oracle-RANK.json.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.completeness.programs.models import layers, train
from tests.completeness.programs.oracle import Oracle

SIZE = 2


def work(rank, attempt, folder, name):
    oracle = Oracle(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)

    def scenario():
        train(DistributedDataParallel(layers()), 2 + attempt)
        dist.all_reduce(torch.ones(4), group=dist.new_group())

    oracle.measure("Processes", name, scenario)
    dist.barrier()
    oracle.destroy()
    oracle.write(rank)


def attempt_folder(folder, attempt):
    path = Path(folder, str(attempt))
    path.mkdir(exist_ok=True)
    return str(path)


def main(folder, way):
    if way == "elastic":
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank = int(os.environ["RANK"])
        name = ("elastic restart, the attempt that fails", "elastic restart, the attempt that ends well")[attempt]
        work(rank, attempt, attempt_folder(folder, attempt), name)
        if attempt == 0 and rank == 1:
            raise RuntimeError("planned")
        return
    context = multiprocessing.get_context(way)
    arguments = [(rank, 0, attempt_folder(folder, 0), f"ranks started by {way}") for rank in range(SIZE)]
    children = [context.Process(target=work, args=argument) for argument in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(child.exitcode for child in children))


if __name__ == "__main__":
    main(*sys.argv[1:])
