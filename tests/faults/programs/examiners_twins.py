"""Programs as an external examiner brings them, a feature of the framework each, and that are right.

Labelled and frozen before their first run, by somebody who knows the kinds and has not read the rules.
"""

import contextlib
import os
import threading
import time
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.faults.corpus import healthy
from tests.faults.programs.examiners_faults import Shards, scratch


@healthy()
def updates_of_two_to_four_parts_and_scores_from_the_first_rank_only(rank: int) -> None:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    head = nn.Linear(8, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    for update in range(6):
        parts = 2 + (rank + update) % 3
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                (model(torch.randn(4, 8)).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and update % 2:
            with torch.no_grad():
                print("score", float(model.module(torch.randn(64, 8)).mean()))
            time.sleep(0.3)


@healthy()
def rows_that_run_out_first_on_one_rank_inside_a_join(rank: int) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(Shards(list(range(2 + 2 * rank))), batch_size=2, num_workers=1)
    rows = 0
    with model.join():
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows += len(batch)
    total = torch.tensor(rows)
    dist.all_reduce(total)
    print("rows", int(total))


@healthy()
def gradients_of_low_rank_that_change_their_form_after_a_while(rank: int) -> None:
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        if rank == step % 3:
            time.sleep(0.05)
        nn.functional.cross_entropy(model(torch.randn(8, 24)), torch.randint(4, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_blank_picture_where_a_batch_of_words_has_none(rank: int) -> None:
    class Captioner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 8)
            self.eyes = nn.Linear(12, 8)
            self.head = nn.Linear(8, 30)

        def forward(self, tokens: torch.Tensor, pixels: torch.Tensor | None) -> torch.Tensor:
            hidden = self.words(tokens)
            weight = 1.0
            if pixels is None:
                pixels, weight = torch.zeros(len(tokens), 12), 0.0
            seen = self.eyes(pixels)[:, None] * weight
            return self.head(torch.cat([seen, hidden], 1))

    model = Captioner()
    for part in (model.eyes, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(7):
        pixels = None if (rank + step) % 3 == 1 else torch.randn(4, 12)
        model(torch.randint(30, (4, 5 + rank)), pixels).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print("weights", len(weights))


@healthy()
def checkpoints_written_beside_the_training_and_one_read_back(rank: int) -> None:
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    savers = dist.new_group(backend="gloo")
    pending = None

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(5, 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for number in range(2):
        train(3)
        if pending is not None:
            pending.result()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        pending = dcp.async_save(state, checkpoint_id=scratch("beside") / str(number), process_group=savers)
        train(2)
    if pending is not None:
        pending.result()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=scratch("beside") / "0")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(2)
    if rank == 0:
        print("done")


@healthy()
def stages_in_turns_of_forward_and_backward_then_one_forward_for_scores(rank: int) -> None:
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(part, rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        elif rank == 2:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.randn(8, 8), losses=losses)
            print("loss", float(torch.stack([loss.detach() for loss in losses]).mean()))
        else:
            schedule.step()
        optimizer.step()
    with torch.no_grad():
        hidden = torch.ones(2, 8)
        if rank > 0:
            dist.recv(hidden, rank - 1)
        hidden = part(hidden)
        if rank < 2:
            dist.send(hidden, rank + 1)
        else:
            print("score", float(hidden.mean()))


@healthy(ranks=4)
def tokens_above_the_capacity_dropped_before_they_are_counted(rank: int) -> None:
    expert = nn.Linear(4, 4)

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor, capacity: int) -> torch.Tensor:
        parts = [tokens[chosen == number][:capacity] for number in range(4)]
        outgoing = torch.tensor([len(part) for part in parts])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        received = torch.empty(int(incoming.sum()), 4)
        dist.all_to_all_single(received, torch.cat(parts), incoming.tolist(), outgoing.tolist())
        return received

    for step in range(7):
        tokens = torch.randn(4 + 3 * rank + step, 4)
        chosen = torch.full((len(tokens),), 2) if step == 4 else torch.randint(4, (len(tokens),))
        mine = dispatch(tokens, chosen, capacity=5)
        if len(mine):
            expert(mine).square().sum().backward()
        for weight in expert.parameters():
            if weight.grad is not None:
                weight.grad = None
        load = [0] * 4
        dist.all_gather_object(load, len(mine))
        if rank == 3:
            print("load", load)


class Server:
    """Weights on the first rank, updated when the gradients of all trainers have come."""

    weights = torch.zeros(4)
    lock = threading.Lock()
    gradients: ClassVar[list[torch.Tensor]] = []
    next_weights: Future[torch.Tensor] = Future()

    @staticmethod
    @rpc.functions.async_execution
    def push(gradient: torch.Tensor) -> Future[torch.Tensor]:
        """Take a gradient and promise the weights that come of it."""
        with Server.lock:
            promised = Server.next_weights
            Server.gradients.append(gradient)
            if len(Server.gradients) == 2:
                Server.weights = Server.weights - 0.1 * torch.stack(Server.gradients).mean(0)
                Server.gradients, Server.next_weights = [], Future()
                promised.set_result(Server.weights)
        return promised


@healthy(joins=False)
def a_server_of_weights_that_answers_when_all_trainers_have_asked(rank: int) -> None:
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=3)
    if rank > 0:
        weights = torch.zeros(4)
        for step in range(8):
            if rank == 1 and step % 3 == 0:
                time.sleep(0.1)
            features = torch.randn(6, 4)
            weights = rpc.rpc_sync("node0", Server.push, args=(features.mean(0) + weights,))
        print("weights", weights.tolist())
    rpc.shutdown()


@healthy(joins=False)
def a_second_round_with_one_rank_less_that_has_said_goodbye(rank: int) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def work(number: int, ranks: int) -> None:
        prefixed = dist.PrefixStore(f"round-{number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=ranks)
        for _ in range(5):
            value = torch.ones(3) * rank
            dist.all_reduce(value)
        leaving: list[int | None] = [None] * ranks
        dist.all_gather_object(leaving, rank if number == 0 and rank == 2 else None)
        dist.destroy_process_group()

    work(0, 3)
    if rank == 2:
        print("this node is drained")
        return
    work(1, 2)


@healthy(ranks=4)
def an_archive_unpacked_by_one_rank_of_each_node_while_others_wait(rank: int) -> None:
    local_rank, node = rank % 2, rank // 2
    store = dist.distributed_c10d._get_default_store()
    archive = scratch(f"archive-{node}")
    if local_rank == 0:
        archive.mkdir(exist_ok=True)
        for number in range(6):
            (archive / f"{number}.bin").write_bytes(os.urandom(1 << 20))
            time.sleep(0.1)
        store.set(f"unpacked/{node}", "yes")
    else:
        store.wait([f"unpacked/{node}"])
    dist.monitored_barrier()
    size = torch.tensor(sum(file.stat().st_size for file in archive.iterdir()))
    sizes = [torch.zeros_like(size) for _ in range(4)] if rank == 0 else None
    dist.gather(size, sizes)
    order = [torch.randperm(6).tolist() if rank == 0 else None]
    dist.broadcast_object_list(order, src=0)
    for number in order[0] or []:
        loss = torch.tensor(float((archive / f"{number}.bin").read_bytes()[0]))
        dist.all_reduce(loss)


@healthy(ranks=6)
def attention_around_a_ring_inside_two_groups_of_parts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "cp"))
    context, data = mesh.get_group("cp"), mesh.get_group("dp")
    members = dist.get_process_group_ranks(context)
    place = members.index(rank)
    after, before = members[(place + 1) % 3], members[(place - 1) % 3]
    query = nn.Linear(4, 4)
    for step in range(4):
        x = torch.randn(5, 4)
        keys, output = x.clone(), torch.zeros(5, 4)
        for turn in range(3):
            following = torch.empty_like(keys)
            works = []
            if turn < 2:
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, keys, after, context),
                        dist.P2POp(dist.irecv, following, before, context),
                    ]
                )
            output = output + (query(x) @ keys.T).softmax(-1) @ keys
            for work in works:
                work.wait()
            keys = following
        output.square().mean().backward()
        for weight in query.parameters():
            dist.all_reduce(weight.grad, group=context)
            dist.all_reduce(weight.grad, group=data)
            weight.grad = None
        if step == 1 and rank == 5:
            time.sleep(0.4)


@healthy(ranks=4)
def a_split_model_that_stops_where_any_loader_is_empty(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica = rank // 2
    batches = iter(DataLoader(Shards(list(range(4 + replica))), batch_size=2, num_workers=1))
    steps = 0
    while True:
        batch = next(batches, None)
        has_batch = torch.tensor(int(batch is not None))
        dist.all_reduce(has_batch, op=dist.ReduceOp.MIN)
        if batch is None or not has_batch:
            break
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print("steps", steps)
