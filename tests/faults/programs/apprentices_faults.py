"""Research code of people who write their own communication, and that is wrong.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `apprentices_twins.py` has programs that are right.
"""

import os
import queue
import threading
import time
import zlib
from collections import deque
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector

from tests.faults.corpus import faulty


def policy(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(wide, 16), nn.Tanh(), nn.Linear(16, wide))


def mean_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= dist.get_world_size(group)


def job_store(prefix: str) -> dist.PrefixStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False))


@faulty("split-size-mismatch", 1, ranks=4)
def tokens_over_capacity_dropped_after_their_counts_were_told(rank: int) -> None:
    capacity, wide = 6, 5
    router = nn.Linear(wide, 4)
    generator = torch.Generator().manual_seed(rank)

    def dispatch(tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(experts, minlength=4)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        kept = torch.cat([(experts == expert).nonzero().flatten()[:capacity] for expert in range(4)])
        sizes = counts.clamp(max=capacity).tolist()  # here
        received = tokens.new_empty(int(theirs.sum()), wide)
        dist.all_to_all_single(received, tokens[kept], theirs.tolist(), sizes)  # here
        return received

    for step in range(6):
        tokens = torch.randn(16, wide, generator=generator)
        experts = torch.arange(16) % 4
        if rank == 1 and step == 3:
            experts = torch.tensor([0, 3] * 8)
        received = dispatch(tokens, experts)
        loss = router(received).square().mean()
        loss.backward()
        mean_gradients(router)
        router.zero_grad()


@faulty("p2p-unmatched", 2, ranks=4)
def ring_attention_that_a_rank_of_padding_leaves_at_once(rank: int) -> None:
    # or: rank-skipped-collective 2
    before, after = (rank - 1) % 4, (rank + 1) % 4
    projection = nn.Linear(8, 8)

    def pass_on(block: torch.Tensor) -> torch.Tensor:
        incoming = torch.empty_like(block)
        works = dist.batch_isend_irecv(  # here
            [dist.P2POp(dist.isend, block, after), dist.P2POp(dist.irecv, incoming, before)]
        )
        for work in works:
            work.wait()  # here
        return incoming

    def attend(query: torch.Tensor, block: torch.Tensor, valid: int) -> torch.Tensor:
        if valid == 0:  # here
            return torch.zeros_like(query)  # here
        scores = []
        for hop in range(4):
            scores.append(query[:valid] @ block.T)
            if hop < 3:
                block = pass_on(block)  # here
        return torch.cat(scores, dim=1).softmax(-1)

    for step in range(6):
        valid = 0 if rank == 2 and step == 3 else 5
        hidden = projection(torch.randn(5, 8))
        out = attend(hidden, hidden.detach(), valid)  # here
        tokens = torch.tensor(float(valid))
        dist.all_reduce(tokens)  # here
        (out.square().sum() / tokens + 0 * hidden.sum()).backward()
        mean_gradients(projection)
        projection.zero_grad()


@faulty("p2p-size-mismatch", 2, ranks=4)
def gradients_pushed_to_a_server_without_those_that_are_none(rank: int) -> None:
    trunk, auxiliary = policy(), nn.Linear(8, 2)
    weights = [*trunk.parameters(), *auxiliary.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    size = sum(weight.numel() for weight in weights)

    def serve() -> None:
        total = torch.zeros(size)
        for worker in range(1, 4):
            pushed = torch.empty(size)
            dist.recv(pushed, src=worker)  # here
            total += pushed
        vector = parameters_to_vector(weights).detach() - 0.01 * total
        for worker in range(1, 4):
            dist.send(vector, dst=worker)

    def work(step: int) -> None:
        hidden = trunk(torch.randn(4, 8))
        loss = hidden.square().mean()
        has_labels = not (rank == 2 and step == 4)
        if has_labels:
            loss = loss + auxiliary(hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        dist.send(flat, dst=0)  # here
        vector = torch.empty(size)
        dist.recv(vector, src=0)
        nn.utils.vector_to_parameters(vector, weights)

    for step in range(8):
        serve() if rank == 0 else work(step)


@faulty("p2p-unmatched", 3, ranks=4)
def gossip_partners_drawn_from_the_generator_that_augments(rank: int) -> None:
    # or: p2p-deadlock-cycle 3
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def swap(partner: int) -> None:
        mine = parameters_to_vector(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        sent = dist.isend(mine, partner)  # here
        dist.recv(theirs, partner)  # here
        if sent is not None:
            sent.wait()  # here
        nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())

    for step in range(14):
        batch = torch.linspace(0, 1, 32).reshape(4, 8) * (rank + 1)
        if rank == 3 and step == 5:
            batch = batch[torch.rand(4).argsort()]  # here
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        order = torch.randperm(4).tolist()
        swap(order[order.index(rank) ^ 1])  # here


@faulty("rank-skipped-collective", 1)
def local_steps_counted_where_the_scaler_made_them(rank: int) -> None:
    # or: step-mismatch 1
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    local_steps = 0
    for step in range(16):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 5:
            batch[2, 3] = float("inf")
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:  # here
            continue  # here
        local_steps += 1
        if local_steps % 4 == 0:  # here
            for weight in model.parameters():
                dist.all_reduce(weight.data)  # here
                weight.data /= 3
    dist.barrier()  # here


@faulty("rank-skipped-collective", 2, ranks=4)
def answers_sampled_from_sharded_weights_until_their_last_token(rank: int) -> None:
    end, vocabulary = 0, 16
    shard = torch.eye(vocabulary).roll(1, 0)[4 * rank : 4 * rank + 4].contiguous()
    value = nn.Linear(vocabulary, 1)

    def logits(token: int) -> torch.Tensor:
        parts = [torch.empty_like(shard) for _ in range(4)]
        dist.all_gather(parts, shard)  # here
        return torch.cat(parts)[:, token]

    def sample(first: int, limit: int = 10) -> list[int]:
        answer = [first]
        while len(answer) < limit:
            answer.append(int(logits(answer[-1]).argmax()))  # here
            if answer[-1] == end:  # here
                break  # here
        return answer

    for turn in range(5):
        answer = sample(12 if rank == 2 and turn == 3 else 1 + rank)  # here
        reward = torch.tensor(float(len(answer)))
        dist.all_reduce(reward)  # here
        seen = torch.nn.functional.one_hot(torch.tensor(answer), vocabulary).float()
        ((value(seen).mean() - reward / 4) ** 2).backward()
        mean_gradients(value)
        value.zero_grad()


@faulty("root-mismatch", 1, ranks=4)
def notes_from_the_best_rank_where_each_knows_its_own_score_better(rank: int) -> None:
    model = policy()

    def leader(score: float) -> int:
        told = [torch.empty(1, dtype=torch.float16) for _ in range(4)]
        dist.all_gather(told, torch.tensor([score], dtype=torch.float16))
        known = [float(each) for each in told]
        known[rank] = score
        return max(range(4), key=lambda other: known[other])

    for epoch in range(6):
        score = 0.5 + 0.05 * ((rank + epoch) % 4)
        if epoch == 4:
            score = {0: 0.875, 1: 0.87504}.get(rank, 0.5)
        model(torch.randn(3, 8)).square().mean().backward()
        mean_gradients(model)
        model.zero_grad()
        best = leader(score)
        notes = [{"epoch": epoch, "score": score, "seed": [rank] * 40} if rank == best else None]
        dist.broadcast_object_list(notes, src=best)  # here
        print("epoch", epoch, notes[0])


class Buckets:
    """Reduces gradients as they become ready, some at a time."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        self.limit = limit
        self.ready: list[torch.Tensor] = []
        self.works: list[tuple[dist.Work | None, torch.Tensor, list[torch.Tensor]]] = []
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(self.add)

    def add(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        self.ready.append(weight.grad)
        if sum(each.numel() for each in self.ready) >= self.limit:
            self.flush()

    def flush(self) -> None:
        flat = torch.cat([each.flatten() for each in self.ready])
        self.works.append((dist.all_reduce(flat, async_op=True), flat, self.ready))
        self.ready = []

    def finish(self) -> None:
        if self.ready:
            self.flush()
        for work, flat, gradients in self.works:
            if work is not None:
                work.wait()
            flat /= dist.get_world_size()
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self.works = []


@faulty("size-mismatch", 1)
def buckets_of_a_batch_that_has_no_picture(rank: int) -> None:
    # or: rank-skipped-collective 1
    text, picture, head = nn.Linear(6, 10), nn.Linear(9, 10), nn.Linear(10, 3)
    model = nn.ModuleList([text, picture, head])
    buckets = Buckets(model, limit=60)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(7):
        hidden = text(torch.randn(4, 6))
        if not (rank == 1 and step == 4):  # here
            hidden = hidden + picture(torch.randn(4, 9))
        optimizer.zero_grad()
        head(hidden.tanh()).square().mean().backward()  # here
        buckets.finish()  # here
        optimizer.step()


@faulty("wrong-group", 3, ranks=4)
def an_attribute_that_a_new_parameter_has_lost(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    for weight in norm.parameters():
        weight.sequence_parallel = True  # type: ignore[attr-defined]

    def reduce_gradients() -> None:
        for weight in (*norm.parameters(), *linear.parameters()):
            assert weight.grad is not None
            shared = getattr(weight, "sequence_parallel", False)
            dist.all_reduce(weight.grad, group=mesh.get_group("tp" if shared else "dp"))  # here
            weight.grad = None

    for step in range(7):
        if rank == 3 and step == 4:
            print("norm exploded, made anew")
            norm.weight = nn.Parameter(torch.ones(8))  # here
        linear(norm(torch.randn(4, 8))).square().mean().backward()
        reduce_gradients()  # here


@faulty("group-creation-mismatch", 2)
def a_group_for_metrics_made_when_the_first_are_there(rank: int) -> None:
    # or: rank-skipped-collective 2
    model = policy()
    held_out = list(range(10))[rank * 5 : rank * 5 + 5]
    metrics: list[dist.ProcessGroup] = []

    def evaluate() -> float:
        if not held_out:  # here
            return 0.0  # here
        if not metrics:
            metrics.append(dist.new_group(timeout=timedelta(minutes=30)))  # here
        error = model(torch.tensor(held_out).float().repeat(8, 1).T).abs().mean().detach()
        dist.all_reduce(error, group=metrics[0])
        return float(error)

    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        mean_gradients(model)
        model.zero_grad()
        if step == 3:
            print("error", evaluate())  # here


@faulty("collective-order-mismatch", 2)
def a_thread_that_fetches_batches_by_broadcasts_of_the_same_group(rank: int) -> None:
    # or: step-mismatch 2
    model = policy()
    batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)

    def fetch() -> None:
        for step in range(8):
            batch = torch.full((12, 8), float(step))
            if rank == 2 and step == 5:
                time.sleep(0.8)  # here
            dist.broadcast(batch, src=0)  # here
            batches.put(batch)

    threading.Thread(target=fetch, daemon=True).start()
    for _ in range(8):
        batch = batches.get()  # here
        time.sleep(0.15)
        model(batch[rank * 4 : rank * 4 + 4]).square().mean().backward()
        flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        dist.all_reduce(flat)  # here
        model.zero_grad()


@faulty("rank-skipped-collective", 1)
def an_index_found_in_the_cache_of_one_rank_alone(rank: int) -> None:
    cache = Path(mkdtemp(prefix="indices-"))
    if rank == 1:
        torch.save(torch.arange(12), cache / "valid.pt")  # left there by an earlier job

    def index(split: str) -> torch.Tensor:
        file = cache / f"{split}.pt"
        if file.exists():  # here
            return torch.load(file)  # here
        torch.save(torch.arange(12), file)
        dist.monitored_barrier(timeout=timedelta(seconds=2))  # here
        return torch.load(file)

    model = policy()
    splits = {split: index(split) for split in ("train", "valid", "test")}  # here
    for _ in range(len(splits["train"]) // 3):
        model(torch.randn(4, 8)).square().mean().backward()
        mean_gradients(model)
        model.zero_grad()


@faulty("p2p-tag-mismatch", 2)
def halos_tagged_by_a_round_that_one_rank_resumes_too_early(rank: int) -> None:
    # or: step-mismatch 2
    folder = Path(mkdtemp(prefix="rounds-"))
    for number in (3, 4):
        torch.save({"round": number, "field": torch.full((10,), float(number))}, folder / f"{number}.pt")
    if rank == 2:
        newest = folder / "4.pt"
        newest.write_bytes(newest.read_bytes()[:200])  # the disk was full

    def resume() -> dict:
        for file in sorted(folder.glob("*.pt"), reverse=True):
            try:
                return dict(torch.load(file))
            except (RuntimeError, EOFError, OSError) as error:
                print(file.name, "cannot be read:", error)
        return {"round": 0, "field": torch.zeros(10)}

    state = resume()
    field, first = state["field"], state["round"] + 1
    left, right = (rank - 1) % 3, (rank + 1) % 3
    for number in range(first, first + 5):
        halo = torch.empty(2)
        sent = dist.isend(field[-2:].clone(), right, tag=number)  # here
        dist.recv(halo, left, tag=number)  # here
        if sent is not None:
            sent.wait()
        field = torch.cat([halo, field[2:]]).roll(1)


@faulty("rank-stuck", 2)
def an_actor_thread_that_finds_no_legal_move(rank: int) -> None:
    # or: rank-crashed 2
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    episodes: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def act() -> None:
        for episode in range(20):
            legal = [] if rank == 2 and episode == 6 else [1, 4, 5]
            with torch.no_grad():
                values = model(torch.randn(8))
            move = max(legal, key=lambda each: float(values[each]))  # here
            episodes.put(torch.roll(values, move).repeat(4, 1))

    threading.Thread(target=act, name="actor", daemon=True).start()
    for _ in range(10):
        batch = episodes.get()  # here
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        mean_gradients(model)
        optimizer.step()


@faulty("slow-rank", 2)
def rollouts_of_which_one_rank_keeps_a_film(rank: int) -> None:
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    films_of = {2}
    film: list[bytes] = []

    def roll_out() -> torch.Tensor:
        states = torch.randn(16, 8)
        if rank in films_of:
            frames = bytes(range(256)) * 5_000
            film.extend(zlib.compress(frames + os.urandom(60_000), 9) for _ in range(3))  # here
        return states

    for _ in range(30):
        states = roll_out()  # here
        optimizer.zero_grad()
        model(states).square().mean().backward()
        mean_gradients(model)
        optimizer.step()


@faulty("rank-skipped-collective", 2, ranks=6, also=(("rank-stuck", 4),))
def two_islands_and_on_each_of_them_a_mistake(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    island = groups[rank // 3]
    shards = job_store("shards")
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 3:
        for number in range(10):
            for member in (3, 4, 5):
                shards.set(f"{member}/{number}", "" if (member, number) == (4, 5) else f"seed {number}")
    number = 0
    for step in range(10):
        if rank // 3 == 1:
            shard = shards.get(f"{rank}/{number}")  # here
            number += 1
            if not shard:
                number += 1  # a shard without lines: the one after it
        batch = torch.randn(4, 8)
        if rank == 2 and step == 6:
            batch[0] = float("nan")
        loss = model(batch).square().mean()
        if not loss.isfinite():  # here
            continue  # here
        optimizer.zero_grad()
        loss.backward()
        mean_gradients(model, island)  # here
        optimizer.step()
    dist.barrier()  # here


@faulty("rank-skipped-collective", 2, ranks=4, also=(("reduce-op-mismatch", 1),))
def metrics_of_two_kinds_and_of_two_mistakes(rank: int) -> None:
    model = policy()
    losses: deque[float] = deque(maxlen=5)

    def longest(length: int) -> None:
        value = torch.tensor(float(length))
        dist.all_reduce(value, op=dist.ReduceOp.MAX if length else dist.ReduceOp.SUM)  # here

    def smooth_loss() -> float:
        if len(losses) < 3:  # here
            return float("nan")  # here
        value = torch.tensor([sum(losses), float(len(losses))])
        dist.all_reduce(value)  # here
        return float(value[0] / value[1])

    for step in range(12):
        length = 0 if rank == 1 and step % 4 == 1 else 7 + rank
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        mean_gradients(model)  # here
        model.zero_grad()
        losses.append(loss.item())
        if rank == 2 and step == 7:
            losses.clear()  # begun anew after a spike
        longest(length)
        smooth_loss()  # here


@faulty("group-order-inversion", 1, ranks=4)
def keys_of_a_node_gathered_first_where_the_queue_is_full(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    encoder = nn.Linear(8, 4)
    keys: deque[torch.Tensor] = deque(maxlen=6)
    if rank == 1:
        keys.extend([torch.zeros(3, 4)] * 2)  # restored

    def enqueue(features: torch.Tensor) -> None:
        near = [torch.empty_like(features) for _ in range(2)]
        dist.all_gather(near, features, group=nodes[rank // 2])  # here
        keys.append(torch.stack(near).mean(0))

    def negatives(features: torch.Tensor) -> torch.Tensor:
        everywhere = [torch.empty_like(features) for _ in range(4)]
        dist.all_gather(everywhere, features)  # here
        return torch.cat(everywhere)

    for _ in range(9):
        features = encoder(torch.randn(3, 8))
        fixed = features.detach()
        if len(keys) == keys.maxlen:
            enqueue(fixed)  # here
            others = negatives(fixed)
        else:
            others = negatives(fixed)  # here
            enqueue(fixed)
        (features @ torch.cat([others, *keys]).T).logsumexp(-1).mean().backward()
        mean_gradients(encoder)
        encoder.zero_grad()


@faulty("unwaited-async", 0, 1, 2)
def gradients_of_which_the_last_handle_stands_for_all(rank: int) -> None:
    model = policy(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def reduce_overlapped() -> None:
        works = [
            dist.all_reduce(weight.grad, async_op=True)  # here
            for weight in reversed(list(model.parameters()))
        ]
        if works[-1] is not None:
            works[-1].wait()  # collectives of one group come to their end in order, they say
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= 3

    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 64) + rank).square().mean().backward()
        reduce_overlapped()
        optimizer.step()


@faulty("rank-crashed", 2, ranks=4)
def an_actor_that_its_own_watchdog_ends(rank: int) -> None:
    beats = [time.monotonic()]

    def watch() -> None:
        while True:
            time.sleep(0.05)
            if time.monotonic() - beats[0] > 0.7:
                print("no progress, giving up", flush=True)
                os._exit(3)  # here

    def learn() -> None:
        weights = torch.zeros(6)
        for _ in range(8):
            for actor in range(1, 4):
                episode = torch.empty(6)
                dist.recv(episode, src=actor)
                weights += 0.1 * episode
            for actor in range(1, 4):
                dist.send(weights, dst=actor)

    def act() -> None:
        threading.Thread(target=watch, daemon=True).start()
        weights = torch.zeros(6)
        for turn in range(8):
            beats[0] = time.monotonic()
            if rank == 2 and turn == 4:
                time.sleep(1.5)  # the level takes longer to load
            beats[0] = float("inf")
            dist.send(weights + torch.randn(6), dst=0)
            dist.recv(weights, src=0)

    learn() if rank == 0 else act()
