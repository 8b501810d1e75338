"""Messages and coalesced operations on NCCL, 2 ranks on one GPU."""

import os

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
rank = dist.get_rank()
other = 1 - rank
values = torch.full((1000,), float(rank), device="cuda")
received = torch.empty(1000, device="cuda")
dist.all_reduce(torch.ones(1, device="cuda"))
for _ in range(5):
    messages = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    if rank:
        dist.send(values, 0)
    else:
        dist.recv(received, 1)
    with dist._coalescing_manager(async_ops=True) as batch:
        for _ in range(3):
            dist.all_reduce(torch.ones(100, device="cuda"))
    batch.wait()
    torch.cuda.synchronize()
assert received[0].item() == float(other) or rank
dist.destroy_process_group()
