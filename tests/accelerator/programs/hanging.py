"""Let an all_reduce never complete in three ways, one after the other, and print what the hosts see.

stalled    it starts on both ranks, and the network stands still
blocked    rank 1's stream stands in a kernel before it
skipped    rank 1 never issues it
"""

import json
import os
import threading
import time

import torch
import torch.distributed as dist

from tests.accelerator import simulated_device as sim


def hang(fault: str, rank: int, x: torch.Tensor) -> None:
    """Issue the collective and 20 kernels behind it, then see whether the host gets at the result in half a second."""
    if fault == "stalled":
        sim.stall_network(0)
    if fault == "blocked" and rank == 1:
        sim.spin_forever()
    begin_ns = time.monotonic_ns()
    work = None if fault == "skipped" and rank == 1 else dist.all_reduce(x, async_op=True)
    if work is not None:
        work.wait()
    for _ in range(20):
        x = x + 1
    ran_on_ns = time.monotonic_ns() - begin_ns
    waiting = threading.Thread(target=x.sum().item, daemon=True)
    waiting.start()
    waiting.join(0.5)
    seen = {
        "fault": fault,
        "rank": rank,
        "ran_on_ms": ran_on_ns / 1e6,
        "item_returned": not waiting.is_alive(),
        "completed": work is not None and work.is_completed(),
    }
    print(json.dumps(seen), flush=True)
    dist.barrier(HOSTS)  # both have looked
    if fault != "skipped":
        sim.stall_network(1000)
        sim.release_all()
        waiting.join()


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,sim:simccl")
    HOSTS = dist.new_group(backend="gloo")
    ones = torch.ones(8, device="sim")
    dist.all_reduce(ones)
    ones.sum().item()
    for each in ("stalled", "blocked", "skipped"):
        hang(each, dist.get_rank(), ones)
    os._exit(0)
