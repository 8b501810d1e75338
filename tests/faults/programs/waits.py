"""Ranks that are late, slow, or wait for what is no collective."""

import datetime
import fcntl
import os
import socket
import stat
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.faults.corpus import faulty, healthy, train


@faulty("slow-rank", 1)
def a_rank_on_a_busy_host(rank: int) -> None:
    def share_the_core(_: int) -> None:
        if rank == 1:
            time.sleep(0.04)

    train(rank, 30, share_the_core)


class Images(Dataset[torch.Tensor]):
    """Rows that take a while to decode on one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((8,), float(i))


@faulty("slow-rank", 2)
def a_loader_on_a_slow_disk(rank: int) -> None:
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Images(0.01 if rank == 2 else 0.0), batch_size=4):
        optimizer.zero_grad()
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()


@faulty("long-operation", 1)
def many_shards_written_by_one_rank(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())

    def save(step: int) -> None:
        if rank == 1 and step == 2:
            until = time.monotonic() + 14
            i = 0
            while time.monotonic() < until:
                torch.save({"part": torch.ones(1000)}, folder / f"{i % 10}.pt")  # here
                i += 1

    train(rank, 5, save)


@faulty("rank-stuck", 0)
def a_key_that_nobody_sets(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        store.get("tokenizer/ready")  # here
    dist.barrier()


@faulty("rank-stuck", 1)
def a_file_lock_held_across_a_collective(rank: int) -> None:
    path: list[object] = [str(Path(tempfile.mkdtemp()) / "cache.lock") if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    with Path(str(path[0])).open("w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if rank == 1:
            fcntl.flock(file, fcntl.LOCK_EX)  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 2)
def a_server_that_waits_for_a_client(rank: int) -> None:
    def serve(step: int) -> None:
        if rank == 2 and step == 2:
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.accept()  # here

    train(rank, 5, serve)


@faulty("rank-stuck", 1)
def a_rank_later_than_the_timeout(rank: int) -> None:
    hasty = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=2))
    for step in range(4):
        if rank == 1 and step == 2:
            time.sleep(60)
        dist.all_reduce(torch.ones(4), group=hasty)  # here


@faulty("rank-stuck", 2)
def a_monitored_barrier_that_one_misses(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        time.sleep(60)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))  # here


def cut_off() -> None:
    """Let every connection to peers fall silent, as a switch does that drops all packets."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            kept = socket.socket(fileno=os.dup(number))
            if kept.family == socket.AF_INET and kept.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                silent, other = socket.socketpair()
                os.dup2(silent.fileno(), number)
                other.detach()
            kept.detach()
        except OSError:
            continue


@faulty("backend-stall", ranks=2)
def a_network_that_falls_silent(_: int) -> None:
    for step in range(4):
        if step == 2:
            dist.barrier()
            cut_off()
        dist.all_reduce(torch.ones(4))  # here


@faulty("backend-stall")
def a_switch_that_drops_what_a_checkpoint_gathers(rank: int) -> None:
    train(rank, 3)
    dist.barrier()
    cut_off()
    dist.all_gather([torch.zeros(100) for _ in range(3)], torch.ones(100))  # here


@healthy()
def turns_at_being_late(rank: int) -> None:
    def rest(step: int) -> None:
        if step % 3 == rank:
            time.sleep(0.02)

    train(rank, 18, rest)


@healthy()
def a_file_lock_taken_by_turns(rank: int) -> None:
    path: list[object] = [str(Path(tempfile.mkdtemp()) / "cache.lock") if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    with Path(str(path[0])).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_UN)
    dist.barrier()


@healthy()
def keys_set_and_awaited(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        time.sleep(0.2)
        store.set("tokenizer/ready", "1")
    store.get("tokenizer/ready")
    dist.barrier()
