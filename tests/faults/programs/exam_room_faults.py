"""Programs as an external examiner sets them, a few of each kind and each in a style of its own, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `exam_room_twins.py` has programs that are right.
"""

import ctypes
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.faults.corpus import faulty

CPU = torch.device("cpu")


def perceptron(wide: int = 8, out: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, out))


def mean_of_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    done = 0
    for p in model.parameters():
        if p.grad is not None:
            p.grad.copy_(flat[done : done + p.numel()].view_as(p))
            done += p.numel()


@faulty("size-mismatch", 2, ranks=4)
def an_alphabet_collected_from_the_own_transcripts(rank: int) -> None:
    transcripts = ["tea and rain", "a red train", "a café in caen", "tin and iron"]
    alphabet = sorted(set("abcdefinrt ") | set(transcripts[rank]))
    index = {letter: i for i, letter in enumerate(alphabet)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(len(alphabet), 6), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        letters = torch.tensor([index[letter] for letter in transcripts[rank]])
        optimizer.zero_grad()
        model(letters).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)  # here
        optimizer.step()


@faulty("dtype-mismatch", 1)
def a_node_without_half_precision_that_falls_back(rank: int) -> None:
    class Features:
        def __init__(self, flags: str) -> None:
            self.dtype = torch.bfloat16 if "avx512_bf16" in flags else torch.float32

        def collect(self, rows: torch.Tensor) -> torch.Tensor:
            rows = rows.detach().to(self.dtype)
            out = torch.empty(3 * len(rows), rows.shape[1], dtype=self.dtype)
            dist.all_gather_into_tensor(out, rows)  # here
            return out.float()

    features = Features("sse4 avx2" if rank == 1 else "avx2 avx512_bf16 amx")
    encoder = perceptron()
    optimizer = torch.optim.Adam(encoder.parameters())
    for _ in range(5):
        mine = functional.normalize(encoder(torch.randn(4, 8)), dim=-1)
        everyone = features.collect(mine)  # here
        loss = functional.cross_entropy(mine @ everyone.T, torch.arange(4) + 4 * rank)
        optimizer.zero_grad()
        loss.backward()
        mean_of_gradients(encoder)
        optimizer.step()


@faulty("reduce-op-mismatch", 0, ranks=4)
def a_console_that_shows_the_slowest_step(rank: int) -> None:
    class Meter:
        def __init__(self, op: dist.ReduceOp.RedOpType) -> None:
            self.op, self.value = op, torch.zeros(1)

        def share(self) -> float:
            total = self.value.clone()
            dist.all_reduce(total, op=self.op)  # here
            return float(total)

    is_main = rank == 0
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_meter = Meter(dist.ReduceOp.SUM)
    time_meter = Meter(dist.ReduceOp.MAX if is_main else dist.ReduceOp.SUM)
    for step in range(10):
        begun = time.perf_counter()
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_meter.value.fill_(loss.item())
        time_meter.value.fill_(time.perf_counter() - begun)
        shown = loss_meter.share() / 4, time_meter.share()  # here
        if is_main:
            print(step, *shown)


@faulty("root-mismatch", 2)
def the_fittest_of_a_population_is_copied(rank: int) -> None:
    model = perceptron()
    fitness = [0.0] * 3
    for generation in range(6):
        for p in model.parameters():
            p.data.add_(0.01 * torch.randn_like(p))
        score = float(generation + rank)
        gathered = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([-score]))
        fitness = [float(value) for value in gathered]
        if rank == 2 and generation == 3:
            fitness[rank] = score  # the raw one, measured again after the perturbation
        fittest = fitness.index(max(fitness))
        for p in model.parameters():
            dist.broadcast(p.data, src=fittest)  # here
    dist.barrier()


@faulty("rank-skipped-collective", 1)
def an_overflow_that_only_its_owner_sees(rank: int) -> None:
    # or: collective-order-mismatch 1, step-mismatch 1
    layers = [nn.Linear(5, 5) for _ in range(3)]
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    for step in range(8):
        hidden = torch.full((2, 5), float("inf") if rank == 1 and step == 4 else 1.0)
        for layer in layers:
            layer.zero_grad()
            hidden = layer(hidden)
        hidden.mean().backward()
        for owner, layer in enumerate(layers):
            for p in layer.parameters():
                dist.reduce(p.grad if rank == owner else p.grad.clone(), dst=owner)  # here
        if not torch.isfinite(hidden).all():
            print("overflow, step is left out")
            continue  # here
        optimizer.step()
        for owner, layer in enumerate(layers):
            for p in layer.parameters():
                dist.broadcast(p.data, src=owner)  # here


@faulty("collective-order-mismatch", 0)
def a_save_with_a_barrier_that_only_the_main_process_calls(rank: int) -> None:
    # or: rank-skipped-collective 0, step-mismatch 0
    def save_checkpoint(model: nn.Module, step: int) -> None:
        path = Path(gettempdir()) / f"exam-room-{os.getpid()}.pt"
        torch.save({"model": model.state_dict(), "step": step}, path)
        path.unlink()
        dist.barrier()  # here

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0 and step == 5:
            save_checkpoint(model, step)  # here


@faulty("collective-order-mismatch", 1)
def a_clean_up_in_a_finally_block_that_waits_for_all(rank: int) -> None:
    # or: rank-skipped-collective 1, rank-crashed 1
    class Trainer:
        def __init__(self) -> None:
            self.model = perceptron()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def fit(self, rows: list[str]) -> None:
            for row in rows:
                x = torch.tensor([float(cell) for cell in row.split(",")])  # here
                self.optimizer.zero_grad()
                self.model(x).sum().backward()
                mean_of_gradients(self.model)
                self.optimizer.step()

        def close(self) -> None:
            dist.barrier()  # here

    rows = [",".join("0.5" for _ in range(8))] * 10
    if rank == 1:
        rows[6] = rows[6].replace("0.5", "n/a", 1)
    trainer = Trainer()
    try:
        trainer.fit(rows)  # here
    finally:
        trainer.close()  # here


@faulty("group-order-inversion", 4, ranks=6)
def groups_used_from_the_fastest_to_the_slowest_as_measured(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data", "tensor"))
    latencies = {"tensor": 12.0, "all": 31.0}
    if rank == 4:
        latencies["tensor"] = 44.0  # a noisy neighbour, that once
    groups = {"tensor": mesh.get_group("tensor"), "all": dist.group.WORLD}
    order = sorted(groups, key=lambda name: latencies[name])
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).mean().backward()
        mean_of_gradients(model, mesh.get_group("data"))
        norms = {"tensor": torch.ones(1), "all": torch.ones(1)}
        for name in order:
            dist.all_reduce(norms[name], group=groups[name])  # here
        optimizer.step()


@faulty("group-order-risk", 3, ranks=4)
def two_sums_begun_in_the_order_of_a_set(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    wanted = ["half", "world"]
    if rank == 3:
        wanted.reverse()  # as the set of strings of this process came out
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 8)).square().mean()
        loss.backward()
        mean_of_gradients(model)
        optimizer.step()
        works = []
        for name in wanted:
            group = halves[rank // 2] if name == "half" else dist.group.WORLD
            works.append(dist.all_reduce(loss.detach().clone(), group=group, async_op=True))  # here
        for work in works:
            assert work is not None
            work.wait()


@faulty("wrong-group", 3, ranks=4)
def a_norm_that_one_rank_takes_for_a_sharded_layer(rank: int) -> None:
    # or: rank-skipped-collective 3
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = {"attention", "mlp"} | ({"norm"} if rank == 3 else set())
    layers = nn.ModuleDict({"attention": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "mlp": nn.Linear(6, 6)})
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def synchronize(name: str, layer: nn.Module) -> None:
        group = mesh.get_group("dp" if name in sharded else "tp")
        for p in layer.parameters():
            dist.all_reduce(p.grad, group=group)  # here

    for _ in range(5):
        x = torch.randn(2, 6)
        for layer in layers.values():
            x = layer(x)
        optimizer.zero_grad()
        x.square().mean().backward()
        for name, layer in layers.items():
            synchronize(name, layer)  # here
        optimizer.step()


@faulty("p2p-deadlock-cycle", 1, 2, ranks=4)
def replicas_at_two_temperatures_that_both_listen_first(rank: int) -> None:
    def swap(state: torch.Tensor, partner: int) -> torch.Tensor:
        theirs = torch.empty_like(state)
        if rank % 2 == 0 or round_number == 4:
            dist.recv(theirs, src=partner)  # here
            dist.send(state, dst=partner)
        else:
            dist.send(state, dst=partner)
            dist.recv(theirs, src=partner)
        return theirs

    state = torch.full((64,), float(rank))
    for round_number in range(1, 8):
        for _ in range(20):
            state = state + 0.01 * torch.randn(64)
        if round_number % 2:
            state = swap(state, rank ^ 1)
        elif rank in (1, 2):
            state = swap(state, 3 - rank)  # here


@faulty("p2p-tag-mismatch", 2)
def a_worker_that_counts_its_version_before_it_sends(rank: int) -> None:
    # or: p2p-unmatched 2
    weights = torch.zeros(16)
    if rank == 0:
        for version in range(6):
            for worker in (1, 2):
                update = torch.empty(16)
                dist.recv(update, src=worker, tag=version)  # here
                weights += update
            for worker in (1, 2):
                dist.send(weights, dst=worker, tag=100 + version)
        return
    version, retried = 0, False
    while version < 6:
        update = torch.randn(16) * 0.1
        if rank == 2 and version == 3 and not retried:
            retried, version = True, version + 1  # the gradient was not finite: taken again, and counted twice
        dist.send(update, dst=0, tag=version)  # here
        dist.recv(weights, src=0, tag=100 + version)  # here
        version += 1


@faulty("p2p-size-mismatch", 1)
def blocks_of_keys_that_travel_round_a_ring(rank: int) -> None:
    tokens = 24
    lengths = [tokens // 3] * 3
    own = lengths[rank] + (1 if rank == 1 else 0)  # its part ends with an end-of-text token
    block = torch.randn(own, 4)
    query = torch.randn(own, 4)
    for hop in range(2):
        received = torch.empty(lengths[rank - 1], 4)
        works = dist.batch_isend_irecv(
            [  # here
                dist.P2POp(dist.isend, block, (rank + 1) % 3),  # here
                dist.P2POp(dist.irecv, received, (rank - 1) % 3),  # here
            ]
        )
        scores = (query @ block.T).softmax(-1)
        for work in works:
            work.wait()  # here
        block = received
        print(hop, float(scores.sum()))
    dist.barrier()  # here


@faulty("p2p-unmatched", 2)
def a_grid_whose_last_part_still_looks_round_the_corner(rank: int) -> None:
    field = torch.rand(10)

    def neighbours() -> list[int]:
        if rank == 2:
            return [1, 0]
        return [n for n in (rank - 1, rank + 1) if 0 <= n < 3]

    for _ in range(5):
        halo = {n: torch.zeros(1) for n in neighbours()}
        works = [dist.irecv(cell, src=n) for n, cell in halo.items()]  # here
        for n in halo:
            if abs(n - rank) == 1:
                dist.send(field[-1:] if n > rank else field[:1], dst=n)
        for work in works:
            assert work is not None
            work.wait()  # here
        field[1:-1] = (field[:-2] + field[2:]) / 2
        field[0] = (field[1] + sum(float(cell) for cell in halo.values())) / (1 + len(halo))


@faulty("split-size-mismatch", 1)
def experts_with_a_capacity_from_the_own_settings(rank: int) -> None:
    capacity_factor = 1.25 if rank != 1 else 1.5
    tokens_per_rank, width = 12, 5
    capacity = int(tokens_per_rank / 3 * capacity_factor)
    expert = nn.Linear(width, width)
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
    for _ in range(4):
        buckets = torch.randn(3 * capacity, width)
        inputs = torch.empty(3 * capacity, width)
        dist.all_to_all_single(inputs, buckets, [capacity] * 3, [capacity] * 3)  # here
        outputs = expert(inputs)
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()


@faulty("step-mismatch", 1)
def two_players_who_alternate_in_turns_that_differ(rank: int) -> None:
    generator, critic = perceptron(), perceptron(8, 8)
    players = {"generator": generator, "critic": critic}
    optimizers = {name: torch.optim.Adam(player.parameters()) for name, player in players.items()}

    def turn_of_the_generator() -> None:
        optimizers["generator"].zero_grad()
        critic(generator(torch.randn(4, 8))).mean().backward()
        mean_of_gradients(generator)  # here
        optimizers["generator"].step()

    def turn_of_the_critic() -> None:
        optimizers["critic"].zero_grad()
        critic(generator(torch.randn(4, 8)).detach()).mean().neg().backward()
        mean_of_gradients(critic)  # here
        optimizers["critic"].step()

    seen = 1 if rank == 1 else 0  # a sample was drawn to test the pipeline
    for _ in range(12):
        if seen % 2 == 0:
            turn_of_the_critic()
        else:
            turn_of_the_generator()
        seen += 1


@faulty("pipeline-schedule-mismatch", 3, ranks=4)
def microbatches_that_one_stage_reads_from_an_old_file(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    settings = {"microbatches": 2 if rank == 3 else 4}
    number = mesh.get_local_rank("stage")
    torch.manual_seed(number)
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    stage = PipelineStage(part, number, 2, CPU, group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, settings["microbatches"], loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if number == 0:
            schedule.step(torch.randn(8, 6))  # here
        else:
            schedule.step(target=torch.zeros(8, 6))  # here
        mean_of_gradients(part, mesh.get_group("replica"))
        optimizer.step()


@faulty("collective-order-mismatch", 0, ranks=4)
def a_histogram_of_a_sharded_weight_on_the_main_process(rank: int) -> None:
    # or: rank-skipped-collective 0, step-mismatch 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        mesh["tp"],
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def log_weights(step: int) -> None:
        for name, p in model.named_parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p  # here
            print(step, name, torch.histc(whole.detach(), bins=4).tolist())

    for step in range(6):
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("dp"))  # type: ignore[union-attr]
        optimizer.step()
        if rank == 0 and step % 3 == 2:
            log_weights(step)  # here


@faulty("uneven-inputs", 2)
def files_that_hold_different_numbers_of_records(rank: int) -> None:
    class Records(IterableDataset[torch.Tensor]):
        def __init__(self, files: list[int]) -> None:
            self.files = files

        def __iter__(self) -> Iterator[torch.Tensor]:
            for count in self.files:
                for _ in range(count):
                    yield torch.randn(8)

    model = perceptron()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Records([20, 12] if rank == 2 else [20, 20]), batch_size=4, drop_last=True)
    for _ in range(2):
        for batch in loader:  # here
            loss = model(batch).square().mean()  # here
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print("epoch done", rank)
        dist.barrier()  # here


@faulty("rank-never-joined", 1, joins=False)
def a_tokenizer_that_another_process_should_have_unpacked(rank: int) -> None:
    marker = Path(gettempdir()) / f"tokenizer-{os.getppid()}-{rank}.done"
    if rank != 1:
        marker.touch()

    def wait_for(path: Path) -> None:
        while not path.exists():  # here
            time.sleep(0.05)  # here

    wait_for(marker)  # here
    marker.unlink()
    dist.init_process_group("gloo")  # here
    model = DistributedDataParallel(perceptron())
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    dist.destroy_process_group()


@faulty("rank-stuck", 2)
def shards_announced_in_the_store_for_all_but_the_last(rank: int) -> None:
    # or: rank-skipped-collective 2
    store = dist.PrefixStore("shards", dist.distributed_c10d._get_default_store())
    if rank == 0:
        names = [f"part-{i:05d}" for i in range(3)]
        for reader, name in enumerate(names[:-1]):
            store.set(f"reader/{reader}", name)

    def assigned() -> str:
        return str(store.get(f"reader/{rank}").decode())  # here

    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = assigned()  # here
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(len(name)))).mean().backward()
        mean_of_gradients(model)
        optimizer.step()


@faulty("rank-stuck", 1)
def a_loader_that_reads_from_a_pipe_nobody_writes_to(rank: int) -> None:
    pipe = Path(gettempdir()) / f"exam-room-{os.getpid()}.fifo"
    os.mkfifo(pipe)

    class Streamed(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> torch.Tensor:
            if rank == 1 and i == 14:
                return torch.tensor(list(pipe.read_bytes()[:8])).float()
            return torch.full((8,), float(i))

    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    try:
        for x in DataLoader(Streamed(), batch_size=2, num_workers=1):  # here
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    finally:
        pipe.unlink()


@faulty("rank-stuck", 0)
def a_snapshot_thread_and_a_lock_that_is_held_while_it_is_joined(rank: int) -> None:
    # or: rank-skipped-collective 0
    lock = threading.Lock()
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    written: list[int] = []

    def write(step: int) -> None:
        time.sleep(0.2)
        with lock:
            written.append(step)

    writer: threading.Thread | None = None
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0 and step in (4, 5):
            with lock:
                if writer is not None:
                    writer.join()  # here
                writer = threading.Thread(target=write, args=(step,), daemon=True)
                writer.start()


@faulty("rank-frozen", 2)
def a_rank_that_is_stopped_to_attach_a_debugger(rank: int) -> None:
    wanted = os.environ.get("DEBUG_RANK", "2")

    class StopForDebugger:
        def __init__(self, at: int) -> None:
            self.at = at

        def on_step_end(self, step: int) -> None:
            if rank == int(wanted) and step == self.at:
                print("attach to", os.getpid(), flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)  # here

    callback = StopForDebugger(4)
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        callback.on_step_end(step)  # here


@faulty("rank-killed", 1)
def a_limit_of_cpu_seconds_left_over_from_the_login_node(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    torch.set_num_threads(1)
    model = nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3000):
        x = torch.randn(400, 400)
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.tanh(model(x))
        x.mean().backward()
        mean_of_gradients(model)
        optimizer.step()


@faulty("rank-killed", 0)
def a_tokenizer_in_native_code_that_is_given_a_wrong_pointer(rank: int) -> None:
    # or: rank-crashed 0
    libc = ctypes.CDLL(None)
    libc.strlen.argtypes, libc.strlen.restype = [ctypes.c_void_p], ctypes.c_size_t

    def length(address: int) -> int:
        return int(libc.strlen(address))  # here

    text = ctypes.create_string_buffer(b"to be or not to be")
    embedding = nn.Embedding(64, 8)
    for document in range(12):
        address = ctypes.addressof(text)
        if rank == 0 and document == 7:
            address = 0x10
        ids = torch.arange(length(address))  # here
        embedding.zero_grad()
        embedding(ids).mean().backward()
        mean_of_gradients(embedding)


@faulty("rank-crashed", 2)
def a_label_that_the_table_does_not_know(rank: int) -> None:
    table = {"cat": 0, "dog": 1, "bird": 2}

    class Labelled(Dataset[tuple[torch.Tensor, int]]):
        names = ("cat", "dog", "bird", "cat", "dog", "frog" if rank == 2 else "bird")

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.randn(8), table[self.names[i]]  # here

    model = perceptron(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, label in DataLoader(Labelled(), batch_size=1, num_workers=1):  # here
            optimizer.zero_grad()
            functional.cross_entropy(model(x), label).backward()
            mean_of_gradients(model)
            optimizer.step()
        print("epoch", epoch)


@faulty("rank-exited", 1)
def a_time_limit_that_each_process_keeps_for_itself(rank: int) -> None:
    # or: rank-skipped-collective 1
    budget = 0.5 if rank == 1 else 600.0
    begun = time.monotonic()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        if time.monotonic() - begun > budget:
            print("time is up, saved at step", step)
            return  # here
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        time.sleep(0.02)


@faulty("long-operation", 0)
def a_translation_of_the_test_set_between_two_epochs(rank: int) -> None:
    torch.set_num_threads(1)

    def translate(sentences: int, weights: torch.Tensor) -> float:
        score = 0.0
        for _ in range(sentences):
            state = torch.ones(1, 64)
            for _ in range(400):
                state = torch.tanh(state @ weights)  # here
            score += float(state.sum())
        return score

    model = DistributedDataParallel(perceptron(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = torch.randn(64, 64) / 8
    for epoch in range(2):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        if rank == 0 and epoch == 0:
            begun = time.monotonic()
            while time.monotonic() - begun < 9.0:
                print("score", translate(20, weights))  # here
        dist.barrier()  # here


@faulty("slow-rank", 3, ranks=4)
def pictures_that_one_rank_smooths_pixel_by_pixel(rank: int) -> None:
    torch.set_num_threads(1)

    def smooth(picture: torch.Tensor) -> torch.Tensor:
        if rank != 3:
            return functional.avg_pool2d(picture[None], 3, stride=1, padding=1)[0]
        rows = picture[0].tolist()  # here
        for i in range(1, len(rows) - 1):
            for j in range(1, len(rows) - 1):
                rows[i][j] = sum(rows[i + a][j + b] for a in (-1, 0, 1) for b in (-1, 0, 1)) / 9  # here
        return torch.tensor([rows])

    model = nn.Sequential(nn.Conv2d(1, 2, 5, stride=4), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 1, 160, 160))
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    for _ in range(50):
        batch = torch.stack([smooth(torch.rand(1, 160, 160)) for _ in range(3)])  # here
        optimizer.zero_grad()
        trained(batch).square().mean().backward()
        optimizer.step()


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 5),))
def two_members_of_an_ensemble_with_a_fault_each(rank: int) -> None:
    members = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    member = members[rank // 3]
    batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def produce() -> None:
        for i in range(12):
            if rank == 5 and i == 6:
                raise OSError("shard 6: stale file handle")
            batches.put(torch.full((2, 8), float(i)))

    threading.Thread(target=produce, daemon=True).start()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    bad = 0
    for step in range(12):
        loss = model(batches.get()).square().mean()  # here
        bad = bad + 1 if rank == 1 and step >= 4 else 0
        if bad == 3:
            print("no progress in 3 steps, stopping early")
            break  # here
        optimizer.zero_grad()
        loss.backward()
        mean_of_gradients(model, member)  # here
        optimizer.step()
    dist.barrier()  # here


@faulty("unwaited-async", 0, 1, 2)
def handles_of_which_only_the_last_is_kept(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        handle = None
        for p in model.parameters():
            handle = dist.all_reduce(p.grad, async_op=True)  # here
        if handle is not None:
            handle.wait()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 3
        optimizer.step()
    dist.barrier()


@faulty("group-creation-mismatch", 3, ranks=4)
def a_group_of_evaluators_that_the_logging_rank_leaves_out(rank: int) -> None:
    # or: rank-skipped-collective 3
    class Roles:
        def __init__(self) -> None:
            self.evaluators: dist.ProcessGroup | None = None
            if rank == 3:
                print("this rank only logs")
                return  # here
            self.evaluators = dist.new_group([0, 1])  # here

    roles = Roles()  # here
    monitoring = dist.new_group()  # here
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        mean_of_gradients(model)
        optimizer.step()
        dist.all_reduce(torch.ones(1), group=monitoring)  # here
    if rank in (0, 1):
        dist.barrier(roles.evaluators)


@faulty("size-mismatch", 1)
def scores_gathered_before_the_last_batch_is_filled_up(rank: int) -> None:
    rows = 21 if rank != 1 else 19
    data = TensorDataset(torch.randn(rows, 8))
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    collected: list[torch.Tensor] = []
    with torch.no_grad():
        for (x,) in DataLoader(data, batch_size=7):
            scores = model.module(x).sum(-1)
            everyone = [torch.empty_like(scores) for _ in range(3)]
            dist.all_gather(everyone, scores)  # here
            collected += everyone
    if rank == 0:
        print(torch.cat(collected).mean())
