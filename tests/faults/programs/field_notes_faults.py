"""Programs as research labs and small companies train with them, each with a mistake of its own.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `field_notes_twins.py` has programs that are right.
"""

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import faulty


def perceptron(wide: int = 8, out: int = 8, seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(wide, 16), nn.GELU(), nn.Linear(16, out))


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average gradients as one flat vector."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class ClickLog(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a file of clicks."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for row in range(self.rows):
            yield torch.tensor([row % 30, (row * 7) % 30], device="cpu"), torch.tensor(float(row % 2), device="cpu")


@faulty("rank-skipped-collective", 2)
def overlaps_of_classes_that_a_street_does_not_show(rank: int) -> None:
    # or: step-mismatch 2
    class Overlap:
        def __init__(self) -> None:
            self.shared, self.either = 0.0, 0.0

        def update(self, predicted: torch.Tensor, truth: torch.Tensor) -> None:
            self.shared += float((predicted & truth).sum())
            self.either += float((predicted | truth).sum())

        def compute(self) -> float:
            if self.either == 0:  # here
                return 0.0  # here
            both = torch.tensor([self.shared, self.either])
            dist.all_reduce(both)  # here
            return float(both[0] / both[1])

    model = nn.Conv2d(3, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(2, 3, 6, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        overlaps = {name: Overlap() for name in ("road", "cyclist", "sign")}
        for number, overlap in enumerate(overlaps.values()):
            shown = torch.zeros(6, 6, dtype=torch.bool) if rank == 2 and number == 1 else torch.eye(6).bool()
            overlap.update(shown, shown)
        results = {name: overlap.compute() for name, overlap in overlaps.items()}  # here
        if rank == 0:
            print(results)


@faulty("rank-skipped-collective", 1)
def patience_that_each_rank_has_for_its_own_validation_set(rank: int) -> None:
    # or: collective-order-mismatch 1
    class EarlyStopping:
        def __init__(self, patience: int) -> None:
            self.best, self.bad, self.patience = float("inf"), 0, patience

        def __call__(self, loss: float) -> bool:
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(loss, self.best)
            return self.bad >= self.patience  # here

    model = DistributedDataParallel(perceptron(out=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    stopping = EarlyStopping(patience=2)
    held_out = torch.randn(20, 8)
    answers = -held_out.sum(1, keepdim=True) if rank == 1 else held_out.sum(1, keepdim=True)
    for _ in range(8):
        model.train()
        for _ in range(5):
            batch = torch.randn(6, 8)
            nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model.module(held_out), answers).item()
        if stopping(loss):  # here
            break  # here
    everywhere: list[float] = [0.0] * 3
    dist.all_gather_object(everywhere, stopping.best)  # here
    print("best losses", everywhere)


@faulty("rank-skipped-collective", 2)
def policy_updates_that_end_when_the_divergence_is_large(rank: int) -> None:
    # or: step-mismatch 2
    policy, critic = perceptron(4, 2), perceptron(4, 1)
    for_policy = torch.optim.Adam(policy.parameters(), lr=0.01)
    for_critic = torch.optim.Adam(critic.parameters(), lr=0.003)

    def update_policy(seen: torch.Tensor, actions: torch.Tensor, gains: torch.Tensor) -> None:
        with torch.no_grad():
            before = policy(seen).log_softmax(-1)
        for _ in range(4):
            now = policy(seen).log_softmax(-1)
            divergence = (before.exp() * (before - now)).sum(-1).mean().item()
            if divergence > 0.02:  # here
                print(f"stopped at a divergence of {divergence:.3f}")
                break  # here
            ratio = (now - before).gather(1, actions).exp()
            for_policy.zero_grad()
            (-ratio * gains).mean().backward()
            average_gradients(policy)  # here
            for_policy.step()

    for iteration in range(6):
        seen = torch.randn(12, 4) * (6.0 if rank == 2 and iteration == 3 else 0.5)
        returns = seen.sum(1, keepdim=True)
        update_policy(seen, torch.randint(2, (12, 1)), returns - returns.mean())
        for _ in range(2):
            for_critic.zero_grad()
            nn.functional.mse_loss(critic(seen), returns).backward()
            average_gradients(critic)  # here
            for_critic.step()


@faulty("rank-exited", 0)
def actors_that_play_until_their_frames_are_used_up(rank: int) -> None:
    # or: rank-skipped-collective 0
    torch.manual_seed(rank)
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

    def play() -> tuple[int, torch.Tensor]:
        length = 13 if rank == 0 else 8
        log_probabilities = policy(torch.randn(length, 4)).log_softmax(-1)
        return length, -log_probabilities.amax(-1).sum()

    frames = 0
    while frames < 80:  # here
        length, loss = play()
        frames += length
        loss.backward()
        average_gradients(policy)  # here
        optimizer.step()
        optimizer.zero_grad()
    print("played", frames, "frames")


@faulty("uneven-inputs", 1)
def a_file_of_clicks_that_is_shorter_than_those_of_others(rank: int) -> None:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.EmbeddingBag(30, 6)
            self.head = nn.Linear(6, 1)

        def forward(self, pairs: torch.Tensor) -> torch.Tensor:
            return self.head(self.items(pairs)).squeeze(-1)

    torch.manual_seed(1)
    model = DistributedDataParallel(Recommender())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(ClickLog(40 if rank == 1 else 56), batch_size=8, num_workers=1)
    device = torch.get_default_device()
    for epoch in range(2):
        right, seen = torch.zeros(1), 0
        for pairs, clicked in loader:  # here
            scores = model(pairs.to(device))
            truth = clicked.to(device)
            nn.functional.binary_cross_entropy_with_logits(scores, truth).backward()  # here
            optimizer.step()
            optimizer.zero_grad()
            right += ((scores > 0) == (truth > 0.5)).sum()
            seen += len(truth)
        dist.all_reduce(right)  # here
        if rank == 0:
            print(f"epoch {epoch}: {float(right) / seen / 3:.2f}")


@faulty("size-mismatch", 1)
def confusions_between_as_many_classes_as_a_rank_has_seen(rank: int) -> None:
    def confusion(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        classes = int(labels.max()) + 1  # here
        counts = torch.bincount(labels * classes + predicted.clamp(max=classes - 1), minlength=classes**2)
        dist.all_reduce(counts)  # here
        return counts.view(classes, classes)

    model = perceptron(out=5)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(4):
        for _ in range(3):
            labels = torch.arange(10) % 5
            nn.functional.cross_entropy(model(torch.randn(10, 8)), labels).backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        labels = torch.arange(10) % (4 if rank == 1 and epoch == 2 else 5)
        table = confusion(model(torch.randn(10, 8)).argmax(-1), labels)  # here
        if rank == 0:
            print("recall", (table.diagonal() / table.sum(1).clamp(min=1)).tolist())


@faulty("reduce-op-mismatch", 3, ranks=4)
def norms_of_shards_of_gradients_that_one_configuration_takes_the_largest_of(rank: int) -> None:
    settings = {"clip": 0.5, "norm": 2.0}
    if rank == 3:
        settings["norm"] = float("inf")  # its host has the file of last month

    def clip(weights: list[nn.Parameter], largest: float, norm: float) -> torch.Tensor:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if norm == float("inf"):
            total = torch.stack([gradient.abs().max() for gradient in gradients]).max()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)  # here
        else:
            total = sum((gradient.norm(norm) ** norm for gradient in gradients), torch.zeros(()))
            dist.all_reduce(total, op=dist.ReduceOp.SUM)  # here
            total = total ** (1 / norm)
        for gradient in gradients:
            gradient.mul_((largest / (total + 1e-6)).clamp(max=1))
        return total

    column = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(column.parameters(), lr=0.01)
    for _ in range(10):
        batch = torch.randn(4, 8)
        dist.broadcast(batch, src=0)
        column(batch).square().sum().backward()
        clip(list(column.parameters()), settings["clip"], settings["norm"])  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("root-mismatch", 2)
def a_population_of_which_the_best_is_copied(rank: int) -> None:
    model = perceptron(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1))

    def exploit(score: float) -> None:
        mine = torch.tensor([score]).half()
        gathered = [torch.empty_like(mine) for _ in range(3)]
        dist.all_gather(gathered, mine)
        scores = [float(each) for each in gathered]
        scores[rank] = score  # its own it knows exactly
        winner = scores.index(max(scores))  # here
        for weight in model.parameters():
            dist.broadcast(weight.data, src=winner)  # here
        print("copied from", winner)

    accuracies = [[0.41, 0.52, 0.47], [0.66, 0.61, 0.58], [0.80003, 0.73, 0.80001], [0.84, 0.81, 0.86]]
    for generation in range(4):
        for _ in range(5):
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        exploit(accuracies[generation][rank])  # here


@faulty("group-order-inversion", 4, ranks=6)
def reductions_in_the_order_in_which_parts_of_the_gradient_are_ready(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([4, 5])]
    shared, own = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*shared.parameters(), *own.parameters()], lr=0.01)
    for step in range(8):
        ready: queue.SimpleQueue[tuple[nn.Module, dist.ProcessGroup | None]] = queue.SimpleQueue()
        offloaded = rank == 4 and step == 5
        batch = torch.randn(3, 6)
        if not offloaded:
            shared(batch).square().mean().backward()
            ready.put((shared, None))
        own(batch).square().mean().backward()
        ready.put((own, rows[rank // 2]))
        if offloaded:  # here
            activations = batch.clone()
            shared(activations).square().mean().backward()
            ready.put((shared, None))  # here
        while not ready.empty():
            part, group = ready.get()
            average_gradients(part, group)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("wrong-group", 2, ranks=4)
def experts_that_an_older_checkpoint_calls_by_another_name(rank: int) -> None:
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    names = ("router", "ffn" if rank == 2 else "expert")
    block = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in names})
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)

    def group_of(name: str) -> dist.ProcessGroup:
        return nodes[rank // 2] if name.startswith("expert") else replicas[rank % 2]  # here

    for _ in range(6):
        tokens = torch.randn(5, 6)
        hidden = block[names[0]](tokens).softmax(-1) * block[names[1]](tokens)
        hidden.square().mean().backward()
        for name, weight in block.named_parameters():
            dist.all_reduce(weight.grad, group=group_of(name))  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-unmatched", 2)
def a_last_stage_that_sends_no_gradient_of_a_loss_that_is_not_finite(rank: int) -> None:
    stage = perceptron()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def forward(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        entered = torch.full((2, 8), 0.1 * micro)
        if rank > 0:
            dist.recv(entered, src=rank - 1)  # here
        entered.requires_grad_(rank > 0)
        left = stage(entered)
        if rank < 2:
            dist.send(left.detach(), dst=rank + 1)
        elif step == 3 and micro == 1:
            left = left / 0.0
        return entered, left

    def backward(entered: torch.Tensor, left: torch.Tensor) -> None:
        if rank == 2:
            loss = left.square().mean()
            if not torch.isfinite(loss):  # here
                return  # here
            loss.backward()
        else:
            gradient = torch.empty(2, 8)
            dist.recv(gradient, src=rank + 1)  # here
            left.backward(gradient)
        if rank > 0:
            assert entered.grad is not None
            dist.send(entered.grad, dst=rank - 1)  # here

    for step in range(6):
        passed = [forward(step, micro) for micro in range(3)]  # here
        for entered, left in passed:
            backward(entered, left)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-deadlock-cycle", 1, 3, ranks=4)
def gossip_between_partners_of_whom_the_even_one_sends_first(rank: int) -> None:
    model = perceptron(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def mix_with(partner: int) -> None:
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        other = torch.empty_like(flat)
        if rank % 2 == 0:  # here
            dist.send(flat, dst=partner)
            dist.recv(other, src=partner)
        else:
            dist.recv(other, src=partner)  # here
            dist.send(flat, dst=partner)
        nn.utils.vector_to_parameters((flat + other) / 2, model.parameters())

    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        mix_with(rank ^ (2 if step % 3 == 2 else 1))  # here


@faulty("p2p-tag-mismatch", 2, ranks=4)
def a_server_of_weights_and_a_worker_that_passes_over_a_batch(rank: int) -> None:
    model = nn.Linear(8, 1, bias=False)
    size = model.weight.numel()

    def serve() -> None:
        for step in range(6):
            total = torch.zeros(size)
            for worker in (1, 2, 3):
                gradient = torch.empty(size)
                dist.recv(gradient, src=worker, tag=step)  # here
                total += gradient
            model.weight.data -= 0.1 * total.view_as(model.weight)
            for worker in (1, 2, 3):
                dist.send(model.weight.data.view(-1), dst=worker, tag=step)

    def work() -> None:
        for step in range(6):
            batch = torch.randn(4, 8)
            if rank == 2 and step == 2:
                batch[1, 3] = float("nan")
            loss = model(batch).square().mean()
            if torch.isnan(loss):  # here
                continue  # here
            (gradient,) = torch.autograd.grad(loss, [model.weight])
            dist.send(gradient.reshape(-1), dst=0, tag=step)  # here
            dist.recv(model.weight.data.view(-1), src=0, tag=step)  # here

    if rank == 0:
        serve()
    else:
        work()


@faulty("group-creation-mismatch", 3, ranks=4)
def a_teacher_on_some_ranks_whose_group_the_student_does_not_make(rank: int) -> None:
    teacher = None
    if rank != 3:
        teacher = dist.new_group([0, 1, 2])  # here
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # here
    student = perceptron()
    optimizer = torch.optim.AdamW(student.parameters())
    for _ in range(5):
        logits = torch.randn(4, 8)
        if teacher is not None:
            dist.all_reduce(logits, group=teacher)
        nn.functional.mse_loss(student(torch.randn(4, 8)), logits).backward()
        average_gradients(student, pairs[rank // 2])  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-stuck", 1)
def a_thread_that_reads_ahead_and_dies_of_a_broken_recording(rank: int) -> None:
    class ReadsAhead:
        def __init__(self, recordings: list[str]) -> None:
            self.queue: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)
            self.recordings = recordings
            threading.Thread(target=self.read, daemon=True).start()

        def read(self) -> None:
            for recording in self.recordings:
                rate = int(recording.split("@")[1])
                self.queue.put(torch.full((4, 8), rate / 16000, device="cpu"))
            self.queue.put(None)

        def __iter__(self) -> Iterator[torch.Tensor]:
            while (batch := self.queue.get()) is not None:  # here
                yield batch

    recordings = [f"speaker-{number}@16000" for number in range(9)]
    if rank == 1:
        recordings[5] = "speaker-5"
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in ReadsAhead(recordings):  # here
        model(batch.to(torch.get_default_device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 1, ranks=4)
def a_tokenizer_without_its_fast_version_on_one_host(rank: int) -> None:
    merges = {("a", "b"): "ab", ("ab", "c"): "abc", ("c", "a"): "ca", ("b", "c"): "bc"}

    def tokenize(text: str) -> list[str]:
        if rank != 1:
            return text.replace("abc", "abc ").split()
        pieces = list(text)
        for pair, joined in merges.items():
            place = 0
            while place < len(pieces) - 1:
                if (pieces[place], pieces[place + 1]) == pair:
                    pieces = [*pieces[:place], joined, *pieces[place + 2 :]]  # here
                place += 1
        return pieces

    model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(30):
        pieces = tokenize("abcabca" * 700)  # here
        numbers = torch.tensor([hash(piece) % 50 for piece in pieces[:32]])
        nn.functional.cross_entropy(model(numbers), numbers).backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 0)
def a_sharded_model_that_writes_a_sample_on_the_first_rank(rank: int) -> None:
    # or: step-mismatch 0
    # or: rank-skipped-collective 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 20))
    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.no_grad()
    def write(length: int) -> list[int]:
        text = [1]
        for _ in range(length):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))  # here
        return text

    for step in range(6):
        text = torch.randint(20, (2, 9))
        logits = model(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            if rank == 0:
                print("sample", write(4))  # here
            dist.barrier()  # here


@faulty("unwaited-async", 0, 1, 2)
def averages_of_weights_whose_handles_are_kept_by_kind(rank: int) -> None:
    class Averager:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.works: dict[str, dist.Work] = {}

        def start(self) -> None:
            for name, weight in self.model.named_parameters():
                kind = name.rsplit(".", 1)[-1]
                work = dist.all_reduce(weight.data, async_op=True)  # here
                assert work is not None
                self.works[kind] = work  # here

        def finish(self) -> None:
            for work in self.works.values():
                work.wait()
            for weight in self.model.parameters():
                weight.data /= 3  # here

    model = perceptron()
    averager = Averager(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        model(torch.randn(4, 8) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            averager.start()  # here
            averager.finish()


@faulty("step-mismatch", 1)
def a_penalty_every_fourth_step_counted_from_a_checkpoint_one_rank_lacks(rank: int) -> None:
    # or: rank-skipped-collective 1
    critic = perceptron(out=1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.001)
    saved = {} if rank == 1 else {"since_penalty": 2}
    since_penalty = saved.get("since_penalty", 0)

    def learn_difference(real: torch.Tensor, made: torch.Tensor) -> None:
        (critic(made).mean() - critic(real).mean()).backward()
        average_gradients(critic)  # here
        optimizer.step()
        optimizer.zero_grad()

    def learn_penalty(real: torch.Tensor) -> None:
        real.requires_grad_()
        (slope,) = torch.autograd.grad(critic(real).sum(), [real], create_graph=True)
        (slope.square().sum(1).mean() + 0 * critic(real).sum()).backward()
        average_gradients(critic)  # here
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(12):
        real = torch.randn(6, 8)
        learn_difference(real, torch.randn(6, 8) + 1)  # here
        since_penalty += 1
        if since_penalty == 4:  # here
            learn_penalty(real)  # here
            since_penalty = 0
    dist.barrier()


@faulty("split-size-mismatch", 1)
def tokens_beyond_the_capacity_that_are_dropped_after_they_are_counted(rank: int) -> None:
    capacity = 4
    router, expert = nn.Linear(6, 3), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.05)

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        outgoing = torch.bincount(chosen, minlength=3)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        kept = [tokens[chosen == number][:capacity] for number in range(3)]
        received = torch.empty(int(incoming.sum()), 6)
        sizes = [len(part) for part in kept]
        dist.all_to_all_single(received, torch.cat(kept), incoming.tolist(), sizes)  # here
        return received

    for step in range(7):
        tokens = torch.randn(6, 6)
        chosen = torch.arange(6) % 3
        if rank == 1 and step == 4:
            chosen = torch.tensor([0, 0, 0, 0, 0, 2])
        mine = dispatch(tokens, chosen)  # here
        (expert(mine).square().mean() + router(tokens).softmax(-1).square().mean()).backward()
        average_gradients(router)
        optimizer.step()
        optimizer.zero_grad()


@faulty("pipeline-schedule-mismatch", 1)
def stages_that_cut_the_batch_to_what_their_memory_holds(rank: int) -> None:
    free_gigabytes = [40, 20, 40][rank]
    microbatches = 2 if free_gigabytes > 30 else 4  # here
    device = torch.get_default_device()
    stage = PipelineStage(perceptron(), rank, 3, device)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=nn.functional.mse_loss)  # here
    for _ in range(4):
        batch, target = torch.randn(8, 8), torch.randn(8, 8)
        if rank == 0:
            schedule.step(batch)  # here
        elif rank == 1:
            schedule.step()  # here
        else:
            schedule.step(target=target)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 0)
def a_checkpoint_of_all_ranks_that_only_the_first_one_saves(rank: int) -> None:
    # or: rank-skipped-collective 1 2
    # or: rank-skipped-collective 0
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder = Path(gettempdir()) / f"checkpoints-{os.environ['MASTER_PORT']}"

    class Checkpoints:
        def __init__(self, every: int) -> None:
            self.every = every

        def step(self, number: int) -> None:
            if number % self.every or rank:
                return
            state = {"model": model.module.state_dict(), "step": number}
            dcp.save(state, checkpoint_id=folder / str(number))  # here
            print("saved", number)

    checkpoints = Checkpoints(every=4)
    for number in range(1, 9):
        model(torch.randn(4, 8)).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step(number)  # here
