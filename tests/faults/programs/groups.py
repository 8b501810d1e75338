"""Subgroups."""

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy


@faulty("group-order-inversion", 1)
def two_groups_in_opposite_order(rank: int) -> None:
    a, b = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(4), group=b)  # here
        dist.all_reduce(torch.ones(4), group=a)
    else:
        dist.all_reduce(torch.ones(4), group=a)
        dist.all_reduce(torch.ones(4), group=b)


@faulty("group-order-inversion", 0, 1, 2)
def three_groups_in_a_ring(rank: int) -> None:
    groups = [dist.new_group([i, (i + 1) % 3]) for i in range(3)]
    dist.all_reduce(torch.ones(4), group=groups[rank])  # here
    dist.all_reduce(torch.ones(4), group=groups[(rank - 1) % 3])


@faulty("group-order-risk", 0, 1, ranks=2)
def opposite_order_that_went_well(rank: int) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    for _ in range(3):
        works = [dist.all_reduce(torch.ones(4), group=g, async_op=True) for g in ((a, b) if rank else (b, a))]  # here
        for work in works:
            work.wait()


@faulty("wrong-group", 2)
def the_wrong_handle_at_one_step(rank: int) -> None:
    a, b = dist.new_group([0, 1, 2], group_desc="tp"), dist.new_group([0, 1, 2], group_desc="dp")
    for step in range(5):
        group = b if rank == 2 and step == 3 else a
        dist.all_reduce(torch.ones(4), group=group)  # here
        dist.barrier()


@faulty("group-creation-mismatch", 2)
def a_group_that_one_rank_does_not_make(rank: int) -> None:
    dist.barrier()
    if rank < 2:
        dist.new_group([0, 1, 2])  # here
    dist.barrier()


@healthy(ranks=4)
def pairs_and_quartets(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    other = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        dist.all_reduce(torch.ones(4), group=other[rank % 2])
        dist.barrier()


@healthy()
def a_group_of_some_ranks_only(rank: int) -> None:
    some = dist.new_group([0, 1])
    for step in range(4):
        if rank < 2 and step % 2:
            dist.all_reduce(torch.ones(4), group=some)
    dist.barrier()
