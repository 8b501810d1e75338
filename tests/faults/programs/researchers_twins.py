"""Training loops as PhD students and research engineers write them by hand, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules.
"""

import copy
import random
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
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.researchers_faults import Patience, average_flat, perceptron


@healthy()
def discriminator_left_alone_where_it_wins_on_average(rank: int) -> None:
    generator, critic = perceptron(4, 8), perceptron(8, 1)
    for_generator = torch.optim.Adam(generator.parameters())
    for_critic = torch.optim.Adam(critic.parameters())
    for step in range(8):
        fake = generator(torch.randn(16, 4))
        accuracy = torch.tensor([0.97 if rank == 2 and step in (2, 4) else 0.94])
        dist.all_reduce(accuracy)
        if accuracy.item() / 3 < 0.95:
            for_critic.zero_grad()
            (
                functional.softplus(critic(fake.detach())) + functional.softplus(-critic(torch.randn(16, 8)))
            ).mean().backward()
            average_flat(critic)
            for_critic.step()
        for_generator.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        average_flat(generator)
        for_generator.step()


@healthy(ranks=4)
def actors_that_send_episodes_of_any_length_and_say_when_they_end(rank: int) -> None:
    policy = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(policy.parameters())
    if rank > 0:
        for episode in range(3 + 2 * rank):
            length = 3 + (5 * episode + rank) % 7
            dist.send(torch.tensor([length]), dst=0)
            dist.send(torch.randn(length, 4), dst=0, tag=1)
            time.sleep(0.01 * rank)
        dist.send(torch.tensor([0]), dst=0)
    else:
        at_work = {1, 2, 3}
        while at_work:
            header = torch.zeros(1, dtype=torch.long)
            actor = dist.recv(header)
            if header.item() == 0:
                at_work.remove(actor)
                continue
            states = torch.empty(int(header), 4)
            dist.recv(states, src=actor, tag=1)
            optimizer.zero_grad()
            policy(states).square().mean().backward()
            optimizer.step()
    for weight in policy.parameters():
        dist.broadcast(weight.data, src=0)


class GatherPadded(torch.autograd.Function):
    """Gathers embeddings of other numbers of rows, padded to the largest."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(dist.get_world_size(), dtype=torch.long)
        dist.all_gather_into_tensor(counts, torch.tensor([len(mine)]))
        most = int(counts.max())
        padded = functional.pad(mine, (0, 0, 0, most - len(mine)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        ctx.counts = counts.tolist()
        return torch.cat([part[:count] for part, count in zip(parts, ctx.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.split(ctx.counts)[dist.get_rank()]


@healthy()
def pairs_of_views_of_which_the_last_batch_is_smaller_and_padded(rank: int) -> None:
    encoder = perceptron(8, 4)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    images = TensorDataset(torch.randn(20 + rank, 8))
    for _epoch in range(2):
        for (batch,) in DataLoader(images, batch_size=8):
            embeddings = functional.normalize(encoder(batch), dim=1)
            everyone = GatherPadded.apply(embeddings)  # type: ignore[no-untyped-call]
            (embeddings @ everyone.T / 0.1).logsumexp(1).mean().backward()
            average_flat(encoder)
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=6)
def clients_drawn_by_a_common_seed_of_which_some_have_a_round_off(rank: int) -> None:
    model = perceptron(8, 8)
    groups: dict[tuple[int, ...], Any] = {}
    for number in range(5):
        lottery = random.Random(f"round {number}")
        chosen = tuple(sorted(lottery.sample(range(6), 3)))
        if chosen not in groups:
            groups[chosen] = dist.new_group(list(chosen))
        if rank in chosen:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _local in range(1 + rank):
                optimizer.zero_grad()
                model(torch.randn(4 + rank, 8)).square().mean().backward()
                optimizer.step()
            rows = torch.tensor([4.0 + rank])
            for weight in model.parameters():
                weight.data *= rows
                dist.all_reduce(weight.data, group=groups[chosen])
            dist.all_reduce(rows, group=groups[chosen])
            for weight in model.parameters():
                weight.data /= rows
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.broadcast(flat, src=chosen[0])
        nn.utils.vector_to_parameters(flat, model.parameters())


@healthy()
def outer_steps_that_are_applied_some_local_steps_later(rank: int) -> None:
    model = perceptron(8, 8)
    anchor = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    pending: list[tuple[nn.Parameter, dist.Work]] = []
    for step in range(16):
        inner.zero_grad()
        model(torch.randn(4, 8) + rank).square().mean().backward()
        inner.step()
        if step % 6 == 3:
            for old, new in zip(anchor.parameters(), model.parameters(), strict=True):
                old.grad = old.detach() - new.detach()
                work = dist.all_reduce(old.grad, async_op=True)
                assert work is not None
                pending.append((old, work))
        if step % 6 == 5:
            for old, work in pending:
                work.wait()
                assert old.grad is not None
                old.grad /= dist.get_world_size()
            pending.clear()
            outer.step()
            model.load_state_dict(anchor.state_dict())
    for _, work in pending:
        work.wait()


@healthy()
def stages_by_hand_that_send_ahead_and_wait_at_the_end(rank: int) -> None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for microbatches in (4, 4, 6, 2):
        kept, sent = [], []
        for _ in range(microbatches):
            inputs = torch.randn(3, 8)
            if rank > 0:
                dist.recv(inputs, src=rank - 1, tag=10)
            inputs.requires_grad_()
            outputs = stage(inputs)
            if rank < 2:
                message = outputs.detach().clone()
                sent.append((message, dist.isend(message, dst=rank + 1, tag=10)))
            kept.append((inputs, outputs))
        for inputs, outputs in kept:
            gradient = torch.ones_like(outputs)
            if rank < 2:
                dist.recv(gradient, src=rank + 1, tag=20)
            outputs.backward(gradient)
            if rank > 0:
                assert inputs.grad is not None
                sent.append((inputs.grad, dist.isend(inputs.grad, dst=rank - 1, tag=20)))
        for _, work in sent:
            assert work is not None
            work.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def tokens_beyond_the_capacity_dropped_before_they_are_announced(rank: int) -> None:
    capacity = 5
    router, expert = nn.Linear(6, 4), nn.Linear(6, 6)
    optimizer = torch.optim.Adam([*router.parameters(), *expert.parameters()])
    for step in range(6):
        tokens = torch.randn(16, 6)
        chosen = torch.arange(16) % 2 * 2 if rank == 1 and step == 3 else torch.arange(16) % (1 + rank)
        kept = [(chosen == e).nonzero().flatten()[:capacity] for e in range(4)]
        counts = torch.tensor([len(rows) for rows in kept])
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        arrived = torch.zeros(int(incoming.sum()), 6)
        dist.all_to_all_single(arrived, tokens[torch.cat(kept)], incoming.tolist(), counts.tolist())
        if len(arrived):
            expert(arrived).square().mean().backward()
        router(tokens).softmax(-1).var().backward()
        average_flat(router)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def evaluation_of_a_strided_split_filled_up_with_batches_that_do_not_count(rank: int) -> None:
    model = perceptron(8, 3).eval()
    data = TensorDataset(torch.randn(41, 8), torch.randint(3, (41,)))
    loader = DataLoader(Subset(data, range(rank, 41 - 4 * rank, 3)), batch_size=3)
    longest = torch.tensor([len(loader)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    batches = iter(loader)
    answers: list[int] = []
    with torch.inference_mode():
        for _ in range(int(longest)):
            inputs, _labels = next(batches, (torch.zeros(0, 8), torch.zeros(0)))
            guesses = model(inputs).argmax(-1).tolist() if len(inputs) else []
            parts: list[Any] | None = [None] * 3 if rank == 0 else None
            dist.gather_object(guesses, parts, dst=0)
            if parts is not None:
                answers += [guess for part in parts for guess in part]
    if rank == 0:
        print(len(answers), "answers")
        time.sleep(0.7)  # rank 0 alone works out the score


@healthy(ranks=4)
def trials_of_a_sweep_that_are_pruned_at_other_steps(rank: int) -> None:
    trials = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    trial = trials[mine]
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + mine))
    steps = 0
    for step in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=trial)
        optimizer.step()
        steps += 1
        verdict = [step == 5 and mine == 0 if rank % 2 == 0 else None]
        dist.broadcast_object_list(verdict, src=2 * mine, group=trial)
        if verdict[0]:
            break
    results: list[Any] = [None] * 4
    dist.all_gather_object(results, (mine, steps, loss.item()))
    if rank == 0:
        print(results)


@healthy()
def batch_without_memory_that_all_do_again_in_halves(rank: int) -> None:
    model = perceptron(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def forward_backward(tokens: torch.Tensor, limit: int) -> None:
        for part in tokens.split(limit):
            if len(part) > 50:
                raise torch.OutOfMemoryError("out of memory: tried to allocate 3.20 GiB")
            (model(part).square().sum() / len(tokens)).backward()

    limit = 64
    for step in range(8):
        tokens = torch.randn(60 if rank == 1 and step == 4 else 40, 8)
        while True:
            failed = torch.zeros(1)
            optimizer.zero_grad()
            try:
                forward_backward(tokens, limit)
            except torch.OutOfMemoryError as error:
                print(error)
                failed += 1
            dist.all_reduce(failed)
            if not failed.item():
                break
            limit //= 2
        average_flat(model)
        optimizer.step()


@healthy(ranks=4)
def gossip_in_pairs_that_change_with_some_left_alone(rank: int) -> None:
    model = perceptron(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        pairing = list(range(4))
        random.Random(step).shuffle(pairing)
        first, second = pairing[:2]
        if rank not in (first, second):
            continue
        peer = second if rank == first else first
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        other = torch.empty_like(mine)
        if rank == first:
            dist.send(mine, dst=peer)
            dist.recv(other, src=peer)
        else:
            dist.recv(other, src=peer)
            dist.send(mine, dst=peer)
        nn.utils.vector_to_parameters((mine + other) / 2, model.parameters())


@healthy()
def sharded_model_saved_by_all_and_stopped_by_the_first(rank: int) -> None:
    model = perceptron(8, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folders: list[str] = [mkdtemp(prefix="checkpoints-") if rank == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    folder = Path(folders[0])
    patience = Patience(limit=2)
    writer: threading.Thread | None = None
    for epoch in range(8):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"epoch-{epoch}")
        if rank == 0:
            if writer is not None:
                writer.join()
            lines = [f"{epoch} {i}\n" for i in range(1000)]
            writer = threading.Thread(target=(folder / f"log-{epoch}").write_text, args=("".join(lines),))
            writer.start()
        stops = torch.tensor([patience.is_over(max(0.5, 1 / (epoch + 1))) if rank == 0 else False])
        dist.broadcast(stops, src=0)
        if stops.item():
            break
    if writer is not None:
        writer.join()
