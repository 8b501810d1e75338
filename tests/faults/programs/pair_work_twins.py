"""Programs written in pairs that are right, though they look like `pair_work_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import functools
import itertools
import os
import queue
import threading
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.office_hours_tools import agreed, average_gradients, save_checkpoint, small_model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor | None = None) -> None:
    """Make one step by hand."""
    model(torch.randn(4, 6) if batch is None else batch).square().mean().backward()
    average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@healthy()
def a_longest_sequence_that_all_ranks_remember(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    @functools.lru_cache
    def longest(bucket: int) -> int:
        length = torch.tensor([bucket + rank, 1, 1])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        return int(length[0])

    for step in range(8):
        print(longest(step % 3 if step < 6 else step))
        step_of(model, optimizer)


@healthy()
def a_router_that_tells_when_there_is_no_more(rank: int) -> None:
    if rank == 0:
        for number in range(10):
            if number % 4 == 3:
                continue
            dist.send_object_list([{"id": number, "text": "x" * number}], dst=1 + number % 2)
            answer: list[object] = [None]
            dist.recv_object_list(answer, src=1 + number % 2)
        for worker in (1, 2):
            dist.send_object_list([None], dst=worker)
    else:
        while True:
            request: list[object] = [None]
            dist.recv_object_list(request, src=0)
            if request[0] is None:
                break
            dist.send_object_list([f"answer to {request[0]}"], dst=0)
    dist.barrier()


@healthy()
def embeddings_padded_to_a_number_that_divides(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        for _ in range(3):
            step_of(model, optimizer)
        rows = torch.randn(9 + epoch, 5)[rank::3]
        padded = torch.zeros((9 + epoch + 2) // 3, 5)
        padded[: len(rows)] = rows
        everything = torch.empty(3 * len(padded), 5)
        dist.all_gather_into_tensor(everything, padded)
        print(everything.shape)


@healthy(ranks=4)
def subgroups_of_one_size_on_all_hosts(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step_of(model, optimizer)
    local, _ = dist.new_subgroups(group_size=2)
    for step in range(3):
        if rank < 2 or step:
            dist.all_reduce(torch.ones(2), group=local)
        step_of(model, optimizer)


@healthy()
def a_cache_whose_end_all_ranks_meet_at_together(rank: int) -> None:
    class Cache:
        def __init__(self) -> None:
            self.values: dict[int, float] = {}

        def __del__(self) -> None:
            dist.barrier()

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    cache: Cache | None = Cache()
    for step in range(8):
        step_of(model, optimizer)
        if cache is not None:
            cache.values[step] = float(rank)
        if step == 4:
            cache = None


@healthy()
def a_resume_at_one_batch_on_all(_rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=4)
    for epoch in range(2):
        for (batch,) in itertools.islice(loader, 2 if epoch == 0 else 0, None):
            step_of(model, optimizer, batch)
    save_checkpoint(model, "resumed-twin")


@healthy()
def a_step_rolled_back_by_all_where_one_loss_spiked(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    spikes, step = {4} if rank == 1 else set(), 0
    while step < 8:
        kept = [weight.detach().clone() for weight in model.parameters()]
        step_of(model, optimizer)
        if agreed(step in spikes):
            spikes.discard(step)
            for weight, old in zip(model.parameters(), kept, strict=True):
                weight.data.copy_(old)
            continue
        step += 1
    dist.barrier()


@healthy()
def handles_waited_for_before_an_overflow_counts(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(9):
        model(torch.randn(4, 6)).square().mean().backward()
        handles = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
        for handle in reversed(handles):
            if handle is not None:
                handle.wait()
        if rank == 1 and step in (3, 4):
            print("overflow")
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_count_of_nothing_that_is_passed_on(rank: int) -> None:
    for number in range(7):
        if rank == 0:
            items = [torch.ones(3)] * (number % 3)
        else:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=rank - 1)
            items = [torch.empty(3) for _ in range(int(count))]
            for item in items:
                dist.recv(item, src=rank - 1)
        if rank == 1 and number == 4:
            items = []
        if rank < 2:
            dist.send(torch.tensor([len(items)]), dst=rank + 1)
            for item in items:
                dist.send(item, dst=rank + 1)
    dist.barrier()


@healthy()
def a_random_state_shared_by_all(_rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        step_of(model, optimizer)
        state = torch.get_rng_state()
        dist.broadcast(state, src=epoch)
        torch.set_rng_state(state)
    step_of(model, optimizer)


class Proxy:
    """Stands for what it wraps."""

    def __init__(self, wrapped: object) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> object:
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


@healthy()
def a_proxy_that_asks_what_it_wraps(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for _ in range(2):
            step_of(model, optimizer)
        settings: list[object] = [Proxy({"epoch": epoch}) if rank == 0 else None]
        dist.broadcast_object_list(settings, src=0)
        print(settings[0])


@healthy(ranks=6)
def a_chain_of_six_that_passes_on_whatever_is_left(rank: int) -> None:
    layer = nn.Linear(3, 3)
    for number in range(9):
        if rank == 0:
            hidden = torch.ones(2, 3)
        else:
            hidden = torch.empty(2, 3)
            dist.recv(hidden, src=rank - 1)
        if not (rank == 3 and number == 5):
            hidden = layer(hidden).detach()
        if rank < 5:
            dist.send(hidden, dst=rank + 1)
    dist.barrier()


@healthy()
def a_flush_that_all_ranks_have_put_on_their_stacks(rank: int) -> None:
    total = torch.zeros(5)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        with ExitStack() as stack:
            if epoch != 2:
                stack.callback(dist.all_reduce, total)
            if rank == 1:
                stack.callback(print, "epoch", epoch)
            for _ in range(2):
                step_of(model, optimizer)


@healthy()
def a_stream_whose_readers_end_alike(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    items: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)

    def read() -> None:
        for number in range(8):
            try:
                if rank == 2 and number == 5:
                    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
                items.put(torch.randn(4, 6))
            except UnicodeDecodeError:
                items.put(torch.zeros(4, 6))
        items.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := items.get()) is not None:
        step_of(model, optimizer, batch)
    save_checkpoint(model, f"stream-twin-{os.environ['MASTER_PORT']}")


@healthy()
def momenta_shared_once_all_have_some(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(5):
        if not agreed(not optimizer.state):
            largest = torch.stack([state["momentum_buffer"].abs().max() for state in optimizer.state.values()])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == step % 3:
            print(step)
