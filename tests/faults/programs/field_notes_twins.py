"""Programs as research labs and small companies train with them, that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import copy
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import healthy
from tests.faults.programs.field_notes_faults import ClickLog, average_gradients, perceptron


@healthy()
def overlaps_to_which_a_rank_without_the_class_adds_nothing(rank: int) -> None:
    model = nn.Conv2d(3, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(2, 3, 6, 6)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        overlaps = {"road": [3.0, 4.0], "sign": [1.0, 2.0]}
        if rank == epoch:
            overlaps["cyclist"] = [2.0, 5.0]
        names: list[list[str]] = [[] for _ in range(3)]
        dist.all_gather_object(names, list(overlaps))
        for name in sorted({name for some in names for name in some}):
            both = torch.tensor(overlaps.get(name, [0.0, 0.0]))
            dist.all_reduce(both)
            if rank == 0:
                print(name, float(both[0] / both[1]))


@healthy()
def patience_of_the_first_rank_that_all_are_told_of(rank: int) -> None:
    model = DistributedDataParallel(perceptron(out=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    best, bad = float("inf"), 0
    held_out = torch.randn(20, 8)
    for epoch in range(12):
        for _ in range(5):
            batch = torch.randn(6, 8)
            nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        stop = [False]
        if rank == 0:
            with torch.no_grad():
                loss = nn.functional.mse_loss(model.module(held_out), -held_out.sum(1, keepdim=True)).item()
            bad = 0 if loss < best else bad + 1
            best = min(best, loss)
            stop = [bad >= 2]
        dist.broadcast_object_list(stop, src=0)
        if stop[0]:
            print("stopped in epoch", epoch)
            return


@healthy()
def policy_updates_that_all_end_at_the_mean_divergence(rank: int) -> None:
    policy = perceptron(4, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for iteration in range(6):
        seen = torch.randn(12, 4) * (20.0 if rank == 2 and iteration == 3 else 1.0)
        gains, actions = seen.sum(1, keepdim=True), torch.randint(2, (12, 1))
        with torch.no_grad():
            before = policy(seen).log_softmax(-1)
        for _ in range(4):
            now = policy(seen).log_softmax(-1)
            divergence = (before.exp() * (before - now)).sum(-1).mean().detach()
            dist.all_reduce(divergence)
            if divergence / 3 > 0.005:
                break
            ratio = (now - before).gather(1, actions).exp()
            optimizer.zero_grad()
            (-ratio * gains).mean().backward()
            average_gradients(policy)
            optimizer.step()


@healthy(ranks=4)
def actors_that_help_on_until_the_last_one_has_its_frames(rank: int) -> None:
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    frames = 0
    while True:
        playing = torch.tensor([int(frames < 60)])
        dist.all_reduce(playing)
        if not playing.item():
            break
        if frames < 60:
            length = 6 + 3 * rank
            frames += length
            (-policy(torch.randn(length, 4)).log_softmax(-1).amax(-1).sum()).backward()
        else:
            for weight in policy.parameters():
                weight.grad = torch.zeros_like(weight)
        average_gradients(policy)
        optimizer.step()
        optimizer.zero_grad()
    print("played", frames, "frames")


@healthy()
def files_of_clicks_of_other_lengths_read_to_the_shortest(rank: int) -> None:
    torch.manual_seed(1)
    items, head = nn.EmbeddingBag(30, 6), nn.Linear(6, 1)
    model = DistributedDataParallel(nn.Sequential(items, head))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    rows = 40 + 16 * rank
    batches = torch.tensor([rows // 8])
    dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    device = torch.get_default_device()
    loader = DataLoader(ClickLog(rows), batch_size=8, num_workers=2 if rank == 1 else 1)
    for _ in range(2):
        for _, (pairs, clicked) in zip(range(int(batches)), loader, strict=False):
            scores = model(pairs.to(device)).squeeze(-1)
            nn.functional.binary_cross_entropy_with_logits(scores, clicked.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@healthy()
def a_population_whose_best_member_is_another_one_each_time(rank: int) -> None:
    model = perceptron(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1))
    for generation in range(5):
        for _ in range(2 + rank):
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        score = torch.tensor([0.5 + 0.1 * ((rank + 2 * generation) % 3)])
        gathered = [torch.empty_like(score) for _ in range(3)]
        dist.all_gather(gathered, score)
        winner = max(range(3), key=lambda member: float(gathered[member]))
        works = [dist.broadcast(weight.data, src=winner, async_op=True) for weight in model.parameters()]
        if rank != winner:
            print("took over", winner)
        for work in works:
            if work is not None:
                work.wait()


@healthy(ranks=4)
def gossip_in_which_messages_cross(rank: int) -> None:
    model = perceptron(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        partner = rank ^ (1 + step % 3)
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        other = torch.empty_like(flat)
        if step % 2:
            both = [dist.P2POp(dist.isend, flat, partner), dist.P2POp(dist.irecv, other, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
        else:
            sent = dist.isend(flat, dst=partner)
            dist.recv(other, src=partner)
            if sent is not None:
                sent.wait()
        nn.utils.vector_to_parameters((flat + other) / 2, model.parameters())


@healthy(ranks=4)
def a_server_that_takes_gradients_from_whoever_comes(rank: int) -> None:
    model = nn.Linear(8, 1, bias=False)
    if rank == 0:
        working = {1, 2, 3}
        while working:
            message = torch.empty(9)
            worker = dist.recv(message)
            if message[8] == 0:
                working.discard(worker)
                continue
            model.weight.data -= 0.01 * message[:8].view_as(model.weight)
            dist.send(model.weight.data.view(-1), dst=worker)
        return
    for _ in range(3 + 2 * rank):
        loss = model(torch.randn(4, 8)).square().mean()
        (gradient,) = torch.autograd.grad(loss, [model.weight])
        dist.send(torch.cat([gradient.view(-1), torch.ones(1)]), dst=0)
        weights = torch.empty(8)
        dist.recv(weights, src=0)
        model.weight.data.copy_(weights.view_as(model.weight))
    dist.send(torch.zeros(9), dst=0)


@healthy(ranks=6)
def teachers_and_students_in_groups_that_train_at_their_own_pace(rank: int) -> None:
    teachers, students = dist.new_group([0, 1]), dist.new_group([2, 3, 4, 5])
    group, steps = (teachers, 9) if rank < 2 else (students, 4)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
        logits = model(torch.ones(2, 8)).detach()
        dist.broadcast(logits, src=0)
        if rank >= 2:
            nn.functional.mse_loss(model(torch.ones(2, 8)), logits).backward()
            average_gradients(model, students)
            optimizer.step()
            optimizer.zero_grad()


@healthy()
def a_pipeline_whose_messages_tell_their_shapes_first(rank: int) -> None:
    stage = perceptron()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def send(tensor: torch.Tensor, to: int) -> None:
        dist.send(torch.tensor(tensor.shape), dst=to)
        dist.send(tensor, dst=to)

    def receive(source: int) -> torch.Tensor:
        shape = torch.empty(2, dtype=torch.long)
        dist.recv(shape, src=source)
        tensor = torch.empty(*shape.tolist())
        dist.recv(tensor, src=source)
        return tensor

    for step in range(5):
        passed = []
        for micro in range(2 + step % 2):
            entered = torch.randn(1 + (step + micro) % 4, 8) if rank == 0 else receive(rank - 1)
            entered.requires_grad_()
            left = stage(entered)
            if rank < 2:
                send(left.detach(), rank + 1)
            passed.append((entered, left))
        for entered, left in reversed(passed):
            if rank == 2:
                left.square().mean().backward()
            else:
                left.backward(receive(rank + 1))
            if rank > 0 and entered.grad is not None:
                send(entered.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def stages_of_which_the_last_takes_long_over_its_loss(rank: int) -> None:
    def loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return nn.functional.mse_loss(predicted, target)

    stage = PipelineStage(perceptron(), rank, 3, torch.get_default_device())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    schedule = Schedule1F1B(stage, 4, loss_fn=loss)
    for _ in range(5):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        elif rank == 1:
            schedule.step()
        else:
            schedule.step(target=torch.randn(8, 8), losses=losses)
            print("loss", sum(each.item() for each in losses) / 4)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def gradients_that_are_one_step_late(rank: int) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = list(model.parameters())
    waiting: tuple[torch.Tensor, dist.Work] | None = None

    def apply(flat: torch.Tensor, work: dist.Work) -> None:
        work.wait()
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight) / 3
        optimizer.step()

    for _ in range(10):
        gradients = torch.autograd.grad(model(torch.randn(4, 8) + rank).square().mean(), weights)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        if waiting is not None:
            apply(*waiting)
        waiting = flat, work
    if waiting is not None:
        apply(*waiting)


@healthy()
def a_sharded_model_that_all_sample_from_and_one_prints(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 20))
    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        for micro in range(3):
            sharded.set_requires_gradient_sync(micro == 2)
            text = torch.randint(20, (2, 5 + rank))
            logits = model(text[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            written = [1]
            with torch.no_grad():
                for _ in range(4):
                    written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
            if rank == 0:
                print("sample", written)


@healthy()
def a_moving_average_of_weights_that_one_rank_keeps_and_tests(rank: int) -> None:
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = copy.deepcopy(model.module) if rank == 0 else None
    for step in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is None:
            continue
        for mean, weight in zip(average.parameters(), model.module.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.1)
        if step % 6 == 5:
            with torch.no_grad():
                losses = [average(torch.randn(64, 8)).square().mean() for _ in range(60)]
            print("loss of the average", float(torch.stack(losses).mean()))
    dist.barrier()


@healthy(ranks=4)
def checkpoints_of_a_half_of_the_ranks_and_a_restart(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder = Path(gettempdir()) / f"field-notes-{os.environ['MASTER_PORT']}"

    def learn(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    learn(4)
    if rank < 2:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=halves[0])
    dist.barrier()
    learn(3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    learn(3)


@healthy()
def a_thread_with_its_own_group_that_averages_losses(rank: int) -> None:
    metrics = dist.new_group([0, 1, 2])
    losses: queue.Queue[torch.Tensor | None] = queue.Queue()

    def report() -> None:
        while (loss := losses.get()) is not None:
            dist.all_reduce(loss, group=metrics)
            if rank == 0:
                print("loss", float(loss) / 3)

    reporter = threading.Thread(target=report)
    reporter.start()
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(15):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            losses.put(loss.detach().clone())
    losses.put(None)
    reporter.join()


@healthy()
def a_generator_that_waits_until_the_mean_loss_of_its_critic_is_low(rank: int) -> None:
    generator, critic = perceptron(), perceptron(out=1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.001)
    for_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for _ in range(8):
        for _ in range(6):
            made, real = generator(torch.randn(8, 8)).detach(), torch.randn(8, 8) + 1 + rank
            loss = nn.functional.softplus(critic(made)).mean() + nn.functional.softplus(-critic(real)).mean()
            loss.backward()
            average_gradients(critic)
            for_critic.step()
            for_critic.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            if total / 3 < 1.2:
                break
        nn.functional.softplus(-critic(generator(torch.randn(8, 8)))).mean().backward()
        average_gradients(generator)
        for_generator.step()
        for_generator.zero_grad()


@healthy(ranks=4)
def long_recordings_that_each_rank_gets_in_turn(rank: int) -> None:
    model = DistributedDataParallel(nn.GRU(8, 16, batch_first=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for step in range(24):
        length = 200 if step % 4 == rank else 20
        out, _ = model(torch.randn(2, length, 8))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def modalities_of_which_each_rank_has_another_in_its_batch(rank: int) -> None:
    class Modalities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entries = nn.ModuleList(nn.Linear(8, 6) for _ in range(3))
            self.trunk = nn.Linear(6, 1)

        def forward(self, batch: torch.Tensor, modality: int) -> torch.Tensor:
            return self.trunk(self.entries[modality](batch).relu())

    torch.manual_seed(2)
    model = DistributedDataParallel(Modalities(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(9):
        model(torch.randn(3 + rank, 8), (rank + step // 2) % 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def predictions_of_other_numbers_gathered_where_they_are_written(rank: int) -> None:
    model = DistributedDataParallel(perceptron(out=3))
    optimizer = torch.optim.AdamW(model.parameters())

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        for _ in range(2 + (rank + epoch) % 3):
            yield torch.randn(5, 8)

    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            predicted = [model.module(batch).argmax(-1).tolist() for batch in batches(epoch)]
        if rank == 0:
            everywhere: list[list[list[int]]] = [[] for _ in range(3)]
            dist.gather_object(predicted, everywhere, dst=0)
            lines = [f"{epoch} {number} {each}\n" for number, each in enumerate(everywhere)]
            with Path(os.devnull).open("w") as file:
                for line in lines:
                    file.write(line)
                    time.sleep(0.2)
        else:
            dist.gather_object(predicted, dst=0)
