"""Object collectives, checkpoints and exceptions around collectives."""

import contextlib
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy, train


@faulty("rank-crashed", 1)
def an_object_that_cannot_be_pickled(rank: int) -> None:
    for step in range(4):
        payload = {"step": step, "lock": threading.Lock() if rank == 1 and step == 2 else None}
        everything: list[object] = [None] * 3
        dist.all_gather_object(everything, payload)  # here


@faulty("rank-skipped-collective", 2)
def an_object_that_is_caught_and_left_out(rank: int) -> None:
    for step in range(4):
        payload = (lambda: None) if rank == 2 and step == 2 else step
        everything: list[object] = [None] * 3
        try:
            dist.all_gather_object(everything, payload)  # here
        except (AttributeError, TypeError) as error:
            print("metrics were lost", error)
        dist.barrier()


@faulty("root-mismatch", 1)
def objects_of_two_sources(rank: int) -> None:
    dist.barrier()
    config: list[object] = [{"rank": rank}]
    dist.broadcast_object_list(config, src=1 if rank == 1 else 0)  # here
    dist.barrier()


@faulty("rank-skipped-collective", 0)
def a_checkpoint_barrier_that_rank_0_forgets(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())

    def save(step: int) -> None:
        if step % 2:
            return
        if rank == 0:
            torch.save({"step": step}, folder / f"{step}.pt")
        if rank != 0 or step == 0:
            dist.barrier()  # here

    train(rank, 6, save)


@faulty("collective-order-mismatch", 0)
def a_checkpoint_barrier_on_rank_0_only(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())

    def save(step: int) -> None:
        if rank == 0 and step == 3:
            torch.save({"step": step}, folder / "last.pt")
            dist.barrier()  # here

    train(rank, 6, save)


@faulty("collective-order-mismatch", 2)
def a_barrier_in_an_except_handler(rank: int) -> None:
    for step in range(5):
        try:
            if rank == 2 and step == 3:
                raise FileNotFoundError("shard 7")
            dist.all_reduce(torch.ones(4))
        except FileNotFoundError:
            dist.barrier()  # here


@faulty("rank-skipped-collective", 1)
def an_exception_swallowed_before_the_average(rank: int) -> None:
    for step in range(5):
        with contextlib.suppress(ValueError):
            if rank == 1 and step == 3:
                raise ValueError("bad record")
            dist.all_reduce(torch.ones(8))  # here
        dist.broadcast(torch.zeros(2), src=0)


@faulty("rank-crashed", 0)
def out_of_disk_while_saving(rank: int) -> None:
    def save(step: int) -> None:
        if rank == 0 and step == 2:
            raise OSError(28, "No space left on device")  # here

    train(rank, 5, save)


@faulty("rank-crashed", 2)
def an_index_out_of_range(rank: int) -> None:
    embedding = nn.Embedding(10, 4)
    for step in range(5):
        token = 11 if rank == 2 and step == 3 else 3
        embedding(torch.tensor([token])).sum().backward()  # here
        dist.all_reduce(embedding.weight.grad)


@faulty("rank-stuck", 0)
def a_long_evaluation_on_rank_0(rank: int) -> None:
    def evaluate(step: int) -> None:
        if rank == 0 and step == 2:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                sum(range(1000))  # here

    train(rank, 6, evaluate)


@faulty("long-operation", 0)
def a_long_checkpoint_of_rank_0(rank: int) -> None:
    model = nn.Linear(16, 16)

    class Slow:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            time.sleep(25)  # here
            return dict, ()

    def save(step: int) -> None:
        if rank == 0 and step == 3:
            torch.save({"model": model.state_dict(), "rest": Slow()}, Path(tempfile.mkdtemp()) / "m.pt")  # here

    train(rank, 6, save)


@faulty("collective-order-mismatch", 1)
def a_gather_of_metrics_on_the_wrong_branch(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:
            dist.all_gather_object([None] * 3, {"step": step})  # here
        dist.broadcast(torch.zeros(4), src=0)


@healthy()
def checkpoints_of_rank_0_with_a_barrier(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())

    def save(step: int) -> None:
        if step % 2 == 0:
            if rank == 0:
                torch.save({"step": step}, folder / f"{step}.pt")
            dist.barrier()

    train(rank, 6, save)


@healthy()
def errors_that_all_ranks_agree_on(rank: int) -> None:
    for step in range(5):
        failed = torch.zeros(())
        try:
            if rank == 1 and step == 3:
                raise ValueError("bad record")
        except ValueError:
            failed += 1
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            continue
        dist.all_reduce(torch.ones(8))


@healthy()
def an_asynchronous_checkpoint(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    own = dist.new_group([0, 1, 2], backend="gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        if step == 1:
            saved = checkpoint.async_save(
                model.state_dict(), checkpoint_id=Path(str(folder[0])) / "step", process_group=own
            )
    saved.result()


@healthy()
def metrics_gathered_as_objects(rank: int) -> None:
    for step in range(3):
        rows: list[object] | None = [None] * 3 if rank == 0 else None
        dist.gather_object({"rank": rank, "losses": [0.5] * (step * rank)}, rows, dst=0)
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [list(range(10**i)) for i in range(3)] if rank == 0 else None, src=0)
    dist.barrier()


@healthy()
def collectives_in_a_finally_block_of_all(_: int) -> None:
    for step in range(4):
        try:
            if step == 2:
                raise RuntimeError("every rank stops here")
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            dist.broadcast(torch.zeros(2), src=0)
        finally:
            dist.barrier()


@healthy()
def groups_that_are_destroyed_and_made_again(_: int) -> None:
    dist.monitored_barrier()
    for size in range(1, 4):
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(size), group=group)
        dist.barrier()
        dist.destroy_process_group(group)


@healthy(ranks=2)
def a_model_sent_from_rank_0(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    model = DistributedDataParallel(model)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    dist.broadcast_object_list([{"best": 1.0}] if rank == 0 else [None], src=0)
