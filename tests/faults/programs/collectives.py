"""Collectives: left out, added, in another order, with other arguments; and odd ones that are right."""

import contextlib

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy, train


def average(value: float = 1.0, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.full((4,), value), group=group)


@faulty("rank-skipped-collective", 1)
def skip_of_a_group_of_its_own(rank: int) -> None:
    extra = dist.new_group([0, 1, 2])

    def log(step: int) -> None:
        if not (step == 3 and rank == 1):
            dist.all_reduce(torch.ones(4), group=extra)  # here

    train(rank, 6, log)


@faulty("rank-skipped-collective", 0)
def skip_by_continue(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        if step == 4 and rank == 0:
            continue
        dist.broadcast(torch.zeros(3), src=1)  # here
        dist.barrier()


@faulty("step-mismatch", 2)
def skip_made_good_at_the_end(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(8):
        weight.sum().backward()
        optimizer.step()
        if not (step == 3 and rank == 2):
            dist.all_reduce(torch.ones(4))  # here
    if rank == 2:
        dist.all_reduce(torch.ones(4))


@faulty("collective-order-mismatch", 1)
def order_swapped_in_one_group(rank: int) -> None:
    average()
    if rank == 1:
        dist.broadcast(torch.ones(4), src=0)  # here
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), src=0)


@faulty("collective-order-mismatch", 0)
def barrier_on_rank_0_alone(rank: int) -> None:
    for step in range(4):
        average()
        if rank == 0 and step == 2:
            dist.barrier()  # here


@faulty("size-mismatch", 2)
def one_number_more(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(9 if rank == 2 and step == 2 else 8))  # here


@faulty("dtype-mismatch", 1)
def another_number_format(rank: int) -> None:
    for step in range(4):
        wrong = rank == 1 and step == 2
        dist.all_reduce(torch.ones(8, dtype=torch.float64 if wrong else torch.float32))  # here


@faulty("dtype-mismatch", 0)
def another_number_format_of_the_same_size(rank: int) -> None:
    dist.all_reduce(torch.ones(8, dtype=torch.int32 if rank == 0 else torch.float32))  # here
    average()


@faulty("reduce-op-mismatch", 2)
def maximum_for_sum(rank: int) -> None:
    for step in range(4):
        op = dist.ReduceOp.MAX if rank == 2 and step == 1 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(8), op=op)  # here


@faulty("root-mismatch", 1)
def another_source(rank: int) -> None:
    average()
    dist.broadcast(torch.zeros(8), src=1 if rank == 1 else 0)  # here
    average()


@faulty("split-size-mismatch", 0, 1, ranks=2)
def splits_that_do_not_fit(rank: int) -> None:
    mine, theirs = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [2, 2])
    dist.all_to_all_single(torch.zeros(sum(theirs)), torch.ones(sum(mine)), theirs, mine)  # here
    average()


@healthy()
def splits_that_fit(rank: int) -> None:
    mine = [rank + 1] * 3
    dist.all_to_all_single(torch.zeros(6), torch.ones(sum(mine)), [1, 2, 3], mine)
    average()


@healthy()
def lines_that_differ_by_rank(rank: int) -> None:
    for _ in range(6):
        if rank == 0:
            dist.broadcast(torch.ones(4), src=0)
        else:
            dist.broadcast(torch.zeros(4), src=0)
        average()


@healthy()
def objects_of_uneven_size(rank: int) -> None:
    everything: list[object] = [None] * 3
    dist.all_gather_object(everything, "x" * (10 ** (rank + 1)))
    some: list[object] = ["y" * 100] if rank == 0 else [None]
    dist.broadcast_object_list(some, src=0)
    dist.gather_object("z" * rank, [None] * 3 if rank == 0 else None, dst=0)


@healthy()
def refused_on_one_rank_and_caught(rank: int) -> None:
    for _ in range(4):
        average()
        if rank == 1:
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                dist.all_reduce(torch.ones(4).to_sparse().to_sparse_csr())
        dist.broadcast(torch.zeros(3), src=0)


@healthy()
def training_with_a_log_on_rank_0(rank: int) -> None:
    def log(step: int) -> None:
        if rank == 0:
            sum(i * i for i in range(1000))
        if step % 3 == 0:
            average(group=None)

    train(rank, 9, log)


@healthy()
def reductions_to_one_rank(rank: int) -> None:
    for root in range(3):
        dist.reduce(torch.ones(4), dst=root)
        dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(3)] if rank == root else None, dst=root)
        dist.scatter(torch.zeros(2), [torch.ones(2)] * 3 if rank == root else None, src=root)
    dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))
    dist.monitored_barrier()
