"""Train with DistributedDataParallel under torch.profiler; write its trace and what DDP measured itself to a folder."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 14
DELAY_S = 0.05
FORWARD_S = 0.02


class Slow(nn.Module):
    """Takes a known time at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        time.sleep(FORWARD_S)
        return x


def main(folder: Path) -> None:
    """Train; rank 1 is late in every step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(400, 400) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers, Slow()), bucket_cap_mb=1)
    model._set_ddp_runtime_logging_sample_rate(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gathered, pair = torch.empty(2_000), torch.ones(1_000)
    # Every step is profiled, so that the times of dtprof and of the trace are those of the same steps.
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=1, active=STEPS - 3, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(folder / f"trace{rank}.json.gz")),
    ) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(64, 400)).square().mean()
            if rank == 1:
                time.sleep(DELAY_S)
            loss.backward()
            optimizer.step()
            handle = dist.all_gather_single(gathered, pair, async_op=True)
            for _ in range(20):
                loss = loss + (model.module[0].weight @ model.module[1].weight).sum().detach()
            handle.wait()
            dist.broadcast(pair, 1)
            profiler.step()
    told = model._get_ddp_logging_data()
    (folder / f"ddp{rank}.json").write_text(json.dumps({key: str(value) for key, value in told.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
