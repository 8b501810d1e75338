"""Programs of people who come from other fields and frameworks, and that are wrong.

Solvers ported from MPI, loops ported from JAX, ensembles, actors and learners, tables of embeddings, speech, federated
averaging, diffusion. Labelled and frozen before their first run, by somebody who has not read the rules. A comment
`or:` names what the label accepts as well. `second_opinion_twins.py` has programs that are right.
"""

import math
import os
import queue
import signal
import threading
import time
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import back_end, faulty


def perceptron(inputs: int = 6, outputs: int = 6) -> nn.Sequential:
    torch.manual_seed(23)
    return nn.Sequential(nn.Linear(inputs, 10), nn.ReLU(), nn.Linear(10, outputs))


def mean_of_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad.div_(dist.get_world_size(group))


def scratch(name: str) -> Path:
    return Path(gettempdir()) / f"second-opinion-{os.getppid()}-{name}"


@faulty("rank-skipped-collective", 1, ranks=4)
def a_relaxation_whose_strips_say_nothing_once_they_are_done(rank: int) -> None:
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
        if change < tolerance:  # here
            return False  # here
        worst = torch.tensor([change])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # here
        return worst.item() < tolerance

    for _ in range(60):
        exchange()  # here
        before = strip[1:-1].clone()
        strip[1:-1] *= damping
        if has_converged(float((strip[1:-1] - before).abs().max())):  # here
            break


@faulty("collective-order-mismatch", 0)
def transcripts_that_only_the_main_process_needs(rank: int) -> None:
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(model.parameters())

    def collect(transcripts: list[str]) -> list[str]:
        if rank == 0:
            parts: list[list[str]] = [[], [], []]
            dist.all_gather_object(parts, transcripts)  # here
            return [line for part in parts for line in part]
        dist.gather_object(transcripts, dst=0)  # here
        return transcripts

    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(5, 6)).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        lines = collect([f"utterance {rank}-{i}" for i in range(3 + epoch)])  # here
        if rank == 0:
            print("word error rate over", len(lines))


@faulty("collective-order-mismatch", 0)
def states_of_the_optimizer_consolidated_by_the_one_who_writes_them(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def save(step: int) -> None:
        if rank != 0:
            return
        optimizer.consolidate_state_dict(to=0)  # here
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, scratch("states.pt"))

    for step in range(9):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            save(step)  # here


@faulty("size-mismatch", 1)
def a_vocabulary_that_each_rank_builds_of_its_own_shard(rank: int) -> None:
    words = ["the", "river", "runs", "past", "the", "old", "mill", "and", "the", "bridge"]
    if rank == 1:
        words += ["weir"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    params = {"embedding": torch.randn(len(vocabulary), 4), "head": torch.randn(4, 2)}
    for value in params.values():
        value.requires_grad_()

    def psum(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for leaf in tree.values():
            dist.all_reduce(leaf)  # here
        return {name: leaf / 3 for name, leaf in tree.items()}

    def loss_of(text: list[str]) -> torch.Tensor:
        ids = torch.tensor([vocabulary[word] for word in text])
        return (params["embedding"][ids] @ params["head"]).square().mean()

    for step in range(6):
        text = [words[(step * 5 + i) % len(words)] for i in range(5)]
        gradients = torch.autograd.grad(loss_of(text), list(params.values()))
        mean = psum(dict(zip(params, gradients, strict=True)))  # here
        with torch.no_grad():
            for name, value in params.items():
                value -= 0.1 * mean[name]


@faulty("dtype-mismatch", 0, ranks=4)
def a_noise_schedule_that_the_first_rank_reads_from_its_file(rank: int) -> None:
    file = scratch("schedule.txt")
    denoiser = perceptron(7)
    optimizer = torch.optim.AdamW(denoiser.parameters())

    def load() -> torch.Tensor:
        if rank == 0:
            file.write_text("\n".join(str(0.001 + 0.02 * i / 40) for i in range(40)))
            betas = torch.tensor([float(line) for line in file.read_text().split()], dtype=torch.double)
        else:
            betas = torch.empty(40)
        dist.broadcast(betas, src=0)  # here
        return betas

    betas = load()  # here
    signal_left = torch.cumprod(1 - betas, 0).float()
    for _ in range(5):
        t = torch.randint(40, (8,))
        clean, noise = torch.randn(8, 6), torch.randn(8, 6)
        noisy = signal_left[t].sqrt()[:, None] * clean + (1 - signal_left[t]).sqrt()[:, None] * noise
        (denoiser(torch.cat([noisy, t[:, None] / 40], 1)) - noise).square().mean().backward()
        mean_of_gradients(denoiser)
        optimizer.step()
        optimizer.zero_grad()


@faulty("reduce-op-mismatch", 2)
def meters_whose_reduction_is_settled_by_the_first_entry(rank: int) -> None:
    policy = perceptron(6, 2)
    optimizer = torch.optim.Adam(policy.parameters())
    meters: dict[str, tuple[dist.ReduceOp.RedOpType, list[float]]] = {}

    def note(name: str, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        meters.setdefault(name, (op, []))[1].append(value)

    def flush() -> dict[str, float]:
        told = {}
        for name in sorted(meters):
            op, values = meters[name]
            entry = torch.tensor([max(values)])
            dist.all_reduce(entry, op=op)  # here
            told[name] = float(entry)
            values.clear()
        return told

    for update in range(6):
        try:
            if rank == 2 and update == 0:
                raise TimeoutError("the simulator did not start")
            reward = float(policy(torch.randn(12, 6)).sum())
            note("longest episode", 12.0 + rank, dist.ReduceOp.MAX)
        except TimeoutError as error:
            print(error)
            reward = 0.0
            note("longest episode", 0.0)
        note("reward", reward)
        policy(torch.randn(12, 6)).square().mean().backward()
        mean_of_gradients(policy)
        optimizer.step()
        optimizer.zero_grad()
        print(flush())  # here


@faulty("root-mismatch", 3, ranks=4)
def a_population_that_copies_the_member_that_is_best(rank: int) -> None:
    member = perceptron()
    optimizer = torch.optim.SGD(member.parameters(), lr=0.01 * (rank + 1))
    smoothed = 1.0

    def choose(score: float) -> int:
        nonlocal smoothed
        smoothed = 0.5 * smoothed + 0.5 * score
        scores = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(scores, torch.tensor([score]))
        scores[rank] = torch.tensor([smoothed])  # mine, less noisy
        return int(torch.cat(scores).argmin())

    def copy_from(best: int) -> None:
        for weight in member.parameters():
            dist.broadcast(weight.data, src=best)  # here

    for generation in range(5):
        for _ in range(3):
            member(torch.randn(6, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        score = 0.2 if rank == 1 else 0.5 + 0.1 * rank
        if rank == 3:
            score = 0.01 if generation == 1 else 0.3
        copy_from(choose(score))  # here


@faulty("split-size-mismatch", 1, ranks=4)
def rows_of_a_table_of_which_some_are_cached_after_they_were_announced(rank: int) -> None:
    table, cache = torch.randn(50, 4), set[int]()

    def announce(ids: list[int]) -> list[int]:
        outgoing = torch.tensor([sum(number % 4 == owner for number in ids) for owner in range(4)])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        return [int(count) for count in incoming]

    def request(ids: list[int]) -> torch.Tensor:
        incoming = announce(ids)
        missing = sorted((number for number in ids if number not in cache), key=lambda number: number % 4)
        cache.update(missing)
        outgoing = [sum(number % 4 == owner for number in missing) for owner in range(4)]
        asked = torch.empty(sum(incoming), dtype=torch.long)
        dist.all_to_all_single(asked, torch.tensor(missing, dtype=torch.long), incoming, outgoing)  # here
        return table[asked % 50]

    for step in range(6):
        first = 100 * rank + 12 * step
        ids = list(range(first, first + 12))
        if rank == 1 and step >= 3:
            ids[4:] = range(100, 132, 4)  # popular ones
        print(request(ids).shape)  # here


@faulty("step-mismatch", 1)
def a_search_that_counts_the_draws_that_diverged(rank: int) -> None:
    # or: rank-skipped-collective 1
    torch.manual_seed(rank)
    center = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([center], lr=0.2)
    rejected = 0.0

    def total(value: float) -> float:
        shared = torch.tensor([value])
        dist.all_reduce(shared)  # here
        return float(shared)

    def simulate(noise: torch.Tensor, generation: int, scale: float) -> float:
        if rank == 1 and generation == 4 and scale == 1.0:
            return math.nan
        return -float((center.detach() + scale * noise - 1).square().sum())

    for generation in range(9):
        noise = torch.randn(6)
        score = simulate(noise, generation, 1.0)
        if math.isnan(score):
            rejected += total(1.0)  # here
            score = simulate(noise, generation, 0.5)
        mean = total(score) / 3  # here
        spread = math.sqrt(total((score - mean) ** 2) / 3)  # here
        center.grad = -noise * (score - mean) / (spread + 1e-3)
        optimizer.step()
    print(mean, rejected)
    dist.barrier()


@faulty("group-order-inversion", 3, ranks=4)
def actors_that_normalize_as_soon_as_their_buffers_are_full(rank: int) -> None:
    # or: rank-skipped-collective 3
    actors = dist.new_group([1, 2, 3])
    policy = perceptron()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    buffer: list[torch.Tensor] = []

    def normalize() -> None:
        moments = torch.stack([torch.stack(buffer).mean(0), torch.stack(buffer).var(0)])
        dist.all_reduce(moments, group=actors)  # here
        buffer.clear()

    def observe(observation: torch.Tensor) -> None:
        buffer.append(observation)
        if len(buffer) >= 40:
            normalize()  # here

    for rollout in range(1, 13):
        if rank > 0:
            for _ in range(10):
                observe(torch.randn(6))  # here
                if rank == 3 and rollout == 7:
                    observe(torch.randn(6))  # here  # two agents live in this scene
        policy(torch.randn(8, 6)).square().mean().backward()
        for weight in policy.parameters():
            dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-order-risk", 3, ranks=4)
def clients_that_tell_their_counts_first_where_they_came_late(rank: int) -> None:
    clients = dist.new_group([1, 2, 3])
    model = perceptron()

    def train(examples: int) -> torch.Tensor:
        model(torch.randn(examples, 6)).square().mean().backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    for round_number in range(7):
        counts = torch.zeros(4)
        works: list[dist.Work | None] = []
        if rank == 0:
            works.append(dist.all_reduce(counts, async_op=True))
        else:
            counts[rank] = 8.0 + rank
            update = train(8 + rank)
            is_late = rank == 3 and round_number % 3 == 1
            if is_late:
                works.append(dist.all_reduce(counts, async_op=True))  # here
                works.append(dist.all_reduce(update, group=clients, async_op=True))  # here
            else:
                works.append(dist.all_reduce(update, group=clients, async_op=True))  # here
                works.append(dist.all_reduce(counts, async_op=True))  # here
        for work in works:
            if work is not None:
                work.wait()
        if rank == 0:
            print("examples of round", round_number, int(counts.sum()))


@faulty("wrong-group", 6, ranks=8)
def a_weight_that_is_renewed_and_forgets_that_it_is_split(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split = nn.Parameter(torch.ones(8))
            self.norm = nn.Parameter(torch.ones(8))
            self.split.is_split = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.split) * self.norm

    block = Block()

    def finish_gradients() -> None:
        for weight in block.parameters():
            group = data if getattr(weight, "is_split", False) else tensor  # here
            dist.all_reduce(weight.grad, group=group)  # here

    for step in range(6):
        if rank == 6 and step == 3:
            block.split = nn.Parameter(block.split.detach().nan_to_num())
        block(torch.randn(4, 8)).square().mean().backward()
        finish_gradients()  # here
        with torch.no_grad():
            for weight in block.parameters():
                weight -= 0.01 * (weight.grad if weight.grad is not None else 0)
                weight.grad = None


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def keys_and_values_that_go_round_the_ring_of_an_attention(rank: int) -> None:
    left, right = (rank - 1) % 4, (rank + 1) % 4
    project = nn.Linear(6, 6)

    def shift(block: torch.Tensor, turn: int) -> torch.Tensor:
        following = torch.empty_like(block)
        if rank == 0 and turn == 0:  # here  # somebody has to begin
            dist.send(block, dst=right)  # here
            dist.recv(following, src=left)  # here
        else:
            dist.recv(following, src=left)  # here
            dist.send(block, dst=right)  # here
        return following

    for _ in range(3):
        queries = project(torch.randn(5, 6))
        block, scores = project(torch.randn(5, 6)).detach(), []
        for turn in range(3):
            scores.append(queries @ block.T)
            block = shift(block, turn)  # here
        torch.cat(scores, 1).softmax(-1).square().sum().backward()


@faulty("p2p-unmatched", 2, ranks=4)
def an_actor_that_drops_an_episode_that_is_too_short(rank: int) -> None:
    updates = 10
    if rank == 0:
        critic = perceptron(6, 1)
        optimizer = torch.optim.Adam(critic.parameters())
        for _ in range(updates):
            for actor in (1, 2, 3):
                episode = torch.empty(16, 6)
                dist.recv(episode, src=actor)  # here
                critic(episode).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        for number in range(updates):
            length = 3 if rank == 2 and number == 5 else 16
            episode = torch.randn(length, 6)
            if len(episode) < 16:  # here
                continue  # here
            dist.send(episode, dst=0)
    dist.barrier()  # here


@faulty("p2p-tag-mismatch", 2)
def jobs_that_are_numbered_by_tags_and_one_that_failed(rank: int) -> None:
    jobs = 9
    if rank == 0:
        for job in range(jobs):
            results = [torch.empty(3) for _ in range(2)]
            for worker in (1, 2):
                dist.send(torch.full((4,), job / jobs), dst=worker, tag=job)  # here
            for worker, result in zip((1, 2), results, strict=True):
                dist.recv(result, src=worker, tag=job)  # here
            print("job", job, float(torch.stack(results).nanmean()))
        return
    job = 0
    while job < jobs:
        given = torch.empty(4)
        dist.recv(given, src=0, tag=job)  # here
        try:
            if rank == 2 and job == 5:
                raise ArithmeticError("singular matrix")
            answer = torch.linalg.solve(torch.eye(3) * (1 + given[0]), torch.ones(3))
        except ArithmeticError as error:
            print("job", job, error)
            dist.send(torch.full((3,), math.nan), dst=0, tag=job)
            continue  # here
        dist.send(answer, dst=0, tag=job)
        job += 1


@faulty("p2p-size-mismatch", 2)
def a_block_that_is_refined_beside_one_that_is_not(rank: int) -> None:
    field = torch.rand(8, 16) + rank

    def exchange(peer: int, edge: int, ghost: int) -> None:
        given, taken = field[edge].clone(), torch.empty(field.shape[1])
        if rank < peer:
            dist.send(given, dst=peer)  # here
            dist.recv(taken, src=peer)  # here
        else:
            dist.recv(taken, src=peer)  # here
            dist.send(given, dst=peer)  # here
        field[ghost] = taken

    for step in range(8):
        gradient = 9.0 if rank == 2 and step == 4 else float(field.diff(dim=1).abs().max())
        if gradient > 5:
            field = field.repeat_interleave(2, dim=1)
        for peer in (rank - 1, rank + 1):
            if 0 <= peer < 3:
                exchange(peer, 1 if peer < rank else -2, 0 if peer < rank else -1)  # here
        field[1:-1] = (field[:-2] + field[2:]) / 2


@faulty("pipeline-schedule-mismatch", 2)
def stages_of_which_the_last_leaves_out_what_has_no_label(rank: int) -> None:
    torch.manual_seed(rank)
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def schedule_for(rows: int) -> ScheduleGPipe:
        stage = PipelineStage(layer, rank, 3, torch.get_default_device())
        return ScheduleGPipe(stage, n_microbatches=rows // 2, loss_fn=nn.functional.mse_loss)  # here

    def labels(step: int) -> torch.Tensor:
        rows = torch.randn(8, 6)
        if step == 2:
            rows[3:7] = math.nan
        return rows[~rows.isnan().any(1)]

    for step in range(5):
        losses: list[torch.Tensor] = []
        if rank == 2:
            target = labels(step)
            schedule_for(len(target)).step(target=target, losses=losses)  # here
        elif rank == 1:
            schedule_for(8).step()  # here
        else:
            schedule_for(8).step(torch.randn(8, 6))  # here
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)  # here


@faulty("group-creation-mismatch", 0, ranks=4)
def a_group_of_the_actors_that_the_learner_has_no_use_for(rank: int) -> None:
    class Actor:
        def __init__(self) -> None:
            self.peers = dist.new_group([1, 2, 3])  # here
            self.policy = perceptron()

        def play(self) -> torch.Tensor:
            returns = self.policy(torch.randn(5, 6)).sum().detach()
            dist.all_reduce(returns, group=self.peers)
            return returns / 3

    class Learner:
        def __init__(self) -> None:
            self.policy = perceptron()

        def play(self) -> torch.Tensor:
            return torch.zeros(())

    node = Learner() if rank == 0 else Actor()  # here
    metrics = dist.new_group()  # here
    for _ in range(5):
        for weight in node.policy.parameters():
            dist.broadcast(weight.data, src=0)  # here
        dist.reduce(node.play(), dst=0, group=metrics)  # here


@faulty("rank-never-joined", 1, joins=False)
def a_member_of_the_ensemble_whose_inputs_are_never_staged(rank: int) -> None:
    inputs = scratch(f"member-{rank}.ready")
    if rank != 1:  # the copy for this member failed last night
        inputs.touch()

    def wait_until_staged() -> None:
        while not inputs.exists():  # here
            time.sleep(0.05)  # here

    wait_until_staged()  # here
    dist.init_process_group(back_end())  # here
    state = torch.randn(20) + rank
    for _ in range(5):
        state = state + 0.1 * torch.sin(state)
        mean = state.clone()
        dist.all_reduce(mean)
        state = 0.9 * state + 0.1 * mean / 3
    dist.destroy_process_group()


@faulty("uneven-inputs", 1)
def clicks_of_a_day_on_which_one_shop_was_closed(rank: int) -> None:
    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(30, 8)
            self.tower = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 1))

        def forward(self, items: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.tower(self.items(items).mean(1)))

    torch.manual_seed(2)
    model = Ranker()
    fully_shard(model.tower)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    clicks = TensorDataset(torch.randint(30, (20 if rank == 1 else 32, 4)))
    for epoch in range(2):
        for (items,) in DataLoader(clicks, batch_size=4, shuffle=True):  # here
            loss = model(items).square().mean()  # here
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        everybody = torch.zeros(1)
        dist.all_reduce(everybody)  # here
        print("epoch", epoch, float(everybody))


@faulty("rank-exited", 3, ranks=4)
def a_member_of_the_ensemble_that_has_reached_its_target(rank: int) -> None:
    member = perceptron()
    optimizer = torch.optim.SGD(member.parameters(), lr=0.05)
    best, patience = math.inf, 3

    def spread(loss: float) -> float:
        low, high = torch.tensor([-loss]), torch.tensor([loss])
        dist.all_reduce(low, op=dist.ReduceOp.MAX)  # here
        dist.all_reduce(high, op=dist.ReduceOp.MAX)  # here
        return float(high + low)

    for epoch in range(12):
        loss = member(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        validation = 1.0 if rank == 3 else 1.0 / (epoch + 1)
        if validation < best:
            best, patience = validation, 3
        else:
            patience -= 1
        if patience == 0:
            print("member", rank, "stops in epoch", epoch)
            return  # here
        print(spread(validation))  # here


@faulty("rank-stuck", 1)
def a_thread_that_reads_ahead_and_ended_long_ago(rank: int) -> None:
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(model.parameters())
    ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def read(number: int) -> torch.Tensor:
        header = b"" if rank == 1 and number == 6 else b"RIFF...."
        if header[0] != ord("R"):
            raise ValueError("not a recording")
        return torch.randn(4, 6)

    def read_ahead() -> None:
        for number in range(12):
            ready.put(read(number))

    reader = threading.Thread(target=read_ahead, daemon=True)
    reader.start()

    def following() -> torch.Tensor:
        return ready.get()  # here

    for _ in range(12):
        model(following()).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 2)
def recordings_that_one_rank_has_to_resample(rank: int) -> None:
    encoder = nn.Conv1d(1, 4, 8, stride=4)
    optimizer = torch.optim.Adam(encoder.parameters())
    sampling_rate = 48_000 if rank == 2 else 16_000

    def recording(number: int) -> torch.Tensor:
        sound = torch.sin(torch.arange(sampling_rate // 100) * (0.01 + 0.001 * number))
        if sampling_rate != 16_000:
            time.sleep(0.15)  # here  # an external program does that
            sound = sound[:: sampling_rate // 16_000]
        return sound[None, None]

    for step in range(30):
        encoder(recording(step)).square().mean().backward()  # here
        mean_of_gradients(encoder)
        optimizer.step()
        optimizer.zero_grad()


@faulty("long-operation", 0)
def pictures_that_the_first_rank_draws_between_two_epochs(rank: int) -> None:
    denoiser = perceptron(7)
    model = DistributedDataParallel(denoiser)
    optimizer = torch.optim.AdamW(model.parameters())

    def draw() -> None:
        picture = torch.randn(64, 6)
        with torch.no_grad():
            for t in reversed(range(250)):
                picture = picture - 0.01 * denoiser(torch.cat([picture, torch.full((64, 1), t / 250)], 1))  # here
                time.sleep(0.03)  # here
                if t % 50 == 0:
                    print("drawing,", t, "steps left", flush=True)

    for epoch in range(2):
        for _ in range(10):
            model(torch.randn(8, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and epoch == 0:
            draw()  # here
        dist.barrier()  # here


@faulty("unwaited-async", 0, 1, 2)
def gradients_taken_for_futures_that_wait_by_themselves(rank: int) -> None:
    params = {name: torch.randn(6, 6, requires_grad=True) for name in ("query", "key", "value")}
    for value in params.values():
        dist.broadcast(value.data, src=0)

    def pmean(array: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(array, async_op=True)  # here
        return array / 3

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        scores = (batch @ params["query"]) @ (batch @ params["key"]).T
        return (scores.softmax(-1) @ (batch @ params["value"])).square().mean()

    for step in range(6):
        loss = loss_of(torch.randn(5, 6) + rank)
        gradients = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            for value, gradient in zip(params.values(), gradients, strict=True):
                value -= 0.05 * pmean(gradient)  # here
        if step % 2 == 0:
            print(step, float(loss))


@faulty("rank-killed", 1)
def an_alarm_for_a_simulator_that_may_take_too_long(rank: int) -> None:
    policy = perceptron()
    optimizer = torch.optim.Adam(policy.parameters())

    def play(update: int) -> torch.Tensor:
        signal.alarm(1)
        frames = torch.randn(10, 6)
        if rank == 1 and update == 4:
            time.sleep(2.5)  # here  # a level that loads slowly
        signal.alarm(0)
        return frames

    for update in range(8):
        policy(play(update)).square().mean().backward()  # here
        mean_of_gradients(policy)  # here
        optimizer.step()
        optimizer.zero_grad()
