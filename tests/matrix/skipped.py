"""Three ranks reduce until rank 1 leaves one reduction out: the others wait for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(20):
    if rank == 1 and step == 10:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
