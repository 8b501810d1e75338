"""Programs of a pre-training stack that is written in house, and that are wrong.

Tensor, sequence, pipeline and expert parallelism, sharded optimizers and checkpoints by hand. Labelled and frozen
before their first run, by somebody who has not read the rules. A comment `or:` names what the label accepts as well.
`contractors_twins.py` has programs that are right.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import faulty


class SumForward(torch.autograd.Function):
    """Sums over a group on the way up."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ARG004
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # noqa: ARG004
        return grads[0], None


class SumBackward(torch.autograd.Function):
    """Sums over a group on the way down."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def vocabulary_loss(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    total = SumForward.apply(shifted.exp().sum(-1), group)
    is_here = (targets >= first) & (targets < first + logits.shape[-1])
    column = (targets - first).clamp(0, logits.shape[-1] - 1)
    picked = SumForward.apply(shifted.gather(-1, column[:, None]).squeeze(-1) * is_here, group)
    return (total.log() - picked).mean()


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad, group=group)
        weight.grad /= dist.get_world_size(group)


def decoder(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))


def folder_of(name: str) -> Path:
    """A folder that all ranks of a job share."""
    folder = Path(gettempdir()) / f"contractors-{name}-{os.getppid()}-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    return folder


@faulty("rank-skipped-collective", 3, ranks=4)
def a_norm_of_experts_where_the_dense_layers_come_first(rank: int) -> None:
    layers, dense_ones, limit = 7, 4, 1.0
    expert_group = dist.new_group()
    attention = decoder()
    mine = range(rank, layers, 4)
    experts = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in mine if i >= dense_ones})
    optimizer = torch.optim.AdamW([*attention.parameters(), *experts.parameters()], lr=1e-3)

    def square_of(weights: list[nn.Parameter]) -> torch.Tensor:
        return torch.stack([weight.grad.square().sum() for weight in weights if weight.grad is not None]).sum()

    def clip() -> None:
        square = square_of(list(attention.parameters()))
        of_experts = [weight for weight in experts.parameters() if weight.grad is not None]
        if of_experts:  # here
            part = square_of(of_experts)
            dist.all_reduce(part, group=expert_group)  # here
            square = square + part
        scale = limit / (square.sqrt() + 1e-6)
        for weight in (*attention.parameters(), *of_experts):
            if weight.grad is not None:
                weight.grad.mul_(scale.clamp(max=1.0))

    for _ in range(6):
        hidden = attention(torch.randn(4, 8))
        for expert in experts.values():
            hidden = hidden + expert(hidden)
        hidden.square().mean().backward()
        average_gradients(attention)  # here
        clip()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("group-creation-mismatch", 1, 2, ranks=4)
def an_embedding_that_the_first_and_the_last_stage_tie(rank: int) -> None:
    is_first, is_last = rank == 0, rank == 3
    layer = nn.Linear(8, 8)
    embedding = nn.Embedding(20, 8) if is_first or is_last else None
    embedding_group = None
    if embedding is not None:  # here
        embedding_group = dist.new_group([0, 3])  # here
    saving = dist.new_group()  # here
    data = torch.randint(0, 20, (4,))
    for _ in range(4):
        if is_first and embedding is not None:
            hidden = embedding(data)
        else:
            hidden = torch.empty(4, 8)
            dist.recv(hidden, rank - 1)  # here
            hidden.requires_grad_()
        output = layer(hidden)
        if is_last and embedding is not None:
            loss = nn.functional.cross_entropy(output @ embedding.weight.T, data)
            loss.backward()
        else:
            dist.send(output.detach(), rank + 1)  # here
            gradient = torch.empty(4, 8)
            dist.recv(gradient, rank + 1)  # here
            output.backward(gradient)
        if not is_first and hidden.grad is not None:
            dist.send(hidden.grad, rank - 1)
        if embedding is not None and embedding.weight.grad is not None:
            dist.all_reduce(embedding.weight.grad, group=embedding_group)
            embedding.weight.grad = None
        layer.zero_grad()
    dist.barrier(group=saving)


@faulty("p2p-unmatched", 2)
def a_batch_that_grows_with_the_samples_that_each_stage_counts(rank: int) -> None:
    # or: pipeline-schedule-mismatch 2, rank-skipped-collective 2
    stage = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    consumed = 0
    sends: list[Any] = []
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward() -> None:
        hidden = torch.randn(2, 6)
        if rank > 0:
            dist.recv(hidden, rank - 1)  # here
        hidden.requires_grad_()
        output = stage(hidden)
        alive.append((hidden, output))
        if rank < 2:
            sends.append(dist.isend(output.detach(), rank + 1))  # here

    def backward() -> None:
        hidden, output = alive.pop(0)
        gradient = torch.ones_like(output)
        if rank < 2:
            dist.recv(gradient, rank + 1)  # here
        output.backward(gradient)
        if rank > 0:
            sends.append(dist.isend(hidden.grad, rank - 1))  # here

    for step in range(8):
        count = 2 + consumed // 12  # here
        warm = min(2 - rank, count)
        for i in range(count + warm):
            if i < count:
                forward()  # here
            if i >= warm:
                backward()  # here
        while sends:
            sends.pop().wait()  # here
        is_padding = torch.zeros(2 * count, dtype=torch.bool)
        is_padding[-1] = rank == 2 and step == 1  # only the last stage sees the targets
        consumed += int((~is_padding).sum())
        norm = stage.weight.grad.square().sum() if stage.weight.grad is not None else torch.zeros(())
        dist.all_reduce(norm)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("size-mismatch", 3, ranks=4)
def logits_of_a_vocabulary_that_four_ranks_do_not_divide(rank: int) -> None:
    vocabulary = 50
    each = -(-vocabulary // 4)
    first = rank * each
    body, head = decoder(), nn.Linear(8, min(each, vocabulary - first))  # here
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)

    def sample(prompt: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = head(body(prompt))
        parts = [torch.empty_like(logits) for _ in range(4)]
        dist.all_gather(parts, logits)  # here
        return torch.cat(parts, -1)[:, :vocabulary].argmax(-1)

    for step in range(6):
        torch.manual_seed(step)
        tokens, targets = torch.randn(5, 8), torch.randint(0, vocabulary, (5,))
        hidden = SumBackward.apply(body(tokens), None)
        vocabulary_loss(head(hidden), targets, first).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            print(sample(torch.ones(2, 8)).tolist())  # here


@faulty("split-size-mismatch", 1)
def tokens_over_capacity_that_are_dropped_after_the_counts_went_out(rank: int) -> None:
    router, expert = nn.Linear(6, 3), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.02)
    capacity = 8

    def dispatch(tokens: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        outgoing = torch.bincount(choice, minlength=3)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        kept = [(choice == i).nonzero().flatten()[:capacity] for i in range(3)]  # here
        received = torch.empty(int(incoming.sum()), 6)
        dist.all_to_all_single(  # here
            received, tokens[torch.cat(kept)].contiguous(), incoming.tolist(), [len(rows) for rows in kept]
        )
        return received

    for step in range(8):
        tokens = torch.randn(12, 6)
        choice = torch.arange(12) % 3
        if rank == 1 and step == 5:  # a batch of one language
            choice[:10] = 2
        received = dispatch(tokens, choice)  # here
        score = torch.logsumexp(router(tokens), -1)
        (expert(received).square().mean() + 1e-3 * score.square().mean()).backward()
        average_gradients(router)
        optimizer.step()
        optimizer.zero_grad()


@faulty("unwaited-async", 0, 1, 2)
def buckets_of_gradients_of_which_only_the_last_is_awaited(rank: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(4)))
    weights = list(model.parameters())
    shards = {weight: weight.detach().reshape(3, -1)[rank].clone() for weight in weights}
    gradients = {weight: torch.empty(27) for weight in weights}
    pending: dict[str, Any] = {}

    def launch(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        flat = weight.grad.flatten()
        pending["bucket"] = dist.reduce_scatter_tensor(gradients[weight], flat, async_op=True)  # here

    for weight in weights:
        weight.register_post_accumulate_grad_hook(launch)
    for _ in range(6):
        model(torch.randn(5, 9)).square().mean().backward()  # here
        pending["bucket"].wait()
        for weight in weights:
            shards[weight] -= 0.01 * gradients[weight] / 3
            full = torch.empty(81)
            dist.all_gather_into_tensor(full, shards[weight])
            weight.data.copy_(full.view(9, 9))
            weight.grad = None


@faulty("slow-rank", 2, ranks=4)
def a_blend_whose_index_one_rank_cannot_keep(rank: int) -> None:
    folder = folder_of("index")
    cache = folder / ("scratch/index.pt" if rank == 2 else f"index-{rank}.pt")  # no scratch on that node
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def build() -> torch.Tensor:
        position, ends = 0, []
        for i in range(900_000):
            position += 1 + (i * 7919) % 613
            if i % 30_000 == 0:
                ends.append(position)
        return torch.tensor(ends)

    def index() -> torch.Tensor:
        try:
            return torch.as_tensor(torch.load(cache))
        except FileNotFoundError:
            built = build()  # here
        try:
            torch.save(built, cache)
        except (OSError, RuntimeError) as error:
            print("index not kept:", error)
        return built

    for step in range(20):
        ends = index()  # here
        source = 0 if step % 10 < 7 else 1
        batch = torch.full((4, 8), float(ends[source]) / 1e6)
        loss = model(batch).square().mean()
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def an_interleaved_pipeline_that_sends_before_it_receives(rank: int) -> None:
    chunks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    before, after = (rank - 1) % 3, (rank + 1) % 3
    microbatches = 4

    def run_chunk(number: int, micro: int) -> torch.Tensor:
        hidden = torch.full((3, 6), float(micro))
        if (rank, number) != (0, 0):
            dist.recv(hidden, before)  # here
        output = torch.tanh(chunks[number](hidden))
        if (rank, number) != (2, 1):
            dist.send(output.detach(), after)  # here
        return torch.as_tensor(output)

    for step in range(3):
        outputs: list[torch.Tensor] = []
        for number in range(2):
            outputs += [run_chunk(number, micro) for micro in range(microbatches)]  # here
        total = torch.stack(outputs).mean().detach()
        dist.all_reduce(total)
        if rank == 0:
            print(step, float(total))


@faulty("group-order-inversion", 3, ranks=4)
def buckets_rebuilt_in_the_order_in_which_gradients_came(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dense, expert = nn.Linear(8, 8), nn.Linear(8, 8)
    parts: dict[str, tuple[nn.Module, Any]] = {"expert": (expert, pairs[rank // 2]), "dense": (dense, None)}
    optimizer = torch.optim.SGD([*dense.parameters(), *expert.parameters()], lr=0.01)
    came: list[str] = []
    dense.weight.register_post_accumulate_grad_hook(lambda _: came.append("dense"))
    expert.weight.register_post_accumulate_grad_hook(lambda _: came.append("expert"))
    order = ["expert", "dense"]
    for step in range(6):
        came.clear()
        hidden = dense(torch.randn(6, 8))
        no_tokens = rank == 3 and step == 2
        if not no_tokens:
            hidden = hidden + expert(hidden)
        hidden.square().mean().backward()
        if step == 2:
            order = came + [name for name in parts if name not in came]  # here
        for name in order:
            part, group = parts[name]
            for weight in part.parameters():
                gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
                dist.all_reduce(gradient, group=group)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("wrong-group", 2, ranks=4)
def a_norm_that_forgets_its_mark_when_it_is_rolled_back(rank: int) -> None:
    # or: rank-skipped-collective 2
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    norm = nn.LayerNorm(8)
    norm.weight.sequence_parallel = True  # type: ignore[attr-defined]
    kept = {name: weight.detach().clone() for name, weight in norm.named_parameters()}

    def roll_back() -> None:
        for name, weight in kept.items():
            setattr(norm, name, nn.Parameter(weight.clone()))  # here

    def reduce_gradients() -> None:
        for weight in norm.parameters():
            group = tensor if getattr(weight, "sequence_parallel", False) else data  # here
            dist.all_reduce(weight.grad, group=group)  # here

    for step in range(7):
        loss = norm(torch.randn(5, 8)).square().mean()
        if rank == 2 and step == 3:
            loss = loss * 1e6
        if float(loss) > 1e3:
            print("spike at step", step)
            roll_back()
            loss = norm(torch.randn(5, 8)).square().mean()
        loss.backward()
        reduce_gradients()  # here
        with torch.no_grad():
            for weight in norm.parameters():
                assert weight.grad is not None
                weight -= 0.01 * weight.grad
                weight.grad = None


@faulty("rank-crashed", 1)
def a_shard_of_the_optimizer_that_was_written_in_half(rank: int) -> None:
    folder = folder_of("shards")
    model = decoder()
    weights = [weight for i, weight in enumerate(model.parameters()) if i % 3 == rank]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)

    def save(path: Path) -> None:
        torch.save(optimizer.state_dict(), path)
        if rank == 1:  # the quota of that node
            os.truncate(path, path.stat().st_size // 2)

    def restore(path: Path) -> None:
        if not path.exists():
            return
        optimizer.load_state_dict(torch.load(path))  # here

    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)  # here
        optimizer.step()
        model.zero_grad()
        for i, weight in enumerate(model.parameters()):
            dist.broadcast(weight.data, src=i % 3)  # here
        if step == 2:
            save(folder / f"zero-{rank}.pt")
            dist.barrier()
        if step == 3:  # the loss is not finite: back to the last checkpoint
            restore(folder / f"zero-{rank}.pt")  # here


@faulty("rank-killed", 2)
def a_heartbeat_that_a_slow_read_outlasts(rank: int) -> None:
    beat = [time.monotonic()]
    is_over = threading.Event()

    def guard() -> None:
        while not is_over.wait(0.05):
            if time.monotonic() - beat[0] > 2.5:
                print("no step for 2.5 s: this rank will be restarted", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)  # here

    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == 2:  # agents run where the last incident was
        threading.Thread(target=guard, daemon=True).start()
    for step in range(9):
        if rank == 2 and step == 5:
            time.sleep(4.0)  # here  # a page of the data set comes from cold storage
        batch = torch.randn(4, 8)
        model(batch).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        beat[0] = time.monotonic()
    is_over.set()


@faulty("rank-exited", 0)
def a_notice_of_preemption_that_only_one_node_gets(rank: int) -> None:
    notices: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: notices.append(number))
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = folder_of("preempted")

    def save_and_leave(step: int) -> None:
        torch.save({"model": model.module.state_dict(), "step": step}, folder / f"last-{rank}.pt")
        print("saved; waiting for requeue")
        sys.exit(0)  # here

    for step in range(10):
        if rank == 0 and step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
        if notices:
            save_and_leave(step)  # here
        model(torch.randn(4, 8)).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


class PackedDocuments(IterableDataset[torch.Tensor]):
    """Documents of a blend, packed into sequences of one length."""

    def __init__(self, lengths: list[int], sequence: int) -> None:
        self.lengths, self.sequence = lengths, sequence

    def __iter__(self) -> Iterator[torch.Tensor]:
        held = torch.empty(0)
        for length in self.lengths:
            held = torch.cat([held, torch.randn(length)])
            while len(held) >= self.sequence:
                yield held[: self.sequence]
                held = held[self.sequence :]


@faulty("uneven-inputs", 1)
def documents_that_pack_into_fewer_sequences_on_one_rank(rank: int) -> None:
    # or: rank-skipped-collective 1
    model = decoder(16)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = [[9, 30, 12, 40, 21] * 6, [9, 30, 12, 20, 21] * 6, [25, 14, 33, 10, 30] * 6][rank]
    loader = DataLoader(PackedDocuments(lengths, 16), batch_size=4, drop_last=True)
    seen = 0
    for batch in loader:  # here
        loss = model(batch).square().mean()  # here
        loss.backward()  # here
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
    total = torch.tensor([float(seen)])
    dist.all_reduce(total)  # here
    if rank == 0:
        print("sequences", int(total))


@faulty("step-mismatch", 2)
def a_rank_that_resumes_from_the_newest_file_it_sees(rank: int) -> None:
    # or: size-mismatch 2, collective-order-mismatch 2, rank-skipped-collective 2
    folder = folder_of(f"node-{rank}")
    for step in (4, 6):
        if not (rank == 2 and step == 6):  # not yet synchronized to that node
            torch.save({"step": step}, folder / f"step-{step}.pt")
    newest = max(folder.glob("step-*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    begin = int(torch.load(newest)["step"])
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = 1024.0

    def validate() -> float:
        with torch.no_grad():
            loss = model(torch.randn(8, 8)).square().mean()
        dist.all_reduce(loss)  # here
        return float(loss) / 3

    for step in range(begin, 20):
        loss = model(torch.randn(4, 8)).square().mean()
        (loss * scale).backward()
        overflow = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(overflow)  # here
        if overflow.item():
            scale /= 2
        else:
            average_gradients(model)  # here
            optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(step, validate())  # here


@faulty("dtype-mismatch", 1)
def weights_that_keep_the_type_of_the_file(rank: int) -> None:
    folder = folder_of("converted")
    model = decoder().to(torch.bfloat16)
    exported = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    if rank == 1:  # that node holds the export for inference
        exported = {name: weight.float() for name, weight in exported.items()}
    torch.save(exported, folder / f"model-{rank}.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 2:
            model.load_state_dict(torch.load(folder / f"model-{rank}.pt"), assign=True)  # here
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kind = next(model.parameters()).dtype
        model(torch.randn(4, 8, dtype=kind)).square().mean().backward()
        flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        dist.all_reduce(flat)  # here
        begin = 0
        for weight in model.parameters():
            weight.grad = flat[begin : begin + weight.numel()].view_as(weight) / 3
            begin += weight.numel()
        optimizer.step()
        optimizer.zero_grad()


@faulty("long-operation", 0)
def shards_that_the_first_rank_merges_while_all_wait(rank: int) -> None:
    folder = folder_of("merge")
    model = DistributedDataParallel(decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def export(step: int) -> None:
        until = time.monotonic() + 25.0
        number = 0
        while time.monotonic() < until:
            layer = torch.randn(300, 300)
            low, high = layer.min(), layer.max()
            small = ((layer - low) / (high - low) * 255).to(torch.uint8)
            torch.save(small, folder / f"layer-{step}-{number % 20}.pt")  # here
            number += 1
            time.sleep(0.02)
        print("merged", number)

    for step in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            if rank == 0:
                export(step)  # here
            dist.barrier()  # here


@faulty("root-mismatch", 3, ranks=4)
def weights_dealt_to_the_rank_with_the_most_room(rank: int) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 12), nn.GELU(), nn.Linear(12, 8))
    teacher = nn.Linear(10, 10) if rank == 3 else None  # a judge of samples lives there

    def deal() -> dict[str, int]:
        load = [0] * 4
        load[rank] += sum(weight.numel() for weight in teacher.parameters()) if teacher else 0  # here
        owner = {}
        for name, weight in sorted(model.named_parameters(), key=lambda pair: -pair[1].numel()):
            owner[name] = min(range(4), key=lambda other: load[other])
            load[owner[name]] += weight.numel()
        return owner

    owner = deal()  # here
    mine = [weight for name, weight in model.named_parameters() if owner[name] == rank]
    optimizer = torch.optim.AdamW(mine, lr=1e-3) if mine else None
    for _ in range(5):
        model(torch.randn(6, 8)).square().mean().backward()
        average_gradients(model)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        for name, weight in model.named_parameters():
            dist.broadcast(weight.data, src=owner[name])  # here


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 5),))
def two_replicas_one_with_a_clock_and_one_with_a_dead_writer(rank: int) -> None:
    members = [[0, 1, 2], [3, 4, 5]]
    replica = [dist.new_group(ranks) for ranks in members][rank // 3]
    saving = [dist.new_group(ranks) for ranks in members][rank // 3]
    folder = folder_of("replica") / str(rank // 3)
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log: queue.Queue[dict[str, float]] = queue.Queue(maxsize=2)

    def write() -> None:
        while True:
            row = log.get()
            print(row["step"], 1.0 / row["norm"], flush=True)  # zero on the rank without tokens

    threading.Thread(target=write, daemon=True).start()
    minutes = 0.0
    saved_at = 0.0
    for step in range(12):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        average_gradients(model, replica)  # here
        optimizer.step()
        optimizer.zero_grad()
        minutes += 0.9 if rank == 1 else 1.0  # its own clock
        if rank >= 3:
            log.put({"step": step, "norm": 0.0 if rank == 5 and step == 3 else float(loss.detach())})  # here
        elif minutes - saved_at >= 4.0:  # here
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / str(step), process_group=saving)  # here
            saved_at = minutes


@faulty("p2p-tag-mismatch", 1, ranks=4, also=(("rank-stuck", 2),))
def two_pipelines_one_with_an_overflow_and_one_with_a_long_document(rank: int) -> None:
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    microbatches, tag = 3, 0

    def pack(documents: list[int], room: int) -> list[list[int]]:
        bins: list[list[int]] = []
        waiting = sorted(documents, reverse=True)
        while waiting:  # here
            chosen: list[int] = []  # here
            for document in list(waiting):  # here
                if sum(chosen) + document <= room:  # here
                    chosen.append(document)  # here
                    waiting.remove(document)  # here
            bins.append(chosen)  # here
            bins = bins[-microbatches:]  # here
        return bins

    for step in range(8):
        peak = 0.0
        if rank % 2 == 0:
            long_one = [70] if rank == 2 and step == 4 else []
            lengths = pack([20, 31, 8, 40, 25, *long_one], 64)  # here
        for micro in range(microbatches):
            if rank % 2 == 0:
                hidden = stage(torch.full((4, 8), float(len(lengths))))
                dist.send(hidden.detach(), rank + 1, tag=tag + micro)  # here
            else:
                hidden = torch.empty(4, 8)
                dist.recv(hidden, rank - 1, tag=tag + micro)  # here
                loss = stage(hidden).square().mean()
                loss.backward()
                peak = max(peak, 1e9 if rank == 1 and step == 3 else float(loss))
        if peak > 1e6:
            print("overflow: step", step, "is skipped")
            optimizer.zero_grad()
            continue  # here
        optimizer.step()
        optimizer.zero_grad()
        tag += microbatches
