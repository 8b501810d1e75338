"""Programs as an external examiner sets them to catch a false alarm: right, though each does something unusual.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.corpus import healthy
from tests.faults.programs.exam_room_faults import CPU, mean_of_gradients, perceptron


@healthy(ranks=4)
def an_alphabet_agreed_on_before_the_model_is_made(rank: int) -> None:
    transcripts = ["tea and rain", "a red train", "a café in caen", "tin and iron"]
    letters: list[set[str] | None] = [None] * 4
    dist.all_gather_object(letters, set(transcripts[rank]))
    alphabet = sorted(set().union(*[own for own in letters if own]))
    index = {letter: i for i, letter in enumerate(alphabet)}
    model = nn.Sequential(nn.Embedding(len(alphabet), 6), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.tensor([index[letter] for letter in transcripts[rank]])).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()


@healthy()
def microbatches_in_other_numbers_weighed_by_tokens(rank: int) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        tokens = torch.zeros(1)
        for _ in range(1 + (2 * rank + step) % 4):
            x = torch.randn(random.randint(1, 9), 8)
            model(x).square().sum().backward()
            tokens += len(x)
        dist.all_reduce(tokens)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad /= tokens
        optimizer.step()


@healthy()
def an_early_stop_that_rank_0_decides_for_all(rank: int) -> None:
    class EarlyStopping:
        def __init__(self, patience: int) -> None:
            self.patience, self.best, self.waited = patience, float("inf"), 0

        def should_stop(self, loss: float) -> bool:
            self.waited = 0 if loss < self.best else self.waited + 1
            self.best = min(loss, self.best)
            decision = [self.waited >= self.patience]
            dist.broadcast_object_list(decision, src=0)
            return decision[0]

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping = EarlyStopping(3)
    for epoch in range(50):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if stopping.should_stop(float(max(5 - epoch, 0)) if rank == 0 else random.random()):
            print("stopped after", epoch)
            return


@healthy()
def an_evaluation_without_collectives_on_rank_0(rank: int) -> None:
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                losses = [float(model.module(torch.randn(32, 8)).square().mean()) for _ in range(4000)]
            model.train()
            print(epoch, sum(losses) / len(losses))


@healthy()
def the_fittest_of_a_population_is_another_each_time(rank: int) -> None:
    model = perceptron()
    for generation in range(8):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        scores = torch.zeros(3)
        dist.all_gather_into_tensor(scores, torch.tensor([float((rank + generation) % 3)]))
        fittest = int(scores.argmax())
        state = [model.state_dict() if rank == fittest else None]
        dist.broadcast_object_list(state, src=fittest)
        if state[0] is not None:
            model.load_state_dict(state[0])


@healthy(ranks=4)
def tasks_farmed_out_to_whoever_asks(rank: int) -> None:
    if rank == 0:
        left, idle, results = list(range(17)), 0, []
        while idle < 3:
            answer = torch.zeros(2)
            worker = dist.recv(answer)
            if answer[0] >= 0:
                results.append(float(answer[1]))
            task = left.pop(0) if left else -1
            idle += task < 0
            dist.send(torch.tensor([task]), dst=worker)
        print(len(results), "results")
        return
    answer = torch.tensor([-1.0, 0.0])
    while True:
        dist.send(answer, dst=0)
        task_number = torch.zeros(1, dtype=torch.long)
        dist.recv(task_number, src=0)
        if task_number < 0:
            return
        time.sleep(0.02 * rank)
        answer = torch.tensor([float(task_number), float(torch.randn(50, 50).norm())])


@healthy()
def a_grid_whose_edges_have_one_neighbour(rank: int) -> None:
    field = torch.rand(10)
    neighbours = [n for n in (rank - 1, rank + 1) if 0 <= n < 3]
    for step in range(20):
        halo = {n: torch.zeros(1) for n in neighbours}
        edges = {n: (field[-1:] if n > rank else field[:1]).clone() for n in neighbours}
        plan = [dist.P2POp(dist.isend, edges[n], n) for n in neighbours]
        plan += [dist.P2POp(dist.irecv, halo[n], n) for n in neighbours]
        inner = (field[:-2] + field[2:]) / 2
        for work in dist.batch_isend_irecv(plan):
            work.wait()
        field[1:-1] = inner
        field[0] = (field[1] + sum(float(cell) for cell in halo.values())) / (1 + len(halo))
        if step % 5 == 4:
            residual = field.diff().abs().max()
            dist.all_reduce(residual, op=dist.ReduceOp.MAX)


@healthy(ranks=4)
def replicas_that_swap_only_when_both_agree(rank: int) -> None:
    state, energy = torch.full((64,), float(rank)), torch.zeros(1)
    for number in range(10):
        state += 0.01 * torch.randn(64)
        energy[0] = state.square().sum()
        partner = rank ^ 1 if number % 2 else ((rank + 1) ^ 1) - 1
        if not 0 <= partner < 4:
            continue
        theirs = torch.zeros(1)
        first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
        for call in (first, second):
            call(energy if call is dist.send else theirs, partner)
        if (energy < theirs) if rank < partner else (theirs < energy):
            other = torch.empty_like(state)
            for call in (first, second):
                call(state if call is dist.send else other, partner)
            state = other


@healthy(ranks=4)
def a_sharded_weight_gathered_by_all_and_printed_by_one(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        mesh["tp"],
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("dp"))  # type: ignore[union-attr]
        optimizer.step()
        if step % 3 == 2 and mesh.get_local_rank("dp") == 0:
            wholes = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
            if rank == 0:
                print(step, [float(whole.norm()) for whole in wholes])


@healthy(ranks=4)
def pipelines_with_more_microbatches_from_the_second_epoch_on(rank: int) -> None:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    number = mesh.get_local_rank("stage")
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for microbatches in (2, 4):
        stage = PipelineStage(part, number, 2, CPU, group=mesh.get_group("stage"))
        schedule = Schedule1F1B(stage, microbatches, loss_fn=functional.mse_loss)
        for _ in range(3):
            optimizer.zero_grad()
            if number == 0:
                schedule.step(torch.randn(8, 6))
            else:
                schedule.step(target=torch.zeros(8, 6))
            mean_of_gradients(part, mesh.get_group("replica"))
            optimizer.step()


@healthy(ranks=6)
def members_of_an_ensemble_that_train_for_other_numbers_of_steps(rank: int) -> None:
    members = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    member = members[rank // 3]
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9 if rank < 3 else 14):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        mean_of_gradients(model, member)
        optimizer.step()
    votes = model(torch.ones(1, 8)).detach()
    dist.all_reduce(votes)


@healthy()
def gradients_applied_one_step_late(rank: int) -> None:
    torch.manual_seed(rank)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flying: list[tuple[nn.Parameter, torch.Tensor, dist.Work]] = []

    def land() -> None:
        for p, gradient, work in flying:
            work.wait()
            p.grad = gradient / 3
        if flying:
            optimizer.step()
        flying.clear()

    for _ in range(8):
        gradients = torch.autograd.grad(model(torch.randn(4, 8)).square().mean(), list(model.parameters()))
        land()
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            work = dist.all_reduce(gradient, async_op=True)
            assert work is not None
            flying.append((p, gradient, work))
    land()


@healthy(ranks=6)
def sums_over_nodes_and_then_over_their_leaders(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    leaders = dist.new_group([0, 3])
    node, leader = nodes[rank // 3], rank // 3 * 3
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.reduce(p.grad, dst=leader, group=node)
            if rank == leader:
                dist.all_reduce(p.grad, group=leaders)
                p.grad /= 6
            dist.broadcast(p.grad, src=leader, group=node)
        optimizer.step()


@healthy()
def a_sharded_model_saved_and_loaded_again(rank: int) -> None:
    model = perceptron()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = [tempfile.mkdtemp(prefix="exam-room-") if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 2:
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state["model"])


@healthy()
def a_read_that_fails_twice_and_is_tried_again(rank: int) -> None:
    failures = iter([True, True] if rank == 1 else [])

    def read(i: int) -> torch.Tensor:
        for attempt in range(5):
            try:
                if i == 3 and next(failures, False):
                    raise TimeoutError("storage did not answer")
                return torch.full((2, 8), float(i))
            except TimeoutError as error:
                print(error, "attempt", attempt)
                time.sleep(0.2 * 2**attempt)
        raise RuntimeError("storage is gone")

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(8):
        optimizer.zero_grad()
        model(read(i)).square().mean().backward()
        optimizer.step()


@healthy()
def training_ended_by_an_exception_that_all_raise(rank: int) -> None:
    class StopTraining(Exception):
        pass

    def on_batch_end(loss: torch.Tensor, batch: int) -> None:
        diverged = torch.tensor([float((rank == 2 and batch == 6) or not torch.isfinite(loss))])
        dist.all_reduce(diverged, op=dist.ReduceOp.MAX)
        if diverged.item():
            raise StopTraining(f"a rank diverged at batch {batch}")

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for batch in range(20):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            on_batch_end(loss.detach(), batch)
            optimizer.step()
    except StopTraining as stop:
        print(stop)
    finally:
        dist.barrier()


@healthy()
def a_loader_that_fills_its_shuffle_buffer_first(rank: int) -> None:
    class Shuffled(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            kept = []
            for i in range(40):
                if i < 16:
                    time.sleep(0.1 if rank == 1 else 0.01)
                kept.append(torch.full((8,), float(i)))
                if len(kept) == 16:
                    yield kept.pop(random.randrange(16))
            yield from kept

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for x in DataLoader(Shuffled(), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@healthy()
def a_thread_that_averages_what_the_main_thread_hands_over(rank: int) -> None:
    background = dist.new_group([0, 1, 2])
    inbox: queue.Queue[torch.Tensor | None] = queue.Queue()
    averages: list[float] = []

    def average() -> None:
        while (value := inbox.get()) is not None:
            dist.all_reduce(value, group=background)
            averages.append(float(value) / 3)

    thread = threading.Thread(target=average)
    thread.start()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        inbox.put(loss.detach().reshape(1))
        mean_of_gradients(model)
        optimizer.step()
    inbox.put(None)
    thread.join()
    print(rank, len(averages))


@healthy()
def work_that_ranks_take_from_a_counter_until_none_is_left(rank: int) -> None:
    store = dist.PrefixStore("work", dist.distributed_c10d._get_default_store())
    model = perceptron()
    mine: list[tuple[int, float]] = []
    while (item := store.add("next", 1) - 1) < 30:
        mine.append((item, float(model(torch.full((1, 8), float(item))).sum())))
        time.sleep(0.01 * (1 + 3 * rank))
    gathered: list[list[tuple[int, float]]] | None = [[] for _ in range(3)] if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is not None:
        print(max(item for part in gathered for item in part))


@healthy()
def a_signal_that_one_rank_gets_and_all_heed(rank: int) -> None:
    asked = torch.zeros(1)
    signal.signal(signal.SIGUSR1, lambda *_: asked.fill_(1.0))
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if rank == 1 and step == 12:
            os.kill(os.getpid(), signal.SIGUSR1)
        heed = asked.clone()
        dist.all_reduce(heed, op=dist.ReduceOp.MAX)
        if heed.item():
            torch.save(model.state_dict(), Path(tempfile.mkdtemp()) / f"{rank}.pt")
            break
    helper.kill()
    helper.wait()


@healthy(joins=False)
def a_rank_that_downloads_before_it_joins(rank: int) -> None:
    if rank == 2:
        time.sleep(2)

    def train() -> None:
        model = DistributedDataParallel(perceptron())
        for x in DataLoader(Cached(rank), batch_size=2):
            model(x).sum().backward()

    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


class Cached(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rows = [torch.full((8,), float(rank)) for _ in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]
