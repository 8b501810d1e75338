"""Steps of DistributedDataParallel under the program's own torch.profiler: a rank of `exposed_time`, for torchrun.

Leaves behind, for each rank, the trace, when each step ended, and how far the trace's clock is from the host's
monotonic one.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

STEPS = 24
WIDTH, LAYERS, ROWS = (64, 4, 8) if sys.argv[2] == "gloo" else (2048, 8, 4096)


def main(folder: Path, backend: str) -> None:
    """Train, and leave behind what was measured."""
    device = torch.device("cpu" if backend == "gloo" else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(ROWS, WIDTH, device=device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    ends = []
    with profile(activities=activities) as profiler:
        clocks = [(time.monotonic_ns() + time.monotonic_ns()) // 2 - time.time_ns() for _ in range(5)]
        for _ in range(STEPS):
            loss = replica(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            ends.append(time.monotonic_ns())
    rank = dist.get_rank()
    profiler.export_chrome_trace(str(folder / f"{rank}.pt.trace.json"))
    document = {"ends_ns": ends, "monotonic_less_realtime_ns": sorted(clocks)[2]}
    (folder / f"{rank}.json").write_text(json.dumps(document), encoding="utf-8")
    del replica, model
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
