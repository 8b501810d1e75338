"""Fail on rank 1 in the first attempt; succeed in the second."""

import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if dist.get_rank() == 1:
            raise RuntimeError("planned")
        dist.barrier()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
