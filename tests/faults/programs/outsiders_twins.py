"""Programs as somebody writes them who tests the diagnosis from outside, and that are right.

Labelled and frozen before their first run, by somebody who has not read the rules. `outsiders_faults.py` has those with
a mistake.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import healthy
from tests.faults.programs.outsiders_faults import mean_of_gradients, seeded


@healthy(ranks=4)
def reviews_without_a_label_are_passed_over_by_all(rank: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def is_empty_anywhere(known: torch.Tensor) -> bool:
        missing = (~known.any()).float()
        dist.all_reduce(missing, op=dist.ReduceOp.MAX)
        return bool(missing)

    for step in range(12):
        words, stars = torch.randint(0, 50, (5, 6)), torch.randint(0, 2, (5,))
        if rank == 2 and step in (3, 6):
            stars = torch.full((5,), -1)
        known = stars >= 0
        if is_empty_anywhere(known):
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words[known]), stars[known]).backward()
        mean_of_gradients(model)
        optimizer.step()


@healthy()
def a_score_whose_entry_in_the_journal_alone_is_written_again(rank: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    failures = {(1, 3, 1), (1, 3, 2), (2, 4, 1)}

    def write(epoch: int, score: float, attempt: int) -> None:
        if (rank, epoch, attempt) in failures:
            raise OSError("stale file handle")
        print(epoch, score)

    def persistently(action: Callable[[int], None]) -> None:
        for attempt in range(1, 4):
            try:
                action(attempt)
                return
            except OSError as error:
                print("again:", error)
                time.sleep(0.05)

    for epoch in range(6):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            mean_of_gradients(model)
            optimizer.step()
        score = model(torch.ones(4, 6)).square().mean().detach()
        dist.all_reduce(score)
        persistently(lambda attempt, epoch=epoch, score=float(score): write(epoch, score, attempt))  # type: ignore[misc]


@healthy()
def metrics_are_reduced_in_the_order_of_their_names(rank: int) -> None:
    def mean(values: list[float]) -> float:
        total = torch.tensor([sum(values), float(len(values))])
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def spread(values: list[float]) -> float:
        parts = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([sum(values)]))
        return max(map(float, parts)) - min(map(float, parts))

    model = seeded(lambda: nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reductions = {"loss": mean, "length": spread}
    for epoch in range(4):
        board: dict[str, list[float]] = {"length": []} if rank == epoch % 3 else {"loss": []}
        for step in range(3 + epoch):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 5)).square().mean()
            loss.backward()
            mean_of_gradients(model)
            optimizer.step()
            board.setdefault("loss", []).append(float(loss))
            board.setdefault("length", []).append(10.0 + step * rank)
        line = {name: reductions[name](values) for name, values in sorted(board.items())}
        if rank == 0:
            print(epoch, line)


@healthy(ranks=4)
def a_row_of_the_mesh_has_one_more_layer_than_the_other(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = 3 if rank < 2 else 2
    weights = [nn.Parameter(torch.full((8, 8), 0.1)) for _ in range(layers)]
    head = nn.Parameter(torch.full((8, 8), 0.2))
    optimizer = torch.optim.SGD([*weights, head], lr=0.01)
    for step in range(8):
        rows = torch.randn(4, 8)
        for weight in weights:
            part = rows @ weight
            total = part.detach().clone()
            dist.all_reduce(total, group=mesh.get_group("tensor"))
            rows = part + (total - part.detach())
        optimizer.zero_grad()
        (rows @ head).square().mean().backward()
        dist.all_reduce(head.grad, group=mesh.get_group("data"))
        optimizer.step()
        if step == 4 and rank >= 2:
            dist.barrier(group=mesh.get_group("tensor"))


@healthy(ranks=4)
def hard_examples_are_sent_after_their_number(rank: int) -> None:
    model = seeded(lambda: nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    bank: list[torch.Tensor] = []

    def contribute(rows: torch.Tensor, threshold: float) -> None:
        losses = (model(rows) - rows).square().mean(1)
        hard = rows[losses > threshold].contiguous()
        dist.send(torch.tensor([len(hard)]), dst=0)
        if len(hard):
            dist.send(hard, dst=0)

    def collect() -> None:
        for worker in range(1, 4):
            number = torch.zeros(1, dtype=torch.int64)
            dist.recv(number, src=worker)
            if number:
                examples = torch.empty(int(number), 6)
                dist.recv(examples, src=worker)
                bank.append(examples)

    for step in range(8):
        rows = torch.zeros(4, 6) if (rank + step) % 4 == 1 else (1 + step) * torch.randn(4, 6)
        optimizer.zero_grad()
        (model(rows) - rows).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        if rank == 0:
            collect()
        else:
            contribute(rows, threshold=2.0)


@healthy(ranks=4)
def gossip_with_tags_of_each_pair(rank: int) -> None:
    model = seeded(lambda: nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def tag(source: int, target: int, turn: int) -> int:
        return 1000 * source + 100 * target + turn

    def meet(partner: int, turn: int) -> None:
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        requests = [
            dist.irecv(theirs, src=partner, tag=tag(partner, rank, turn)),
            dist.isend(mine, dst=partner, tag=tag(rank, partner, turn)),
        ]
        for request in requests:
            if request is not None:
                request.wait()
        nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())

    for turn in range(9):
        optimizer.zero_grad()
        model(torch.randn(2, 7)).square().mean().backward()
        optimizer.step()
        if turn % 4 != 3 or rank in (0, 3):
            meet(rank ^ (1, 2, 3, 3)[turn % 4], turn)


@healthy()
def activations_and_gradients_go_round_in_batches_of_requests(rank: int) -> None:
    left, right = (rank - 1) % 3, (rank + 1) % 3
    block = seeded(lambda: nn.Linear(9, 9), seed=rank)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)

    def shift(outgoing: torch.Tensor, to: int, origin: int) -> torch.Tensor:
        fresh = torch.empty_like(outgoing)
        plan = [dist.P2POp(dist.irecv, fresh, origin), dist.P2POp(dist.isend, outgoing, to)]
        for request in dist.batch_isend_irecv(plan):
            request.wait()
        return fresh

    for _ in range(5):
        hidden = torch.randn(4, 9)
        for _ in range(2):
            hidden = shift(block(hidden).tanh().detach(), right, left)
        hidden.requires_grad_()
        optimizer.zero_grad()
        block(hidden).square().mean().backward()
        assert hidden.grad is not None
        shift(hidden.grad, left, right)
        optimizer.step()


@healthy()
def shards_of_unequal_length_end_with_the_shortest(rank: int) -> None:
    sentences = [torch.full((12,), 1.0 + number % 5) for number in range(16 + 9 * rank)]
    model = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 12))))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(sentences, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    shortest = torch.tensor([len(loader)])
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    for epoch in range(3):
        for batch in itertools.islice(loader, int(shortest)):
            optimizer.zero_grad()
            (model(batch) - batch).abs().mean().backward()
            optimizer.step()
        with torch.no_grad():
            score = model.module(torch.ones(2, 12)).mean()
        dist.all_reduce(score, op=dist.ReduceOp.MAX)
        print(epoch, float(score))


@healthy()
def a_running_mean_whose_handles_are_waited_for_a_step_later(rank: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Shadow:
        def __init__(self) -> None:
            self.values = [weight.detach().clone() for weight in model.parameters()]
            self.pending: list[tuple[dist.Work | None, torch.Tensor]] = []

        def settle(self) -> None:
            for value, (handle, total) in zip(self.values, self.pending, strict=False):
                if handle is not None:
                    handle.wait()
                value.lerp_(total / 3, 0.1)
            self.pending = []

        def update(self) -> None:
            self.settle()
            for weight in model.parameters():
                total = weight.detach().clone()
                self.pending.append((dist.all_reduce(total, async_op=True), total))

    shadow = Shadow()
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 10) + rank).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        shadow.update()
    shadow.settle()


@healthy()
def the_best_of_a_population_is_adopted_whoever_has_it(rank: int) -> None:
    model = seeded(lambda: nn.Linear(8, 4), seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.linspace(-1, 1, 32).reshape(4, 8)
    for turn in range(7):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        scores = torch.empty(3)
        dist.all_gather_into_tensor(scores, torch.tensor([float((rank * 2 + turn) % 3)]))
        best = int(scores.argmax())
        for weight in model.state_dict().values():
            dist.broadcast(weight, src=best)
        if rank != best:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * torch.randn_like(parameter)


@healthy()
def rows_that_are_cut_to_the_capacity_and_then_announced(rank: int) -> None:
    width, capacity = 6, 10
    expert = seeded(lambda: nn.Linear(width, width), seed=rank)
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.02)
    for step in range(8):
        counts = [[18, 0, 0], [2, 13, 3], [0, 0, 18]][(step + rank) % 3]
        kept = [part[:capacity] for part in torch.randn(18, width).split(counts)]
        outgoing = [len(part) for part in kept]
        announced = torch.empty(3, dtype=torch.int64)
        dist.all_to_all_single(announced, torch.tensor(outgoing))
        incoming = announced.tolist()
        received = torch.empty(sum(incoming), width)
        dist.all_to_all_single(received, torch.cat(kept), incoming, outgoing)
        optimizer.zero_grad()
        ((expert(received) - received).square().sum() / max(1, len(received))).backward()
        mean_of_gradients(expert)
        optimizer.step()


@healthy()
def patience_that_ends_on_all_ranks_while_a_thread_still_writes(rank: int) -> None:
    model = seeded(lambda: nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters())
    written: list[int] = []
    writers: list[threading.Thread] = []

    def write(step: int, state: dict[str, torch.Tensor]) -> None:
        time.sleep(0.8)  # the object store
        written.append(step + len(state))

    def save(step: int) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        writers.append(threading.Thread(target=write, args=(step, state)))
        writers[-1].start()

    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        if rank == 0 and step % 4 == 3:
            save(step)
        votes = torch.tensor([1.0 if rank != 2 and step > 8 else 0.0])
        dist.all_reduce(votes)
        if votes > 1:
            break
    dist.barrier()
    for writer in writers:
        writer.join()
    dist.destroy_process_group()
    sys.exit(0)
