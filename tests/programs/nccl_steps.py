"""Train a few steps on NCCL, one rank a process, several ranks on one GPU; print the last loss.

Each rank needs its own NCCL_HOSTID so that NCCL accepts a device that another rank uses; the program sets it.
"""

import os

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256, device=device), device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        loss = model(torch.ones(8, 256, device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
    print(f"rank {dist.get_rank()} loss {loss.item()!r}")
    del model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
