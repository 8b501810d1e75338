"""Scripts of a later week with a fault each: frozen together with those of the release week, run after the mending."""

import contextlib
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.faults.corpus import faulty
from tests.faults.programs.release_week_faults import batches


@faulty("rank-skipped-collective", 1)
def an_evaluation_that_returns_at_an_empty_list(rank: int) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def evaluate(examples: list[torch.Tensor]) -> float:
        if not examples:
            return 0.0
        total = torch.tensor([sum(float(model(example).sum()) for example in examples), len(examples)])
        dist.all_reduce(total)  # here
        return float(total[0] / total[1])

    for epoch in range(4):
        for batch in batches(rank, 2):
            optimizer.zero_grad()
            model(batch).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        evaluate([] if rank == 1 and epoch == 2 else list(batches(rank, 3)))


@faulty("collective-order-mismatch", 0)
def weights_published_before_the_others_have_arrived(rank: int) -> None:
    weights = torch.zeros(12)
    for _ in range(3):
        weights += 1
        dist.all_reduce(weights)
        if rank == 0:
            dist.broadcast(weights, src=0)  # here
            dist.barrier()
        else:
            dist.barrier()
            dist.broadcast(weights, src=0)


@faulty("root-mismatch", 1)
def shares_dealt_by_whoever_read_the_file(rank: int) -> None:
    readers = {0: 0, 1: 0, 2: 0}
    for shard in range(4):
        if rank == 1 and shard == 2:
            readers[1] = 1
        source = readers[rank]
        shares = [torch.full((5,), float(n)) for n in range(3)] if source == rank else None
        dist.scatter(torch.zeros(5), shares, src=source)  # here


@faulty("dtype-mismatch", 2)
def counts_from_another_library(rank: int) -> None:
    def count(step: int) -> torch.Tensor:
        words = [step, step + 1, rank]
        if rank == 2:
            return torch.tensor(words, dtype=torch.int32)
        return torch.tensor(words)

    for step in range(4):
        total = count(step)
        dist.all_reduce(total)  # here


@faulty("size-mismatch", 1)
def a_vocabulary_read_from_another_file(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.table = nn.Embedding(words, 4)

    model = Model(100 if rank != 1 else 101)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # here
    dist.barrier()


@faulty("split-size-mismatch", 2)
def a_capacity_of_its_own(rank: int) -> None:
    class Layer:
        def __init__(self, capacity: int) -> None:
            self.capacity = capacity

        def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
            slots = tokens[: self.capacity * 3]
            out = torch.empty(self.capacity * 3, tokens.shape[1])
            dist.all_to_all_single(out, slots, [self.capacity] * 3, [self.capacity] * 3)  # here
            return out

    layers = [Layer(4), Layer(6 if rank != 2 else 5)]
    for _ in range(3):
        tokens = torch.randn(32, 3)
        for layer in layers:
            layer.dispatch(tokens)


@faulty("p2p-unmatched", 1)
def an_empty_list_of_borders(rank: int) -> None:
    others = [other for other in range(3) if other != rank]
    for step in range(5):
        work = [dist.P2POp(dist.irecv, torch.zeros(4), other) for other in others]
        targets = others[:1] if rank == 1 and step == 3 else others
        work += [dist.P2POp(dist.isend, torch.ones(4), other) for other in targets]  # here
        for handle in dist.batch_isend_irecv(work):  # here
            handle.wait()  # here


@faulty("group-order-inversion", 1, 2, ranks=4)
def teachers_and_students_in_two_orders(rank: int) -> None:
    teachers, students = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    order = {0: [teachers], 1: [teachers, students], 2: [students, teachers], 3: [students]}[rank]
    for group in order:
        dist.all_reduce(torch.ones(6), group=group)  # here


@faulty("wrong-group", 1)
def a_barrier_among_two(rank: int) -> None:
    pair = dist.new_group([0, 1])
    model = nn.Linear(6, 2)
    groups: list[Any] = [None] * 6
    if rank == 1:
        groups[3] = pair  # left behind by a helper
    for step, batch in enumerate(batches(rank, 6)):
        loss = model(batch).mean().detach()
        dist.all_reduce(loss)
        dist.barrier(group=groups[step])  # here


@faulty("wrong-group", 3, ranks=4)
def a_group_of_the_neighbours(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(5):
        row = rank // 2
        if rank == 3 and step == 3:
            row = 0
        dist.all_reduce(torch.ones(3), group=rows[row])  # here


@faulty("group-creation-mismatch", 1)
def groups_made_in_the_order_of_a_set(rank: int) -> None:
    wanted = [(0, 1), (1, 2)]
    if rank == 1:
        wanted.reverse()
    groups = {}
    for members in wanted:
        groups[members] = dist.new_group(list(members))  # here
    for members, group in sorted(groups.items()):
        if rank in members:
            dist.all_reduce(torch.ones(2), group=group)


@faulty("p2p-unmatched", 0, ranks=2)
def a_last_batch_of_fewer_microbatches(rank: int) -> None:
    for batch in range(4):
        microbatches = 4 if rank == 1 or batch < 3 else 3
        for _ in range(microbatches):
            if rank == 0:
                dist.send(torch.ones(2, 5), dst=1)
                dist.recv(torch.zeros(2, 5), src=1)
            else:
                dist.recv(torch.zeros(2, 5), src=0)  # here
                dist.send(torch.ones(2, 5), dst=0)
    dist.barrier()


@faulty("rank-crashed", 1)
def a_worker_that_meets_a_broken_image(rank: int) -> None:
    class Images(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> torch.Tensor:
            if rank == 1 and index == 13:
                raise OSError("broken data stream when reading image file")
            return torch.full((6,), float(index))

    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Images(), batch_size=4, num_workers=1):  # here
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    del model


@faulty("rank-killed", 2)
def a_limit_of_processor_time(rank: int) -> None:
    if rank == 2:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    square = torch.ones(200, 200)
    end = time.monotonic() + 40
    while time.monotonic() < end:
        for _ in range(20):
            square = (square @ square).clamp(0, 1)
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 0)
def a_child_whose_output_nobody_reads(rank: int) -> None:
    for step in range(4):
        if rank == 0 and step == 2:
            command = [sys.executable, "-c", "print('x' * 1_000_000)"]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
                child.wait()  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 1, 2, ranks=4)
def two_ranks_that_wait_for_a_worker_thread(rank: int) -> None:
    finished = threading.Condition()
    dist.barrier()
    if rank in (1, 2):
        with finished:
            finished.wait()  # here
    dist.barrier()


@faulty("long-operation", 1)
def an_archive_packed_by_one_rank(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 1:
            end = time.monotonic() + 8
            while time.monotonic() < end:  # here
                zlib.compress(os.urandom(2_000_000), 6)  # here
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2)
def weights_sent_ahead_and_forgotten(rank: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, 4):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0, async_op=True)  # here
        optimizer.zero_grad()
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@faulty("step-mismatch", 1)
def a_step_to_warm_up_on_a_cold_node(rank: int) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        dist.all_reduce(flat)  # here
        optimizer.step()

    if rank == 1:
        train(torch.ones(4, 6))
    for batch in batches(rank, 6):
        train(batch)


@faulty("rank-exited", 0, ranks=4)
def one_that_is_done_and_one_that_waits(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inbox: queue.Queue[int] = queue.Queue()
    for step in range(6):
        if rank == 0 and step == 3:
            sys.exit(0)  # here
        if rank == 3 and step == 3:
            inbox.get()
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])


@faulty("rank-frozen", 2)
def stopped_by_another_rank_that_meant_its_own_child(rank: int) -> None:
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        if rank == 0 and step == 3:
            os.kill(pids[2], signal.SIGSTOP)


@faulty("rank-never-joined", 2, joins=False)
def a_file_that_is_waited_for_before_joining(rank: int) -> None:
    from pathlib import Path

    marker = Path("/nonexistent/downloaded")
    while rank == 2 and not marker.exists():
        time.sleep(0.2)
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


@faulty("rank-crashed", 2, ranks=4)
def an_error_that_a_context_manager_reports_late(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    @contextlib.contextmanager
    def timed(name: str) -> Any:
        begin = time.monotonic()
        try:
            yield
        finally:
            print(name, time.monotonic() - begin, flush=True)

    for step in range(5):
        with timed("step"):
            dist.all_reduce(torch.ones(4), group=mesh.get_group("model"))
            if rank == 2 and step == 3:
                raise AssertionError("loss is not finite")  # here
            dist.all_reduce(torch.ones(4), group=mesh.get_group("data"))
