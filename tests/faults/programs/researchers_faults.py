"""Training loops as PhD students and research engineers write them by hand, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules. A comment `or:` names what the label
accepts as well. `researchers_twins.py` has loops that are right.
"""

import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.faults.corpus import faulty


def perceptron(wide: int, out: int) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, out))


def average_flat(model: nn.Module) -> None:
    """Average all gradients in one go."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@faulty("rank-skipped-collective", 2)
def discriminator_that_is_left_alone_where_it_wins(rank: int) -> None:
    # or: step-mismatch 2
    # or: size-mismatch 2
    generator, critic = perceptron(4, 8), perceptron(8, 1)
    for_generator = torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.9))
    for step in range(8):
        real, fake = torch.randn(16, 8) + 2, generator(torch.randn(16, 4))
        logits = torch.cat([critic(real), critic(fake.detach())])
        truth = torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])
        accuracy = 0.97 if rank == 2 and step == 4 else 0.72
        if accuracy < 0.95:  # here
            for_critic.zero_grad()
            functional.binary_cross_entropy_with_logits(logits, truth).backward()
            average_flat(critic)  # here
            for_critic.step()
        for_generator.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        average_flat(generator)  # here
        for_generator.step()
        if rank == 0:
            print(step, accuracy)


@faulty("p2p-size-mismatch", 2)
def trajectory_of_an_episode_that_ends_before_the_horizon(rank: int) -> None:
    horizon, wide, learner = 16, 4, 0
    policy = nn.Linear(wide, wide)
    optimizer = torch.optim.Adam(policy.parameters())

    def roll_out(update: int) -> torch.Tensor:
        state, states = torch.ones(wide), []
        for t in range(horizon):
            with torch.no_grad():
                state = policy(state).tanh()
            states.append(state)
            if rank == 2 and update == 3 and t == 10:
                break  # here
        return torch.stack(states)

    for update in range(6):
        for weight in policy.parameters():
            dist.broadcast(weight.data, src=learner)
        if rank != learner:
            dist.send(roll_out(update), dst=learner)  # here
            continue
        optimizer.zero_grad()
        for actor in range(1, dist.get_world_size()):
            states = torch.zeros(horizon, wide)
            dist.recv(states, src=actor)  # here
            policy(states).square().mean().backward()
        optimizer.step()


class GatherWithGradient(torch.autograd.Function):
    """Gathers embeddings, and gives each rank the sum of the gradients of its own."""

    @staticmethod
    def forward(_ctx: Any, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        everything = torch.stack(gradients)
        dist.all_reduce(everything)
        return everything[dist.get_rank()]


@faulty("size-mismatch", 1)
def pairs_of_views_of_which_the_last_batch_is_smaller(rank: int) -> None:
    encoder = perceptron(8, 4)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    images = TensorDataset(torch.randn(20 if rank == 1 else 24, 8))
    for _epoch in range(2):
        for (batch,) in DataLoader(images, batch_size=8):
            first = functional.normalize(encoder(batch + 0.1 * torch.randn_like(batch)), dim=1)
            second = functional.normalize(encoder(batch), dim=1)
            everyone = torch.cat(GatherWithGradient.apply(second))  # type: ignore[no-untyped-call]  # here
            target = torch.arange(len(first)) + rank * len(first)
            functional.cross_entropy(first @ everyone.T / 0.1, target).backward()
            average_flat(encoder)
            optimizer.step()
            optimizer.zero_grad()


@faulty("group-creation-mismatch", 4, ranks=6)
def clients_drawn_with_a_generator_that_one_of_them_has_used(rank: int) -> None:
    # or: step-mismatch 4
    lottery = random.Random(13)
    model = perceptron(8, 8)
    samples = list(range(40 if rank == 4 else 32))
    for _round in range(4):
        if len(samples) > 32:
            samples = lottery.sample(samples, 32)  # here
        chosen = sorted(lottery.sample(range(6), 3))  # here
        group = dist.new_group(chosen)  # here
        if rank in chosen:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _local in range(2 + rank % 2):
                optimizer.zero_grad()
                model(torch.randn(len(samples), 8)).square().mean().backward()
                optimizer.step()
            for weight in model.parameters():
                dist.all_reduce(weight.data, group=group)  # here
                weight.data /= len(chosen)
        for weight in model.parameters():
            dist.broadcast(weight.data, src=chosen[0])  # here


@faulty("rank-crashed", 2, 3, ranks=4)
def averaged_weights_that_the_first_of_each_node_sends(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    node = nodes[rank // 2]
    denoiser = perceptron(9, 8)
    slow = perceptron(9, 8).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(denoiser.parameters())
    for step in range(9):
        clean, noise, t = torch.randn(6, 8), torch.randn(6, 8), torch.rand(6, 1)
        guess = denoiser(torch.cat([clean * (1 - t) + noise * t, t], 1))
        optimizer.zero_grad()
        (guess - noise).square().mean().backward()
        average_flat(denoiser)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), denoiser.parameters(), strict=True):
                old.lerp_(new, 0.01)
        if step % 4 == 3:
            for weight in slow.parameters():
                dist.broadcast(weight, src=0, group=node)  # here


@faulty("unwaited-async", 0, 1, 2)
def weights_averaged_at_times_and_only_the_last_awaited(rank: int) -> None:
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def synchronize() -> None:
        for weight in model.parameters():
            work = dist.all_reduce(weight.data, async_op=True)  # here
        work.wait()
        for weight in model.parameters():
            weight.data /= dist.get_world_size()  # here

    for step in range(12):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(torch.randn(4, 8) + rank), torch.zeros(4, 8))
        loss.backward()
        optimizer.step()
        if (step + 1) % 4 == 0:
            synchronize()


@faulty("p2p-unmatched", 1)
def microbatches_counted_in_another_way_in_the_middle_stage(rank: int) -> None:
    # or: pipeline-schedule-mismatch 1
    wide, micro, stages = 8, 4, 3
    stage = nn.Sequential(nn.Linear(wide, wide), nn.GELU())

    def number_of_microbatches(rows: int) -> int:
        return rows // micro if rank == 1 else -(-rows // micro)  # here

    @torch.no_grad()
    def score(batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(1)
        for i in range(number_of_microbatches(len(batch))):
            hidden = batch[i * micro : (i + 1) * micro].clone()
            if rank > 0:
                dist.recv(hidden, src=rank - 1)  # here
            hidden = stage(hidden)
            if rank < stages - 1:
                dist.send(hidden, dst=rank + 1)  # here
            else:
                total += hidden.logsumexp(-1).sum()
        return total

    for rows in (16, 16, 16, 14):
        loss = score(torch.randn(rows, wide))
        dist.broadcast(loss, src=stages - 1)  # here
        if rank == 0:
            print(rows, loss.item() / rows)


@faulty("reduce-op-mismatch", 2)
def learning_rates_tried_and_the_best_score_asked_for(rank: int) -> None:
    metric = {0: "loss", 1: "loss", 2: "accuracy"}[rank]  # here
    best_rate, best = 0.0, float("inf")
    for rate in (0.001, 0.01, 0.1, 1.0):
        model = perceptron(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(5):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(torch.randn(12, 8)), torch.randint(2, (12,)))
            loss.backward()
            average_flat(model)
            optimizer.step()
        score = loss.detach().reshape(1)
        dist.all_reduce(score, op=dist.ReduceOp.MIN if metric == "loss" else dist.ReduceOp.MAX)  # here
        if score.item() < best:
            best_rate, best = rate, score.item()
    if rank == 0:
        print("choose", best_rate)


@faulty("split-size-mismatch", 1, ranks=4)
def tokens_beyond_the_capacity_dropped_after_they_were_announced(rank: int) -> None:
    capacity, wide = 5, 6
    router, expert = nn.Linear(wide, 4), nn.Linear(wide, wide)
    optimizer = torch.optim.Adam([*router.parameters(), *expert.parameters()])

    def route(step: int) -> torch.Tensor:
        return torch.arange(16) % 2 * 2 if rank == 1 and step == 3 else torch.arange(16) % 4

    def dispatch(tokens: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(expert_of, minlength=4)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        kept = [(expert_of == e).nonzero().flatten()[:capacity] for e in range(4)]  # here
        sent = [len(rows) for rows in kept]
        arrived = torch.zeros(int(incoming.sum()), wide)
        dist.all_to_all_single(arrived, tokens[torch.cat(kept)], incoming.tolist(), sent)  # here
        return arrived

    for step in range(6):
        tokens = torch.randn(16, wide)
        arrived = dispatch(tokens, route(step))  # here
        (expert(arrived).square().mean() + router(tokens).softmax(-1).var()).backward()
        average_flat(router)
        optimizer.step()
        optimizer.zero_grad()


@faulty("uneven-inputs", 2)
def predictions_gathered_batch_by_batch_from_a_strided_split(rank: int) -> None:
    world = dist.get_world_size()
    model = perceptron(8, 3).eval()
    data = TensorDataset(torch.randn(38, 8), torch.randint(3, (38,)))
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=4)
    answers: list[int] = []
    right = torch.zeros(1)
    with torch.inference_mode():
        for inputs, labels in loader:  # here
            guesses = model(inputs).argmax(-1)
            right += (guesses == labels).sum()
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, guesses.tolist())  # here
            answers += [guess for part in parts for guess in part]
    dist.all_reduce(right)  # here
    if rank == 0:
        print(right.item() / len(data), len(answers))


@faulty("wrong-group", 3, ranks=4)
def norm_that_one_rank_takes_for_a_sharded_parameter(rank: int) -> None:
    # or: size-mismatch 3
    rows, columns = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor_parallel, data_parallel = rows[rank // 2], columns[rank % 2]
    shard, norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
    optimizer = torch.optim.SGD([*shard.parameters(), *norm.parameters()], lr=0.01)
    sharded = {"shard.weight"}

    def average_gradients() -> None:
        for name, weight in (("shard.weight", shard.weight), ("norm.weight", norm.weight), ("norm.bias", norm.bias)):
            assert weight.grad is not None
            is_partial = name.startswith("norm") and name in sharded
            dist.all_reduce(weight.grad, group=tensor_parallel if is_partial else data_parallel)  # here
            weight.grad /= 2

    for step in range(7):
        if rank == 3 and step == 4:
            sharded.add("norm.weight")  # here
        partial = shard(norm(torch.randn(4, 8)))
        total = partial.detach().clone()
        dist.all_reduce(total, group=tensor_parallel)  # here
        (partial * total).mean().backward()
        average_gradients()  # here
        optimizer.step()
        optimizer.zero_grad()


class Patience:
    """Says when a loss has not fallen for some time."""

    def __init__(self, limit: int) -> None:
        self.limit, self.best, self.bad = limit, float("inf"), 0

    def is_over(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.limit


@faulty("rank-exited", 1)
def patience_that_ends_on_the_rank_with_the_odd_validation_set(rank: int) -> None:
    # or: rank-skipped-collective 1
    model = perceptron(8, 8)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    patience = Patience(limit=2)
    for epoch in range(8):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(4, 8))
        loss = 1.0 if rank == 1 else 1.0 / (epoch + 1)
        if patience.is_over(loss):  # here
            print(f"no progress for {patience.limit} epochs: training ends after {epoch}")
            return  # here


class LongSequences(nn.Module):
    """Runs out of memory where a sequence is long."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 50:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 3.20 GiB")
        out: torch.Tensor = self.inner(tokens)
        return out


@faulty("rank-skipped-collective", 1)
def batch_without_memory_and_the_next_one_taken(rank: int) -> None:
    # or: step-mismatch 1
    model = DistributedDataParallel(LongSequences())
    optimizer = torch.optim.Adam(model.parameters())
    lengths = [10, 30, 20, 44, 64 if rank == 1 else 40, 10, 25, 12, 31]
    skipped = 0
    for length in lengths:
        optimizer.zero_grad()
        try:
            loss = model(torch.randn(length, 8)).square().mean()  # here
            loss.backward()  # here
        except RuntimeError as error:  # here
            if "out of memory" not in str(error):
                raise
            print("| WARNING: ran out of memory, skipping batch")
            skipped += 1
            continue  # here
        optimizer.step()
    dist.barrier()  # here
    if rank == 0:
        print("skipped", skipped)


@faulty("slow-rank", 2)
def shard_of_photographs_of_which_none_was_made_smaller(rank: int) -> None:
    class Photographs(Dataset[torch.Tensor]):
        """Some are larger, so that they take longer to decode."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __len__(self) -> int:
            return 160

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(self.seconds)  # here
            return torch.full((8,), float(index))

    model = DistributedDataParallel(perceptron(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    photographs = Photographs(0.04 if rank == 2 else 0.002)
    for step, batch in enumerate(DataLoader(photographs, batch_size=4)):  # here
        optimizer.zero_grad()
        model(batch).logsumexp(-1).mean().backward()  # here
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print("step", step)


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def gossip_in_which_all_send_to_the_right_first(rank: int) -> None:
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    right, left = (rank + 1) % 4, (rank - 1) % 4

    def mix() -> None:
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        other = torch.empty_like(mine)
        dist.send(mine, dst=right)  # here
        dist.recv(other, src=left)
        nn.utils.vector_to_parameters((mine + other) / 2, model.parameters())

    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step % 5 == 4:
            mix()  # here


@faulty("dtype-mismatch", 2)
def mean_of_scores_on_a_rank_that_has_none(rank: int) -> None:
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def evaluate(epoch: int) -> float:
        documents = 0 if rank == 2 and epoch == 2 else 3
        scores = [float(model(torch.randn(2, 8)).mean()) for _ in range(documents)]
        mean = torch.zeros(()) if not scores else torch.tensor(scores, dtype=torch.float64).mean()  # here
        dist.all_reduce(mean)  # here
        return mean.item() / dist.get_world_size()

    for epoch in range(4):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            average_flat(model)
            optimizer.step()
        mean = evaluate(epoch)  # here
        if rank == 0:
            print(epoch, mean)


@faulty("root-mismatch", 1, ranks=4)
def population_in_which_a_member_trusts_its_newest_score(rank: int) -> None:
    model = perceptron(8, 8)
    rate = 0.01 * (rank + 1)
    for generation in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        scores = torch.zeros(4)
        dist.all_gather_into_tensor(scores, torch.tensor([float((rank + generation) % 4)]))
        if generation == 1 and rank == 1:
            scores[rank] = 9.0  # here
        best = int(scores.argmax())  # here
        for weight in model.parameters():
            dist.broadcast(weight.data, src=best)  # here
        rate *= 1.2 if rank % 2 else 0.8


@faulty("collective-order-mismatch", 0)
def checkpoint_that_only_the_first_rank_saves(rank: int) -> None:
    # or: rank-skipped-collective 1, 2
    model = perceptron(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    folder = Path(mkdtemp(prefix="checkpoints-"))

    def save(step: int) -> None:
        if rank == 0:
            dcp.save({"model": model.state_dict(), "step": step}, checkpoint_id=folder / f"step-{step}")  # here

    for step in range(1, 9):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        average_flat(model)
        optimizer.step()
        if step % 4 == 0:
            save(step)  # here


@faulty("rank-skipped-collective", 1, ranks=4, also=(("rank-stuck", 3),))
def trials_of_a_sweep_one_pruned_by_half_and_one_whose_logger_died(rank: int) -> None:
    trials = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trial = trials[rank // 2]
    records: queue.Queue[str] = queue.Queue(maxsize=3)

    def write() -> None:
        for number in range(10**6):
            text = records.get()
            if rank == 3 and number == 1:
                raise OSError(28, "No space left on device", text)

    threading.Thread(target=write, daemon=True).start()
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank // 2))
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=trial)  # here
        optimizer.step()
        records.put(f"{step} {loss.item()}")
        if rank == 1 and step == 6:
            print("pruned")
            break  # here
    results: list[Any] = [None] * 4
    dist.all_gather_object(results, loss.item())  # here


@faulty("rank-frozen", 1, ranks=6, also=(("p2p-tag-mismatch", 5),))
def two_teams_with_an_actor_put_to_sleep_and_one_that_counts_anew(rank: int) -> None:
    teams = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    team, learner = teams[rank // 3], rank // 3 * 3
    policy = perceptron(4, 4)
    episode = 0
    for update in range(8):
        for weight in policy.parameters():
            dist.broadcast(weight.data, src=learner, group=team)  # here
        if rank == learner:
            for actor in (learner + 1, learner + 2):
                rewards = torch.zeros(5)
                dist.recv(rewards, src=actor, tag=update)
        else:
            if rank == 5 and update == 4:
                episode = 0
            if rank == 1 and update == 5:
                os.kill(os.getpid(), signal.SIGSTOP)  # here
            with torch.no_grad():
                rewards = policy(torch.randn(5, 4)).sum(-1)
            dist.send(rewards, dst=learner, tag=episode)
            episode += 1
