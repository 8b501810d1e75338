"""Two ranks; each has a Python child train on its own in the middle, with a group of one member, and forks another."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(steps: int) -> None:
    """Train, the ranks of the default group together."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and dist.get_world_size() > 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
            if (pid := os.fork()) == 0:
                torch.ones(1, requires_grad=True).backward()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0


if sys.argv[1:] == ["child"]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(2)
else:
    dist.init_process_group("gloo")
    train(5)
dist.destroy_process_group()
