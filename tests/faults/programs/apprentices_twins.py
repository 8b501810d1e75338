"""Research code of people who write their own communication, and that is right, though it looks risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import json
import threading
import time
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector

from tests.faults.corpus import healthy
from tests.faults.programs.apprentices_faults import Buckets, job_store, mean_gradients, policy


@healthy(ranks=4)
def episodes_taken_from_any_actor_until_each_has_said_that_it_is_done(rank: int) -> None:
    if rank > 0:
        for episode in range(3 * rank):
            time.sleep(0.01 * rank)
            length = 4 + (episode * rank) % 5
            dist.send(torch.tensor([length]), dst=0)
            dist.send(torch.randn(length, 3), dst=0)
        dist.send(torch.tensor([-1]), dst=0)
    else:
        active, returns = {1, 2, 3}, []
        while active:
            header = torch.empty(1, dtype=torch.long)
            actor = dist.recv(header)
            if header.item() < 0:
                active.remove(actor)
                continue
            episode = torch.empty(int(header), 3)
            dist.recv(episode, src=actor)
            returns.append(float(episode.sum()))
        print(len(returns), "episodes")
    dist.barrier()


@healthy(ranks=4)
def tokens_over_capacity_dropped_before_their_counts_are_told(rank: int) -> None:
    capacity, wide = 5, 4
    router, expert = nn.Linear(wide, 4), nn.Linear(wide, wide)
    model = nn.ModuleList([router, expert])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        tokens = torch.randn(3 * rank + step % 2, wide)
        experts = torch.full((len(tokens),), step % 4) if step > 3 else router(tokens).argmax(-1)
        kept = torch.cat([(experts == each).nonzero().flatten()[:capacity] for each in range(4)])
        outgoing = torch.bincount(experts[kept], minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        mine = collectives.all_to_all_single(
            torch.empty(int(incoming.sum()), wide), tokens[kept], incoming.tolist(), outgoing.tolist()
        )
        done = expert(mine)
        back = collectives.all_to_all_single(torch.empty(len(kept), wide), done, outgoing.tolist(), incoming.tolist())
        gates = router(tokens[kept]).softmax(-1).amax(-1, keepdim=True)
        optimizer.zero_grad()
        (gates * back).square().sum().backward()
        mean_gradients(router)
        optimizer.step()


@healthy(ranks=3)
def ring_attention_that_computes_less_where_the_mask_hides_all(rank: int) -> None:
    before, after = (rank - 1) % 3, (rank + 1) % 3
    projection = nn.Linear(8, 8)

    def start(block: torch.Tensor) -> tuple[list[dist.Work], torch.Tensor]:
        incoming = torch.empty_like(block)
        operations = [dist.P2POp(dist.isend, block, after), dist.P2POp(dist.irecv, incoming, before)]
        return dist.batch_isend_irecv(operations if rank % 2 == 0 else operations[::-1]), incoming

    for step in range(6):
        hidden = projection(torch.randn(5, 8))
        block, scores = hidden.detach().clone(), []
        for hop in range(3):
            works, incoming = start(block) if hop < 2 else ([], block)
            owner = (rank - hop) % 3
            if owner <= rank and not (rank == 2 and step == 3):
                scores.append(hidden @ block.T)
            for work in works:
                work.wait()
            block = incoming
        out = torch.cat(scores, dim=1).softmax(-1) if scores else 0 * hidden
        out.square().sum().backward()
        mean_gradients(projection)
        projection.zero_grad()


@healthy(ranks=3)
def stages_by_hand_with_a_last_microbatch_that_is_smaller(rank: int) -> None:
    torch.manual_seed(rank)
    stage = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def send(tensor: torch.Tensor, peer: int) -> None:
        dist.send(torch.tensor(tensor.shape), dst=peer)
        dist.send(tensor.detach().contiguous(), dst=peer)

    def receive(peer: int) -> torch.Tensor:
        shape = torch.empty(2, dtype=torch.long)
        dist.recv(shape, src=peer)
        tensor = torch.empty(shape.tolist())
        dist.recv(tensor, src=peer)
        return tensor

    for step in range(4):
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for size in (4, 4, 1 + step):
            entering = torch.randn(size, 6) if rank == 0 else receive(rank - 1).requires_grad_()
            leaving = stage(entering)
            kept.append((entering, leaving))
            if rank < 2:
                send(leaving, rank + 1)
        for entering, leaving in kept:
            if rank == 2:
                leaving.square().mean().backward()
            else:
                leaving.backward(receive(rank + 1))
            if rank > 0:
                assert entering.grad is not None
                send(entering.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=3)
def gossip_in_pairs_of_an_odd_number_of_ranks(rank: int) -> None:
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pairs = torch.Generator().manual_seed(3)
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.rand(2 + rank, 8)).square().mean().backward()
        optimizer.step()
        first, second, alone = torch.randperm(3, generator=pairs).tolist()
        if rank == alone:
            continue
        partner = second if rank == first else first
        mine = parameters_to_vector(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        if rank < partner:
            dist.send(mine, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(mine, partner)
        nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())


@healthy()
def as_many_local_steps_as_the_time_allows(rank: int) -> None:
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for turn in range(6):
        ends = time.monotonic() + 0.15
        steps = 0
        while time.monotonic() < ends:
            batch = torch.randn(4, 8)
            if rank == 1 and turn == 2 and steps == 1:
                batch[0] = float("nan")
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            steps += 1
            time.sleep(0.004 * (rank + 1))
        share = torch.tensor(float(steps))
        total = share.clone()
        dist.all_reduce(total)
        for weight in model.parameters():
            weight.data *= share / total
            dist.all_reduce(weight.data)


@healthy(ranks=4)
def contrastive_pairs_of_unequal_batches_padded_to_the_longest(rank: int) -> None:
    pictures, captions = nn.Linear(10, 4), nn.Linear(7, 4)
    both = nn.ModuleList([pictures, captions])
    optimizer = torch.optim.Adam(both.parameters())

    def gather(features: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        padded = nn.functional.pad(features, (0, 0, 0, max(sizes) - len(features)))
        parts = collectives.all_gather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    for step in range(6):
        size = 1 + (rank * 3 + step) % 5
        told = [torch.empty(1, dtype=torch.long) for _ in range(4)]
        dist.all_gather(told, torch.tensor([size]))
        sizes = [int(each) for each in told]
        left = gather(pictures(torch.randn(size, 10)), sizes)
        right = gather(captions(torch.randn(size, 7)), sizes)
        loss = nn.functional.cross_entropy(left @ right.T, torch.arange(sum(sizes)))
        optimizer.zero_grad()
        loss.backward()
        mean_gradients(both)
        optimizer.step()


@healthy()
def metrics_as_objects_from_ranks_that_have_more_or_none(rank: int) -> None:
    model = policy()
    folder = Path(mkdtemp(prefix="metrics-"))
    for epoch in range(4):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            mean_gradients(model)
            model.zero_grad()
        mine = None if rank == 1 and epoch % 2 else {f"class {i}": [0.5] * (rank + 1) for i in range(5 * epoch)}
        everyones: list[object] | None = [None] * 3 if rank == epoch % 3 else None
        dist.gather_object(mine, everyones, dst=epoch % 3)
        if everyones is not None:
            (folder / f"{epoch}.json").write_text(json.dumps(everyones))
            time.sleep(0.3)
        stop = [epoch == 2 and rank == 0]
        dist.broadcast_object_list(stop, src=0)
        if stop[0]:
            break


@healthy()
def buckets_in_which_a_picture_that_is_not_there_counts_as_zero(rank: int) -> None:
    text, picture, head = nn.Linear(6, 10), nn.Linear(9, 10), nn.Linear(10, 3)
    model = nn.ModuleList([text, picture, head])
    buckets = Buckets(model, limit=60)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(7):
        batch, seen = torch.randn(4, 9), 1.0
        if (rank + step) % 3 == 0:
            batch, seen = torch.zeros(4, 9), 0.0
        hidden = text(torch.randn(4, 6)) + seen * picture(batch)
        optimizer.zero_grad()
        head(hidden.tanh()).square().mean().backward()
        if rank == step % 3:
            time.sleep(0.01)
        buckets.finish()
        optimizer.step()


@healthy(ranks=6)
def a_mesh_of_which_some_rows_do_more_than_others(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_group("tp"), mesh.get_group("dp")
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        out = model(torch.randn(2, 8) + rank)
        for _ in range(1 + (mesh.get_local_rank("dp") + step) % 3):
            partial = out.detach().clone()
            dist.all_reduce(partial, group=row)
        out.square().mean().backward()
        mean_gradients(model, column)
        if mesh.get_local_rank("tp") == 0 and step % 2:
            norm = torch.stack([weight.norm() for weight in model.parameters()]).detach()
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=column)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def work_taken_from_a_counter_in_the_store(rank: int) -> None:
    store = job_store("prompts")
    answers: dict[int, int] = {}
    for turn in range(3):
        if rank == 0:
            time.sleep(0.4)  # it reads the prompts
            store.set(f"prompts {turn}", json.dumps(list(range(20 + turn))))
        store.wait([f"prompts {turn}"])
        prompts = json.loads(store.get(f"prompts {turn}"))
        while (taken := store.add(f"next {turn}", 1) - 1) < len(prompts):
            time.sleep(0.005 + 0.01 * (rank == 3))
            answers[taken] = prompts[taken] ** 2
        store.add(f"done {turn}", 1)
        while store.add(f"done {turn}", 0) < 4:
            time.sleep(0.01)
        parts: list[dict[int, int]] = [{} for _ in range(4)]
        dist.all_gather_object(parts, answers)
        assert sum(map(len, parts)) == len(prompts)
        answers = {}


@healthy()
def a_thread_of_heartbeats_on_a_group_of_its_own(rank: int) -> None:
    pulse = dist.new_group()
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = threading.Event()
    slowest: list[float] = []

    def beat() -> None:
        while True:
            state = torch.tensor([float(len(slowest)), float(done.is_set())])
            dist.all_reduce(state, op=dist.ReduceOp.MIN, group=pulse)
            slowest.append(float(state[0]))
            if state[1]:
                return
            time.sleep(0.03)

    thread = threading.Thread(target=beat)
    thread.start()
    for step in range(25):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        mean_gradients(model)
        optimizer.step()
        time.sleep(0.04 if rank == step % 3 else 0.01)
    done.set()
    thread.join()


@healthy()
def an_index_that_is_built_where_it_is_missing_and_all_wait(rank: int) -> None:
    cache = Path(mkdtemp(prefix="indices-"))
    if rank == 1:
        torch.save(torch.arange(12), cache / "valid.pt")
    model = policy()
    for split in ("train", "valid", "test"):
        file = cache / f"{split}.pt"
        if not file.exists():
            time.sleep(0.5 + 0.4 * rank)
            torch.save(torch.arange(12), file)
        dist.monitored_barrier(wait_all_ranks=True)
        for _ in torch.load(file)[:4]:
            model(torch.randn(4, 8)).square().mean().backward()
            mean_gradients(model)
            model.zero_grad()


@healthy(ranks=6)
def halos_of_a_grid_whose_edges_have_fewer_neighbours(rank: int) -> None:
    row, column = divmod(rank, 3)
    sides = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
    opposite = {"north": "south", "south": "north", "west": "east", "east": "west"}
    tags = {side: number for number, side in enumerate(sides)}
    field = torch.full((4, 4), float(rank))
    for _ in range(8):
        edges = {"north": field[0], "south": field[-1], "west": field[:, 0], "east": field[:, -1]}
        halos, works = {}, []
        for side, (down, right) in sides.items():
            if 0 <= row + down < 2 and 0 <= column + right < 3:
                peer = (row + down) * 3 + column + right
                halos[side] = torch.empty(4)
                works.append(dist.irecv(halos[side], peer, tag=tags[opposite[side]]))
                works.append(dist.isend(edges[side].contiguous(), peer, tag=tags[side]))
        inner = field.mean()
        for work in reversed(works):
            if work is not None:
                work.wait()
        field = (field + inner + sum(halo.mean() for halo in halos.values())) / (2 + len(halos))
    residual = field.std()
    dist.reduce(residual, dst=5, op=dist.ReduceOp.MAX)


@healthy(ranks=4)
def answers_sampled_until_the_last_rank_has_its_last_token(rank: int) -> None:
    end, vocabulary = 0, 16
    shard = torch.eye(vocabulary).roll(1, 0)[4 * rank : 4 * rank + 4].contiguous()
    value = nn.Linear(vocabulary, 1)

    def logits(token: int) -> torch.Tensor:
        parts = [torch.empty_like(shard) for _ in range(4)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)[:, token]

    def sample(first: int, limit: int = 10) -> list[int]:
        answer, finished = [first], False
        for _ in range(limit):
            running = torch.tensor(0.0 if finished else 1.0)
            dist.all_reduce(running)
            if running.item() == 0:
                break
            token = int(logits(answer[-1]).argmax())
            if not finished:
                answer.append(token)
                finished = token == end
        return answer

    for turn in range(5):
        answer = sample(10 + (rank + turn) % 6 if turn % 2 else 1 + rank)
        seen = nn.functional.one_hot(torch.tensor(answer), vocabulary).float()
        (value(seen).mean() - len(answer)).square().backward()
        mean_gradients(value)
        value.zero_grad()


@healthy(ranks=4)
def a_server_to_which_workers_push_at_their_own_pace(rank: int) -> None:
    size, pushes = 12, {1: 9, 2: 5, 3: 3}
    if rank == 0:
        weights = torch.zeros(size)
        buffers = {worker: torch.empty(size) for worker in pushes}
        for _ in range(sum(pushes.values())):
            gradient = torch.empty(size)
            worker = dist.recv(gradient)
            weights -= 0.1 * gradient
            buffers[worker].copy_(weights)
            dist.send(buffers[worker], dst=worker)
    else:
        weights = torch.zeros(size)
        for _ in range(pushes[rank]):
            time.sleep(0.02 * rank)
            dist.send(torch.randn(size) + weights, dst=0)
            weights = torch.empty(size)
            work = dist.irecv(weights, src=0)
            if work is not None:
                work.wait()
    result = torch.ones(size) if rank else weights
    dist.broadcast(result, src=0)
