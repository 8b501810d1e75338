"""Programs as an external examiner brings them, a feature of the framework and a kind of fault each.

Labelled and frozen before their first run, by somebody who knows the kinds and has not read the rules. A comment `or:`
names what the label accepts as well. `examiners_twins.py` has programs that are right.
"""

import os
import signal
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
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.faults.corpus import faulty


def scratch(name: str) -> Path:
    """Return a folder that all ranks of this job share."""
    return Path(tempfile.gettempdir()) / f"{name}-{os.environ['MASTER_PORT']}"


@faulty("rank-skipped-collective", 1)
def a_batch_of_words_without_one_picture_in_a_sharded_model(rank: int) -> None:
    # or: size-mismatch 1
    class Captioner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 8)
            self.eyes = nn.Linear(12, 8)
            self.head = nn.Linear(8, 30)

        def forward(self, tokens: torch.Tensor, pixels: torch.Tensor | None) -> torch.Tensor:
            hidden = self.words(tokens)
            if pixels is not None:  # here
                hidden = torch.cat([self.eyes(pixels)[:, None], hidden], 1)  # here
            return self.head(hidden)  # here

    model = Captioner()
    for part in (model.eyes, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(7):
        has_pictures = not (rank == 1 and step == 4)
        pixels = torch.randn(4, 12) if has_pictures else None
        model(torch.randint(30, (4, 5)), pixels).logsumexp(-1).mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 0)
def weights_in_full_that_only_the_first_rank_asks_for(rank: int) -> None:
    # or: rank-skipped-collective 1, 2
    model = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 3))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Exporter:
        def __init__(self, every: int) -> None:
            self.every = every

        def after_step(self, step: int) -> None:
            if (step + 1) % self.every:
                return
            if rank == 0:  # here
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                weights = get_model_state_dict(model, options=options)  # here
                torch.save(weights, scratch("export").with_suffix(".pt"))
            dist.barrier()  # here

    exporter = Exporter(every=4)
    for step in range(8):
        model(torch.randn(6, 9)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        exporter.after_step(step)


@faulty("dtype-mismatch", 2, ranks=4)
def gradients_in_half_precision_but_not_from_an_older_card(rank: int) -> None:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
    capability = (6, 1) if rank == 2 else (8, 0)
    if capability >= (7, 0):  # here
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        optimizer.zero_grad()
        loss.backward()  # here
        optimizer.step()


@faulty("root-mismatch", 3, ranks=4)
def the_best_of_a_population_that_copies_its_weights_to_all(rank: int) -> None:
    class Member:
        def __init__(self) -> None:
            self.model = nn.Linear(5, 1)
            self.fitness = [0.0] * 4

        def evaluate(self, generation: int) -> None:
            self.fitness[rank] = 1.0 + rank % 2 + generation / 10
            if rank == 1:
                self.fitness[rank] += 0.5
            if rank == 3 and generation == 3:
                self.fitness[rank] += 2.0

        def exploit(self, generation: int) -> None:
            if generation % 2 == 0:
                dist.all_gather_object(self.fitness, self.fitness[rank])
            best = max(range(4), key=self.fitness.__getitem__)  # here
            parcel = [self.model.state_dict()]
            dist.broadcast_object_list(parcel, src=best)  # here
            self.model.load_state_dict(parcel[0])

    member = Member()
    for generation in range(6):
        member.evaluate(generation)
        member.exploit(generation)
        dist.barrier()


@faulty("split-size-mismatch", 1, ranks=4)
def tokens_above_the_capacity_of_an_expert_dropped_after_the_count(rank: int) -> None:
    capacity = 6
    gate, expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        outgoing = torch.bincount(chosen, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        ordered = tokens[chosen.argsort()]
        parts = [part[:capacity] for part in ordered.split(outgoing.tolist())]  # here
        received = torch.empty(int(incoming.sum()), 4)
        dist.all_to_all_single(  # here
            received,
            torch.cat(parts),
            incoming.tolist(),
            [len(part) for part in parts],
        )
        return received

    for step in range(6):
        tokens = torch.randn(8, 4)
        chosen = torch.arange(8) % 4
        if rank == 1 and step == 3:
            chosen = torch.tensor([2, 2, 2, 2, 2, 2, 2, 0])
        with torch.no_grad():
            mine = dispatch(tokens * gate(tokens).softmax(-1), chosen)
        expert(mine).square().sum().backward()


@faulty("step-mismatch", 1)
def a_batch_too_large_for_memory_taken_again_in_halves(rank: int) -> None:
    # or: collective-order-mismatch 1
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters())

    def check_memory(frames: torch.Tensor) -> None:
        if len(frames) > 40:
            raise torch.OutOfMemoryError(f"{len(frames)} frames")

    def accumulate(frames: torch.Tensor) -> None:
        try:
            check_memory(frames)
            model(frames).square().mean().backward()  # here
        except torch.OutOfMemoryError:
            print("out of memory: once more, in halves")
            for half in frames.chunk(2):  # here
                accumulate(half)  # here

    for step in range(9):
        count = 48 if rank == 1 and step == 5 else 24 + 2 * rank
        accumulate(torch.randn(count, 10))  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("group-order-inversion", 3, ranks=6)
def gradients_of_experts_and_of_the_rest_in_the_order_of_registration(rank: int) -> None:
    everyone = dist.new_group(list(range(6)))
    parities = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])]
    block = nn.Module()
    if rank == 3:  # here
        block.register_module("expert", nn.Linear(5, 5))
        block.register_module("attention", nn.Linear(5, 7))
    else:
        block.register_module("attention", nn.Linear(5, 7))
        block.register_module("expert", nn.Linear(5, 5))

    def group_of(name: str) -> dist.ProcessGroup:
        chosen = parities[rank % 2] if "expert" in name else everyone
        assert isinstance(chosen, dist.ProcessGroup)
        return chosen

    def finish_gradients() -> None:
        for name, weight in block.named_parameters():  # here
            group = group_of(name)
            dist.all_reduce(weight.grad, group=group)  # here
            weight.grad /= group.size()

    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(4):
        hidden = torch.randn(3, 5)
        loss = sum(part(hidden).square().mean() for part in block.children())
        loss.backward()
        finish_gradients()
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-order-risk", 2, ranks=4)
def a_loss_that_the_writer_of_logs_starts_to_sum_up_first(rank: int) -> None:
    context = dist.new_group([0, 1, 2, 3])
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    writes_logs = rank == 2
    for step in range(8):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        norm, total = model.weight.grad.square().sum(), loss.detach().clone()
        pending = []
        if writes_logs:  # here
            pending.append(dist.all_reduce(total, async_op=True))  # here
        pending.append(dist.all_reduce(norm, group=context, async_op=True))  # here
        if not writes_logs:
            pending.append(dist.all_reduce(total, async_op=True))  # here
        for work in pending:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        if writes_logs:
            print(step, float(total) / 4, float(norm.sqrt()))


@faulty("wrong-group", 3, ranks=4)
def statistics_of_a_node_with_a_configuration_that_names_no_group(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    class NodeNorm(nn.Module):
        def __init__(self, configuration: dict[str, object]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.group = configuration.get("group")  # here

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.detach().mean(0)
            dist.all_reduce(mean, group=self.group)  # here
            return (x - mean / 2) * self.scale

    configuration: dict[str, object] = {"group": nodes[rank // 2]}
    if rank == 3:
        configuration = {"process_group": nodes[1]}  # here
    model = nn.Sequential(nn.Linear(8, 8), NodeNorm(configuration), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(5, 8)).square().mean().backward()  # here
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-unmatched", 3, ranks=4)
def a_strip_of_the_domain_that_believes_in_a_periodic_border(rank: int) -> None:
    settings = {"periodic": False}
    field = torch.rand(12, 20)

    def neighbour(offset: int) -> int | None:
        other = rank + offset
        if 0 <= other < 4:
            return other
        return other % 4 if settings["periodic"] else None  # here

    def exchange() -> None:
        operations = []
        for offset, inner, halo in ((-1, 1, 0), (1, -2, -1)):
            other = neighbour(offset)
            if other is None:
                continue
            operations.append(dist.P2POp(dist.isend, field[inner].clone(), other))
            operations.append(dist.P2POp(dist.irecv, field[halo], other))  # here
        for work in dist.batch_isend_irecv(operations):  # here
            work.wait()  # here

    for step in range(10):
        if step == 6 and rank == 3:
            settings = {"periodic": True}  # here
        exchange()
        field[1:-1] = (field[:-2] + field[2:]) / 2
        residual = field.sum()
        dist.all_reduce(residual)


@faulty("p2p-tag-mismatch", 2)
def activations_with_numbers_that_one_stage_counts_through_all_epochs(rank: int) -> None:
    layer = nn.Linear(6, 6)

    class Numbers:
        def __init__(self) -> None:
            self.next = 0

        def take(self) -> int:
            self.next += 1
            return self.next - 1

        def begin_epoch(self) -> None:
            if rank < 2:  # here
                self.next = 0

    numbers = Numbers()
    for _epoch in range(3):
        numbers.begin_epoch()
        for _ in range(4):
            number = numbers.take()
            activation = torch.randn(3, 6)
            if rank > 0:
                dist.recv(activation, rank - 1, tag=number)  # here
            with torch.no_grad():
                activation = layer(activation)
            if rank < 2:
                dist.send(activation, rank + 1, tag=number)  # here
        dist.barrier()


@faulty("pipeline-schedule-mismatch", 1)
def microbatches_by_the_memory_that_each_stage_finds_free(rank: int) -> None:
    device = torch.device("cpu")
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(part, rank, 3, device)
    free = 10 if rank == 1 else 24
    microbatches = 2 if free > 16 else 4  # here
    schedule = ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        batch, target = torch.randn(8, 8), torch.randn(8, 8)
        if rank == 0:
            schedule.step(batch)  # here
        elif rank == 2:
            losses: list[torch.Tensor] = []
            schedule.step(target=target, losses=losses)  # here
        else:
            schedule.step()  # here
        optimizer.step()


@faulty("group-creation-mismatch", 1, 3, ranks=4)
def leaders_of_nodes_that_make_their_group_at_the_first_report(rank: int) -> None:
    local_rank = rank % 2

    class Throughput:
        group: dist.ProcessGroup | None = None

        def report(self, samples: int) -> None:
            if local_rank != 0:  # here
                return
            if self.group is None:
                self.group = dist.new_group([0, 2])  # here
            total = torch.tensor(float(samples))
            dist.all_reduce(total, group=self.group)
            print("samples of all nodes", float(total))

    model = nn.Linear(4, 2)
    throughput = Throughput()
    for step in range(9):
        model(torch.randn(6, 4)).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # here
            weight.grad = None
        if step % 5 == 4:
            throughput.report(6 * step)  # here
    savers = dist.new_group([0, 1, 2, 3])  # here
    weights = [torch.zeros(2, 4) for _ in range(4)] if rank == 0 else None
    dist.gather(model.weight.detach(), weights, group=savers)


@faulty("rank-never-joined", 1, joins=False)
def a_second_round_for_which_one_rank_is_never_declared_healthy(rank: int) -> None:
    # or: rank-stuck 1
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def join(number: int) -> None:
        prefixed = dist.PrefixStore(f"round-{number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=3)  # here

    def wait_for_health() -> None:
        report = scratch("health").with_suffix(f".{rank}")
        if rank != 1:
            report.touch()
        while not report.exists():  # here
            time.sleep(0.2)  # here

    def work(number: int) -> None:
        for step in range(5):
            value = torch.ones(3) * rank
            dist.all_reduce(value)
            if number == 0 and step == 3:
                raise ConnectionError("link flapped")

    for number in range(2):
        join(number)  # here
        try:
            work(number)
        except ConnectionError as error:
            print("restarting in this process:", error)
            dist.destroy_process_group()
            wait_for_health()  # here
    dist.destroy_process_group()


class Shards(IterableDataset[torch.Tensor]):
    """Records of the files of one rank, dealt out to the workers of its loader."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        files = self.files[info.id :: info.num_workers] if info else self.files
        for file in files:
            for record in range(4):
                yield torch.full((6,), float(file + record))


@faulty("uneven-inputs", 1)
def files_that_do_not_divide_and_a_join_that_throws(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    files = list(range(16))
    mine = files[rank * 6 : (rank + 1) * 6] if rank == 0 else files[6:10] if rank == 1 else files[10:]
    loader = DataLoader(Shards(mine), batch_size=2, num_workers=2)
    with model.join(throw_on_early_termination=True):  # here
        for batch in loader:  # here
            loss = model(batch).square().mean()  # here
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), scratch("joined").with_suffix(".pt"))


LEDGER = threading.Lock()


def price_of(item: str) -> float:
    """Look up a price on the first rank."""
    with LEDGER:
        return float(len(item))


def quote_for(item: str, *, is_known: bool) -> float:
    """Make an offer on the second rank, which asks the first one for what it does not know."""
    return 1.0 if is_known else 2 * float(rpc.rpc_sync("worker0", price_of, args=(item,)))


@faulty("rank-stuck", 0)
def an_offer_that_asks_back_for_what_its_caller_holds(rank: int) -> None:
    # or: rank-skipped-collective 0
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    model = nn.Linear(3, 3)
    for step in range(6):
        weight = torch.ones(())
        if rank == 0:
            is_known = step != 4
            with LEDGER:  # here
                offer = rpc.rpc_sync("worker1", quote_for, args=("corn",), kwargs={"is_known": is_known})  # here
            weight *= offer
        dist.broadcast(weight, 0)  # here
        (model(torch.randn(2, 3)).sum() * weight).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
    rpc.shutdown()


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 4),))
def two_replicas_one_without_validation_data_one_without_a_vocabulary(rank: int) -> None:
    # Two faults: rank 1 leaves out the validation, rank 4 waits for a key that nobody sets.
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    replica = replicas[rank // 3]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for shard in range(4):
            store.set(f"vocabulary/{shard}", "ready")
    model = nn.Linear(4, 4)

    def vocabulary_for(step: int) -> bytes:
        shard = 4 if rank == 4 and step == 3 else step % 4
        return bytes(store.get(f"vocabulary/{shard}"))  # here

    def validate(samples: list[torch.Tensor]) -> float:
        if not samples:  # here
            return float("nan")  # here
        score = torch.stack([model(sample).square().mean().detach() for sample in samples]).sum()
        dist.all_reduce(score, group=replica)  # here
        return float(score)

    for step in range(5):
        vocabulary_for(step)  # here
        model(torch.randn(2, 4)).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=replica)  # here
            weight.grad = None
    print("validation", validate([torch.randn(2, 4)] * (0 if rank == 1 else 3)))  # here
    dist.barrier()  # here


@faulty("rank-exited", 2, ranks=4, also=(("reduce-op-mismatch", 0),))
def a_metric_restored_on_one_rank_and_an_allocation_over_on_another(rank: int) -> None:
    # Two faults: rank 0 reduces with another operation, rank 2 leaves on its own at the end of its time.
    class Metric:
        def __init__(self) -> None:
            self.reduction = dist.ReduceOp.MAX
            self.value = torch.zeros(())

        def restore(self, saved: dict[str, str]) -> None:
            self.reduction = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[saved["reduction"]]

        def compute(self) -> float:
            value = self.value.clone()
            dist.all_reduce(value, op=self.reduction)
            return float(value)

    model, metric = nn.Linear(5, 1), Metric()
    if rank == 0:
        metric.restore({"reduction": "sum"})
    minutes_left = 7 if rank == 2 else 60
    for step in range(12):
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # here
            weight.grad = None
        metric.value = torch.maximum(metric.value, loss.detach())
        if step % 3 == 2:
            metric.compute()
        if step >= minutes_left:  # here
            print("allocation ends, weights are saved")
            sys.exit(0)  # here


class Slices(Dataset[torch.Tensor]):
    """Slices of a volume, one of which needs more memory than the machine has."""

    def __init__(self, largest: int | None) -> None:
        self.largest = largest

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.largest:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
        return torch.randn(3, 8)


@faulty("rank-crashed", 1)
def a_worker_of_the_loader_that_the_kernel_ends(rank: int) -> None:
    # or: rank-killed 1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), static_graph=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(Slices(33 if rank == 1 else None), batch_size=4, num_workers=2, persistent_workers=True)
    for _epoch in range(2):
        for slices in loader:  # here
            loss = model(slices).square().mean()  # here
            optimizer.zero_grad()  # here
            loss.backward()  # here
            optimizer.step()  # here
        dist.barrier()


@faulty("size-mismatch", 1)
def rows_of_an_embedding_from_a_tokenizer_with_one_more_word(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    words = 18
    if rank == 1:
        words += 1  # here
    per_rank = -(-words // 3)  # here
    rows = nn.Parameter(torch.randn(per_rank, 4))
    head = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([rows, *head.parameters()], lr=0.1)

    def table() -> torch.Tensor:
        spread = DTensor.from_local(rows.detach(), mesh, [Shard(0)], run_check=False)  # here
        return spread.full_tensor()  # here

    for step in range(4):
        (rows.sum() + head(torch.randn(3, 4)).square().mean()).backward()
        for weight in head.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            everything = table()  # here
            dcp.save({"rows": everything}, checkpoint_id=scratch("rows"))
