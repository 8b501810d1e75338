"""Programs as visitors bring them, each from a field of its own, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.visitors_faults import network, share_gradients


@healthy()
def utterances_of_which_some_ranks_have_fewer_in_each_update(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    for update in range(5):
        utterances = [torch.randn(5 + i, 8) for i in range(1 + (rank + update) % 3)]
        for number, frames in enumerate(utterances, start=1):
            is_last = number == len(utterances)
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(frames).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@healthy()
def sentences_that_run_out_on_one_rank_first_and_are_joined(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(16 + 8 * rank, 8))
    for _ in range(2):
        with model.join():
            for (batch,) in DataLoader(data, batch_size=4):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()


@healthy(ranks=4)
def experts_that_get_other_numbers_of_tokens_or_none(rank: int) -> None:
    router, expert = nn.Linear(6, 4), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.05)
    for step in range(6):
        tokens = torch.randn(3 + rank + step, 6)
        chosen = torch.zeros(len(tokens), dtype=torch.long) if step == 2 else router(tokens).argmax(-1)
        ordered = tokens[chosen.argsort()]
        outgoing = torch.bincount(chosen, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        mine = torch.empty(int(incoming.sum()), 6)
        dist.all_to_all_single(mine, ordered, incoming.tolist(), outgoing.tolist())
        done = expert(mine) if len(mine) else mine
        back = torch.empty_like(ordered)
        dist.all_to_all_single(back, done.detach(), outgoing.tolist(), incoming.tolist())
        (router(ordered).softmax(-1).amax(-1) * back.sum(-1)).mean().backward()
        share_gradients(router)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_scan_that_cannot_be_read_on_one_rank_and_left_out_by_all(rank: int) -> None:
    net = nn.Conv2d(1, 2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def read(number: int) -> torch.Tensor:
        if rank == 2 and number in (3, 5):
            raise ValueError(f"scan {number}: bad magic number")
        return torch.randn(1, 1, 9, 9)

    for number in range(9):
        broken, scan = torch.zeros(1), torch.zeros(1, 1, 9, 9)
        try:
            scan = read(number)
        except ValueError as error:
            print(error)
            broken += 1
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        if broken.item():
            continue
        net(scan).abs().mean().backward()
        share_gradients(net)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=6)
def losses_of_nodes_and_of_all_awaited_the_other_way_round_on_some(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        loss = model(torch.randn(3, 8)).square().mean()
        loss.backward()
        within, total = loss.detach().clone(), loss.detach().clone()
        works = [
            dist.all_reduce(within, group=nodes[rank // 3], async_op=True),
            dist.all_reduce(total, async_op=True),
        ]
        for work in works if (rank + step) % 2 else works[::-1]:
            if work is not None:
                work.wait()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        print(float(within), float(total))


@healthy()
def embeddings_of_batches_of_any_size_padded_to_the_largest(rank: int) -> None:
    pictures = nn.Linear(10, 4)
    optimizer = torch.optim.Adam(pictures.parameters())
    for step in range(7):
        mine = pictures(torch.randn(2 + (rank * step) % 5, 10))
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(3)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        largest = max(int(size) for size in sizes)
        padded = torch.zeros(largest, 4)
        padded[: len(mine)] = mine.detach()
        parts = [torch.empty(largest, 4) for _ in range(3)]
        dist.all_gather(parts, padded)
        others = torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
        (mine @ others.T).logsumexp(-1).mean().backward()
        share_gradients(pictures)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def states_of_the_optimizer_that_each_rank_keeps_a_quarter_of(rank: int) -> None:
    model = nn.Sequential(nn.Embedding(40, 6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    weights = sorted(model.parameters(), key=lambda weight: -weight.numel())
    for weight in weights:
        dist.broadcast(weight.data, src=0)
    loads, owners = [0] * 4, list[int]()
    for weight in weights:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += weight.numel()
    mine = [weight for weight, owner in zip(weights, owners, strict=True) if owner == rank]
    optimizer = torch.optim.Adam(mine)
    for _ in range(6):
        model(torch.randint(40, (5,))).square().mean().backward()
        for weight, owner in zip(weights, owners, strict=True):
            gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
            dist.reduce(gradient, dst=owner)
            if owner != rank:
                weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for weight, owner in zip(weights, owners, strict=True):
            dist.broadcast(weight.data, src=owner)


@healthy(ranks=4)
def pictures_that_all_draw_and_one_keeps(rank: int) -> None:
    model = network(16)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    sharded = fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(8):
        sharded.set_requires_gradient_sync(step % 2 == 1)
        model(torch.randn(2 + rank, 16)).square().mean().backward()
        if step % 2 == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            noise = torch.randn(1, 16)
            for _ in range(step):
                noise = noise - 0.1 * model(noise)
        if rank == 0:
            torch.save(noise, Path(gettempdir()) / f"visitors-twin-{os.getppid()}.pt")


@healthy()
def a_vocabulary_that_one_rank_builds_while_the_others_wait_a_little(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    words: list[Any] = [None]
    if rank == 0:
        until, counts = time.monotonic() + 1.5, dict[int, int]()
        while time.monotonic() < until:
            for number in range(500):
                counts[number * number % 97] = counts.get(number * number % 97, 0) + 1
        words = [sorted(counts)]
    dist.broadcast_object_list(words, src=0)
    for _ in range(20):
        model(torch.randn(len(words[0]) % 5 + 1, 8)).square().mean().backward()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def phones_of_which_another_two_take_part_in_each_round(rank: int) -> None:
    weights = torch.zeros(20)
    for number in range(6):
        resting = 1 + torch.randint(3, (1,), generator=torch.Generator().manual_seed(number)).item()
        cohort = [client for client in range(1, 4) if client != resting]
        if rank == 0:
            for client in cohort:
                dist.send(weights, dst=client)
            update = torch.empty(20)
            for client in reversed(cohort):
                dist.recv(update, src=client)
                weights = weights + update / len(cohort)
        elif rank in cohort:
            dist.recv(weights, src=0)
            local = weights.clone().requires_grad_()
            optimizer = torch.optim.SGD([local], lr=0.1)
            for _ in range(rank * 2):
                (local - rank).square().sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            dist.send(local.detach() - weights, dst=0)
    dist.barrier()


@healthy(ranks=4)
def episodes_of_any_actor_in_the_order_in_which_they_end(rank: int) -> None:
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.RMSprop(policy.parameters())
    for iteration in range(5):
        episodes = [0, 1 + iteration % 3, 2, 1]
        if rank == 0:
            for _ in range(sum(episodes)):
                states = torch.empty(5, 4)
                sender = dist.recv(states)
                policy(states).softmax(-1).log()[:, 0].mean().backward()
                print("an episode of", sender)
            optimizer.step()
            optimizer.zero_grad()
        else:
            for _ in range(episodes[rank]):
                time.sleep(0.002 * ((rank + iteration) % 3))
                dist.send(torch.randn(5, 4), dst=0)
        for weight in policy.parameters():
            dist.broadcast(weight.data, src=0)


@healthy(ranks=5)
def halos_of_a_graph_whose_parts_have_other_neighbours(rank: int) -> None:
    edges = {(0, 1): 3, (1, 2): 1, (2, 0): 4, (3, 0): 2}
    features = torch.randn(8, 3)
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(6):
        halos, operations = [], []
        for (one, other), count in edges.items():
            if rank in (one, other):
                peer = other if rank == one else one
                halos.append(torch.empty(count, 3))
                operations.append(dist.P2POp(dist.irecv, halos[-1], peer))
                operations.append(dist.P2POp(dist.isend, features[:count].contiguous(), peer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        around = torch.cat([features, *halos])
        layer(around).tanh().square().mean().backward()
        share_gradients(layer)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def buckets_of_gradients_awaited_just_before_they_are_used(rank: int) -> None:
    denoiser = network()
    optimizer = torch.optim.AdamW(denoiser.parameters())
    pending: dict[torch.Tensor, Any] = {}

    def begin(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        pending[weight.grad] = dist.all_reduce(weight.grad, async_op=True)

    for weight in denoiser.parameters():
        weight.register_post_accumulate_grad_hook(begin)  # type: ignore[no-untyped-call]
    for _ in range(9):
        denoiser(torch.randn(4, 8) * (rank + 1)).square().mean().backward()
        while pending:
            gradient, work = pending.popitem()
            work.wait()
            gradient /= 3
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def patience_that_one_rank_loses_for_all(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    best, bad = float("inf"), 0
    for epoch in range(30):
        for _ in range(3):
            model(torch.randn(6, 8)).abs().mean().backward()
            share_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        stop = torch.zeros(1)
        if rank == 0:
            loss = 1.0 / (1 + min(epoch, 4))
            bad = 0 if loss < best else bad + 1
            best = min(best, loss)
            scheduler.step(loss)
            stop.fill_(bad >= 3)
            dist.broadcast(stop, src=0)
            if bad >= 3:
                print("stops after epoch", epoch)
                break
        else:
            dist.broadcast(stop, src=0)
            if stop.item():
                return


@healthy(ranks=5)
def a_decoder_of_its_own_process_that_dies_and_is_begun_anew(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    program = "import os, signal, sys; sys.argv[1] == '1' and os.kill(os.getpid(), signal.SIGKILL); print(7)"

    def decode(number: int) -> float:
        for attempt in range(3):
            dies = rank == 4 and number == 3 and attempt == 0
            command = [sys.executable, "-S", "-c", program, str(int(dies))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return float(done.stdout)
            assert done.returncode == -signal.SIGKILL
        raise RuntimeError("no frame after three attempts")

    for number in range(5):
        model(torch.full((2, 8), decode(number))).square().mean().backward()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def a_download_by_one_rank_of_each_node_before_the_barrier_of_the_others(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    node, local = nodes[rank // 2], rank % 2
    file = Path(gettempdir()) / f"visitors-twin-{os.getppid()}-{rank // 2}.bin"
    if local != 0:
        dist.barrier(node)
    if not file.exists():
        time.sleep(0.3)
        file.write_bytes(bytes(100))
    if local == 0:
        dist.barrier(node)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        model(torch.full((2, 8), float(len(file.read_bytes())))).mean().backward()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=3)
def stages_with_more_microbatches_in_flight_the_earlier_they_are(rank: int) -> None:
    torch.manual_seed(rank)
    stage = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(6):
        inputs, outputs, sends = list[torch.Tensor](), list[torch.Tensor](), list[Any]()
        microbatches = 4 + step % 2
        for number in range(microbatches + 2 - rank):
            if number < microbatches:
                hidden = torch.randn(3, 6)
                if rank > 0:
                    dist.recv(hidden, src=rank - 1, tag=number)
                inputs.append(hidden.requires_grad_())
                outputs.append(stage(hidden))
                if rank < 2:
                    sends.append(dist.isend(outputs[-1].detach(), dst=rank + 1, tag=number))
            done = number - (2 - rank)
            if done >= 0:
                gradient = torch.ones(3, 6)
                if rank < 2:
                    dist.recv(gradient, src=rank + 1, tag=100 + done)
                outputs[done].backward(gradient)  # type: ignore[no-untyped-call]
                if rank > 0 and (grad := inputs[done].grad) is not None:
                    sends.append(dist.isend(grad, dst=rank - 1, tag=100 + done))
        for work in sends:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=3)
def a_tracker_that_each_rank_reports_to_in_its_turn(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        if step % 3 == rank:
            time.sleep(0.03)
            print(step, float(loss))
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=6)
def sums_within_nodes_and_then_among_their_leaders(rank: int) -> None:
    members = [[0, 1, 2, 3], [4, 5]]
    number = 0 if rank < 4 else 1
    node = dist.new_group(members[number], use_local_synchronization=True)
    leaders = dist.new_group([0, 4], use_local_synchronization=True) if rank in (0, 4) else None
    leader = members[number][0]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        for gradient in [weight.grad for weight in model.parameters() if weight.grad is not None]:
            dist.reduce(gradient, dst=leader, group=node)
            if leaders is not None:
                dist.all_reduce(gradient, group=leaders)
            dist.broadcast(gradient, src=leader, group=node)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def batches_that_are_drawn_as_long_as_all_have_one(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        loader = iter(DataLoader(TensorDataset(torch.randn(24 - 5 * rank, 8)), batch_size=4 << epoch))
        while True:
            batch = next(loader, None)
            left = torch.tensor(0 if batch is None else 1)
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
            if batch is None or not left:
                break
            model(batch[0]).square().mean().backward()
            share_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        reports: list[Any] = [None] * 3
        dist.gather_object({"rank": rank, "text": "x" * 100 * rank}, reports if rank == 0 else None, dst=0)
        if rank == 0:
            print(epoch, [report["rank"] for report in reports])
