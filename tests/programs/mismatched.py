"""Train on gloo; rank 1 asks for another reduction at one step, and all go on until the file named is there."""

import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in itertools.count():
    weight.sum().backward()
    odd = rank == 1 and step == 20
    dist.all_reduce(torch.ones(8), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    if rank == 0:
        dist.broadcast(torch.ones(2), src=0, group=pair)
    else:
        dist.broadcast(torch.zeros(2), src=0, group=pair)
    dist.all_gather_object([None, None], "x" * (10 ** (rank + 1)))
    optimizer.step()
    time.sleep(0.02)
    over = torch.tensor([int(step > 30 and (Path(sys.argv[1]).exists() or step > 5000))])
    dist.broadcast(over, src=0)
    if over:
        break
dist.destroy_process_group()
