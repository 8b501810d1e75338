"""One rank of a trial: its groups, and operations that are written down before they are issued."""

import datetime
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.stress.journal import Journal

Plan = Mapping[str, Any]
TIMEOUT = datetime.timedelta(seconds=300)
OPERATIONS = ("allreduce_", "broadcast_", "barrier", "_allgather_base_", "allgather_", "reduce_")
OF_PAIRS = ("send", "recv_")


class Rank:
    """What the program of a trial works with."""

    def __init__(self, *, rank: int, plan: Plan, folder: Path) -> None:
        """Join the default group, and as many others as the plan has."""
        self.rank = rank
        self.size: int = plan["ranks"]
        self.plan = plan
        self.folder = folder
        self.journal = Journal(journal_path(folder, rank))
        self.chance = random.Random(plan["seed"])
        """Draws the same on every rank: ranks that follow it issue the same operations."""
        store = dist.HashStore() if self.size == 1 else dist.FileStore(str(folder / "store"), self.size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=TIMEOUT)
        self.groups = [dist.group.WORLD, *(dist.new_group(timeout=TIMEOUT) for _ in range(plan.get("groups", 1) - 1))]
        self.total = torch.zeros(1)

    def issue(self, operation: str, group: Any, *, asynchronous: bool = False) -> Any:
        """Write an operation down and issue it; return its handle if it is asynchronous."""
        value = torch.ones(8)
        call = self._calls(value, group, asynchronous)[operation]
        counter = self.journal.counter(group.group_name, operation)
        counter.issue()
        handle = call()
        counter.see_return()
        return handle

    def _calls(self, value: torch.Tensor, group: Any, asynchronous: bool) -> dict[str, Callable[[], Any]]:
        several = torch.empty(self.size * 8)
        peer = (self.rank + 1) % self.size
        return {
            "allreduce_": lambda: dist.all_reduce(value, group=group, async_op=asynchronous),
            "broadcast_": lambda: dist.broadcast(value, src=0, group=group, async_op=asynchronous),
            "barrier": lambda: dist.barrier(group=group, async_op=asynchronous),
            "_allgather_base_": lambda: dist.all_gather_into_tensor(several, value, group, asynchronous),
            "allgather_": lambda: dist.all_gather(list(several.chunk(self.size)), value, group, asynchronous),
            "reduce_": lambda: dist.reduce(value, dst=0, group=group, async_op=asynchronous),
            "send": lambda: dist.isend(value, peer, group=group),
            "recv_": lambda: dist.irecv(value, peer, group=group),
        }

    def exchange(self, group: Any) -> None:
        """Send and receive between two ranks."""
        handles = [self.issue(operation, group) for operation in OF_PAIRS[:: 1 if self.rank == 0 else -1]]
        for handle in handles:
            handle.wait()

    def issue_some(self, count: int, group: Any, chance: random.Random) -> list[Any]:
        """Issue operations that `chance` draws, some of them asynchronous; return handles not waited for yet."""
        open_handles: list[Any] = []
        for _ in range(count):
            operation = chance.choice(OPERATIONS)
            asynchronous = chance.random() < 0.6
            waits = chance.random() < 0.3
            exchanges = chance.random() < 0.1
            handle = self.issue(operation, group, asynchronous=asynchronous)
            if handle is not None:
                open_handles.append(handle)
            if waits:
                finish(open_handles)
            if exchanges and self.size == 2:
                self.exchange(group)
        return open_handles

    def sum_up(self) -> None:
        """Print a value that all ranks computed together, which must not depend on who watches."""
        value = torch.full((4,), 0.1 + self.rank)
        counter = self.journal.counter(dist.group.WORLD.group_name, "allreduce_")
        counter.issue()
        dist.all_reduce(value)
        counter.see_return()
        print(f"computed {value[0].item():.17f}", flush=True)


def finish(handles: list[Any]) -> None:
    """Wait for all of them."""
    while handles:
        handles.pop(0).wait()


def journal_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's journal."""
    return folder / f"journal-{rank}"
