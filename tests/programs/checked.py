"""Collectives that torch compares between the ranks before it makes them (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    ones = torch.ones(4)
    dist.all_reduce(ones)
    dist.broadcast(ones, src=1)
    both = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(both, ones)
    assert [one.tolist() for one in both] == [[2.0] * 4] * 2
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
