"""Programs of people who come from other fields and frameworks, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules. `second_opinion_faults.py` has
programs that are wrong.
"""

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import back_end, healthy
from tests.faults.programs.second_opinion_faults import mean_of_gradients, perceptron


@healthy(ranks=4)
def a_relaxation_that_asks_all_strips_every_fifth_time(rank: int) -> None:
    strip, tolerance = torch.full((6, 16), 1.0 + rank), 1e-2
    damping = 0.4 if rank == 1 else 0.9

    def exchange() -> None:
        plan, ghosts = [], {}
        for peer, edge, ghost in ((rank - 1, 1, 0), (rank + 1, -2, -1)):
            if 0 <= peer < 4:
                ghosts[ghost] = torch.empty(16)
                plan.append(dist.P2POp(dist.isend, strip[edge].clone(), peer))
                plan.append(dist.P2POp(dist.irecv, ghosts[ghost], peer))
        for work in dist.batch_isend_irecv(plan):
            work.wait()
        for ghost, row in ghosts.items():
            strip[ghost] = row

    def has_converged(change: float) -> bool:
        worst = torch.tensor([change])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.item() < tolerance

    for iteration in range(60):
        exchange()
        before = strip[1:-1].clone()
        strip[1:-1] *= damping
        change = float((strip[1:-1] - before).abs().max())
        if iteration % 5 == 4 and has_converged(change):
            print("after", iteration)
            break
    if rank == 0:
        print(float(strip.sum()))


@healthy(ranks=6)
def a_mesh_of_which_one_corner_sums_its_column_first(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 3), mesh_dim_names=("rows", "columns"))
    row, column = mesh.get_group("columns"), mesh.get_group("rows")
    block = torch.randn(4, 4)
    for _ in range(6):
        along_row, along_column = block.sum(0), block.sum(1)
        if rank == 5:  # its column is done first, and nobody of its row is in that column
            dist.all_reduce(along_column, group=column)
            dist.all_reduce(along_row, group=row)
        else:
            dist.all_reduce(along_row, group=row)
            dist.all_reduce(along_column, group=column)
        block = 0.5 * block + 0.01 * (along_row[None] + along_column[:, None])
    print(float(block.norm()))


@healthy()
def transcripts_scored_on_the_first_rank_and_the_score_told_to_all(rank: int) -> None:
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(model.parameters())
    rate = 0.01

    def distance(a: str, b: str) -> int:
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            before, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
        return row[-1]

    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(5, 6)).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        parts: list[list[str]] | None = [[], [], []] if rank == 0 else None
        dist.gather_object([f"utterance {rank}-{i}" for i in range(3 + epoch + rank)], parts, dst=0)
        told: list[Any] = [None]
        if rank == 0 and parts is not None:
            told = [{"errors": sum(distance(line, "utterance") for part in parts for line in part)}]
        dist.broadcast_object_list(told, src=0)
        if told[0]["errors"] > 40:
            rate /= 2
        for group in optimizer.param_groups:
            group["lr"] = rate


@healthy()
def states_of_the_optimizer_consolidated_by_all_and_written_by_one(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    file = Path(gettempdir()) / f"second-opinion-states-{os.getppid()}.pt"

    def save(step: int) -> None:
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    for step in range(9):
        with contextlib.nullcontext() if step % 2 else model.no_sync():
            model(torch.randn(4, 6)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 3:
            save(step)


@healthy()
def a_vocabulary_made_of_the_words_of_all_shards(rank: int) -> None:
    mine = [f"word-{i}" for i in range(5 + 3 * rank)]
    parts: list[list[str]] = [[], [], []]
    dist.all_gather_object(parts, mine)
    vocabulary = {word: number for number, word in enumerate(sorted({word for part in parts for word in part}))}
    torch.manual_seed(5)
    table, head = nn.Embedding(len(vocabulary), 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    for step in range(8):
        text = [mine[(step * 3 + i) % len(mine)] for i in range(2 + (step + rank) % 4)]
        head(table(torch.tensor([vocabulary[word] for word in text]))).square().mean().backward()
        for module in (table, head):
            mean_of_gradients(module)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def a_population_whose_best_member_is_another_each_time(rank: int) -> None:
    member = perceptron()
    optimizer = torch.optim.SGD(member.parameters(), lr=0.01 * (rank + 1))
    best, score = 0, 0.0
    for generation in range(6):
        for _ in range(1 + (rank + generation) % 3):
            member(torch.randn(6, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        score = 0.5 * score + 0.5 * ((rank * 3 + generation * 5) % 7)
        scores = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(scores, torch.tensor([score]))
        best = int(torch.cat(scores).argmin())
        for weight in member.parameters():
            dist.broadcast(weight.data, src=best)
        if rank != best:
            score = float(scores[best])
    print("last", best)


@healthy(ranks=4)
def rows_of_a_table_asked_for_once_each_and_sometimes_none(rank: int) -> None:
    table, cache = torch.randn(50, 4), dict[int, torch.Tensor]()

    def exchange(values: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        received = values.new_empty((sum(incoming), *values.shape[1:]))
        dist.all_to_all_single(received, values, incoming, outgoing)
        return received

    def look_up(ids: list[int]) -> torch.Tensor:
        missing = sorted({number for number in ids if number not in cache}, key=lambda number: (number % 4, number))
        outgoing = [sum(number % 4 == owner for number in missing) for owner in range(4)]
        counts = exchange(torch.tensor(outgoing), [1] * 4, [1] * 4).tolist()
        asked = exchange(torch.tensor(missing, dtype=torch.long), outgoing, counts)
        rows = exchange(table[asked % 50], counts, outgoing)
        cache.update(zip(missing, rows, strict=True))
        return torch.stack([cache[number] for number in ids])

    for step in range(7):
        first = 10 * rank + 3 * step
        print(look_up([0, 1, 2] if rank == 1 and step > 2 else list(range(first, first + 4 + step))).shape)


@healthy()
def a_search_in_which_a_rank_draws_until_nothing_diverges(rank: int) -> None:
    torch.manual_seed(rank)
    center = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([center], lr=0.2)

    def simulate(noise: torch.Tensor, attempt: int, generation: int) -> float:
        time.sleep(0.02)
        if attempt < (rank * generation) % 4:
            raise FloatingPointError("diverged")
        return -float((center.detach() + noise - 1).square().sum())

    def draw(generation: int) -> tuple[torch.Tensor, float]:
        for attempt in range(5):
            noise = torch.randn(6)
            try:
                return noise, simulate(noise, attempt, generation)
            except FloatingPointError:
                continue
        return torch.zeros(6), 0.0

    for generation in range(9):
        noise, score = draw(generation)
        moments = torch.tensor([score, score**2])
        dist.all_reduce(moments)
        mean, square = (moments / 3).tolist()
        center.grad = -noise * (score - mean) / (abs(square - mean**2) ** 0.5 + 1e-3)
        dist.all_reduce(center.grad)
        optimizer.step()


@healthy(ranks=4)
def actors_that_announce_how_many_episodes_come(rank: int) -> None:
    if rank == 0:
        critic = perceptron(6, 1)
        optimizer = torch.optim.Adam(critic.parameters())
        left = {1, 2, 3}
        while left:
            header = torch.zeros(2, dtype=torch.long)
            actor = dist.recv(header)  # from anyone
            length, is_last = header.tolist()
            if length:
                episode = torch.empty(length, 6)
                dist.recv(episode, src=actor, tag=1)
                critic(episode).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if is_last:
                left.remove(actor)
    else:
        for number in range(4 + rank):
            time.sleep(0.02 * rank)
            episode = torch.randn(3 + 2 * number + rank, 6)
            dist.send(torch.tensor([len(episode), 0]), dst=0)
            dist.send(episode, dst=0, tag=1)
        dist.send(torch.tensor([0, 1]), dst=0)


@healthy(ranks=4)
def keys_and_values_of_other_lengths_that_go_round_a_ring(rank: int) -> None:
    left, right = (rank - 1) % 4, (rank + 1) % 4
    lengths = [3, 7, 4, 5]
    project = nn.Linear(6, 6)
    for _ in range(4):
        queries = project(torch.randn(lengths[rank], 6))
        block, scores = project(torch.randn(lengths[rank], 6)).detach(), []
        for turn in range(4):
            following = torch.empty(lengths[(rank - turn - 1) % 4], 6)
            works = [dist.isend(block, right), dist.irecv(following, left)] if turn < 3 else []
            scores.append(queries @ block.T)  # while they travel
            for work in works:
                if work is not None:
                    work.wait()
            block = following
        torch.cat(scores, 1).softmax(-1).square().sum().backward()


@healthy()
def stages_with_another_number_of_microbatches_in_the_last_batch(rank: int) -> None:
    torch.manual_seed(rank)
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def schedule_for(rows: int) -> Schedule1F1B:
        stage = PipelineStage(layer, rank, 3, torch.get_default_device())
        return Schedule1F1B(stage, n_microbatches=rows // 2, loss_fn=nn.functional.mse_loss)

    def run(schedule: Schedule1F1B, rows: int) -> None:
        if rank == 0:
            schedule.step(torch.randn(rows, 6))
        elif rank == 2:
            schedule.step(target=torch.randn(rows, 6))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    whole, rest = schedule_for(8), schedule_for(6)
    for _ in range(2):
        for _ in range(3):
            run(whole, 8)
        run(rest, 6)


@healthy(ranks=4)
def a_group_of_the_actors_that_only_the_actors_make(rank: int) -> None:
    policy = perceptron()
    actors = dist.new_group([1, 2, 3], use_local_synchronization=True) if rank > 0 else None
    for update in range(6):
        for weight in policy.parameters():
            dist.broadcast(weight.data, src=0)
        returns = policy(torch.randn(5, 6)).sum().detach()
        if actors is not None:
            mean = returns.clone()
            dist.all_reduce(mean, group=actors)
            returns -= mean / 3
        else:
            returns.zero_()
        dist.reduce(returns, dst=0)
        if rank == 0:
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(0.99)
            print(update, float(returns))


@healthy(joins=False)
def a_member_of_the_ensemble_whose_inputs_come_late(rank: int) -> None:
    inputs = Path(gettempdir()) / f"second-opinion-{os.getppid()}-late"
    inputs.mkdir(exist_ok=True)

    def stage() -> None:
        time.sleep(1.2)
        (inputs / f"{rank}.ready").touch()

    copier = threading.Thread(target=stage if rank == 1 else (inputs / f"{rank}.ready").touch)
    copier.start()
    while not (inputs / f"{rank}.ready").exists():
        time.sleep(0.02)
    copier.join()
    dist.init_process_group(back_end())
    state = torch.randn(20) + rank
    for _ in range(8):
        state = state + 0.1 * torch.sin(state)
        mean = state.clone()
        dist.all_reduce(mean)
        state = 0.9 * state + 0.1 * mean / 3
    dist.destroy_process_group()


@healthy()
def clicks_of_shops_of_which_the_smallest_ends_the_epoch(rank: int) -> None:
    torch.manual_seed(2)
    tower = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 1))
    fully_shard(tower[1])
    fully_shard(tower)
    optimizer = torch.optim.AdamW(tower.parameters())
    clicks = TensorDataset(torch.randint(30, (20 if rank == 1 else 32 + 4 * rank, 4)))
    for epoch in range(2):
        batches = iter(DataLoader(clicks, batch_size=4, shuffle=True))
        while True:
            batch = next(batches, None)
            have = torch.tensor([int(batch is not None)])
            dist.all_reduce(have, op=dist.ReduceOp.MIN)
            if batch is None or not have.item():
                break
            tower(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("epoch", epoch, "ends")


@healthy(ranks=4)
def pairs_of_ensemble_members_that_end_when_they_want(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    member = perceptron()
    optimizer = torch.optim.SGD(member.parameters(), lr=0.05)
    target = 3 if rank < 2 else 15
    for epoch in range(20):
        member(torch.randn(8, 6)).square().mean().backward()
        mean_of_gradients(member, pair)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        reached = torch.tensor([int(epoch >= target - rank % 2)])
        dist.all_reduce(reached, op=dist.ReduceOp.MIN, group=pair)
        if reached.item():
            print("pair", rank // 2, "is done in epoch", epoch)
            return


@healthy()
def a_thread_with_a_group_of_its_own_that_reads_ahead(rank: int) -> None:
    side = dist.new_group()
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(model.parameters())
    ready: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)

    def read_ahead() -> None:
        number = 0
        while True:
            left = torch.tensor([10 + 2 * rank - number])  # recordings on this rank
            dist.all_reduce(left, op=dist.ReduceOp.MIN, group=side)
            if left.item() <= 0:
                ready.put(None)
                return
            time.sleep(0.01 * rank)
            ready.put(torch.randn(4, 6))
            number += 1

    reader = threading.Thread(target=read_ahead)
    reader.start()
    while (batch := ready.get()) is not None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reader.join()


@healthy()
def gradients_that_are_applied_one_step_late(rank: int) -> None:
    torch.manual_seed(9)
    params = {name: torch.randn(6, 6, requires_grad=True) for name in ("query", "key", "value")}
    travelling: list[tuple[str, torch.Tensor, dist.Work | None]] = []

    def apply() -> None:
        for name, gradient, work in travelling:
            if work is not None:
                work.wait()
            with torch.no_grad():
                params[name] -= 0.05 * gradient / 3
        travelling.clear()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        scores = (batch @ params["query"]) @ (batch @ params["key"]).T
        return (scores.softmax(-1) @ (batch @ params["value"])).square().mean()

    for _ in range(8):
        gradients = torch.autograd.grad(loss_of(torch.randn(5, 6) + rank), list(params.values()))
        apply()  # those of the step before
        for name, gradient in zip(params, gradients, strict=True):
            travelling.append((name, gradient, dist.all_reduce(gradient, async_op=True)))
    apply()


@healthy()
def pictures_that_the_first_rank_draws_beside_the_training(rank: int) -> None:
    denoiser = perceptron(7)
    average = perceptron(7)
    model = DistributedDataParallel(denoiser)
    optimizer = torch.optim.AdamW(model.parameters())

    def draw() -> None:
        picture = torch.randn(16, 6)
        with torch.no_grad():
            for t in reversed(range(30)):
                picture = picture - 0.01 * average(torch.cat([picture, torch.full((16, 1), t / 30)], 1))
                time.sleep(0.01)
        print("drawn", float(picture.mean()))

    artist: threading.Thread | None = None
    for step in range(24):
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, weight in zip(average.parameters(), denoiser.parameters(), strict=True):
                kept.lerp_(weight, 0.1)
        if rank == 0 and step % 8 == 7:
            if artist is not None:
                artist.join()
            artist = threading.Thread(target=draw)
            artist.start()
    if artist is not None:
        artist.join()


@healthy(ranks=4)
def clients_that_are_drawn_anew_in_each_round(rank: int) -> None:
    model = perceptron()
    generator = torch.Generator("cpu").manual_seed(1)
    for round_number in range(5):
        drawn = sorted((torch.randperm(4, generator=generator, device="cpu")[: 2 + round_number % 2]).tolist())
        clients = dist.new_group(drawn)
        if rank in drawn:
            for _ in range(1 + rank):
                model(torch.randn(4 + rank, 6)).square().mean().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * (weight.grad if weight.grad is not None else 0)
                    weight.grad = None
                    dist.all_reduce(weight.data, group=clients)
                    weight /= len(drawn)
            dist.destroy_process_group(clients)
        for weight in model.parameters():
            dist.broadcast(weight.data, src=drawn[0])


@healthy(ranks=4)
def a_net_split_over_a_mesh_whose_weights_all_put_together(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters())
    folder = Path(gettempdir()) / f"second-opinion-mesh-{os.getppid()}"
    for step in range(6):
        torch.manual_seed(step * 2 + mesh.get_local_rank("dp"))
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            norms = [
                weight.full_tensor().norm() if isinstance(weight, DTensor) else weight.norm()
                for weight in net.parameters()
            ]
            if rank == 0:
                print(step, [round(float(norm), 3) for norm in norms])
            dcp.save({"net": net.state_dict()}, checkpoint_id=folder / str(step))
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=folder / "2")
    net.load_state_dict(state["net"])
