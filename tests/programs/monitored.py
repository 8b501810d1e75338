"""Train on two ranks, the second late in each step; then rank 0 waits for a file while the other waits for it.

monitored.py STEPS FILE
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LATE_S = 0.02


def main() -> None:
    """Train, wait, take one more step."""
    steps, file = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps + 1):
        if step == steps and dist.get_rank() == 0:
            while not file.exists():
                time.sleep(0.05)
        if step == steps:
            dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = torch.ones(1)
        dist.all_reduce(total)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
