"""A program that asks to be recorded: one all_reduce a rank under torchrun, or alone; optionally in spawned ranks."""

import dtprof.auto  # noqa: F401, I001 - first, as its documentation says

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, world_size: int, store: str) -> None:
    """Join the group and reduce once."""
    method = {} if store == "env" else {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **method)
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.sum().item() == 3 * world_size
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(0, int(os.environ["WORLD_SIZE"]), "env")
    else:
        mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
