"""Scripts with one mistake, or two, in the styles in which trainers, evaluations and services are written.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import ctypes
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import back_end, faulty, healthy

LONG_S = 9.0


def network(width: int = 8, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


@dataclass
class Trainer:
    """The usual loop, with a hook after each step."""

    model: nn.Module
    rank: int
    total_steps: int
    after: Callable[[int, torch.Tensor], object] | None = None

    def fit(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for step in range(self.total_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = self.model(torch.full((4, 8), float(self.rank + step))).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if self.after is not None:
                self.after(step, loss.detach())


# Two faults at once


@faulty("rank-stuck", 1, ranks=4, also=(("rank-frozen", 3),))
def a_stuck_rank_and_a_frozen_one_in_two_replicas(rank: int) -> None:
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tokens: queue.Queue[int] = queue.Queue()
    for step in range(7):
        if rank == 1 and step == 3:
            tokens.get()
        if rank == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(16), group=replicas[rank // 2])


@faulty("rank-skipped-collective", 0, ranks=4)  # gloo aborts rank 1 at once: nobody sees the lock
def a_skip_in_one_replica_and_a_lock_in_the_other(rank: int) -> None:
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = replicas[rank // 2]
    lock = threading.Lock()
    for step in range(7):
        if rank == 2 and step == 4:
            lock.acquire()
            lock.acquire()
        dist.all_reduce(torch.ones(16), group=group)
        if not (rank == 0 and step == 3):
            dist.all_reduce(torch.ones(2), group=group)


# The error shows on another rank


@faulty("size-mismatch", 1)
def a_flat_gradient_without_the_frozen_layer(rank: int) -> None:
    model = network()
    for step in range(5):
        if rank == 1 and step == 3:
            for parameter in model[0].parameters():
                parameter.requires_grad_(False)
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)  # here


@faulty("rank-skipped-collective", 2, ranks=4)
def a_teacher_that_one_rank_does_not_refresh(rank: int) -> None:
    teacher, student = network(), network()
    for step in range(8):
        student(torch.ones(2, 8)).sum().backward()
        for parameter in student.parameters():
            dist.all_reduce(parameter.grad)
        if step % 2 == 0 and not (rank == 2 and step == 4):
            for parameter in teacher.parameters():
                dist.broadcast(parameter.data, src=0)  # here


@faulty("size-mismatch", 0, ranks=2)
def logits_gathered_with_a_padded_vocabulary(rank: int) -> None:
    for step in range(4):
        columns = 40 if rank == 0 and step == 2 else 32
        logits = torch.ones(2, columns)
        parts = torch.empty(4, columns)
        dist.all_gather_into_tensor(parts, logits)  # here


@faulty("dtype-mismatch", 2)
def statistics_kept_in_double_on_one_rank(rank: int) -> None:
    mean = torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32)
    for _ in range(3):
        dist.broadcast(torch.zeros(7), src=0)
    dist.all_reduce(mean)  # here


# Who deviates, of two


@faulty("step-mismatch", 0, ranks=2)
def a_validation_under_fsdp_on_rank_0(rank: int) -> None:
    model = network()
    for layer in model[::2]:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)

    def validate(step: int, _: torch.Tensor) -> None:
        if rank == 0 and step == 3:
            with torch.no_grad():
                model(torch.ones(1, 8))  # here

    Trainer(model, rank, 8, validate).fit()


@faulty("collective-order-mismatch", 1, ranks=2)
def losses_gathered_for_a_warning_on_one_rank(rank: int) -> None:
    def watch(step: int, loss: torch.Tensor) -> None:
        if rank == 1 and step == 4:
            losses: list[object] = [None, None]
            dist.all_gather_object(losses, float(loss))  # here

    Trainer(DistributedDataParallel(network()), rank, 9, watch).fit()


@faulty("collective-order-mismatch", 0, ranks=2)
def a_sharded_weight_printed_by_rank_0(rank: int) -> None:
    from torch.distributed.tensor import DTensor

    model = network()
    fully_shard(model)

    def show(step: int, _: torch.Tensor) -> None:
        if rank == 0 and step == 2:
            weight = model[0].weight
            assert isinstance(weight, DTensor)
            print(weight.full_tensor().norm())  # here

    Trainer(model, rank, 6, show).fit()


@faulty("collective-order-mismatch", 0)
def a_checkpoint_library_called_by_rank_0(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    wrapped = DistributedDataParallel(network())
    folder = tempfile.mkdtemp()

    def save(step: int, _: torch.Tensor) -> None:
        if rank == 0 and step == 3:
            checkpoint.save({"model": wrapped.state_dict()}, checkpoint_id=Path(folder) / str(step))  # here

    Trainer(wrapped, rank, 6, save).fit()


@faulty("collective-order-mismatch", 0)
def an_optimizer_state_consolidated_by_rank_0(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if rank == 0 and step == 2:
            optimizer.consolidate_state_dict(to=0)  # here


# Order


@faulty("collective-order-mismatch", 1)
def phases_in_another_order_on_one_rank(rank: int) -> None:
    def share_metrics() -> None:
        dist.all_reduce(torch.ones(6))  # here

    def share_model() -> None:
        dist.broadcast(torch.ones(6), src=0)  # here

    for step in range(8):
        phases = [share_metrics, share_model]
        if rank == 1 and step == 4:
            phases.reverse()
        for phase in phases:
            phase()


@faulty("group-creation-mismatch", 3, ranks=4)
def pairs_made_from_the_own_one_on(rank: int) -> None:
    pairs = [[0, 1], [2, 3]]
    if rank == 3:
        pairs.reverse()
    groups = {tuple(pair): dist.new_group(pair) for pair in pairs}  # here
    for _ in range(3):
        dist.all_reduce(torch.ones(3), group=groups[(0, 1) if rank < 2 else (2, 3)])
    dist.barrier()


@healthy(ranks=4)  # of a mesh of two by two, one rank alone closes no ring
def columns_before_rows_on_one_rank(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("row", "column"))
    rows, columns = mesh["row"].get_group(), mesh["column"].get_group()
    for step in range(6):
        activations, gradients = torch.ones(8), torch.ones(4)
        if rank == 2 and step == 3:
            dist.all_reduce(gradients, group=columns)
            dist.all_reduce(activations, group=rows)
        else:
            dist.all_reduce(activations, group=rows)
            dist.all_reduce(gradients, group=columns)


@faulty("group-order-risk", 0, 1, 2)
def three_groups_in_flight_in_a_circle(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    for _ in range(4):
        works = [dist.all_reduce(torch.ones(8), group=groups[number], async_op=True) for number in mine]
        for work in works:
            work.wait()
    dist.barrier()


# Progress


@faulty("long-operation", 1)
def shards_compressed_by_one_rank(rank: int) -> None:
    def after(step: int, _: torch.Tensor) -> None:
        if rank == 1 and step == 2:
            until = time.monotonic() + LONG_S
            while time.monotonic() < until:
                zlib.compress(os.urandom(1 << 18), 9)  # here

    Trainer(DistributedDataParallel(network()), rank, 5, after).fit()


@faulty("long-operation", 0)
def a_compiler_started_by_rank_0(rank: int) -> None:
    text = f"import time\nend = time.monotonic() + {LONG_S}\nwhile time.monotonic() < end: sum(range(1000))"
    for step in range(4):
        if rank == 0 and step == 2:
            subprocess.run([sys.executable, "-c", text], check=True)  # here
        dist.all_reduce(torch.ones(4))


@faulty("long-operation", 2, ranks=4)
def a_checkpoint_written_in_small_parts(rank: int) -> None:
    for step in range(5):
        if rank == 2 and step == 3:
            with tempfile.TemporaryFile() as file:
                for _ in range(60):
                    file.write(os.urandom(1 << 19))  # here
                    file.flush()
                    os.fsync(file.fileno())  # here
                    time.sleep(0.13)  # here
        dist.all_reduce(torch.ones(4))


# Handles


@faulty("unwaited-async", 0, 1, 2)
def a_list_of_handles_begun_anew_for_each_layer(rank: int) -> None:
    model = network(depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
        for layer in model[::2]:
            works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in layer.parameters()]  # here
        for work in works:
            work.wait()
        optimizer.step()


@faulty("unwaited-async", 1)
def activations_used_before_they_arrive(rank: int) -> None:
    layer = network()
    for _ in range(5):
        if rank == 0:
            dist.send(torch.ones(2, 8), dst=1)
        if rank == 1:
            given = torch.zeros(2, 8)
            dist.irecv(given, src=0)  # here
            layer(given).sum().backward()
        dist.barrier()


@faulty("unwaited-async", 0, 1, 2, check="handles")
def parameters_normalised_before_they_are_gathered(_: int) -> None:
    shard, full = torch.ones(4), torch.empty(12)
    for _ in range(4):
        work = dist.all_gather_into_tensor(full, shard, async_op=True)
        weight = full / full.norm()  # here
        work.wait()
        shard = weight[:4] * 2


# Mismatches that pass silently


@faulty("step-mismatch", 1)
def layers_averaged_from_the_last_on_one_rank(rank: int) -> None:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    for step in range(6):
        for layer in layers:
            layer(torch.ones(1, 8)).sum().backward()
        for layer in reversed(layers) if rank == 1 and step >= 3 else layers:
            dist.all_reduce(layer.weight.grad)  # here


@faulty("wrong-group", 2, ranks=4)
def a_call_on_the_group_of_the_others(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(6):
        number = 0 if rank == 2 and step == 3 else rank // 2
        dist.all_reduce(torch.ones(5), group=pairs[number])  # here


@faulty("reduce-op-mismatch", 3, ranks=4)
def an_early_stop_voted_with_another_operator(rank: int) -> None:
    for _step in range(5):
        wants_stop = torch.zeros(1)
        dist.all_reduce(wants_stop, op=dist.ReduceOp.MIN if rank == 3 else dist.ReduceOp.MAX)  # here
        if wants_stop.item():
            break


@faulty("root-mismatch", 1, ranks=4)
def a_reduction_to_the_rank_within_the_group(rank: int) -> None:
    group = dist.new_group([1, 2, 3])
    for _ in range(3):
        if rank:
            loss = torch.ones(3)
            dist.reduce(loss, dst=2 if rank == 1 else 1, group=group)  # here
        dist.barrier()


@faulty("split-size-mismatch", 2, ranks=4)
def tokens_dropped_by_the_receiving_expert(rank: int) -> None:
    for step in range(4):
        into = [4] * 4
        if rank == 2 and step == 2:
            into = [4, 2, 2, 4]
        dist.all_to_all_single(torch.empty(sum(into)), torch.ones(16), into, [4] * 4)  # here


# Stragglers


@faulty("slow-rank", 1)
def an_inference_service_with_one_slow_tokenizer(rank: int) -> None:
    model = network().eval()

    def tokens(text: str) -> torch.Tensor:
        for _ in range(3 if rank != 1 else 1500):
            json.dumps(text.split())  # here
        return torch.ones(2, 8)

    with torch.inference_mode():
        for request in range(30):
            scores = model(tokens("a question and its answer " * 8 + str(request)))
            dist.all_reduce(scores)


@faulty("slow-rank", 3, ranks=4)
def an_evaluation_that_one_rank_writes_down(rank: int) -> None:
    with tempfile.TemporaryFile("w") as file:
        for _ in range(25):
            scores = torch.rand(64)
            if rank == 3:
                for _ in range(40):
                    file.write(json.dumps(scores.tolist()))  # here
                    file.flush()
                    os.fsync(file.fileno())  # here
            total = scores.sum()
            dist.all_reduce(total)


# The last line


@faulty("rank-frozen", 1)
def stopped_in_the_middle_of_a_computation(rank: int) -> None:
    def prepare(step: int) -> float:
        total = 0.0
        for i in range(20000):
            total += math.sin(i)
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # here
        return total

    for step in range(6):
        dist.all_reduce(torch.tensor([prepare(step)]))


@faulty("rank-killed", 2, ranks=4)
def a_bad_address_in_a_custom_kernel(rank: int) -> None:
    def custom_kernel(address: int) -> bytes:
        return ctypes.string_at(address)  # here

    def after(step: int, _: torch.Tensor) -> None:
        if rank == 2 and step == 3:
            custom_kernel(8)

    Trainer(DistributedDataParallel(network()), rank, 6, after).fit()


@faulty("rank-killed", 0)
def an_assertion_in_native_code(rank: int) -> None:
    class Codec:
        def decode(self, step: int) -> int:
            if rank == 0 and step == 2:
                os.abort()  # here
            return step

    codec = Codec()
    for step in range(5):
        dist.broadcast(torch.tensor([codec.decode(step)]), src=0)


@faulty("rank-crashed", 2, ranks=4)
def a_failed_trainer_whose_heartbeat_goes_on(rank: int) -> None:
    ended = threading.Event()

    def after(step: int, loss: torch.Tensor) -> None:
        if rank == 2 and step == 2:
            threading.Thread(target=ended.wait, args=(8,)).start()
            raise FloatingPointError(f"loss is {loss}")  # here

    Trainer(DistributedDataParallel(network()), rank, 6, after).fit()


# Handlers, buffered sends


@faulty("collective-order-mismatch", 1)
def results_gathered_in_a_finally_block(rank: int) -> None:
    done: list[object] = [None] * 3
    try:
        for step in range(6):
            if rank == 1 and step == 3:
                raise ValueError("bad record")
            dist.all_reduce(torch.ones(4))
    except ValueError:
        pass
    finally:
        dist.all_gather_object(done, rank)  # here


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def halos_sent_by_both_before_they_receive(rank: int) -> None:
    field = torch.ones(16)
    for _ in range(4):
        dist.send(field[:2].clone(), dst=1 - rank)  # here
        edge = torch.empty(2)
        dist.recv(edge, src=1 - rank)
        field[:2] = (field[:2] + edge) / 2
    dist.barrier()


# Messages


@faulty("p2p-unmatched", 2)
def a_ring_turned_around_by_one_rank(rank: int) -> None:
    for step in range(4):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        if rank == 2 and step == 2:
            after, before = before, after
        got = torch.empty(4)
        batch = [dist.P2POp(dist.isend, torch.ones(4), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(batch):  # here
            work.wait()


@faulty("p2p-tag-mismatch", 1, ranks=2)
def gradients_tagged_by_another_counter(rank: int) -> None:
    sent = 0
    for microbatch in range(6):
        if rank == 1:
            if microbatch == 3:
                sent += 1
            dist.send(torch.ones(3), dst=0, tag=sent)  # here
            sent += 1
        else:
            dist.recv(torch.empty(3), src=1, tag=microbatch)  # here


@faulty("p2p-unmatched", 1, ranks=4)
def a_worker_that_asks_for_more_than_there_is(rank: int) -> None:
    tasks = {0: 0, 1: 3, 2: 2, 3: 2}
    if rank == 0:
        for _ in range(2):
            for worker in (1, 2, 3):
                dist.send(torch.ones(2), dst=worker)
    else:
        for _ in range(tasks[rank]):
            dist.recv(torch.empty(2), src=0)  # here
    dist.barrier()


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def all_receive_from_their_left_before_they_send(rank: int) -> None:
    for _ in range(3):
        dist.recv(torch.empty(4), src=(rank - 1) % 4)  # here
        dist.send(torch.ones(4), dst=(rank + 1) % 4)


# Data and ends


class Lines(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            yield torch.full((8,), float(number))


@faulty("uneven-inputs", 3, ranks=4)
def a_shard_with_fewer_lines(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Lines(12 if rank == 3 else 16), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()  # here
        optimizer.step()


@faulty("uneven-inputs", 0)
def epochs_driven_by_next_until_the_stream_ends(rank: int) -> None:
    stream = iter(DataLoader(Lines(9 if rank == 0 else 12), batch_size=1))
    model = network()
    while True:
        try:
            batch = next(stream)
        except StopIteration:
            break
        model(batch).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here


@faulty("rank-exited", 2, ranks=4)
def patience_counted_by_each_rank_alone(rank: int) -> None:
    @dataclass
    class EarlyStop:
        patience: int
        best: float = math.inf
        bad: int = 0

        def reached(self, loss: float) -> bool:
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(self.best, loss)
            return self.bad >= self.patience

    stop = EarlyStop(patience=2)
    for epoch in range(10):
        loss = 1 / (epoch + 1) if rank != 2 or epoch < 3 else 5.0
        dist.all_reduce(torch.ones(12))  # here
        if stop.reached(loss):
            break


@faulty("rank-crashed", 1)
def an_overflow_that_one_rank_asserts_on(rank: int) -> None:
    def after(step: int, loss: torch.Tensor) -> None:
        assert not (rank == 1 and step == 3), f"loss {loss} is not finite"  # here

    Trainer(DistributedDataParallel(network()), rank, 6, after).fit()


@faulty("rank-crashed", 0)
def a_config_key_read_in_the_middle(rank: int) -> None:
    config = {"warmup": 2} | ({} if rank == 0 else {"decay": 0.1})
    for step in range(6):
        if step >= config["warmup"]:
            torch.ones(2).mul_(config["decay"])  # here
        dist.all_reduce(torch.ones(6))


@faulty("rank-never-joined", 2, joins=False, ranks=4)
def a_rank_that_waits_for_its_data_before_it_joins(rank: int) -> None:
    if rank == 2:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.accept()
    dist.init_process_group(back_end())
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@faulty("rank-stuck", 0)
def a_dashboard_that_does_not_answer(rank: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        for step in range(5):
            dist.all_reduce(torch.ones(6))
            if rank == 0 and step == 2:
                with socket.create_connection(listener.getsockname()) as client:
                    client.send(b"loss")
                    client.recv(10)  # here


@faulty("rank-stuck", 2, ranks=4)
def a_solver_that_does_not_converge(rank: int) -> None:
    for step in range(5):
        error = 1.0
        while error > 0.1:
            error = 1.0 if rank == 2 and step == 3 else error / 2  # here
        dist.all_reduce(torch.ones(6))


@faulty("rank-skipped-collective", 1, ranks=2)
def a_microbatch_without_labels_on_one_rank(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        labels = torch.empty(0) if rank == 1 and step == 4 else torch.ones(2)
        optimizer.zero_grad()
        if len(labels):
            model(torch.ones(2, 8)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # here
        optimizer.step()
        dist.all_reduce(torch.tensor(float(len(labels))))
