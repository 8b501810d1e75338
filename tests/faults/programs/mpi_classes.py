"""The classes of error of the MPI Bugs Initiative and of MPI-CorrBench, as far as torch.distributed has them.

Each is written anew as a torch program beside a sound twin. Not there: epochs and global concurrency (one-sided
communication), and datatypes, which torch derives from tensors. Races of messages and leaked groups exist, and
dtprof says nothing of them: see `docs/explanation/measurements/verdicts.md`.
"""

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy

LARGE = 1 << 20


# Invalid parameters.


@faulty("rank-crashed", 0, 1, 2)
def invalid_root(_: int) -> None:
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), src=7)  # here


@faulty("rank-killed", 0)  # torch 2.13 itself reads beyond the peers of gloo
def invalid_peer(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), dst=11)  # here
    elif rank == 1:
        dist.recv(torch.ones(4), src=0)
    dist.barrier()


@faulty("rank-crashed", 2)
def invalid_length(rank: int) -> None:
    gathered = torch.empty(12 if rank != 2 else 11)
    dist.all_gather_into_tensor(gathered, torch.ones(4))  # here


@faulty("rank-crashed", 0)
def invalid_list(rank: int) -> None:
    parts = [torch.empty(2) for _ in range(2 if rank == 0 else 3)]
    dist.all_gather(parts, torch.ones(2))  # here


@healthy()
def valid_parameters(rank: int) -> None:
    table = torch.ones(4, 4)
    dist.broadcast(table, src=2)
    dist.all_reduce(table[:, 1] if rank == 1 else table[1])  # gloo takes what is not contiguous
    dist.all_gather_into_tensor(torch.empty(12), table[rank])
    parts = [torch.empty(2) for _ in range(3)]
    dist.all_gather(parts, torch.ones(2))
    everybody = dist.new_group([0, 1, 2])
    dist.all_reduce(table, group=everybody)
    dist.destroy_process_group(everybody)


# Parameters that must match.


@faulty("root-mismatch", 1)
def matching_root(rank: int) -> None:
    for step in range(4):
        dist.broadcast(torch.ones(4), src=1 if rank == 1 and step == 2 else 0)  # here


@faulty("root-mismatch", 2)
def matching_root_of_a_reduction(rank: int) -> None:
    for _ in range(3):
        dist.reduce(torch.ones(4), dst=2 if rank == 2 else 0)  # here


@faulty("reduce-op-mismatch", 2)
def matching_operator(rank: int) -> None:
    for step in range(4):
        how = dist.ReduceOp.MAX if rank == 2 and step == 3 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4), op=how)  # here


@faulty("dtype-mismatch", 0)
def matching_type(rank: int) -> None:
    for _ in range(3):
        value = torch.ones(4, dtype=torch.int32 if rank == 0 else torch.float32)
        dist.all_reduce(value)  # here


@faulty("dtype-mismatch", 1)
def matching_type_of_a_broadcast(rank: int) -> None:
    dist.barrier()
    dist.broadcast(torch.zeros(8, dtype=torch.float16 if rank == 1 else torch.int16), src=0)  # here


@faulty("size-mismatch", 1)
def matching_length(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(5 if rank == 1 and step == 1 else 4))  # here


@faulty("wrong-group", 1)
def matching_group(rank: int) -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=first)
    dist.all_reduce(torch.ones(4), group=second if rank == 1 else first)  # here
    dist.all_reduce(torch.ones(4), group=second)


@faulty("split-size-mismatch", 0, ranks=2)
def matching_splits(rank: int) -> None:
    out = torch.empty(6)
    given = [2, 4] if rank == 0 else [3, 3]
    dist.all_to_all_single(out, torch.ones(6), [3, 3], given)  # here


@faulty("p2p-tag-mismatch", 0, 1, ranks=2)
def matching_tag(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), src=1, tag=0)  # here
    else:
        dist.send(torch.ones(4), dst=0, tag=1)  # here
    dist.barrier()


@faulty("p2p-size-mismatch", 1, 2)
def matching_message(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(10), dst=2)  # here
    elif rank == 2:
        dist.recv(torch.ones(6), src=1)  # here
    dist.barrier()


@healthy()
def matching_everything(rank: int) -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for step in range(4):
        dist.broadcast(torch.ones(4), src=step % 3)
        dist.reduce(torch.ones(4), dst=step % 3)
        dist.all_reduce(torch.ones(4 + step), op=dist.ReduceOp.MAX if step == 3 else dist.ReduceOp.SUM)
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if step else torch.float32))
        dist.all_reduce(torch.ones(4), group=second if step == 2 else first)
    dist.all_to_all_single(torch.empty(6), torch.ones(6), [2, 2, 2], [2, 2, 2])
    if rank == 0:
        dist.recv(torch.ones(4), src=1, tag=1)
    elif rank == 1:
        dist.send(torch.ones(4), dst=0, tag=1)


# The order of calls.


@faulty("collective-order-mismatch", 1)
def order_of_two_collectives(rank: int) -> None:
    for step in range(3):
        if rank == 1 and step == 1:
            dist.broadcast(torch.ones(4), src=0)  # here
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(4), src=0)


@faulty("collective-order-mismatch", 2)
def order_of_a_reduction_and_a_barrier(rank: int) -> None:
    if rank == 2:
        dist.barrier()  # here
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
        dist.barrier()


@faulty("rank-skipped-collective", 2)
def order_without_one_collective(rank: int) -> None:
    for step in range(4):
        if not (rank == 2 and step == 2):
            dist.all_reduce(torch.ones(4))  # here
        dist.broadcast(torch.ones(2), src=0)


@faulty("rank-exited", 0)
def order_without_the_last_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        raise SystemExit(0)
    dist.all_reduce(torch.ones(4))  # here


@faulty("group-creation-mismatch", 1)
def order_without_a_group(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank != 1:
        dist.new_group([0, 1, 2])  # here
    dist.barrier()


@faulty("group-order-inversion", 1)
def order_of_two_groups(rank: int) -> None:
    rows, columns = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for group in (columns, rows) if rank == 1 else (rows, columns):
        dist.all_reduce(torch.ones(4), group=group)  # here


@healthy()
def order_that_agrees(rank: int) -> None:
    rows, columns = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for step in range(3):
        for group in (columns, rows) if step == 1 else (rows, columns):
            dist.all_reduce(torch.ones(4), group=group)
        dist.broadcast(torch.ones(4), src=0)
        dist.barrier()
    if rank == 0:
        torch.ones(4).sum()


# Messages.


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def messages_that_are_received_first(rank: int) -> None:
    dist.barrier()
    dist.recv(torch.ones(4), src=1 - rank)  # here
    dist.send(torch.ones(4), dst=1 - rank)


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def messages_in_a_ring(rank: int) -> None:
    for step in range(2):
        if step == 0 and rank % 2:
            dist.recv(torch.ones(4), src=(rank - 1) % 3)
            dist.send(torch.ones(4), dst=(rank + 1) % 3)
        elif step == 0:
            dist.send(torch.ones(4), dst=(rank + 1) % 3)
            dist.recv(torch.ones(4), src=(rank - 1) % 3)
        else:
            dist.recv(torch.ones(4), src=(rank + 1) % 3)  # here
            dist.send(torch.ones(4), dst=(rank - 1) % 3)


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def messages_across_a_barrier(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.barrier()  # here
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.ones(4), src=0)  # here
        dist.barrier()


@faulty("p2p-unmatched", 0)
def messages_without_a_sender(rank: int) -> None:
    if rank == 2:
        dist.recv(torch.ones(4), src=0)  # here
    dist.barrier()


@faulty("p2p-unmatched", 1, ranks=2)
def messages_without_a_receiver(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE), dst=1)  # here
    dist.barrier()


@faulty("p2p-unmatched", 1)
def messages_to_another_rank(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(LARGE), dst=0)  # here
    elif rank == 2:
        dist.recv(torch.ones(LARGE), src=1)  # here
    dist.barrier()


@healthy()
def messages_in_order(rank: int) -> None:
    for _ in range(2):
        if rank == 0:
            dist.send(torch.ones(4), dst=1)
            dist.recv(torch.ones(4), src=2)
        else:
            dist.recv(torch.ones(4), src=rank - 1)
            dist.send(torch.ones(4), dst=(rank + 1) % 3)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(LARGE), dst=1, tag=5)
    elif rank == 1:
        dist.recv(torch.ones(LARGE), src=0, tag=5)


# The life of a request.


@faulty("unwaited-async", 1)
def request_without_a_wait(rank: int) -> None:
    for _ in range(3):
        value = torch.zeros(4)
        if rank == 0:
            dist.send(torch.ones(4), dst=1)
        elif rank == 1:
            dist.irecv(value, src=0)  # here
            value.sum()
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2)
def request_of_all_without_a_wait(_: int) -> None:
    for _ in range(3):
        value = torch.ones(4)
        dist.all_reduce(value, async_op=True)  # here
        value.sum()


@faulty("unwaited-async", 2)
def request_of_one_without_a_wait(rank: int) -> None:
    for _ in range(3):
        gathered = torch.empty(12)
        work = dist.all_gather_into_tensor(gathered, torch.ones(4), async_op=True)  # here
        if rank != 2:
            work.wait()
    dist.barrier()


@healthy()
def request_with_its_wait(rank: int) -> None:
    for _ in range(3):
        value = torch.zeros(4)
        if rank < 2:
            work = dist.isend(torch.ones(4), 1) if rank == 0 else dist.irecv(value, 0)
            work.wait()
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
    dist.barrier()


# Local concurrency: a buffer in two hands.


@faulty("unwaited-async", 0)
def concurrent_write_of_what_is_sent(rank: int) -> None:
    for _ in range(3):
        value = torch.ones(1000)
        if rank == 0:
            work = dist.isend(value, dst=1)  # here
            value.fill_(0)
            work.wait()
        elif rank == 1:
            dist.recv(value, src=0)
    dist.barrier()


@faulty("unwaited-async", 1, check="handles")
def concurrent_read_of_what_is_received(rank: int) -> None:
    for _ in range(3):
        value = torch.ones(1000)
        if rank == 0:
            dist.send(value, dst=1)
        elif rank == 1:
            work = dist.irecv(value, src=0)  # here
            value.mean()
            work.wait()
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2, check="handles")
def concurrent_operations_on_one_buffer(_: int) -> None:
    value = torch.ones(1000)
    for _ in range(3):
        first = dist.all_reduce(value, async_op=True)  # here
        second = dist.broadcast(value, src=0, async_op=True)
        first.wait()
        second.wait()


@faulty("unwaited-async", 0, 1, 2)
def concurrent_write_of_what_is_reduced(_: int) -> None:
    for _ in range(3):
        value = torch.ones(1000)
        work = dist.all_reduce(value, async_op=True)  # here
        value.mul_(2)
        work.wait()


@healthy(check="handles")
def concurrent_reads_and_other_buffers(rank: int) -> None:
    for _ in range(3):
        value, other = torch.ones(1000), torch.ones(1000)
        if rank == 0:
            work = dist.isend(value, dst=1)
            value.mean()
            other.fill_(0)
            work.wait()
        elif rank == 1:
            dist.recv(value, src=0)
        works = [dist.all_reduce(part, async_op=True) for part in (value, other)]
        for work in works:
            work.wait()
        value.mul_(2)
    dist.barrier()


# Twins of one fault each.


@healthy()
def twin_of_a_root(_: int) -> None:
    for step in range(4):
        dist.broadcast(torch.ones(4), src=1 if step == 2 else 0)


@healthy()
def twin_of_an_operator(_: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if step == 3 else dist.ReduceOp.SUM)


@healthy()
def twin_of_a_type(_: int) -> None:
    dist.barrier()
    dist.broadcast(torch.zeros(8, dtype=torch.float16), src=0)
    dist.broadcast(torch.zeros(8, dtype=torch.int32), src=0)


@healthy()
def twin_of_a_group(rank: int) -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=first)
    if rank < 2:
        dist.all_reduce(torch.ones(4), group=second)


@healthy(ranks=2)
def twin_of_splits(rank: int) -> None:
    out = torch.empty(5 if rank == 0 else 7)
    dist.all_to_all_single(out, torch.ones(6), [2, 3] if rank == 0 else [4, 3], [2, 4] if rank == 0 else [3, 3])


@healthy(ranks=2)
def twin_of_a_tag(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), src=1, tag=1)
        dist.recv(torch.ones(4), src=1, tag=0)
    else:
        dist.send(torch.ones(4), dst=0, tag=1)
        dist.send(torch.ones(4), dst=0, tag=0)
    dist.barrier()


@healthy()
def twin_of_an_order(rank: int) -> None:
    for step in range(3):
        if step == 1:
            dist.broadcast(torch.ones(4), src=0)
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.full((4,), float(rank)))
            dist.broadcast(torch.ones(4), src=0)


@healthy()
def twin_of_a_skipped_collective(_: int) -> None:
    for step in range(4):
        if step != 2:
            dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(2), src=0)


@healthy()
def twin_of_a_last_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        raise SystemExit(0)


@healthy()
def twin_of_a_new_group(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(torch.ones(4), group=pair)
    dist.barrier()


@healthy(ranks=2)
def twin_of_messages_received_first(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.recv(torch.ones(4), src=1)
        dist.send(torch.ones(4), dst=1)
    else:
        dist.send(torch.ones(4), dst=0)
        dist.recv(torch.ones(4), src=0)


@healthy(ranks=2)
def twin_of_messages_across_a_barrier(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    work = dist.isend(torch.ones(4), dst=1) if rank == 0 else dist.irecv(torch.ones(4), src=0)
    dist.barrier()
    work.wait()


@healthy(ranks=2)
def twin_of_a_missing_receiver(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE), dst=1)
    else:
        dist.recv(torch.ones(LARGE), src=0)
    dist.barrier()


@healthy(check="handles")
def twin_of_concurrent_operations(_: int) -> None:
    value = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(value, async_op=True).wait()
        dist.broadcast(value, src=0, async_op=True).wait()
        value.mul_(2)


@healthy(check="handles")
def twin_of_parts_of_a_buffer(_: int) -> None:
    value = torch.ones(1000)
    for _ in range(3):
        first = dist.all_reduce(value[:500], async_op=True)
        second = dist.broadcast(value[500:], src=0, async_op=True)
        second.wait()
        value[500:].mul_(2)
        first.wait()
