"""Sound steps on NCCL, several ranks on one GPU, and then a fault of rank 1, by name."""

import os
import sys
import time

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist


def stays_away():
    time.sleep(1000)


def runs_a_kernel_that_never_ends():
    torch.cuda._sleep(1 << 60)


fault = globals()[sys.argv[1]]
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
for step in range(12):
    gradients = torch.ones(8, device=device)
    dist.all_reduce(gradients, async_op=True).wait()
    if step == 8 and dist.get_rank() == 1:
        fault()
    dist.broadcast(gradients, 0)
    gradients[0].item()
dist.destroy_process_group()
