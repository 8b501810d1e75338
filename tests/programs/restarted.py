"""Fail on rank 1 in the first attempt of torchrun; succeed in the second.

restarted.py FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist


def main(folder):
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    # A store for each attempt: in torchrun's own, gloo finds the addresses of the ranks that have failed.
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    dist.all_reduce(torch.ones(4))
    if attempt == 0:
        if rank == 1:
            raise RuntimeError("planned")
        dist.barrier()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
