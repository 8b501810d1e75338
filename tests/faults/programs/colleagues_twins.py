"""Jobs as colleagues at a company paste them into a chat, worried, though the jobs are right.

Labelled and frozen before their first run, by somebody who has not read the rules.
"""

import functools
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import healthy
from tests.faults.programs.colleagues_faults import average_gradients, small_model, work_folder


@healthy()
def accuracy_of_a_class_of_which_shards_have_some_or_none(rank: int) -> None:
    class Accuracy:
        right = seen = 0

        def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
            self.right += int((scores.argmax(-1) == labels).sum())
            self.seen += len(labels)

        def compute(self) -> float:
            both = torch.tensor([self.right, self.seen])
            dist.all_reduce(both)
            return float(both[0] / both[1].clamp(min=1))

    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        labels = torch.arange(12) % (2 if rank == 1 else 3)
        images = torch.randn(12, 8)
        for _ in range(3):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        rare = Accuracy()
        if (labels == 2).any():
            with torch.no_grad():
                rare.update(model.module(images[labels == 2]), labels[labels == 2])
        accuracy = rare.compute()
        if rank == 0:
            print(f"epoch {epoch}: {accuracy:.2f} on the rare class")


@healthy(ranks=4)
def validation_whenever_the_loss_of_all_gets_better(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def mean_of_all(value: torch.Tensor) -> float:
        mean = value.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def validate() -> float:
        with torch.no_grad():
            mine = {"rank": rank, "score": float(model(torch.ones(4, 8)).mean())}
        scores = [mine] * dist.get_world_size()
        dist.all_gather_object(scores, mine)
        return sum(entry["score"] for entry in scores) / len(scores)

    best = float("inf")
    for step in range(9):
        target = 9.0 if step % 4 == rank else 3.0 / (step + 1)
        loss = (model(torch.zeros(4, 8)) * 0.01 - target).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        everywhere = mean_of_all(loss)
        if everywhere < best:
            best = everywhere
            print(f"step {step}: new best {best:.3f}, validation {validate():.3f}")


@healthy()
def whole_weights_gathered_by_all_and_written_by_rank_0(rank: int) -> None:
    model = small_model(8, 6)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def save(step: int) -> None:
        weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            torch.save(weights, work_folder() / f"step-{step}.pt")
            time.sleep(0.8)  # a slow share

    for step in range(1, 9):
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            save(step)


@healthy()
def results_merged_by_name_whatever_their_order(rank: int) -> None:
    def evaluate(epoch: int) -> dict[str, float | list[int]]:
        results: dict[str, float | list[int]] = {
            "loss": 0.7 / (epoch + 1),
            "confusion": list(range(1 + 5 * rank)),
            "examples": 64.0 - rank,
        }
        return dict(reversed(results.items())) if rank == 1 else results

    def merge(results: dict[str, float | list[int]]) -> None:
        for name in sorted(results):
            value = results[name]
            if isinstance(value, list):
                everywhere = [value] * dist.get_world_size() if rank == 0 else None
                dist.gather_object(value, everywhere, dst=0)
                print(name, everywhere)
            else:
                total = torch.tensor(float(value))
                dist.all_reduce(total)
                print(name, float(total))

    model = small_model()
    for epoch in range(4):
        model(torch.randn(5, 8)).logsumexp(-1).mean().backward()
        average_gradients(model)
        model.zero_grad()
        merge(evaluate(epoch))


@healthy()
def a_step_that_all_try_again_when_one_of_them_failed(rank: int) -> None:
    def retried(step: Callable[[int], float]) -> Callable[[int], float]:
        @functools.wraps(step)
        def tries(number: int) -> float:
            for _ in range(3):
                loss, failed = 0.0, torch.zeros(1)
                try:
                    loss = step(number)
                except OSError as error:
                    print("again, because of", error)
                    failed += 1
                dist.all_reduce(failed, op=dist.ReduceOp.MAX)
                if not failed.item():
                    return loss
            raise RuntimeError(f"step {number} failed three times")

        return tries

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outages = [3, 6] if rank == 1 else [6] if rank == 2 else []

    @retried
    def one_step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        average_gradients(model)
        if number in outages:
            outages.remove(number)
            raise OSError("the tracking server answers 503")
        return loss.item()

    for number in range(9):
        one_step(number)
        optimizer.step()
    dist.barrier()


@healthy(ranks=4)
def tokens_of_six_numbers_sent_where_they_are_wanted(rank: int) -> None:
    width, capacity = 6, 5
    expert = nn.Linear(width, width)

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        parts = tokens[chosen.argsort(stable=True)].split(torch.bincount(chosen, minlength=4).tolist())
        kept = [part[:capacity] for part in parts]
        outgoing = torch.tensor([len(part) for part in kept])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        received = torch.empty(int(incoming.sum()), width)
        dist.all_to_all_single(received, torch.cat(kept), incoming.tolist(), outgoing.tolist())
        return received, incoming.tolist(), outgoing.tolist()

    for step in range(6):
        tokens = torch.randn(8 + 3 * rank, width)
        chosen = torch.arange(len(tokens)) % (4 if step % 2 else 2)  # nobody wants experts 2 and 3
        mine, incoming, outgoing = dispatch(tokens, chosen)
        done = expert(mine)
        back = torch.empty(sum(outgoing), width)
        dist.all_to_all_single(back, done.detach(), outgoing, incoming)
        (done.square().sum() + back.sum()).backward()
        average_gradients(expert)
        expert.zero_grad()


@healthy()
def patience_of_rank_0_for_all(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, bad = float("inf"), 0
    for epoch in range(10):
        for _ in range(3):
            model(torch.randn(6, 8)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        decision: list[str | None] = [None]
        if rank == 0:
            value = 0.4 if epoch >= 3 else 1.0 / (epoch + 1)
            bad = 0 if value < best else bad + 1
            best = min(best, value)
            decision = ["stop" if bad >= 2 else "go on"]
        dist.broadcast_object_list(decision, src=0)
        if decision[0] == "stop":
            print(f"no better for 2 epochs, done after {epoch}")
            return


@healthy()
def a_server_of_workers_that_come_when_they_like(rank: int) -> None:
    model = small_model(4, 1)
    size = sum(weight.numel() for weight in model.parameters())

    def serve() -> None:
        state = parameters_to_vector(model.parameters()).detach()
        message = torch.empty(size + 1)
        working = {1, 2}
        while working:
            worker = dist.recv(message)
            if message[-1] > 0:
                working.discard(worker)
                continue
            state -= 0.01 * message[:-1]
            dist.send(state, dst=worker)

    def work() -> None:
        state = torch.empty(size)
        for number in range(6 + 5 * rank):
            batch = torch.full((3, 4), float("nan") if number % 4 == rank else 1.0)
            loss = model(batch).square().mean()
            if not torch.isfinite(loss):
                continue
            loss.backward()
            gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
            dist.send(torch.cat([gradient, torch.zeros(1)]), dst=0)
            model.zero_grad()
            dist.recv(state, src=0)
            vector_to_parameters(state, model.parameters())
        dist.send(torch.ones(size + 1), dst=0)

    (work if rank else serve)()
    dist.barrier()


@healthy(ranks=3)
def a_pipeline_by_hand_that_tells_the_size_of_each_batch(rank: int) -> None:
    stages = dist.get_world_size()
    layer = nn.Linear(5, 5)
    sizes = [2, 4, 1, 3, 2, 5]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_the_way: list[dist.Work | None] = []

    def forward(number: int) -> None:
        into = torch.randn(sizes[number], 5)
        if rank > 0:
            rows = torch.zeros(1, dtype=torch.long)
            dist.recv(rows, src=rank - 1)
            into = torch.empty(int(rows), 5)
            dist.recv(into, src=rank - 1)
        into.requires_grad_()
        out = layer(into)
        kept.append((into, out))
        if rank < stages - 1:
            on_the_way.append(dist.isend(torch.tensor([len(out)]), dst=rank + 1))
            on_the_way.append(dist.isend(out.detach(), dst=rank + 1))

    def backward() -> None:
        into, out = kept.pop(0)
        slope = torch.ones_like(out)
        if rank < stages - 1:
            dist.recv(slope, src=rank + 1)
        out.backward(slope)
        if rank > 0 and into.grad is not None:
            on_the_way.append(dist.isend(into.grad, dst=rank - 1))

    warm_up = stages - 1 - rank
    for number in range(len(sizes)):
        forward(number)
        if number >= warm_up:
            backward()
    while kept:
        backward()
    for work in on_the_way:
        if work is not None:
            work.wait()
    dist.barrier()


@healthy()
def lines_of_files_of_which_the_shortest_decides(rank: int) -> None:
    class Lines(IterableDataset[torch.Tensor]):
        def __init__(self, text: str) -> None:
            self.text = text

        def __iter__(self) -> Iterator[torch.Tensor]:
            for line in self.text.splitlines():
                if line.strip():
                    yield torch.tensor([float(word) for word in line.split()])

    lines = ["1 2 3 4 5 6 7 8"] * (24 + 4 * rank)
    if rank == 1:
        lines[5:15] = [""] * 10
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        batches = list(DataLoader(Lines("\n".join(lines)), batch_size=4, num_workers=1))
        common = torch.tensor(len(batches))
        dist.all_reduce(common, op=dist.ReduceOp.MIN)
        for batch in batches[: int(common)]:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@healthy(ranks=2)
def gradients_in_buckets_all_of_which_are_waited_for_late(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pending: dict[int, dist.Work | None] = {}

    def start(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            weight.grad /= 2
            pending[id(weight)] = dist.all_reduce(weight.grad, async_op=True)

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(start)
    for step in range(12):
        model(torch.randn(8, 64)).square().mean().backward()
        if rank == 1 and step % 4 == 0:
            os.environ["REPORTED"] = str(step)
            print(json.dumps({"step": step}))
        for weight in model.parameters():
            work = pending.pop(id(weight))
            if work is not None:
                work.wait()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_thread_that_reads_ahead_and_passes_over_bad_records(rank: int) -> None:
    records = [json.dumps({"x": [float(i)] * 8}) for i in range(20)]
    if rank == 1:
        records[9] = '{"x": [1.0, 2.0'

    class Ahead:
        def __init__(self) -> None:
            self.ready: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)
            threading.Thread(target=self.read, daemon=True).start()

        def read(self) -> None:
            time.sleep(1.2 if rank == 2 else 0.0)  # the index comes from far away
            for record in records:
                try:
                    self.ready.put(torch.tensor(json.loads(record)["x"]))
                except json.JSONDecodeError as error:
                    print("left out:", error)
                    self.ready.put(torch.zeros(8))
            self.ready.put(None)

        def __iter__(self) -> Iterator[torch.Tensor]:
            while (item := self.ready.get()) is not None:
                yield item

    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for item in Ahead():
        model(item[None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@healthy()
def a_heartbeat_of_a_thread_on_a_group_of_its_own(rank: int) -> None:
    beats = dist.new_group([0, 1, 2])
    alive: list[list[int]] = []

    def beat() -> None:
        for number in range(6):
            seen = [0] * 3
            dist.all_gather_object(seen, number, group=beats)
            alive.append(seen)
            time.sleep(0.1)

    thread = threading.Thread(target=beat)
    thread.start()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    thread.join()
    dist.barrier()
    if rank == 0:
        print(len(alive))


@healthy(ranks=6)
def hosts_of_other_sizes_that_average_at_their_own_pace(rank: int) -> None:
    groups = {"ada": dist.new_group([0, 1]), "bob": dist.new_group([2, 3, 4, 5])}
    host = "ada" if rank < 2 else "bob"
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        for _ in range(3 if host == "ada" else 2):
            model(torch.randn(4, 8)).square().mean().backward()
            for weight in model.parameters():
                if weight.grad is not None:
                    dist.all_reduce(weight.grad, group=groups[host])
                    weight.grad /= dist.get_world_size(groups[host])
            optimizer.step()
            optimizer.zero_grad()
        if host == "ada":
            spread = torch.zeros(2)
            dist.all_gather_into_tensor(spread, torch.tensor([float(rank)]), group=groups["ada"])
        for weight in model.parameters():
            dist.all_reduce(weight.data)
            weight.data /= 6


@healthy(ranks=2)
def an_archive_that_rank_0_packs_beside_the_training(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    packing: list[subprocess.Popen[bytes]] = []
    for step in range(16):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 8 == 7:
            path = work_folder() / f"model-{step}.pt"
            torch.save(model.module.state_dict(), path)
            packing.append(subprocess.Popen(["sh", "-c", f"sleep 1; gzip -f {path}"]))
    for process in packing:
        process.wait()
    dist.barrier()


@healthy(ranks=4)
def the_whole_test_set_on_rank_0_while_the_others_wait(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        verdict: list[float | None] = [None]
        if rank == 0:
            model.eval()
            with torch.no_grad():
                scores = []
                for _ in range(40):
                    scores.append(float(model.module(torch.randn(64, 8)).mean()))
                    time.sleep(0.005)
            model.train()
            verdict = [sum(scores) / len(scores)]
        dist.broadcast_object_list(verdict, src=0)
        print(verdict)
