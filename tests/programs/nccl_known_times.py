"""Known times on NCCL, 2 ranks on one GPU: a phase, and an all_reduce to which the device of rank 1 comes late.

Both are measured by CUDA events of the program, whose times go to a file of each rank in a folder.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist

import dtprof

CYCLES = 40_000_000  # some 20 ms


def spin(cycles: int) -> "tuple[torch.cuda.Event, torch.cuda.Event]":
    """Keep the stream busy, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    return begin, end


torch.cuda.set_device(0)
dist.init_process_group("nccl")
rank = dist.get_rank()
values = torch.ones(1000, device="cuda")
for _ in range(3):
    dist.all_reduce(values, async_op=True).wait()
    torch.cuda.synchronize()
with dtprof.phase("of known length"):
    phase = spin(CYCLES)
torch.cuda.synchronize()
dist.barrier()
torch.cuda.synchronize()
late = spin(4 * CYCLES * rank)
work = dist.all_reduce(values, async_op=True)
work.wait()
torch.cuda.synchronize()
measured = {"phase_ms": phase[0].elapsed_time(phase[1]), "late_ms": late[0].elapsed_time(late[1])}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(measured))
dist.destroy_process_group()
