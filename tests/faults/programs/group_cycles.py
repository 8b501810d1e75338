"""Orders of more than two groups that form a ring, and pass because calls are asynchronous; and sound orders.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
barrier that met another operation was mended since.
"""

import threading

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy


def neighbours(ranks: int) -> list[dist.ProcessGroup]:
    """Return the groups of each rank and the next one, the last of which closes the ring."""
    return [dist.new_group(sorted((i, (i + 1) % ranks))) for i in range(ranks)]


def exchange_halos(first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (first, second)]
    for work in works:
        work.wait()


@faulty("group-order-risk", 0, 1, 2, 3, ranks=4)
def halos_that_each_rank_sends_to_the_right_first(rank: int) -> None:
    edges = neighbours(4)
    for _ in range(4):
        works = [dist.all_reduce(torch.ones(4), group=edges[i], async_op=True) for i in (rank, (rank - 1) % 4)]  # here
        for work in works:
            work.wait()


@faulty("group-order-risk", 0, ranks=4)
def one_step_in_which_rank_0_begins_at_the_other_edge(rank: int) -> None:
    edges = neighbours(4)
    for step in range(6):
        own = sorted({rank, (rank - 1) % 4})
        if rank == 0 and step == 3:
            own.reverse()
        works = [dist.all_reduce(torch.ones(4), group=edges[i], async_op=True) for i in own]  # here
        for work in works:
            work.wait()


@faulty("group-order-risk", 0, 1, 2, 3, ranks=4)
def rows_first_on_one_diagonal_and_columns_first_on_the_other(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    for _ in range(3):
        gathered, shard = torch.zeros(8), torch.zeros(2)
        if rank in (0, 3):
            gather = dist.all_gather_into_tensor(gathered, torch.ones(4), group=row, async_op=True)  # here
            reduce = dist.all_reduce(shard, group=column, async_op=True)
        else:
            reduce = dist.all_reduce(shard, group=column, async_op=True)  # here
            gather = dist.all_gather_into_tensor(gathered, torch.ones(4), group=row, async_op=True)
        gather.wait()
        reduce.wait()


@faulty("group-order-risk", 0, 1, 2, ranks=4)
def three_groups_of_unequal_size(rank: int) -> None:
    heads, body, ends = dist.new_group([0, 1]), dist.new_group([1, 2, 3]), dist.new_group([0, 2])
    order = {0: (heads, ends), 1: (body, heads), 2: (ends, body), 3: (body,)}[rank]
    for _ in range(3):
        works = [dist.broadcast(torch.ones(4), group=g, group_src=0, async_op=True) for g in order]  # here
        for work in reversed(works):
            work.wait()


@faulty("group-order-risk", 0, 1, 2)
def one_asynchronous_call_that_opens_the_ring(rank: int) -> None:
    a, b, c = dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])
    for _ in range(3):
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), group=a, async_op=True)  # here
            dist.all_reduce(torch.ones(4), group=c)
            work.wait()
        elif rank == 1:
            dist.all_reduce(torch.ones(4), group=b)  # here
            dist.all_reduce(torch.ones(4), group=a)
        else:
            dist.all_reduce(torch.ones(4), group=c)  # here
            dist.all_reduce(torch.ones(4), group=b)


@faulty("group-order-risk", 0, 1, 2)
def a_ring_of_barriers_once_at_the_end(rank: int) -> None:
    edges = neighbours(3)
    for _ in range(4):
        for i in sorted({rank, (rank - 1) % 3}):
            dist.all_reduce(torch.ones(4), group=edges[i])
    first, second = edges[rank], edges[(rank - 1) % 3]
    leaving = dist.barrier(group=first, async_op=True)  # here
    dist.barrier(group=second, async_op=True).wait()
    leaving.wait()


@healthy(ranks=4)
def halos_in_the_order_of_the_edges(rank: int) -> None:
    edges = neighbours(4)
    for _ in range(4):
        first, second = sorted({rank, (rank - 1) % 4})
        exchange_halos(edges[first], edges[second])


@healthy(ranks=4)
def halos_of_even_edges_and_then_of_odd_ones(rank: int) -> None:
    edges = neighbours(4)
    for _ in range(4):
        for parity in (0, 1):
            edge = rank if rank % 2 == parity else (rank - 1) % 4
            dist.all_reduce(torch.ones(4), group=edges[edge])


@healthy(ranks=4)
def rows_and_columns_by_turns(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(4):
        groups = (rows[rank // 2], columns[rank % 2])
        works = [dist.all_reduce(torch.ones(4), group=g, async_op=True) for g in (groups if step % 2 else groups[::-1])]
        for work in works:
            work.wait()


@healthy()
def edges_backwards_after_a_barrier(rank: int) -> None:
    edges = neighbours(3)
    own = sorted({rank, (rank - 1) % 3})
    for i in own:
        dist.all_reduce(torch.ones(4), group=edges[i])
    dist.barrier()
    for i in reversed(own):
        dist.all_reduce(torch.ones(4), group=edges[i])


@healthy()
def a_thread_for_each_edge(rank: int) -> None:
    edges = neighbours(3)

    def keep(edge: dist.ProcessGroup) -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(4), group=edge)

    threads = [threading.Thread(target=keep, args=(edges[i],)) for i in (rank, (rank - 1) % 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@healthy(ranks=4)
def three_groups_of_unequal_size_in_one_order(rank: int) -> None:
    heads, body, ends = dist.new_group([0, 1]), dist.new_group([1, 2, 3]), dist.new_group([0, 2])
    order = {0: (heads, ends), 1: (heads, body), 2: (body, ends), 3: (body,)}[rank]
    for _ in range(3):
        works = [dist.broadcast(torch.ones(4), group=g, group_src=0, async_op=True) for g in order]
        for work in reversed(works):
            work.wait()
