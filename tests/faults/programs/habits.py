"""What scripts do from habit: flags reduced in handlers, hooks, lists of messages, checkpoints beside steps."""

import contextlib
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


@faulty("p2p-unmatched", 0)
def a_list_of_messages_without_the_receive(rank: int) -> None:
    before, after = (rank - 1) % 3, (rank + 1) % 3
    for step in range(4):
        rows = torch.zeros(1 << 18)
        operations = [dist.P2POp(dist.isend, torch.ones(1 << 18), after)]
        if not (rank == 0 and step == 2):
            operations.append(dist.P2POp(dist.irecv, rows, before))
        for work in dist.batch_isend_irecv(operations):  # here
            work.wait()
        dist.barrier()


@faulty("rank-skipped-collective", 2)
def metrics_gathered_by_those_that_have_some(rank: int) -> None:
    for step in range(5):
        metrics = {} if rank == 2 and step == 3 else {"loss": 1.0 / (step + 1)}
        if metrics:
            dist.all_gather_object([None] * 3, metrics)  # here
        dist.all_reduce(torch.ones(16))


@faulty("rank-skipped-collective", 1)
def a_step_in_parts_that_one_rank_leaves_out(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    for step in range(5):
        loss = model(torch.ones(2, 8)).sum()
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step == 3:
            continue
        optimizer.step()  # here


@faulty("step-mismatch", 1)
def a_flag_reduced_again_because_the_work_failed_after_it(rank: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        failed = torch.zeros(1)
        try:
            dist.all_reduce(failed)
            if rank == 1 and step == 3:
                raise OSError("cannot write the log")
        except OSError:
            dist.all_reduce(failed.fill_(1))  # here
        optimizer.step()


@faulty("dtype-mismatch", 1)
def gradients_halved_in_size_on_one_rank(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(nn.Linear(64, 64))
    if rank == 1:
        model.register_comm_hook(None, fp16_compress_hook)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()  # here


@healthy()
def lists_of_messages_that_are_shorter_at_the_edges(rank: int) -> None:
    for step in range(4):
        rows = {other: torch.zeros(32) for other in (rank - 1, rank + 1) if 0 <= other < 3}
        operations = [dist.P2POp(dist.irecv, row, other) for other, row in rows.items()]
        operations += [dist.P2POp(dist.isend, torch.full((32,), float(step)), other) for other in rows]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


@healthy()
def a_flag_reduced_in_the_handler_as_outside_of_it(rank: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        failed = torch.zeros(1)
        try:
            if rank == 1 and step % 3 == 2:
                raise OSError("bad shard")
            dist.all_reduce(failed)
        except OSError:
            dist.all_reduce(failed.fill_(1))
        if not failed.item():
            optimizer.step()


@healthy()
def accumulation_over_other_numbers_of_microbatches(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        last = (rank + step) % 3
        for microbatch in range(last + 1):
            with contextlib.nullcontext() if microbatch == last else model.no_sync():
                model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_checkpoint_that_is_written_while_steps_go_on(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    own = dist.new_group([0, 1, 2], backend="gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = None
    for step in range(9):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step in (2, 6):
            if saved is not None:
                saved.result()
            target = Path(str(folder[0])) / f"step-{step}"
            saved = checkpoint.async_save(model.state_dict(), checkpoint_id=target, process_group=own)
    assert saved is not None
    saved.result()


@healthy()
def threads_with_messages_and_reductions_on_groups_of_their_own(rank: int) -> None:
    ring, sums = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])

    def pass_on() -> None:
        for step in range(6):
            rows = torch.zeros(8)
            waiting = dist.irecv(rows, (rank - 1) % 3, group=ring)
            dist.send(torch.full((8,), float(step)), (rank + 1) % 3, group=ring)
            waiting.wait()

    def add_up() -> None:
        for _ in range(6):
            dist.all_reduce(torch.ones(8), group=sums)

    threads = [threading.Thread(target=target) for target in (pass_on, add_up)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        dist.all_reduce(torch.ones(64))
    for thread in threads:
        thread.join()
    dist.barrier()


@healthy()
def a_model_whose_graph_breaks_on_one_rank(rank: int) -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            rows = self.first(rows)
            if rank == 0:
                torch._dynamo.graph_break()
            return self.second(rows)

    model = DistributedDataParallel(Noting())
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, 8)).sum().backward()
