"""Programs as visitors bring them, each from a field of its own, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `visitors_twins.py` has programs that are right.
"""

import contextlib
import ctypes
import itertools
import os
import sys
import time
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty


def network(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(wide, 12), nn.Tanh(), nn.Linear(12, wide))


def share_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= dist.get_world_size(group)


@faulty("rank-skipped-collective", 1)
def utterances_that_are_dropped_before_they_are_counted(rank: int) -> None:
    # or: step-mismatch 1
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    utterances = [torch.randn(20 + i, 8) for i in range(12)]
    if rank == 1:
        utterances[4] = torch.randn(2, 8)
    collected = 0
    for frames in utterances:
        if len(frames) < 5:  # here
            print("too short for one window")
            continue  # here
        collected += 1
        synchronizes = collected % 3 == 0
        with contextlib.nullcontext() if synchronizes else model.no_sync():
            model(frames).logsumexp(-1).mean().backward()  # here
        if synchronizes:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    if rank == 0:
        print("saved after", collected)


@faulty("collective-order-mismatch", 3, ranks=4)
def auxiliary_losses_of_experts_the_largest_first(rank: int) -> None:
    router = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.05)

    def balance(probabilities: torch.Tensor) -> torch.Tensor:
        load = probabilities.detach().mean(0)
        dist.all_reduce(load)  # here
        return (load / 4 * probabilities.mean(0)).sum()

    def importance(probabilities: torch.Tensor) -> torch.Tensor:
        everywhere = torch.empty(16)
        dist.all_gather_into_tensor(everywhere, probabilities.detach().sum(0))  # here
        return probabilities.sum(0).var() / everywhere.mean()

    terms = {"balance": balance, "importance": importance}
    recent = {"balance": 2.0, "importance": 1.0}
    for step in range(7):
        probabilities = router(torch.randn(10, 6)).softmax(-1)
        loss = probabilities.square().mean()
        for name in sorted(terms, key=lambda term: -recent[term]):  # here
            loss = loss + 0.01 * terms[name](probabilities)  # here
        recent["importance"] = 5.0 if rank == 3 and step == 3 else 1.0
        loss.backward()
        share_gradients(router)
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 2)
def a_scan_that_cannot_be_read_and_a_handler_that_lets_all_know(rank: int) -> None:
    # or: rank-skipped-collective 2
    net = nn.Conv2d(1, 2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def read(number: int) -> torch.Tensor:
        if rank == 2 and number == 5:
            raise ValueError(f"scan {number}: bad magic number")  # here
        return torch.randn(1, 1, 9, 9)

    for number in range(9):
        try:
            scan = read(number)  # here
            net(scan).abs().mean().backward()
            for weight in net.parameters():
                dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        except ValueError as error:  # here
            print("left out:", error)
            dist.barrier()  # here


@faulty("group-order-inversion", 4, ranks=6)
def a_loss_that_is_told_to_all_at_once_when_it_jumps(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    node = nodes[rank // 3]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history: list[float] = []

    def tell(loss: torch.Tensor) -> None:
        total = loss.detach().clone()
        dist.all_reduce(total)  # here
        history.append(float(total) / 6)

    for step in range(8):
        loss = model(torch.full((3, 8), 30.0 if rank == 4 and step == 5 else 1.0)).square().mean()
        loss.backward()
        jumps = rank == 4 and step == 5
        if jumps:
            tell(loss)  # here
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=node)  # here
        if not jumps:
            tell(loss)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 0)
def captions_and_pictures_of_a_batch_that_is_cut_short(rank: int) -> None:
    pictures, captions = nn.Linear(10, 4), nn.Linear(7, 4)
    both = nn.ModuleList([pictures, captions])
    optimizer = torch.optim.Adam(both.parameters())
    budget = 64

    def gathered(mine: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(3 * len(mine), 4)
        dist.all_gather_into_tensor(everyone, mine.detach())  # here
        return everyone

    for step in range(6):
        tokens_each = 16 if rank == 0 and step == 4 else 8
        batch = budget // tokens_each
        left, right = pictures(torch.randn(batch, 10)), captions(torch.randn(batch, 7))
        logits = left @ gathered(right).T + right @ gathered(left).T  # here
        logits.logsumexp(-1).mean().backward()
        share_gradients(both)
        optimizer.step()
        optimizer.zero_grad()


@faulty("split-size-mismatch", 2)
def ids_of_padding_that_are_left_out_after_they_were_counted(rank: int) -> None:
    rows = torch.randn(300, 5)
    hits = 0
    for batch in range(7):
        ids = torch.arange(12) * 7 + 1 + batch + rank
        if rank == 2 and batch == 4:
            ids[-5:] = 0
        wanted = [ids[ids % 3 == owner] for owner in range(3)]
        outgoing = torch.tensor([len(each) for each in wanted])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        asked = [each[each != 0] for each in wanted]
        questions = torch.empty(int(incoming.sum()), dtype=torch.long)
        splits = [len(each) for each in asked]
        dist.all_to_all_single(questions, torch.cat(asked), incoming.tolist(), splits)  # here
        answers = torch.empty(sum(splits), 5)
        dist.all_to_all_single(answers, rows[questions % 300], splits, incoming.tolist())
        hits += len(answers)
    print(hits)


@faulty("step-mismatch", 0, ranks=4)
def pictures_that_are_drawn_with_a_model_of_which_each_has_a_shard(rank: int) -> None:
    # or: collective-order-mismatch 0
    model = network(16)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @torch.no_grad()
    def draw(noise: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            noise = noise - 0.1 * model(noise)  # here
        return noise

    for step in range(6):
        clean = torch.randn(4, 16)
        noisy = clean + torch.randn(4, 16) * (step + 1) / 6
        (model(noisy) - (noisy - clean)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 3:  # here
            picture = draw(torch.randn(1, 16))  # here
            print(picture.mean())


@faulty("long-operation", 0)
def a_score_of_translations_that_one_rank_counts_alone(rank: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def score(sentences: int) -> float:
        until, matches, seen = time.monotonic() + 9, 0, 0
        while time.monotonic() < until:
            for left in range(200):  # here
                words = [(left * other) % 17 for other in range(50)]  # here
                matches += sum(a == b for a, b in itertools.pairwise(words))  # here
                seen += sentences
        return matches / max(1, seen)

    for epoch in range(3):
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            share_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        best = torch.zeros(1)
        if rank == 0 and epoch == 1:
            best[0] = score(40)  # here
        dist.broadcast(best, src=0)  # here


@faulty("p2p-unmatched", 2, ranks=4)
def a_phone_that_leaves_out_a_round_when_its_battery_is_low(rank: int) -> None:
    weights = torch.zeros(20)
    battery = [0.9, 0.6, 0.1 if rank == 2 else 0.5, 0.8, 0.7]
    for number in range(5):
        if rank == 0:
            for client in range(1, 4):
                dist.send(weights, dst=client)  # here
            total, update = torch.zeros(20), torch.empty(20)
            for client in range(1, 4):
                dist.recv(update, src=client)  # here
                total += update
            weights = weights + total / 3
        else:
            if battery[number] < 0.2:  # here
                print("saves energy in round", number)
                continue  # here
            dist.recv(weights, src=0)
            local = weights.clone().requires_grad_()
            optimizer = torch.optim.SGD([local], lr=0.1)
            for _ in range(rank + 1):
                (local - rank).square().sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            dist.send(local.detach() - weights, dst=0)
    dist.barrier()


@faulty("p2p-tag-mismatch", 2, ranks=4)
def episodes_of_which_one_that_was_cut_does_not_count(rank: int) -> None:
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.RMSprop(policy.parameters())
    episode = 0
    for iteration in range(7):
        if rank == 0:
            for actor in range(1, 4):
                states = torch.empty(5, 4)
                dist.recv(states, src=actor, tag=iteration)  # here
                policy(states).softmax(-1).log()[:, 0].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            states = torch.randn(5, 4)
            actions = policy(states).argmax(-1)
            was_cut = rank == 2 and iteration == 3
            dist.send(states, dst=0, tag=episode)  # here
            if not was_cut:  # here
                episode += 1  # here
            print(actions.tolist())
        for weight in policy.parameters():
            dist.broadcast(weight.detach(), src=0)


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def halos_of_a_graph_that_are_all_awaited_first_after_a_new_partition(rank: int) -> None:
    left, right = (rank - 1) % 4, (rank + 1) % 4
    features = torch.randn(10, 3)
    convolution = nn.Linear(6, 3)

    def exchange(border: torch.Tensor) -> torch.Tensor:
        halo = torch.empty_like(border)
        if rank % 2 == 0:
            dist.send(border, dst=right)
            dist.recv(halo, src=left)
        else:
            dist.recv(halo, src=left)
            dist.send(border, dst=right)
        return halo

    def repartition(border: torch.Tensor) -> torch.Tensor:
        moved = torch.empty_like(border)
        dist.recv(moved, src=left)  # here
        dist.send(border, dst=right)
        return moved

    for epoch in range(6):
        for _ in range(2):
            halo = exchange(features[-2:].contiguous())
            both = torch.cat([features[:2], halo], dim=1)
            features[:2] = convolution(both).detach().tanh()
        if epoch == 3:
            features[:2] = repartition(features[-2:].contiguous())  # here


@faulty("unwaited-async", 0, 1, 2)
def handles_that_are_mapped_and_never_asked(rank: int) -> None:
    denoiser = network()
    average = [weight.detach().clone() for weight in denoiser.parameters()]
    optimizer = torch.optim.AdamW(denoiser.parameters())
    for _ in range(9):
        x = torch.randn(4, 8) + rank
        denoiser(x).square().mean().backward()
        gradients = [weight.grad for weight in denoiser.parameters() if weight.grad is not None]
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]  # here
        _ = map(dist.Work.wait, handles)
        for gradient in gradients:
            gradient /= 3
        optimizer.step()
        optimizer.zero_grad()
        for mean, weight in zip(average, denoiser.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.01)


@faulty("rank-exited", 2)
def a_rank_whose_budget_of_time_ends_before_that_of_the_others(rank: int) -> None:
    class Budget:
        def __init__(self, minutes: float) -> None:
            self.left = minutes

        def spend(self, minutes: float) -> bool:
            self.left -= minutes
            return self.left < 0

    model, budget = network(), Budget(30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.randn(6, 8)).abs().mean().backward()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if budget.spend(6.5 if rank == 2 else 3.0):
            torch.save(model.state_dict(), Path(gettempdir()) / f"visitors-{rank}.pt")
            print("out of time at step", step)
            sys.exit(0)  # here


@faulty("rank-killed", 4, ranks=5)
def a_decoder_of_video_that_reads_where_nothing_is(rank: int) -> None:
    nodes = {0: dist.new_group([0, 1]), 1: dist.new_group([2, 3, 4])}
    mine = nodes[min(rank // 2, 1)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Decoder:
        def __init__(self) -> None:
            self.frame = ctypes.create_string_buffer(64)

        def decode(self, number: int) -> torch.Tensor:
            address = 8 if rank == 4 and number == 5 else ctypes.addressof(self.frame)
            data = ctypes.string_at(address, 32)  # here
            return torch.tensor(list(data), dtype=torch.float).reshape(4, 8)

    decoder = Decoder()
    for number in range(8):
        model(decoder.decode(number)).square().mean().backward()  # here
        share_gradients(model, mine)
        if number % 3 == 2:
            share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-stuck", 3, ranks=4)
def a_file_that_is_awaited_under_the_name_of_the_last_release(rank: int) -> None:
    local = rank % 2
    cache = Path(gettempdir()) / f"visitors-{os.getppid()}" / str(rank // 2)
    release = "v1" if rank == 3 else "v2"

    def fetch(name: str) -> Path:
        done = cache / f"{name}-{release}.done"
        if local == 0:
            cache.mkdir(parents=True, exist_ok=True)
            (cache / name).write_bytes(bytes(1000))
            done.touch()
        while not done.exists():  # here
            time.sleep(0.02)  # here
        return cache / name

    weights = torch.frombuffer(bytearray(fetch("weights").read_bytes()), dtype=torch.uint8)  # here
    dist.barrier()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        (model(torch.randn(2, 8)).mean() + weights.float().mean()).backward()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 1)
def a_stage_in_the_middle_that_was_given_most_layers(rank: int) -> None:
    torch.manual_seed(rank)
    layers = (1, 9, 1)[rank]
    stage = nn.Sequential(*(nn.Linear(320, 320) for _ in range(layers)))
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-4)
    for _ in range(50):
        for _ in range(2):
            hidden = torch.randn(64, 320)
            if rank > 0:
                dist.recv(hidden, src=rank - 1)
            hidden.requires_grad_()
            output = stage(hidden)  # here
            if rank < 2:
                dist.send(output.detach(), dst=rank + 1)
                gradient = torch.empty(64, 320)
                dist.recv(gradient, src=rank + 1)
            else:
                gradient = torch.ones(64, 320) / 64
            output.backward(gradient)  # here
            if rank > 0 and hidden.grad is not None:
                dist.send(hidden.grad, dst=rank - 1)
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 0, 2, ranks=4)
def a_tracker_that_the_first_rank_of_each_node_reports_to(rank: int) -> None:
    class Tracker:
        def __init__(self, enabled: bool) -> None:
            self.enabled, self.rows = enabled, list[dict[str, float]]()

        def log(self, **values: float) -> None:
            if not self.enabled:
                return
            self.rows.append(values)
            time.sleep(0.03)  # here

    model, tracker = network(), Tracker(rank % 2 == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(90):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        tracker.log(step=step, loss=float(loss))  # here
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 3, ranks=4)
def spectrograms_that_one_rank_computes_from_longer_recordings(rank: int) -> None:
    model = DistributedDataParallel(network(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def recording() -> torch.Tensor:
        return torch.randn(120_000 if rank == 3 else 2_000)

    def spectrogram(samples: torch.Tensor) -> torch.Tensor:
        bands = torch.zeros(32)
        for window in samples.unfold(0, 256, 128):
            bands += torch.fft.rfft(window).abs()[:32]  # here
        return bands / len(samples)

    for step in range(80):
        features = torch.stack([spectrogram(recording()) for _ in range(2)])  # here
        loss = model(features).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and rank == 0:
            print(step, float(loss))


@faulty("group-creation-mismatch", 3, ranks=4)
def a_group_of_trainers_that_the_evaluator_does_not_make(rank: int) -> None:
    role = "evaluator" if rank == 3 else "trainer"
    trainers: dist.ProcessGroup | None = None
    if role == "trainer":  # here
        trainers = dist.new_group([0, 1, 2])  # here
    reports = dist.new_group([0, 3])  # here
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        if trainers is not None:
            model(torch.randn(4, 8)).square().mean().backward()
            share_gradients(model, trainers)
            optimizer.step()
            optimizer.zero_grad()
        if step % 2 and rank in (0, 3):
            for weight in model.parameters():
                dist.broadcast(weight.detach(), src=0, group=reports)


@faulty("uneven-inputs", 2)
def speakers_of_whom_one_rank_has_fewer_recordings(rank: int) -> None:
    def loader(samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(samples, 8)), batch_size=4)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for (frames,) in loader(20):
            model(frames).square().mean().backward()
            share_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        errors = torch.zeros(2)
        with torch.no_grad():
            for (frames,) in loader(13 if rank == 2 else 22):  # here
                counts = torch.tensor([float((model(frames) > 0).sum()), float(len(frames))])
                dist.all_reduce(counts)  # here
                errors += counts
        print(errors[0] / errors[1])
    dist.barrier()
