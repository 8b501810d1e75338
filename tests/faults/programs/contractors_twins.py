"""Programs of a pre-training stack that is written in house, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import back_end, healthy
from tests.faults.programs.contractors_faults import (
    PackedDocuments,
    SumBackward,
    SumForward,
    average_gradients,
    decoder,
    folder_of,
    vocabulary_loss,
)


class GatherSequence(torch.autograd.Function):
    """Gathers the sequence over the group on the way up, scatters the sums of gradients on the way down."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.count = group, dist.get_world_size(group)
        whole = part.new_empty(ctx.count * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        part = grads[0].new_empty(len(grads[0]) // ctx.count, *grads[0].shape[1:])
        dist.reduce_scatter_tensor(part, grads[0].contiguous(), group=ctx.group)
        return part, None


@healthy(ranks=4)
def sequences_of_other_lengths_in_each_tensor_group(rank: int) -> None:
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    norm, up, down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
    parts = nn.ModuleList([norm, up, down])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
    for step in range(7):
        length = 2 * (2 + (step * (1 + rank // 2)) % 5)  # of a group, not of the job
        whole = GatherSequence.apply(norm(torch.randn(length // 2, 8)), tensor)
        hidden = SumForward.apply(down(torch.relu(up(whole))), tensor)
        hidden.square().mean().backward()
        for weight in norm.parameters():
            dist.all_reduce(weight.grad, group=tensor)
        average_gradients(parts, data)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=3)
def keys_and_values_in_a_ring_with_zigzag_shards(rank: int) -> None:
    query = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.01)
    before, after = (rank - 1) % 3, (rank + 1) % 3
    for step in range(5):
        length = 4 + 2 * (step % 3)
        block = torch.randn(length, 6)
        output = torch.zeros(length, 6)
        mine = query(torch.randn(length, 6))
        for turn in range(3):
            works = []
            incoming = torch.empty_like(block)
            if turn < 2:
                send = dist.P2POp(dist.isend, block, after)
                receive = dist.P2POp(dist.irecv, incoming, before)
                works = dist.batch_isend_irecv([send, receive])
            if (rank - turn) % 3 <= rank:  # causal: the other blocks are of later positions
                output = output + (mine @ block.T).softmax(-1) @ block
            for work in works:
                work.wait()
            block = incoming
        output.square().mean().backward()
        average_gradients(query)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def gathers_of_weights_that_the_next_forward_pass_awaits(rank: int) -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(9, 9, bias=False) for _ in range(3)]
    shards = [layer.weight.detach().reshape(3, -1)[rank].clone() for layer in layers]
    gathers: dict[int, Any] = {}
    full = [torch.empty(81) for _ in layers]

    def ready(number: int) -> None:
        work = gathers.pop(number, None)
        if work is not None:
            work.wait()
            layers[number].weight.data.copy_(full[number].view(9, 9))

    for _ in range(6):
        hidden = torch.randn(5, 9)
        for number, layer in enumerate(layers):
            ready(number)
            hidden = torch.tanh(layer(hidden))
        hidden.square().mean().backward()
        reductions = []
        for layer in reversed(layers):
            assert layer.weight.grad is not None
            part = torch.empty(27)
            reductions.append((dist.reduce_scatter_tensor(part, layer.weight.grad.flatten(), async_op=True), part))
            layer.weight.grad = None
        for number, (work, part) in zip((2, 1, 0), reductions, strict=True):
            if work is not None:
                work.wait()
            shards[number] -= 0.01 * part / 3
        for number, shard in enumerate(shards):
            gathers[number] = dist.all_gather_into_tensor(full[number], shard, async_op=True)
    for number in range(3):
        ready(number)


@healthy(ranks=4)
def a_pipeline_of_four_with_tied_embeddings_and_growing_batches(rank: int) -> None:
    tied = dist.new_group([0, 3])
    stage, embedding = nn.Linear(8, 8), nn.Embedding(20, 8)
    optimizer = torch.optim.SGD([*stage.parameters(), *embedding.parameters()], lr=0.01)
    tokens = torch.randint(0, 20, (4,))
    consumed = 0
    for _ in range(6):
        count = min(2 + consumed // 8, 6)
        sends: list[Any] = []
        alive: list[tuple[torch.Tensor, torch.Tensor]] = []
        warm = min(3 - rank, count)
        for i in range(count + warm):
            if i < count:
                hidden = embedding(tokens) if rank == 0 else torch.empty(4, 8)
                if rank > 0:
                    dist.recv(hidden, rank - 1)
                    hidden.requires_grad_()
                output = stage(hidden)
                alive.append((hidden, output))
                if rank < 3:
                    sends.append(dist.isend(output.detach(), rank + 1))
            if i >= warm:
                hidden, output = alive.pop(0)
                if rank == 3:
                    nn.functional.cross_entropy(output @ embedding.weight.T, tokens).backward()
                else:
                    gradient = torch.empty(4, 8)
                    dist.recv(gradient, rank + 1)
                    output.backward(gradient)
                if rank > 0:
                    sends.append(dist.isend(hidden.grad, rank - 1))
        for work in sends:
            work.wait()
        if rank in (0, 3):
            dist.all_reduce(embedding.weight.grad, group=tied)
        consumed += count
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def micro_batches_dealt_by_the_speed_of_each_rank(rank: int) -> None:
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shares = [4, 4, 4]
    for step in range(7):
        begun = time.perf_counter()
        for i in range(shares[rank]):
            model.require_backward_grad_sync = i == shares[rank] - 1
            time.sleep(0.02 if rank == 1 else 0.01)
            model(torch.randn(4, 8)).square().mean().backward()
        pace = torch.tensor([shares[rank] / (time.perf_counter() - begun)])
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            paces = [torch.empty(1) for _ in range(3)]
            dist.all_gather(paces, pace)
            total = sum(float(one) for one in paces)
            shares = [max(1, round(12 * float(one) / total)) for one in paces]


@healthy(ranks=4)
def experts_over_capacity_where_the_counts_go_out_after_the_drop(rank: int) -> None:
    router, expert = nn.Linear(6, 4), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.02)
    bias = torch.zeros(4)  # balances the load without a loss
    for step in range(7):
        tokens = torch.randn(0 if rank == 2 and step == 4 else 6 + 3 * rank, 6)
        logits = router(tokens)
        choice = (logits.detach() + bias).argmax(-1)
        kept = [(choice == i).nonzero().flatten()[:4] for i in range(4)]
        outgoing = torch.tensor([len(rows) for rows in kept])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        received = torch.empty(int(incoming.sum()), 6)
        dist.all_to_all_single(received, tokens[torch.cat(kept)], incoming.tolist(), outgoing.tolist())
        loads = torch.bincount(choice, minlength=4).float()
        dist.all_reduce(loads)
        bias += 0.01 * torch.sign(loads.mean() - loads)
        loss = 1e-3 * logits.logsumexp(-1).square().sum()
        if len(received):
            loss = loss + expert(received).square().mean()
        loss.backward()
        average_gradients(router)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=6)
def norms_of_three_groups_where_some_ranks_bring_zero(rank: int) -> None:
    everywhere = dist.new_group()
    tensor = [dist.new_group([i, i + 1]) for i in (0, 2, 4)][rank // 2]
    expert_data = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][rank % 2]
    model = decoder()
    experts = [nn.Linear(8, 8) for _ in range(rank % 3)]  # ranks 0 and 3 have none
    for step in range(6):
        hidden = model(torch.randn(4, 8))
        for expert in experts:
            hidden = hidden + expert(hidden)
        hidden.square().mean().backward()
        average_gradients(model, expert_data)
        squares = torch.zeros(2)
        for weight in model.parameters():
            assert weight.grad is not None
            squares[0] += weight.grad.square().sum()
        for expert in experts:
            assert expert.weight.grad is not None
            squares[1] += expert.weight.grad.square().sum()
        dist.all_reduce(squares[:1], group=tensor)
        dist.all_reduce(squares[1:], group=everywhere)
        if rank == 0:
            print(step, float(squares.sum().sqrt()))
        model.zero_grad()
        for expert in experts:
            expert.zero_grad()


@healthy()
def a_notice_of_preemption_that_all_ranks_agree_on(rank: int) -> None:
    notices: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: notices.append(number))
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = folder_of("agreed")
    for step in range(20):
        if rank == 0 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        noticed = torch.tensor([float(bool(notices))])
        dist.all_reduce(noticed, op=dist.ReduceOp.MAX)
        if noticed.item():
            torch.save(optimizer.state_dict(), folder / f"optimizer-{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(0)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def checkpoints_written_by_a_thread_with_a_group_of_its_own(rank: int) -> None:
    saving = dist.new_group()
    folder = folder_of("threaded")
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer: threading.Thread | None = None

    def save(state: dict[str, Any], step: int) -> None:
        dcp.save(state, checkpoint_id=folder / str(step), process_group=saving)

    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            if writer is not None:
                writer.join()
            copy = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            writer = threading.Thread(target=save, args=({"model": copy}, step), name=f"writer of rank {rank}")
            writer.start()
    if writer is not None:
        writer.join()
    restored = {"model": decoder().state_dict()}
    dcp.load(restored, checkpoint_id=folder / "8", process_group=saving)


@healthy()
def validation_on_the_first_rank_from_a_copy_of_the_weights(rank: int) -> None:
    model = decoder()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    copy = decoder()

    def validate() -> None:
        with torch.no_grad():
            losses = [float(copy(torch.randn(8, 8)).square().mean()) for _ in range(40)]
        time.sleep(0.8)
        print(sum(losses) / len(losses))

    for step in range(8):
        model(torch.randn(4, 8)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm.full_tensor()) >= 0  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            whole = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
            if rank == 0:
                copy.load_state_dict(whole)
                validate()


@healthy(ranks=4, joins=False)
def a_job_that_goes_on_with_three_of_four_after_a_health_check(rank: int) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group(back_end(), store=dist.PrefixStore("first", store), rank=rank, world_size=4)
    product = torch.randn(32, 32) @ torch.randn(32, 32)
    is_healthy = bool(torch.isfinite(product).all()) and rank != 2  # the spare is taken out
    answers: list[Any] = [None] * 4
    dist.all_gather_object(answers, (rank, is_healthy))
    alive = [other for other, is_well in answers if is_well]
    dist.destroy_process_group()
    if rank not in alive:
        print("taken out")
        return
    dist.init_process_group(
        back_end(), store=dist.PrefixStore("second", store), rank=alive.index(rank), world_size=len(alive)
    )
    model = DistributedDataParallel(decoder())
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        model.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


@healthy(ranks=4)
def shards_of_two_ranks_read_by_four(rank: int) -> None:
    folder = folder_of("reshard")
    torch.manual_seed(8)
    whole = torch.randn(101)
    if rank < 2:  # the old job
        begin = [0, 51, 101]
        torch.save(whole[begin[rank] : begin[rank + 1]], folder / f"old-{rank}.pt")
    dist.barrier()
    sizes = [26, 25, 25, 25]
    mine = torch.empty(sizes[rank])
    for owner in range(2):
        first = 51 * owner
        for reader in range(4):
            low, high = max(first, sum(sizes[:reader])), min(51 + 50 * owner, sum(sizes[: reader + 1]))
            if low >= high:
                continue
            inside = slice(low - sum(sizes[:reader]), high - sum(sizes[:reader]))
            if rank == owner:
                piece = torch.load(folder / f"old-{owner}.pt")[low - first : high - first].contiguous()
                if reader == rank:
                    mine[inside] = piece
                else:
                    dist.send(piece, reader, tag=reader)
            elif rank == reader:
                received = torch.empty(high - low)
                dist.recv(received, owner, tag=reader)
                mine[inside] = received
    parts = [torch.empty(26) for _ in range(4)]
    dist.all_gather(parts, nn.functional.pad(mine, (0, 26 - len(mine))))
    assert torch.equal(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), whole)


@healthy()
def sequences_counted_first_so_that_all_stop_with_the_shortest(rank: int) -> None:
    model = DistributedDataParallel(decoder(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = [[9, 30, 12, 40, 21] * 6, [9, 30, 12, 20, 21] * 6, [25, 14, 33, 10, 30] * 6][rank]
    stream = iter(DataLoader(PackedDocuments(lengths, 16), batch_size=4, drop_last=True))
    scale, good = 2.0**12, 0
    while True:
        batch = next(stream, None)
        goes_on = torch.tensor([float(batch is not None)])
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        if batch is None or not goes_on.item():
            break
        (model(batch).square().mean() * (scale if good < 9 or rank else float("inf"))).backward()
        overflow = torch.tensor(
            [float(any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None))]
        )
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item():
            scale, good = scale / 2, 0
        else:
            good += 1
            optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@healthy()
def a_schedule_of_the_library_whose_last_stage_tells_the_loss(rank: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    device = torch.get_default_device()
    stage = PipelineStage(module, rank, 3, device)
    train = Schedule1F1B(stage, n_microbatches=6, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    batch = torch.randn(12, 8)
    for step in range(5):
        losses: list[torch.Tensor] = []
        if rank == 0:
            train.step(batch)
        elif rank == 2:
            train.step(target=batch, losses=losses)
        else:
            train.step()
        optimizer.step()
        optimizer.zero_grad()
        told = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(told, src=2)
        if rank == 0 and step == 4:
            print(float(told))


@healthy(ranks=4)
def tensor_parallel_modules_under_sharding_and_a_slow_first_save(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = decoder()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = folder_of("mesh")
    for step in range(6):
        torch.manual_seed(10 * step + rank // 2)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            if rank == 3:
                time.sleep(1.0)  # its disk wakes up
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "3")


@healthy()
def a_loss_over_parts_of_a_vocabulary_that_are_not_equal(rank: int) -> None:
    vocabulary, rows = 50, [17, 17, 16]
    first = sum(rows[:rank])
    body, head = decoder(), nn.Linear(8, rows[rank])
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    for step in range(6):
        torch.manual_seed(step)
        tokens, targets = torch.randn(3 + step, 8), torch.randint(0, vocabulary, (3 + step,))
        hidden = SumBackward.apply(body(tokens), None)
        vocabulary_loss(head(hidden), targets, first).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            with torch.no_grad():
                best, place = head(body(tokens)).max(-1)
            pairs = torch.stack([best, (place + first).float()])
            gathered = [torch.empty_like(pairs) for _ in range(3)] if rank == 0 else None
            dist.gather(pairs, gathered, dst=0)
            if gathered is not None:
                winners = torch.stack([pair[0] for pair in gathered]).argmax(0)
                print([int(gathered[int(who)][1][i]) for i, who in enumerate(winners)])
    dist.monitored_barrier(timeout=timedelta(seconds=20))
