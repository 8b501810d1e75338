"""Train the same model twice from the same seed, then go on until a file appears; rank 0 then runs its own profiler.

What a profiler window does to losses shows in the second training, over whose steps it is taken.
"""

import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 10


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(16, 64, generator=batches)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer


def main(stop):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = train(rank)[0]
    gc.collect()
    second, model, optimizer = train(rank)
    print(f"rank {rank} same losses {first == second}", flush=True)
    own = torch.profiler.profile(schedule=torch.profiler.schedule(wait=10**9, warmup=1, active=1))
    if rank == 0:
        own.start()
    ended = torch.zeros(1)
    while not ended.item():
        time.sleep(0.01)
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()
        ended.fill_(stop.exists())
        dist.all_reduce(ended)
    # Of its own, now active: it must find no window in its way.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).add(1)
    print(f"rank {rank} own profiler saw {len(profiler.events()) > 0}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
