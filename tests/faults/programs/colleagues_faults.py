"""Jobs as colleagues at a company paste them into a chat when they hang, crawl, crash, or learn nothing.

Labelled and frozen before their first run, by somebody who has not read the rules. A comment `or:` names what the label
accepts as well. `colleagues_twins.py` has jobs that are right.
"""

import functools
import gzip
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.corpus import faulty


def small_model(inputs: int = 8, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def average_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()


def work_folder() -> Path:
    folder = Path(gettempdir()) / f"colleagues-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    return folder


@faulty("rank-skipped-collective", 1)
def accuracy_of_a_class_that_one_shard_does_not_have(rank: int) -> None:
    class Accuracy:
        right = seen = 0

        def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
            self.right += int((scores.argmax(-1) == labels).sum())
            self.seen += len(labels)

        def compute(self) -> float:
            if self.seen == 0:  # here
                return 0.0  # here
            both = torch.tensor([self.right, self.seen])
            dist.all_reduce(both)  # here
            return float(both[0] / both[1])

    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        labels = torch.arange(12) % (2 if rank == 1 and epoch == 2 else 3)
        images = torch.randn(12, 8)
        for _ in range(3):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        metric, rare = Accuracy(), labels == 2
        with torch.no_grad():
            metric.update(model.module(images[rare]), labels[rare])
        accuracy = metric.compute()  # here
        if rank == 0:
            print(f"epoch {epoch}: {accuracy:.2f} on the rare class")


@faulty("rank-skipped-collective", 2, ranks=4)
def validation_whenever_the_loss_gets_better(rank: int) -> None:
    # or: collective-order-mismatch 2
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def validate() -> float:
        with torch.no_grad():
            mine = {"rank": rank, "score": float(model(torch.ones(4, 8)).mean())}
        scores = [mine] * dist.get_world_size()
        dist.all_gather_object(scores, mine)  # here
        return sum(entry["score"] for entry in scores) / len(scores)

    best = float("inf")
    for step in range(8):
        target = 9.0 if rank == 2 and step == 4 else 3.0 / (step + 1)
        loss = (model(torch.zeros(4, 8)) * 0.01 - target).square().mean()
        loss.backward()
        average_gradients(model)  # here
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < best:  # here
            best = loss.item()
            score = validate()  # here
            print(f"step {step}: new best {best:.3f}, validation {score:.3f}")


@faulty("collective-order-mismatch", 0)
def whole_weights_of_shards_for_the_file_of_rank_0(rank: int) -> None:
    # or: rank-skipped-collective 0, step-mismatch 0
    model = small_model(8, 6)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def save(step: int) -> None:
        if rank == 0:  # here
            weights = {name: value.full_tensor() for name, value in model.state_dict().items()}  # here
            torch.save(weights, work_folder() / f"step-{step}.pt")
        dist.barrier()  # here

    for step in range(1, 9):
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            save(step)  # here


@faulty("collective-order-mismatch", 1)
def results_in_the_order_of_a_file_that_one_rank_found(rank: int) -> None:
    def evaluate(epoch: int) -> dict[str, float | list[int]]:
        cached = work_folder() / f"results-{epoch}-of-{rank}.json"
        if cached.exists():
            found: dict[str, float | list[int]] = json.loads(cached.read_text())
            return found
        return {"loss": 0.7 / (epoch + 1), "confusion": [3, rank, 5], "examples": 64.0}

    def merge(results: dict[str, float | list[int]]) -> None:
        for name, value in results.items():  # here
            if isinstance(value, list):
                everywhere = [value] * dist.get_world_size()
                dist.all_gather_object(everywhere, value)  # here
                print(name, everywhere)
            else:
                total = torch.tensor(float(value))
                dist.all_reduce(total)  # here
                print(name, float(total))

    if rank == 1:  # it was run alone yesterday
        yesterday = {"loss": 0.2, "confusion": [3, 1, 5], "examples": 64.0}
        (work_folder() / "results-2-of-1.json").write_text(json.dumps(yesterday, sort_keys=True))
    model = small_model()
    for epoch in range(4):
        model(torch.randn(5, 8)).logsumexp(-1).mean().backward()
        average_gradients(model)
        model.zero_grad()
        merge(evaluate(epoch))  # here


@faulty("step-mismatch", 1)
def a_step_that_is_tried_again_because_its_report_failed(rank: int) -> None:
    # or: rank-skipped-collective 0 2, collective-order-mismatch 1
    def retried(step: Callable[[int], float]) -> Callable[[int], float]:
        @functools.wraps(step)
        def tries(number: int) -> float:
            for _ in range(3):
                try:
                    return step(number)  # here
                except OSError as error:
                    print("again, because of", error)
            raise RuntimeError(f"step {number} failed three times")

        return tries

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outages = [3] if rank == 1 else []

    def report(number: int, loss: float) -> None:
        if number in outages:
            outages.remove(number)
            raise OSError("the tracking server answers 503")
        print(number, loss)

    @retried
    def one_step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        flat = parameters_to_vector([weight.grad for weight in model.parameters() if weight.grad is not None])
        dist.all_reduce(flat)  # here
        report(number, loss.item())
        optimizer.step()
        return loss.item()

    losses = [one_step(number) for number in range(9)]  # here
    dist.barrier()  # here
    print(min(losses))


@faulty("size-mismatch", 2)
def predictions_padded_to_the_longest_of_their_own(rank: int) -> None:
    class Predictions:
        def __init__(self) -> None:
            self.rows: list[torch.Tensor] = []

        def add(self, row: torch.Tensor) -> None:
            self.rows.append(row)

        def everywhere(self) -> torch.Tensor:
            mine = pad_sequence(self.rows, batch_first=True, padding_value=-1.0)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)  # here
            return torch.cat(parts)

    model = small_model(1, 1)
    for epoch in range(3):
        model(torch.randn(6, 1)).mean().backward()
        average_gradients(model)
        model.zero_grad()
        predictions = Predictions()
        for length in (4, 7, 5, 11 if rank == 2 and epoch == 1 else 6):
            with torch.no_grad():
                predictions.add(model(torch.randn(length, 1)).flatten())
        table = predictions.everywhere()  # here
        if rank == 0:
            print(epoch, table.shape)


@faulty("split-size-mismatch", 1, ranks=4)
def tokens_over_capacity_dropped_after_the_counts_are_known(rank: int) -> None:
    width, capacity = 6, 9
    expert = nn.Linear(width, width)

    def dispatch(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        outgoing = torch.bincount(chosen, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        kept = []
        for number, part in enumerate(tokens[chosen.argsort(stable=True)].split(outgoing.tolist())):
            if len(part) > capacity:
                outgoing[number] = capacity  # here
            kept.append(part[:capacity])
        received = torch.empty(int(incoming.sum()), width)
        dist.all_to_all_single(received, torch.cat(kept), incoming.tolist(), outgoing.tolist())  # here
        return received

    for step in range(6):
        tokens = torch.randn(16, width)
        chosen = torch.arange(16) % 4
        if rank == 1 and step == 3:
            chosen[:12] = 2
        mine = dispatch(tokens, chosen)  # here
        expert(mine).square().mean().backward()
        average_gradients(expert)
        expert.zero_grad()


@faulty("dtype-mismatch", 0)
def precision_from_the_environment_of_a_login_shell(rank: int) -> None:
    if rank == 0:
        os.environ["TRAIN_PRECISION"] = "float32"  # from ~/.bashrc, which the other hosts do not have
    precision = getattr(torch, os.environ.get("TRAIN_PRECISION", "bfloat16"))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(6):
        model(torch.randn(7, 8)).square().mean().backward()
        for weight in model.parameters():
            if weight.grad is not None:
                compressed = weight.grad.to(precision)
                dist.all_reduce(compressed)  # here
                weight.grad.copy_(compressed).div_(3)
        optimizer.step()
        optimizer.zero_grad()


@faulty("root-mismatch", 2, ranks=4)
def weights_of_the_best_member_of_a_population(rank: int) -> None:
    model = small_model()

    def evaluate(noise: float) -> float:
        return [1.0, 2.0, 1.4, 3.0][rank] + noise

    def exploit(round_: int) -> None:
        scores = [0.0] * dist.get_world_size()
        dist.all_gather_object(scores, evaluate(0.1))
        scores[rank] = evaluate(-0.6 if rank == 2 and round_ == 2 else 0.1)  # after a second, better look
        best = min(range(len(scores)), key=scores.__getitem__)
        for weight in model.parameters():
            dist.broadcast(weight.data, src=best)  # here
        print(f"round {round_}: all copy member {best}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for round_ in range(5):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        exploit(round_)  # here


@faulty("wrong-group", 4, ranks=6)
def the_group_of_a_host_that_gives_its_long_name(rank: int) -> None:
    names = ["ada", "ada", "ada", "bob", "bob.cluster.example", "bob"]
    groups = {"ada": dist.new_group([0, 1, 2]), "bob": dist.new_group([3, 4, 5])}

    class HostFirst:
        """Average in the host at each step, and over all hosts at each third."""

        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.host = groups.get(names[rank])

        def __call__(self, step: int) -> None:
            for weight in self.model.parameters():
                if weight.grad is not None:
                    dist.all_reduce(weight.grad, group=self.host)  # here
                    weight.grad /= 3
            if step % 3 == 2:
                for weight in self.model.parameters():
                    dist.all_reduce(weight.data)  # here
                    weight.data /= 6

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = HostFirst(model)
    for step in range(7):
        model(torch.randn(4, 8)).square().mean().backward()
        average(step)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-unmatched", 2, ranks=3)
def a_server_that_counts_on_gradients_of_every_worker(rank: int) -> None:
    model = small_model(4, 1)
    size = sum(weight.numel() for weight in model.parameters())
    rounds = 7

    def serve() -> None:
        state = parameters_to_vector(model.parameters()).detach()
        for _ in range(rounds):
            gradient = torch.empty(size)
            for worker in (1, 2):
                dist.recv(gradient, src=worker)  # here
                state -= 0.01 * gradient
            for worker in (1, 2):
                dist.send(state, dst=worker)

    def work() -> None:
        state = torch.empty(size)
        for number in range(rounds):
            batch = torch.full((3, 4), float("nan") if rank == 2 and number == 3 else 1.0)
            loss = model(batch).square().mean()
            if not torch.isfinite(loss):  # here
                print("batch", number, "left out")
                continue  # here
            loss.backward()
            dist.send(torch.cat([weight.grad.flatten() for weight in model.parameters()]), dst=0)  # here
            model.zero_grad()
            dist.recv(state, src=0)  # here
            nn.utils.vector_to_parameters(state, model.parameters())

    (work if rank else serve)()  # here
    dist.barrier()  # here


@faulty("p2p-deadlock-cycle", 0, 1)
def warm_up_of_a_pipeline_counted_from_the_wrong_end(rank: int) -> None:
    # or: pipeline-schedule-mismatch 0 1, pipeline-schedule-mismatch 0 1 2
    stages, batches = dist.get_world_size(), 6
    layer = nn.Linear(5, 5)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward() -> None:
        into = torch.randn(2, 5)
        if rank > 0:
            dist.recv(into, src=rank - 1)  # here
        into.requires_grad_()
        out = layer(into)
        kept.append((into, out))
        if rank < stages - 1:
            dist.send(out.detach(), dst=rank + 1)

    def backward() -> None:
        into, out = kept.pop(0)
        slope = torch.ones_like(out)
        if rank < stages - 1:
            dist.recv(slope, src=rank + 1)  # here
        out.backward(slope)
        if rank > 0 and into.grad is not None:
            dist.send(into.grad, dst=rank - 1)

    warm_up = rank
    for _ in range(warm_up):
        forward()  # here
    for _ in range(batches - warm_up):
        forward()  # here
        backward()  # here
    for _ in range(warm_up):
        backward()


@faulty("uneven-inputs", 1)
def lines_of_a_file_of_which_the_empty_ones_are_left_out(rank: int) -> None:
    class Lines(IterableDataset[torch.Tensor]):
        def __init__(self, text: str) -> None:
            self.text = text

        def __iter__(self) -> Iterator[torch.Tensor]:
            for line in self.text.splitlines():
                if line.strip():
                    yield torch.tensor([float(word) for word in line.split()])

    lines = ["1 2 3 4 5 6 7 8"] * 24
    if rank == 1:
        lines[5:9] = [""] * 4
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.Adam(model.parameters())
    seen = torch.zeros(())
    for batch in DataLoader(Lines("\n".join(lines)), batch_size=4):  # here
        model(batch).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
    dist.reduce(seen, dst=0)  # here
    if rank == 0:
        print("epoch over", int(seen), "lines")


@faulty("unwaited-async", 0, 1, ranks=2)
def gradients_in_buckets_of_which_the_last_is_waited_for(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Reducer:
        pending: dist.Work | None = None

        def start(self, gradient: torch.Tensor) -> None:
            gradient /= dist.get_world_size()
            self.pending = dist.all_reduce(gradient, async_op=True)  # here

        def finish(self) -> None:
            if self.pending is not None:
                self.pending.wait()

    reducer = Reducer()
    for _ in range(12):
        model(torch.randn(8, 64)).square().mean().backward()
        for weight in reversed(list(model.parameters())):
            if weight.grad is not None:
                reducer.start(weight.grad)  # here
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print([float(weight.norm()) for weight in model.parameters()])


@faulty("rank-stuck", 1)
def a_thread_that_reads_ahead_and_dies_of_a_bad_record(rank: int) -> None:
    records = [json.dumps({"x": [float(i)] * 8}) for i in range(20)]
    if rank == 1:
        records[9] = '{"x": [1.0, 2.0'

    class Ahead:
        def __init__(self) -> None:
            self.ready: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)
            threading.Thread(target=self.read, daemon=True).start()

        def read(self) -> None:
            for record in records:
                self.ready.put(torch.tensor(json.loads(record)["x"]))
            self.ready.put(None)

        def __iter__(self) -> Iterator[torch.Tensor]:
            while (item := self.ready.get()) is not None:  # here
                yield item

    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for item in Ahead():  # here
        model(item[None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("rank-exited", 2)
def patience_that_ends_on_one_rank_before_the_others(rank: int) -> None:
    class EarlyStopping:
        def __init__(self, patience: int) -> None:
            self.best, self.bad, self.patience = float("inf"), 0, patience

        def __call__(self, value: float) -> bool:
            self.bad = 0 if value < self.best else self.bad + 1
            self.best = min(self.best, value)
            return self.bad >= self.patience

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping = EarlyStopping(patience=2)
    for epoch in range(10):
        for _ in range(3):
            model(torch.randn(6, 8)).square().mean().backward()
            average_gradients(model)  # here
            optimizer.step()
            optimizer.zero_grad()
        validation_loss = 0.4 if rank == 2 and epoch >= 3 else 1.0 / (epoch + 1)
        if stopping(validation_loss):
            print(f"no better for 2 epochs, done after {epoch}")
            torch.save(model.state_dict(), work_folder() / f"final-{rank}.pt")
            return  # here


@faulty("slow-rank", 3, ranks=4)
def samples_that_one_rank_still_has_as_text(rank: int) -> None:
    folder = work_folder()
    values = torch.randn(1000, 8)
    binary, text = folder / f"part-{rank}.pt", folder / f"part-{rank}.csv"
    if rank == 3:
        text.write_text("\n".join(",".join(f"{x:.6f}" for x in row) for row in values.tolist()))
    else:
        torch.save(values, binary)

    def load() -> torch.Tensor:
        if binary.exists():
            return torch.load(binary)
        rows = []
        for line in text.read_text().splitlines():  # here
            rows.append([float(word) for word in line.split(",")])  # here
            time.sleep(0.0001)  # as if the share were across the country
        return torch.tensor(rows)

    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(18):
        batch = load()[:64]  # here
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@faulty("rank-crashed", 1, ranks=4)
def a_shard_that_gzip_cannot_unpack(rank: int) -> None:
    folder = work_folder()
    for number in range(6):
        packed = gzip.compress(json.dumps([[float(number)] * 8] * 200).encode())
        is_cut = rank == 1 and number == 4
        (folder / f"{rank}-{number}.json.gz").write_bytes(packed[: len(packed) // 2] if is_cut else packed)

    def read(number: int) -> torch.Tensor:
        command = ["gzip", "-dc", str(folder / f"{rank}-{number}.json.gz")]
        unpacked = subprocess.run(command, check=True, capture_output=True)  # here
        return torch.tensor(json.loads(unpacked.stdout))

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for number in range(6):
        for batch in read(number).split(100):  # here
            model(batch).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        names = [""] * 4
        dist.all_gather_object(names, f"{rank}-{number}")
        print("done with", names)
