"""Programs as an inspector writes them, who knows the list of kinds only, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules. Each uses another feature than the
usual loop over DDP. A comment `or:` names what the label accepts as well. `inspectors_twins.py` has programs that are
right.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty


class Experts(nn.Module):
    """One expert a rank; tokens go to their experts and come back."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.router, self.expert = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.numel() == 0:  # here
            return tokens  # here
        chosen = self.router(tokens).argmax(-1)
        ordered = tokens[chosen.argsort()]
        outgoing = torch.bincount(chosen, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)  # here
        mine = torch.empty(int(incoming.sum()), 6)
        dist.all_to_all_single(mine, ordered, incoming.tolist(), outgoing.tolist(), group=self.group)
        done = self.expert(mine).detach()
        back = torch.empty_like(ordered)
        dist.all_to_all_single(back, done, outgoing.tolist(), incoming.tolist(), group=self.group)
        return back * self.router(ordered).softmax(-1).amax(-1, keepdim=True)


@faulty("rank-skipped-collective", 2, ranks=4)
def experts_of_a_rank_whose_documents_are_all_filtered_out(rank: int) -> None:
    torch.manual_seed(rank)
    layer = Experts(dist.new_group(range(4)))
    head = nn.Linear(6, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()])
    for step in range(8):
        documents = torch.randn(12, 6)
        quality = torch.rand(12) if (rank, step) != (2, 4) else torch.zeros(12)
        tokens = documents[quality > 0.1]
        loss = head(layer(tokens)).sum()  # here
        loss.backward()
        for weight in head.parameters():
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()


class Meter:
    """Averages of a number over all ranks."""

    def __init__(self) -> None:
        self.best = float("inf")

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        summed = funcol.all_reduce(value.detach(), "sum", dist.group.WORLD)  # here
        return torch.as_tensor(summed) / dist.get_world_size()

    def keep_best(self, loss: torch.Tensor, model: nn.Module, path: Path) -> None:
        if loss < self.best:
            self.best = float(loss)
            text = f"{self.mean(loss):.3f}"  # here
            torch.save(model.state_dict(), path.with_suffix(f".{text}"))


@faulty("step-mismatch", 0)
def best_weights_kept_by_rank_0_under_the_name_of_a_mean(rank: int) -> None:
    torch.manual_seed(rank)  # a search: each rank trains a model of its own, and only losses are shared
    model = nn.GRU(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * (rank + 1))
    meter, path = Meter(), Path(mkdtemp()) / "best"
    for step in range(10):
        loss = (model(torch.ones(5, 2, 4))[0] - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 4 == 3:
            meter.keep_best(loss.detach(), model, path)  # here
        shown = meter.mean(loss)  # here
        if rank == 0:
            print(step, float(shown))


@faulty("collective-order-mismatch", 0)
def a_histogram_of_sharded_weights_that_only_the_logger_wants(rank: int) -> None:
    # or: rank-skipped-collective 1 2, step-mismatch 0
    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    weight = nn.Parameter(distribute_tensor(torch.randn(9, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def log(step: int) -> None:
        if rank == 0 and step % 5 == 4:
            whole = weight.detach().redistribute(placements=[Replicate()]).to_local()  # here
            print(step, torch.histc(whole, 8).tolist())

    for step in range(12):
        x = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
        loss = (x @ weight.T).square().to_local().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(step)  # here
        total = loss.detach()
        dist.all_reduce(total)  # here


@faulty("root-mismatch", 1)
def a_population_whose_best_member_sends_its_settings(rank: int) -> None:
    settings = {"lr": 0.1 * (rank + 1), "from": rank}
    scores = [0.0, 0.0, 0.0]
    model = nn.Linear(5, 1)
    for generation in range(6):
        loss = model(torch.full((4, 5), 1.0 + rank)).square().mean()
        score = 1.0 + generation * (rank == 2)
        dist.all_gather_object(scores, score)
        if rank == 1 and generation == 3:
            scores[rank] = score + 5.0 - float(loss.isnan())  # here
        best = max(range(3), key=lambda member: scores[member])  # here
        box = [settings]
        dist.broadcast_object_list(box, src=best)  # here
        settings = {**box[0], "lr": box[0]["lr"] * (0.8 + 0.2 * rank)}
    dist.barrier()


@faulty("dtype-mismatch", 2)
def shards_of_a_sequence_in_the_half_type_that_the_host_likes(rank: int) -> None:
    capabilities = {0: (9, 0), 1: (9, 0), 2: (7, 5)}
    half = torch.bfloat16 if capabilities[rank][0] >= 8 else torch.float16  # here
    norm, project = nn.LayerNorm(8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*norm.parameters(), *project.parameters()], lr=0.01)

    def gather_sequence(part: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(3 * len(part), 8, dtype=part.dtype)
        dist.all_gather_into_tensor(whole, part)  # here
        return whole.float()

    for _ in range(6):
        part = norm(torch.randn(4, 8))
        whole = gather_sequence(part.detach().to(half))  # here
        (project(part) @ whole.T).square().mean().backward()
        for weight in [*norm.parameters(), *project.parameters()]:
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 3, ranks=4)
def a_context_in_chunks_of_which_the_last_is_shorter(rank: int) -> None:
    query, key = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*query.parameters(), *key.parameters()], lr=0.01)

    def keys_of_all(keys: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(keys) for _ in range(4)]
        dist.all_gather(parts, keys.contiguous())  # here
        parts[rank] = keys
        return torch.cat(parts)

    for length in (16, 24, 12, 10, 16):
        torch.manual_seed(length)
        tokens = torch.randn(length, 8).chunk(4)[rank]  # here
        keys = keys_of_all(key(tokens).detach())  # here
        (query(tokens) @ keys.T).softmax(-1).square().sum().backward()
        for weight in query.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("split-size-mismatch", 1, ranks=4)
def tokens_dropped_over_capacity_after_the_counts_went_out(rank: int) -> None:
    torch.manual_seed(7)
    capacity = 5

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        outgoing = torch.bincount(chosen, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        if outgoing.max() > capacity:  # here
            kept = [(chosen == expert).nonzero().flatten()[:capacity] for expert in range(4)]
            outgoing = torch.tensor([len(tokens) for tokens in kept])  # here
            tokens = tokens[torch.cat(kept)]  # here
        mine = torch.empty(int(incoming.sum()), 3)
        dist.all_to_all_single(mine, tokens.contiguous(), incoming.tolist(), outgoing.tolist())  # here
        return mine

    for step in range(7):
        chosen = torch.arange(12) % 4
        if rank == 1 and step == 4:
            chosen = torch.cat([torch.zeros(7, dtype=torch.long), torch.tensor([1, 1, 2, 3, 3])])
        mine = dispatch(torch.randn(12, 3), chosen.sort().values)  # here
        load = torch.tensor(float(len(mine)))
        dist.all_reduce(load)


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def islands_that_swap_migrants_with_the_nearest_first(rank: int) -> None:
    population = torch.rand(10, 3)

    def swap(partner: int, migrants: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty_like(migrants)
        if rank < partner:
            dist.send(migrants, partner)
            dist.recv(arrived, partner)  # here
        else:
            dist.recv(arrived, partner)  # here
            dist.send(migrants, partner)
        return arrived

    for generation in range(9):
        population = population[population.sum(1).argsort()]
        population[5:] = population[:5] + 0.01 * torch.randn(5, 3)
        if generation % 3 == 2:
            for distance in range(1, 4):
                partner = (rank + distance) % 4
                population[-distance] = swap(partner, population[0].clone())  # here
    best = population.sum(1).min()
    dist.all_reduce(best, op=dist.ReduceOp.MIN)


class Rod:
    """A part of a rod that cools, with the ghost cells of its neighbours."""

    def __init__(self, rank: int, size: int) -> None:
        self.left, self.right = rank - 1, (rank + 1) % size  # here
        self.cells = torch.linspace(0.0, 1.0, 12) + rank

    def exchange(self) -> None:
        plan, ghosts = [], {}
        for neighbour, edge, ghost in ((self.left, 1, 0), (self.right, -2, -1)):
            if neighbour >= 0:
                ghosts[ghost] = torch.empty(1)
                plan.append(dist.P2POp(dist.isend, self.cells[edge].reshape(1).clone(), neighbour))
                plan.append(dist.P2POp(dist.irecv, ghosts[ghost], neighbour))  # here
        for work in dist.batch_isend_irecv(plan):  # here
            work.wait()  # here
        for ghost, value in ghosts.items():
            self.cells[ghost] = value.item()


@faulty("p2p-unmatched", 3, ranks=4)
def a_rod_whose_last_part_believes_that_it_is_a_ring(rank: int) -> None:
    rod = Rod(rank, 4)
    for step in range(20):
        rod.exchange()  # here
        cells = rod.cells
        cells[1:-1] += 0.2 * (cells[2:] - 2 * cells[1:-1] + cells[:-2])
        if step % 10 == 9:
            heat = cells[1:-1].sum()
            dist.all_reduce(heat)


@faulty("p2p-size-mismatch", 1, ranks=2)
def features_for_a_head_that_pads_its_targets(rank: int) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD(body.parameters() if rank == 0 else head.parameters(), lr=0.1)
    for rows in (8, 8, 8, 6, 8):
        if rank == 0:
            features = body(torch.randn(rows, 4))
            dist.send(features.detach(), 1)  # here
            gradient = torch.empty_like(features)
            dist.recv(gradient, 1)
            features.backward(gradient)
        else:
            targets = torch.zeros(rows, dtype=torch.long)
            targets = nn.functional.pad(targets, (0, -rows % 8), value=-100)  # here
            features = torch.zeros(len(targets), 8)  # here
            dist.recv(features, 0)  # here
            features.requires_grad_()
            nn.functional.cross_entropy(head(features), targets).backward()
            dist.send(features.grad[:rows].contiguous(), 0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("group-order-inversion", 1)
def a_checkpoint_ahead_of_the_gradients_when_the_disk_fills(rank: int) -> None:
    folder = Path(gettempdir()) / f"inspectors-{os.environ['MASTER_PORT']}"
    savers = dist.new_group(backend="gloo")
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def save(step: int) -> None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / str(step), process_group=savers)  # here

    def average() -> None:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # here

    for step in range(1, 9):
        model(torch.randn(5, 6)).square().mean().backward()
        is_due = step % 2 == 0
        free = 0.01 if (rank, step) == (1, 6) else 0.4
        if is_due and free < 0.05:
            save(step)  # here
        average()  # here
        optimizer.step()
        optimizer.zero_grad()
        if is_due and free >= 0.05:
            save(step)  # here


class RowParallel(nn.Module):
    """Its output is the sum over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.part = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.part(x)
        summed = partial.detach().clone()
        dist.all_reduce(summed, group=self.group)  # here
        return partial + (summed - partial).detach()


@faulty("wrong-group", 1, ranks=4)
def a_block_built_anew_with_the_other_axis_of_the_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    blocks = nn.ModuleList(RowParallel(mesh.get_group("tensor")) for _ in range(2))
    for step in range(8):
        if rank == 1 and step == 3:  # its weights had NaN: reset the block
            blocks[1] = RowParallel(mesh.get_group(0))  # here
        x = torch.full((4, 4), 1.0 + rank)
        loss = sum(block(x).square().mean() for block in blocks)  # here
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        for weight in blocks.parameters():
            dist.all_reduce(weight.grad, group=mesh.get_group("data"))
            weight.data -= 0.01 * weight.grad
            weight.grad = None


@faulty("pipeline-schedule-mismatch", 2)
def stages_that_count_microbatches_by_the_rows_of_their_own_file(rank: int) -> None:
    torch.manual_seed(rank)
    rows = {0: 12, 1: 12, 2: 8}[rank]  # here
    stage = PipelineStage(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=rows // 2, loss_fn=nn.functional.mse_loss)  # here
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    for _ in range(3):
        if rank == 0:
            schedule.step(torch.randn(rows, 6))  # here
        elif rank == 2:
            schedule.step(target=torch.zeros(rows, 6))  # here
        else:
            schedule.step()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-creation-mismatch", 3, ranks=4)
def groups_made_anew_after_a_restart_by_those_who_train(rank: int) -> None:
    roles = ["trainer", "trainer", "trainer", "evaluator"]

    def begin() -> tuple[dist.ProcessGroup | None, str]:
        told = [""] * 4
        dist.all_gather_object(told, roles[rank])
        trainers = [i for i, role in enumerate(told) if role == "trainer"]
        if told[rank] == "trainer" or len(trainers) == 4:  # here
            return dist.new_group(trainers), told[rank]  # here
        return None, told[rank]  # here

    def attempt(group: dist.ProcessGroup | None, steps: int) -> None:
        weight = torch.ones(5)
        for _ in range(steps):
            if group is not None:
                dist.all_reduce(weight, group=group)
        dist.broadcast(weight, src=0)  # here

    everyone = dist.new_group(range(4))
    attempt(everyone, 3)
    again = dist.PrefixStore("attempt-1", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=again, rank=rank, world_size=4)
    group, role = begin()  # here
    print("back as", role)
    attempt(group, 5)  # here


@faulty("rank-never-joined", 2, joins=False)
def a_tokenised_file_that_is_written_once_all_have_met(rank: int) -> None:
    done = Path(gettempdir()) / f"inspectors-tokens-{os.environ['MASTER_PORT']}"

    class Corpus:
        def __init__(self) -> None:
            if rank == 0:
                done.write_text(" ".join(map(str, range(1000))))
            dist.barrier()

        def tokens(self) -> list[int]:
            return [int(word) for word in done.read_text().split()]

    def wait_for_cache() -> None:
        while not done.exists():  # here
            time.sleep(0.05)  # here

    if rank == 2:  # its disk is mounted late
        wait_for_cache()  # here
    dist.init_process_group("gloo")  # here
    total = torch.tensor(float(sum(Corpus().tokens()[rank::3])))
    dist.all_reduce(total)
    dist.destroy_process_group()


@faulty("uneven-inputs", 1, ranks=4)
def shards_of_replicas_of_which_one_has_a_batch_fewer(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(36 if rank == 1 else 40, 8))
    seen = 0
    for (batch,) in DataLoader(data, batch_size=4):  # here
        model(batch).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
    counts = [0] * 4
    dist.all_gather_object(counts, seen)  # here
    if rank == 0:
        print("seen", counts)


@faulty("unwaited-async", 0, 1, 2)
def local_steps_whose_average_is_divided_before_it_is_there(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    class Averager:
        def __init__(self, every: int) -> None:
            self.every, self.steps = every, 0

        def step(self) -> None:
            self.steps += 1
            if self.steps % self.every:
                return
            for weight in model.parameters():
                dist.all_reduce(weight.data, async_op=True)  # here
            for weight in model.parameters():
                weight.data /= dist.get_world_size()  # here

    averager = Averager(4)
    for _ in range(16):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()  # here
    dist.barrier()


TABLE = torch.randn(50, 4)


def look_up(indices: list[int]) -> torch.Tensor:
    """Rows of the table that rank 0 holds."""
    return TABLE[torch.tensor(indices)]  # here


@faulty("rank-crashed", 1)
def an_embedding_far_away_that_lacks_the_newest_word(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    tower = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)

    def fetch(words: list[int]) -> torch.Tensor:
        return rpc.rpc_sync("worker0", look_up, args=(words,))  # here

    for step in range(8):
        words = [(7 * step + 3 * rank + i) % 50 for i in range(5)]
        if rank == 1 and step == 5:
            words[2] = 50
        rows = fetch(words)  # here
        tower(rows).square().mean().backward()
        for weight in tower.parameters():
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()
    rpc.shutdown()


@faulty("rank-skipped-collective", 1, ranks=4, also=(("rank-stuck", 3),))
def features_awaited_under_another_key_and_a_budget_that_is_spent(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    spent = 0.0
    for epoch in range(4):
        if rank == 0:
            store.set(f"features/{epoch}", "ready")
        name = f"features/{epoch}" if (rank, epoch) != (3, 2) else f"features/{epoch:02d}"  # here
        store.wait([name], timedelta(minutes=20))  # here
        spent += 1.0 if rank != 1 else 1.7
        if spent > 4.2:  # here
            print("budget is spent")
            break  # here
        score = torch.tensor(float(epoch + rank))
        dist.all_reduce(score, group=pair)  # here
    dist.barrier()  # here


@faulty("rank-frozen", 5, ranks=6, also=(("reduce-op-mismatch", 2),))
def numbers_of_nodes_reduced_by_their_type_and_a_member_that_is_suspended(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]

    def combine(numbers: dict[str, float]) -> dict[str, float]:
        combined = {}
        for name, number in sorted(numbers.items()):
            op = dist.ReduceOp.MAX if isinstance(number, int) else dist.ReduceOp.SUM  # here
            value = torch.tensor(float(number))
            dist.all_reduce(value, op=op, group=nodes[rank // 3])  # here
            combined[name] = float(value)
        return combined

    for step in range(6):
        losses = [0.5 + rank, 0.25] if (rank, step) != (2, 2) else []
        if (rank, step) == (5, 4):
            os.kill(os.getpid(), signal.SIGSTOP)  # a batch system suspends it  # here
        numbers = combine({"loss": sum(losses), "memory": 100 + rank})  # here
        total = torch.tensor(numbers["loss"])
        dist.all_reduce(total)  # here
