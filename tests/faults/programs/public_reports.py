"""Faults that public reports tell of, in programs of this project's own, and their sound twins.

Written after the programs of the reports themselves had been judged, which are not kept.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy


@faulty("unwaited-async", 0, ranks=2)
def a_result_sent_by_a_worker_that_ends_at_once(rank: int) -> None:
    result = torch.full((1 << 22,), 3.0)
    if rank == 0:
        dist.isend(result, dst=1)  # here
        return
    time.sleep(2)
    dist.recv(result, src=0)


@healthy(ranks=2)
def a_result_sent_by_a_worker_that_waits_for_it(rank: int) -> None:
    result = torch.full((1 << 22,), 3.0)
    if rank == 0:
        dist.isend(result, dst=1).wait()
        return
    time.sleep(2)
    dist.recv(result, src=0)


@faulty("long-operation", 0)
def a_spectrum_that_rank_0_computes_for_all(rank: int) -> None:
    layer, matrix = nn.Linear(160, 160), torch.randn(160, 160)
    for step in range(6):
        layer(torch.randn(3, 160)).sum().backward()
        dist.all_reduce(layer.weight.grad)
        end = time.monotonic() + 14.0 * (step == 3 and rank == 0)
        while time.monotonic() < end:
            torch.linalg.eigvalsh(layer.weight.T @ layer.weight + matrix @ matrix.T)  # here


@healthy()
def a_spectrum_of_which_all_compute_a_part(rank: int) -> None:
    layer, matrix = nn.Linear(6, 6), torch.randn(160, 160)
    for step in range(6):
        layer(torch.randn(3, 6)).sum().backward()
        dist.all_reduce(layer.weight.grad)
        if step % 3 == rank:
            torch.linalg.eigvalsh(matrix @ matrix.T)
