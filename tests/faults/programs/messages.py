"""Point-to-point messages."""

import torch
import torch.distributed as dist

from tests.faults.corpus import faulty, healthy


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def ring_that_receives_first(rank: int) -> None:
    value = torch.ones(4)
    dist.recv(value, src=(rank - 1) % 3)  # here
    dist.send(value, dst=(rank + 1) % 3)


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def both_send_first(rank: int) -> None:
    dist.barrier()
    dist.send(torch.ones(1 << 20), dst=1 - rank)  # here
    dist.recv(torch.ones(1 << 20), src=1 - rank)


@faulty("p2p-tag-mismatch", 0, 1, ranks=2)
def other_tags(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), dst=1, tag=3)  # here
    else:
        dist.recv(torch.ones(4), src=0, tag=4)  # here


@faulty("p2p-unmatched", 0)
def a_message_nobody_sends(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.ones(4), src=0)  # here
    dist.barrier()


@faulty("p2p-size-mismatch", 0, 1, ranks=2)
def a_smaller_buffer(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(8), dst=1)  # here
    else:
        dist.recv(torch.ones(4), src=0)  # here
    dist.barrier()


@faulty("p2p-size-mismatch", 0, 1, ranks=2)
def a_larger_buffer(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.ones(8), src=0)  # here
    dist.barrier()


@healthy()
def ring_of_batched_messages(rank: int) -> None:
    for _ in range(3):
        given, taken = torch.ones(4), torch.zeros(4)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, given, (rank + 1) % 3),
                dist.P2POp(dist.irecv, taken, (rank - 1) % 3),
            ]
        )
        for work in works:
            work.wait()


@healthy()
def from_any_source(rank: int) -> None:
    if rank == 0:
        for _ in range(4):
            dist.recv(torch.zeros(2))
    else:
        for _ in range(2):
            dist.send(torch.ones(2), dst=0)
    dist.barrier()


@healthy()
def objects_between_pairs(rank: int) -> None:
    if rank == 0:
        dist.send_object_list(["a" * 50, 3], dst=1)
    elif rank == 1:
        dist.recv_object_list([None, None], src=0)
    dist.barrier()
