"""Make more operations than one segment holds, in a group of one; say at the end what was computed.

many_operations.py COUNT
"""

import sys

import torch
import torch.distributed as dist


def main(count):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    total = torch.zeros(1)
    one = torch.ones(1)
    for _ in range(count):
        dist.all_reduce(one)
        total += one
    print(f"computed {total.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
