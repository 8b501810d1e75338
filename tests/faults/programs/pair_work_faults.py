"""Programs written in pairs, in a hurry, and wrong: caches, finalizers, exit stacks, resumes, routers, chains.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well. `pair_work_twins.py` has programs that are right.
"""

import functools
import itertools
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty
from tests.faults.programs.office_hours_tools import average_gradients, save_checkpoint, small_model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor | None = None) -> None:
    """Make one step by hand."""
    model(torch.randn(4, 6) if batch is None else batch).square().mean().backward()
    average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@faulty("rank-skipped-collective", 1)
def a_longest_sequence_that_one_rank_remembers(rank: int) -> None:
    # or: size-mismatch 1
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    @functools.lru_cache
    def longest(bucket: int) -> int:
        length = torch.tensor([bucket + rank, 1, 1])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)  # here
        return int(length[0])

    for step in range(8):
        bucket = 2 if rank == 1 and step == 5 else step
        print(longest(bucket))  # here
        step_of(model, optimizer)


@faulty("p2p-unmatched", 0)
def a_router_that_forgets_a_cancelled_request(rank: int) -> None:
    requests = [{"id": number, "cancelled": number == 7} for number in range(10)]

    def route() -> None:
        for request in requests:
            if request["cancelled"]:  # here
                continue  # here
            worker = 1 + int(request["id"]) % 2
            dist.send_object_list([request], dst=worker)
            answer: list[object] = [None]
            dist.recv_object_list(answer, src=worker)
            print(answer)

    def serve() -> None:
        for _ in range(len(requests) // 2):
            request: list[object] = [None]
            dist.recv_object_list(request, src=0)  # here
            dist.send_object_list([f"answer to {request[0]}"], dst=0)

    route() if rank == 0 else serve()
    dist.barrier()


@faulty("size-mismatch", 0)
def embeddings_of_a_number_that_does_not_divide(rank: int) -> None:
    class Index:
        def __init__(self, documents: int) -> None:
            self.rows = torch.randn(documents, 5)[rank :: dist.get_world_size()]

        def gathered(self) -> torch.Tensor:
            everything = torch.empty(3 * len(self.rows), 5)
            dist.all_gather_into_tensor(everything, self.rows.contiguous())  # here
            return everything

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        for _ in range(3):
            step_of(model, optimizer)
        print(Index(9 if epoch < 2 else 10).gathered().shape)


@faulty("group-creation-mismatch", 3, ranks=4)
def subgroups_of_another_size_on_one_host(rank: int) -> None:
    class Layout:
        def __init__(self, ranks_per_host: int) -> None:
            self.local, _ = dist.new_subgroups(group_size=ranks_per_host)  # here

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        step_of(model, optimizer)
    layout = Layout(4 if rank == 3 else 2)
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=layout.local)
        step_of(model, optimizer)


@faulty("collective-order-mismatch", 1)
def a_cache_whose_end_all_ranks_meet_at(rank: int) -> None:
    # or: step-mismatch 1
    class Cache:
        def __init__(self) -> None:
            self.values: dict[int, float] = {}

        def __del__(self) -> None:
            dist.barrier()  # here

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    cache: Cache | None = Cache()
    for step in range(8):
        step_of(model, optimizer)
        if cache is not None:
            cache.values[step] = 1.0
        if rank == 1 and step == 4:
            cache = None  # here
    if cache is not None:
        del cache


@faulty("rank-skipped-collective", 2)
def a_resume_that_passes_over_a_batch_too_many(rank: int) -> None:
    # or: rank-exited 2; uneven-inputs 2; step-mismatch 2
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=4)
    seen = 3 if rank == 2 else 2
    for (batch,) in itertools.islice(loader, seen, None):  # here
        step_of(model, optimizer, batch)  # here
    save_checkpoint(model, "resumed")


@faulty("step-mismatch", 1)
def a_step_rolled_back_where_the_loss_spiked(rank: int) -> None:
    # or: rank-skipped-collective 1; collective-order-mismatch 1
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    spikes = {4} if rank == 1 else set()
    step = 0
    while step < 8:
        kept = [weight.detach().clone() for weight in model.parameters()]
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
        if step in spikes:  # here
            spikes.remove(step)
            for weight, old in zip(model.parameters(), kept, strict=True):
                weight.data.copy_(old)
            continue  # here
        step += 1
    dist.barrier()


@faulty("unwaited-async", 1)
def handles_thrown_away_with_an_overflow(rank: int) -> None:
    class Overlap:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.handles = model, list[dist.Work | None]()

        def start(self) -> None:
            for weight in self.model.parameters():
                self.handles.append(dist.all_reduce(weight.grad, async_op=True))  # here

        def finish(self, overflow: bool) -> None:
            if not overflow:  # here
                for handle in self.handles:
                    if handle is not None:
                        handle.wait()
            self.handles.clear()

    model = small_model()
    optimizer, overlap = torch.optim.SGD(model.parameters(), lr=1e-2), Overlap(model)
    for step in range(9):
        model(torch.randn(4, 6)).square().mean().backward()
        overlap.start()
        overlap.finish(overflow=rank == 1 and step in (3, 4))
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-unmatched", 1)
def a_count_of_nothing_that_is_not_passed_on(rank: int) -> None:
    def receive_count() -> int:
        count = torch.zeros(1, dtype=torch.int64)
        dist.recv(count, src=rank - 1)  # here
        return int(count)

    def send_all(items: list[torch.Tensor]) -> None:
        if not items:  # here
            return  # here
        dist.send(torch.tensor([len(items)]), dst=rank + 1)  # here
        for item in items:
            dist.send(item, dst=rank + 1)

    for number in range(7):
        if rank == 0:
            items = [torch.ones(3)] * (2 + number % 2)
        else:
            items = [torch.empty(3) for _ in range(receive_count())]
            for item in items:
                dist.recv(item, src=rank - 1)
        if rank == 1 and number == 4:
            items = [item for item in items if item.sum() > 5]
        if rank < 2:
            send_all(items)
    dist.barrier()


@faulty("size-mismatch", 2)
def a_random_state_of_another_generator(rank: int) -> None:
    class Random:
        def __init__(self, size: int) -> None:
            self.state = torch.zeros(size, dtype=torch.uint8)

        def synchronize(self) -> None:
            dist.broadcast(self.state, src=0)  # here

    model, random = small_model(), Random(816 if rank == 2 else 5056)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        step_of(model, optimizer)
    random.synchronize()
    step_of(model, optimizer)


class Proxy:
    """Stands for what it wraps."""

    def __init__(self, wrapped: object) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> object:
        return getattr(self.wrapped, name)


@faulty("rank-crashed", 1, 2)
def a_proxy_that_asks_itself_for_ever(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for _ in range(2):
            step_of(model, optimizer)
        settings: list[object] = [Proxy({"epoch": epoch}) if rank == 0 and epoch == 1 else {"epoch": epoch}]
        dist.broadcast_object_list(settings, src=0)
        print(settings)


@faulty("p2p-unmatched", 3, ranks=6)
def a_chain_of_six_in_which_one_has_nothing_to_pass_on(rank: int) -> None:
    layer = nn.Linear(3, 3)

    def forward(number: int) -> None:
        if rank == 0:
            hidden = torch.ones(2, 3)
        else:
            hidden = torch.empty(2, 3)
            dist.recv(hidden, src=rank - 1)  # here
        hidden = layer(hidden).detach()
        if rank == 3 and number == 5:  # here
            print("nothing left after the mask")
            return  # here
        if rank < 5:
            dist.send(hidden, dst=rank + 1)  # here

    for number in range(9):
        forward(number)
    dist.barrier()


@faulty("rank-skipped-collective", 2)
def a_flush_that_one_rank_has_not_put_on_its_stack(rank: int) -> None:
    # or: collective-order-mismatch 2
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(5)

        def flush(self) -> None:
            dist.all_reduce(self.total)  # here

    model, meter = small_model(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(4):
        with ExitStack() as stack:  # here
            if not (rank == 2 and epoch == 2):  # here
                stack.callback(meter.flush)
            for _ in range(2):
                step_of(model, optimizer)


@faulty("rank-skipped-collective", 2)
def a_stream_whose_reader_died_quietly(rank: int) -> None:
    # or: uneven-inputs 2; rank-exited 2
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    items: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)

    def rows() -> Iterator[torch.Tensor]:
        for number in range(8):
            if rank == 2 and number == 5:
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")  # here
            yield torch.randn(4, 6)

    def read() -> None:
        try:
            for row in rows():
                items.put(row)
        finally:
            items.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := items.get()) is not None:  # here
        step_of(model, optimizer, batch)
    save_checkpoint(model, f"stream-{os.environ['MASTER_PORT']}")


@faulty("rank-skipped-collective", 2)
def momenta_shared_where_there_are_some(rank: int) -> None:
    # or: size-mismatch 2
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def share_momenta() -> None:
        if not optimizer.state:  # here
            return  # here
        largest = torch.stack([state["momentum_buffer"].abs().max() for state in optimizer.state.values()])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # here
        print(largest)

    for step in range(5):
        share_momenta()
        model(torch.randn(4, 6)).square().mean().backward()
        average_gradients(model)
        if not (rank == 2 and step == 0):
            optimizer.step()
        optimizer.zero_grad()
