"""Train until every rank has written a window of its turns and let a later turn pass, on the device that is named."""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")  # several ranks on one GPU

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def states(run):
    """Return the states of the windows of each rank so far."""
    # A rank may be writing its last line.
    lines = [file.read_text().split("\n")[:-1] for file in sorted(run.glob("rank-*/strings.jsonl"))]
    entries = [[json.loads(line) for line in of_rank if '"window"' in line] for of_rank in lines]
    return [{entry["state"] for entry in of_rank if entry["k"] == "window"} for of_rank in entries]


def main(run, device):
    if device == "sim":
        from tests.accelerator import simulated_device  # noqa: F401 - makes the device
    dist.init_process_group({"cpu": "gloo", "sim": "cpu:gloo,sim:simccl", "cuda": "cpu:gloo,cuda:nccl"}[device])
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ended = torch.zeros(1)
    while ended.item() < dist.get_world_size():
        time.sleep(0.05)
        model(torch.ones(16, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended.fill_(len(states(run)) == 2 and all({"written", "failed"} <= own for own in states(run)))
        dist.all_reduce(ended)


if __name__ == "__main__":
    main(Path(os.environ["DTPROF_RUN_DIR"]), sys.argv[1] if sys.argv[1:] else "cpu")
    sys.stdout.flush()
    dist.destroy_process_group()
