"""Groups of some ranks: made, used and mixed up as people do."""

import datetime

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy


@faulty("group-creation-mismatch", 2, 3, ranks=4)
def a_group_made_by_its_members_only(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank in (0, 1):
        pair = dist.new_group([0, 1])  # here
        dist.all_reduce(torch.ones(4), group=pair)
    dist.barrier()


@faulty("group-creation-mismatch", 0)
def a_group_for_logging_that_rank_0_does_not_make(rank: int) -> None:
    train_group = dist.new_group([0, 1, 2])
    if rank != 0:
        dist.new_group([1, 2])  # here
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=train_group)


@faulty("rank-crashed", 2)
def a_source_outside_the_group(rank: int) -> None:
    pair = dist.new_group([1, 2])
    dist.barrier()
    if rank == 1:
        dist.broadcast(torch.ones(4), src=1, group=pair)
    elif rank == 2:
        dist.broadcast(torch.ones(4), src=0, group=pair)  # here
    dist.barrier()


@faulty("root-mismatch", 3, ranks=4)
def a_source_by_group_rank(rank: int) -> None:
    upper = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank:
        dist.broadcast(torch.ones(4), src=2 if rank == 3 else 1, group=upper)  # here
    dist.barrier()


@faulty("wrong-group", 3, ranks=4)
def tensor_group_for_data_group(rank: int) -> None:
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    rows = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    data = rows[rank % 2]
    for step in range(5):
        dist.all_reduce(torch.ones(4), group=tensor)
        chosen = tensor if rank == 3 and step == 3 else data
        dist.all_reduce(torch.ones(4), group=chosen)  # here


@faulty("wrong-group", 0)
def the_default_group_for_the_own_one(rank: int) -> None:
    own = dist.new_group([0, 1, 2])
    for step in range(4):
        dist.all_reduce(torch.ones(8), group=None if rank == 0 and step == 2 else own)  # here
        dist.broadcast(torch.ones(3), src=0, group=own)


@faulty("group-order-inversion", 0, 1, 2, 3, ranks=4)
def rows_first_on_half_of_the_ranks(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    other = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.barrier()
    first, second = pairs[rank // 2], other[rank % 2]
    if rank in (1, 2):
        first, second = second, first
    dist.all_reduce(torch.ones(4), group=first)  # here
    dist.all_reduce(torch.ones(4), group=second)


@faulty("group-order-risk", 0, 1, ranks=2)
def gradients_and_metrics_in_flight_in_two_orders(rank: int) -> None:
    gradients, metrics = dist.new_group([0, 1]), dist.new_group([0, 1])
    for _ in range(4):
        if rank == 0:
            first = dist.all_reduce(torch.ones(64), group=gradients, async_op=True)
            second = dist.broadcast(torch.ones(2), src=0, group=metrics, async_op=True)
        else:
            second = dist.broadcast(torch.ones(2), src=0, group=metrics, async_op=True)
            first = dist.all_reduce(torch.ones(64), group=gradients, async_op=True)
        first.wait()
        second.wait()


@faulty("rank-skipped-collective", 3, ranks=4)
def a_member_that_leaves_its_pair_alone(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(5):
        if not (rank == 3 and step == 3):
            dist.all_reduce(torch.ones(4), group=pairs[rank // 2])  # here
        dist.all_reduce(torch.ones(4))


@faulty("collective-order-mismatch", 1)
def buckets_in_another_order(rank: int) -> None:
    sizes = {"a": torch.ones(4), "b": torch.ones(4)}
    names = sorted(sizes, reverse=rank == 1)
    for step in range(3):
        for name in names if step == 1 else sorted(sizes):
            if name == "a":
                dist.all_reduce(sizes[name])  # here
            else:
                dist.reduce(sizes[name], dst=0)  # here


@faulty("split-size-mismatch", 0, 2)
def experts_that_get_more_than_they_expect(rank: int) -> None:
    for step in range(3):
        sends = [2, 2, 2]
        takes = [2, 2, 2]
        if rank == 2 and step == 1:
            sends = [3, 2, 2]
        dist.all_to_all_single(torch.zeros(sum(takes)), torch.ones(sum(sends)), takes, sends)  # here


@faulty("reduce-op-mismatch", 0)
def minimum_on_rank_0(rank: int) -> None:
    pair = dist.new_group([0, 1, 2])
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        kind = dist.ReduceOp.MIN if rank == 0 else dist.ReduceOp.SUM
        dist.reduce(torch.ones(4), dst=0, op=kind, group=pair)  # here


@healthy(ranks=4)
def mesh_of_two_axes_with_collectives_on_both(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))
        if mesh.get_local_rank("tp") == 0:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))


@healthy(ranks=4)
def experts_with_uneven_tokens(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        counts = torch.randint(0, 5, (4, 4), generator=generator)
        mine, theirs = counts[rank], torch.empty(4, dtype=torch.long)
        dist.all_to_all_single(theirs, mine.contiguous())
        dist.all_to_all_single(
            torch.zeros(int(theirs.sum()), 8), torch.ones(int(mine.sum()), 8), theirs.tolist(), mine.tolist()
        )


@healthy()
def a_group_with_another_timeout(_: int) -> None:
    slow = dist.new_group([0, 1, 2], timeout=datetime.timedelta(hours=2))
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        dist.barrier(group=slow)


@healthy(ranks=4)
def tensor_and_sequence_parallel(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(torch.get_default_device().type, (4,))
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(), "3": RowwiseParallel()})
    for _ in range(3):
        out = model[3](model[2](model[1](torch.ones(2, 8, 8))))
        out.sum().backward()


@healthy()
def rooted_calls_inside_a_group(rank: int) -> None:
    pair = dist.new_group([1, 2])
    if rank:
        dist.broadcast(torch.ones(3), src=1, group=pair)
        dist.broadcast(torch.ones(3), group_src=1, group=pair)
        dist.reduce(torch.ones(3), dst=2, group=pair)
    dist.barrier()


@healthy(ranks=4)
def groups_used_by_turns(_: int) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 3], [1, 2])]
    for step in range(6):
        group = groups[step % 4]
        if dist.get_rank(group) >= 0:
            dist.all_reduce(torch.ones(step + 1), group=group)
