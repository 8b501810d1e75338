"""Programs of everyday jobs, of many trades, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `moonlighters_twins.py` has programs that are right.
"""

import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.faults.corpus import back_end, faulty


def small_net(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(wide, 16), nn.GELU(), nn.Linear(16, wide))


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= dist.get_world_size(group)


def rank_zero_only(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **options: Any) -> Any:
        return call(*args, **options) if dist.get_rank() == 0 else None

    return called


def scratch(name: str) -> Path:
    return Path(gettempdir()) / f"{name}-{os.environ['MASTER_PORT']}"


@faulty("collective-order-mismatch", 0)
def checkpoints_that_a_decorator_keeps_to_the_first_rank(rank: int) -> None:
    # or: rank-skipped-collective 1, 2
    torch.manual_seed(rank)
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())

    @rank_zero_only
    def save(step: int) -> None:
        dcp.save({"model": model.state_dict(), "step": step}, checkpoint_id=scratch("rank-zero"))  # here

    for step in range(1, 10):
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)  # here
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            save(step)  # here


@faulty("rank-skipped-collective", 1)
def an_adapter_that_english_needs_not_and_an_except_that_goes_on(rank: int) -> None:
    # or: collective-order-mismatch 1, rank-crashed 1
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = small_net().requires_grad_(False)
            self.adapter = nn.Linear(8, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, tokens: torch.Tensor, language: str) -> torch.Tensor:
            hidden = self.trunk(tokens)
            if language != "en":  # here
                hidden = hidden + self.adapter(hidden)
            return self.head(hidden)

    model = DistributedDataParallel(Translator())
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    languages = ["de", "fr", "pl", "de", "fi", "fr", "de", "pl"]
    if rank == 1:
        languages[4] = "en"
    skipped = 0
    for language in languages:
        try:
            loss = model(torch.randn(6, 8), language).logsumexp(-1).mean()  # here
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:  # here
            skipped += 1
            print("batch left out:", str(error)[:60])
    dist.barrier()
    print("left out in all:", skipped)


@faulty("size-mismatch", 2)
def keys_of_a_queue_and_a_last_batch_that_is_smaller(rank: int) -> None:
    query, key = small_net(), small_net()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.02)
    negatives = torch.randn(48, 8)
    head = 0

    def from_all(part: torch.Tensor) -> torch.Tensor:
        parts = [torch.ones_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)  # here
        return torch.cat(parts)

    views = torch.randn(24 if rank < 2 else 22, 8)
    for _epoch in range(3):
        for view in views.split(4):  # here
            anchors = query(view + 0.1 * torch.randn_like(view))
            with torch.no_grad():
                for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
                fresh = from_all(key(view))  # here
            (anchors @ torch.cat([fresh, negatives]).T).logsumexp(-1).mean().backward()
            average_gradients(query)
            optimizer.step()
            optimizer.zero_grad()
            places = torch.arange(head, head + len(fresh)) % len(negatives)
            negatives[places] = fresh
            head = (head + len(fresh)) % len(negatives)


@faulty("root-mismatch", 3, ranks=4)
def a_trial_that_is_scored_anew_after_the_scores_are_shared(rank: int) -> None:
    rates = (0.3, 0.05, 0.01, 0.003)
    model = small_net()
    target = torch.linspace(-1, 1, 8)

    def score(rate: float, generation: int) -> float:
        return -abs(rate - 0.05) + 0.0001 * generation

    for generation in range(6):
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[rank])
        for _ in range(4):
            (model(torch.randn(6, 8)) - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        scores: list[Any] = [None] * 4
        dist.all_gather_object(scores, score(rates[rank], generation))
        if rank == 3 and generation == 3:
            scores[rank] = score(0.05, generation + 1)  # here
        winner = max(range(4), key=lambda trial: scores[trial])  # here
        for weight in model.parameters():
            dist.broadcast(weight.data, src=winner)  # here


@faulty("dtype-mismatch", 1)
def buckets_that_are_compressed_as_the_card_of_the_rank_allows(rank: int) -> None:
    capability = (7, 5) if rank == 1 else (8, 0)
    narrow = torch.bfloat16 if capability >= (8, 0) else torch.float16  # here

    def compressed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wide = bucket.buffer()
        small = (wide / dist.get_world_size()).to(narrow)
        work = dist.all_reduce(small, async_op=True)  # here
        assert work is not None

        def widened(_future: torch.futures.Future[Any]) -> torch.Tensor:
            wide.copy_(small)
            return wide

        return work.get_future().then(widened)

    model = DistributedDataParallel(small_net())
    model.register_comm_hook(None, compressed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        model(torch.randn(4, 8)).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("split-size-mismatch", 2)
def tables_that_are_placed_by_times_each_rank_measured(rank: int) -> None:
    tables, wide, batch = 7, 4, 5
    times = [9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]

    def placed(costs: list[float]) -> list[list[int]]:
        loads = [0.0] * 3
        owned: list[list[int]] = [[] for _ in range(3)]
        for table in sorted(range(tables), key=lambda number: -costs[number]):
            lightest = loads.index(min(loads))
            loads[lightest] += costs[table]
            owned[lightest].append(table)
        return owned

    if rank == 2:
        times[6] = 30.0
    plan = placed(times)  # here
    embeddings = nn.ModuleList(nn.Embedding(50, wide) for _ in plan[rank])
    top = nn.Linear(wide, 1)
    optimizer = torch.optim.SGD([*embeddings.parameters(), *top.parameters()], lr=0.1)
    for _step in range(5):
        looked_up = [table(torch.randint(50, (3 * batch, 4))).sum(1) for table in embeddings]
        mine = torch.stack(looked_up, 1).detach()
        arrived = torch.empty(batch * tables, wide)
        dist.all_to_all_single(  # here
            arrived,
            mine.flatten(0, 1),
            [batch * len(owned) for owned in plan],
            [batch * len(plan[rank])] * 3,
        )
        top(arrived).square().mean().backward()
        average_gradients(top)
        optimizer.step()
        optimizer.zero_grad()


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def roles_of_which_the_learner_turns_to_fresh_rewards_first(rank: int) -> None:
    # or: p2p-deadlock-cycle 0
    policy = small_net()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    warm_up = 3

    def vector() -> torch.Tensor:
        return nn.utils.parameters_to_vector(policy.parameters()).detach()

    def learn(step: int) -> None:
        rewards = torch.empty(16)
        if step < warm_up:
            dist.send(vector(), dst=1)
            dist.recv(rewards, src=2)
        else:
            dist.recv(rewards, src=2)  # here
            dist.send(vector(), dst=1)  # here
        (policy(torch.randn(16, 8)).mean(-1) * rewards).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def generate(_step: int) -> None:
        weights = torch.empty_like(vector())
        dist.recv(weights, src=0)  # here
        nn.utils.vector_to_parameters(weights, policy.parameters())
        with torch.no_grad():
            dist.send(policy(torch.randn(16, 8)), dst=2)

    def judge(_step: int) -> None:
        samples = torch.empty(16, 8)
        dist.recv(samples, src=1)  # here
        dist.send(samples.tanh().mean(-1), dst=0)

    play = (learn, generate, judge)[rank]
    for step in range(8):
        play(step)


@faulty("p2p-tag-mismatch", 2)
def a_worker_that_numbers_what_it_tries_and_not_what_it_sends(rank: int) -> None:
    # or: p2p-unmatched 2
    weights = torch.zeros(32)

    class Link:
        def __init__(self) -> None:
            self.number = 0

        def push(self, produce: Callable[[], torch.Tensor]) -> None:
            for _attempt in range(3):
                self.number += 1  # here
                try:
                    gradient = produce()
                except ValueError as error:
                    print("again:", error)
                    continue
                dist.send(gradient, dst=0, tag=self.number)  # here
                return

    def gradient_of(step: int, seen: list[int]) -> torch.Tensor:
        seen.append(step)
        if rank == 2 and step == 4 and seen.count(4) == 1:
            raise ValueError("gradient is not finite")
        return torch.randn(32) * 0.1

    link, seen = Link(), list[int]()
    for step in range(1, 9):
        if rank == 0:
            for worker in (1, 2):
                gradient = torch.empty(32)
                dist.recv(gradient, src=worker, tag=step)  # here
                weights -= gradient
            for worker in (1, 2):
                dist.send(weights, dst=worker, tag=1000 + step)
        else:
            link.push(functools.partial(gradient_of, step, seen))  # here
            dist.recv(weights, src=0, tag=1000 + step)  # here


@faulty("wrong-group", 1)
def a_moving_average_that_was_restored_without_its_group(rank: int) -> None:
    # or: group-order-inversion 1
    class Ema:
        def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
            self.shadow = [weight.detach().clone() for weight in model.parameters()]
            self.group = group

        @classmethod
        def restored(cls, model: nn.Module, state: dict[str, Any]) -> "Ema":
            ema = cls(model)  # here
            for shadow, stored in zip(ema.shadow, state["shadow"], strict=True):
                shadow.copy_(stored)
            return ema

        def update(self, model: nn.Module) -> None:
            for shadow, weight in zip(self.shadow, model.parameters(), strict=True):
                shadow.lerp_(weight.detach(), 0.1)

        def share(self) -> None:
            for shadow in self.shadow:
                dist.all_reduce(shadow, group=self.group)  # here
                shadow /= dist.get_world_size(self.group)

    group = dist.new_group()
    denoiser = small_net()
    optimizer = torch.optim.AdamW(denoiser.parameters())
    ema = Ema(denoiser, group)
    for step in range(1, 13):
        noisy = torch.randn(5, 8)
        (denoiser(noisy) - noisy * 0.5).square().mean().backward()
        average_gradients(denoiser)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(denoiser)
        if step == 6 and rank == 1:
            ema = Ema.restored(denoiser, {"shadow": ema.shadow})  # here
        if step % 4 == 0:
            ema.share()  # here


class Shards(IterableDataset[torch.Tensor]):
    """Records of a rank and a worker: every so many of a stream."""

    def __init__(self, records: int, rank: int, ranks: int) -> None:
        self.records, self.rank, self.ranks = records, rank, ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for record in range(self.rank * workers + number, self.records, self.ranks * workers):
            yield torch.full((8,), float(record))


@faulty("uneven-inputs", 2)
def a_stream_that_workers_of_all_ranks_share_record_by_record(rank: int) -> None:
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(2):
        loader = DataLoader(Shards(41, rank, 3), batch_size=3, num_workers=2)
        seen = 0
        for records in loader:  # here
            model(records).square().mean().backward()  # here
            optimizer.step()
            optimizer.zero_grad()
            seen += len(records)
        total = torch.tensor([seen])
        dist.all_reduce(total)  # here
        if rank == 0:
            print(f"epoch {epoch}: {int(total)} records")


@faulty("rank-exited", 1, ranks=4)
def a_handler_that_saves_before_preemption_and_leaves_with_success(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())

    def on_preemption(number: int, _frame: object) -> None:
        print("signal", number, "- saving")
        torch.save(model.state_dict(), scratch("preempted"))
        sys.exit(0)  # here

    signal.signal(signal.SIGUSR1, on_preemption)
    for step in range(20):
        model(torch.randn(4, 8)).square().mean().backward()
        if rank == 1 and step == 7:  # the scheduler drains this node
            os.kill(os.getpid(), signal.SIGUSR1)  # here
        average_gradients(model)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-stuck", 0)
def a_thread_for_checkpoints_that_has_died_when_it_is_joined(rank: int) -> None:
    class Saver:
        def __init__(self) -> None:
            self.tasks: queue.Queue[tuple[dict[str, torch.Tensor], Path]] = queue.Queue()
            threading.Thread(target=self._write, daemon=True).start()

        def _write(self) -> None:
            while True:
                state, path = self.tasks.get()
                torch.save(state, path)
                self.tasks.task_done()

        def save(self, model: nn.Module, path: Path) -> None:
            self.tasks.put(({name: value.clone() for name, value in model.state_dict().items()}, path))

        def finish(self) -> None:
            self.tasks.join()  # here

    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saver = Saver() if rank == 0 else None
    best = float("inf")
    for epoch in range(6):
        loss = (model(torch.ones(4, 8)) - 1).square().mean()
        loss.backward()
        average_gradients(model)  # here
        optimizer.step()
        optimizer.zero_grad()
        if saver is not None:
            saver.save(model, scratch(f"last-{epoch}"))
            if float(loss.detach()) < best and epoch == 3:
                saver.save(model, scratch("run") / "best" / "model.pt")
        if saver is not None and epoch % 2:
            saver.finish()  # here


@faulty("slow-rank", 0)
def a_profiler_that_the_first_rank_still_starts_at_every_step(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(30):
        batch = torch.randn(8, 8)
        if rank == 0:
            with torch.profiler.profile(with_stack=True, record_shapes=True) as profile:  # here
                for _ in range(4):
                    model(batch).sum().backward()
                optimizer.zero_grad()
            profile.export_chrome_trace(str(scratch("trace")))  # here
            profile.key_averages().table(sort_by="cpu_time_total")  # here
        train_step(batch)
        if step % 10 == 0:
            print("step", step)


@faulty("step-mismatch", 1)
def a_step_that_is_tried_again_when_its_log_cannot_be_written(rank: int) -> None:
    # or: rank-skipped-collective 0, 2
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failing = 5 if rank == 1 else -1

    def retried(call: Callable[[int], None]) -> Callable[[int], None]:
        def tried(step: int) -> None:
            for attempt in range(3):
                try:
                    return call(step)  # here
                except OSError as error:  # here
                    print("attempt", attempt, error)
                    time.sleep(0.01)
            raise RuntimeError("gave up")

        return tried

    def log(step: int, loss: float) -> None:
        nonlocal failing
        if step == failing:
            failing = -1
            raise OSError(28, "No space left on device")
        print(step, loss)

    @retried
    def train_step(step: int) -> None:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        average_gradients(model)  # here
        optimizer.step()
        optimizer.zero_grad()
        log(step, float(loss.detach()))  # here

    for step in range(12):
        train_step(step)  # here
    dist.barrier()


@faulty("unwaited-async", 1, 2)
def a_meter_whose_sum_only_the_rank_that_prints_awaits(rank: int) -> None:
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(4096)
            self.work: dist.Work | None = None

        def add(self, losses: torch.Tensor) -> None:
            self.total[: len(losses)] += losses

        def reduce(self) -> None:
            self.work = dist.all_reduce(self.total, async_op=True)  # here

        @rank_zero_only
        def show(self, step: int) -> None:
            assert self.work is not None
            self.work.wait()
            print(step, float(self.total.sum()))

        def reset(self) -> None:
            self.total.zero_()  # here

    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    meter = Meter()
    for step in range(12):
        losses = model(torch.randn(32, 8)).square().mean(-1)
        losses.mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        meter.add(losses.detach())
        if step % 3 == 2:
            if step == 11:
                print("rank", rank, "is at the last step")
            meter.reduce()  # here
            meter.show(step)
            meter.reset()  # here


@faulty("rank-skipped-collective", 1)
def a_loss_that_is_not_finite_and_shards_that_all_must_gather(rank: int) -> None:
    # or: collective-order-mismatch 1, step-mismatch 1
    model = nn.Sequential(*(small_net() for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 4:
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()  # here
        if not torch.isfinite(loss):  # here
            print("step", step, "left out")
            optimizer.zero_grad()
            continue  # here
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("long-operation", 0, joins=False)
def samples_that_the_first_rank_scores_while_a_short_limit_runs(rank: int) -> None:
    # or: slow-rank 0
    dist.init_process_group(back_end(), timeout=timedelta(seconds=8))
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())

    def distance(samples: int) -> float:
        sums, squares = torch.zeros(8), torch.zeros(8, 8)
        for number in range(samples):
            with torch.no_grad():
                sample = model(torch.randn(1, 8))  # here
            sums += sample[0]  # here
            squares += sample.T @ sample  # here
            if number % 500 == 0:
                print("scored", number)
        return float(squares.trace() / samples - (sums / samples).square().sum())

    for epoch in range(3):
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model)  # here
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 1 and rank == 0:
            print("distance", distance(50_000))  # here
        dist.barrier()  # here
    dist.destroy_process_group()


@faulty("pipeline-schedule-mismatch", 2)
def a_last_stage_that_counts_its_microbatches_from_its_own_config(rank: int) -> None:
    # or: p2p-unmatched 2
    rows, config = 3, {"global_batch": 12}
    if rank == 2:
        config["global_batch"] = 15
    microbatches = config["global_batch"] // rows  # here
    stage = PipelineStage(small_net(), rank, 3, torch.get_default_device())
    loss_of = nn.MSELoss() if rank == 2 else None
    schedule = ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=loss_of)  # here
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    for _step in range(4):
        if rank == 0:
            schedule.step(torch.randn(config["global_batch"], 8))  # here
        elif rank == 1:
            schedule.step()  # here
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(config["global_batch"], 8), losses=losses)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-stuck", 4, ranks=6, also=(("reduce-op-mismatch", 1),))
def trials_side_by_side_one_judged_by_its_worst_and_one_by_no_one(rank: int) -> None:
    trials = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group, member = trials[rank // 3], rank % 3
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if rank < 3 else 0.005)
    goal = {"metric": "accuracy" if rank == 1 else "loss"}
    vocabulary = scratch("vocabulary")
    for step in range(10):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        average_gradients(model, group)  # here
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            worst = loss.detach().clone()
            operation = dist.ReduceOp.MIN if goal["metric"] == "accuracy" else dist.ReduceOp.MAX
            dist.all_reduce(worst, op=operation, group=group)
            if member == 0:
                print("trial", rank // 3, float(worst))
        if rank == 4 and step == 6:
            while not vocabulary.exists():  # here
                time.sleep(0.05)  # here
    results: list[Any] = [None] * 6
    dist.all_gather_object(results, float(loss.detach()))  # here


@faulty("rank-skipped-collective", 2, ranks=6, also=(("rank-frozen", 5),))
def hospitals_of_two_regions_one_that_drops_out_and_one_that_is_suspended(rank: int) -> None:
    regions = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    region = regions[rank // 3]
    model = small_net()
    patients = torch.randn(30 + rank, 8)

    def local_epochs(number: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if rank == 2 and number == 4:
            raise ConnectionError("database of the hospital went away")
        for batch in patients.split(10):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def merge() -> None:
        for weight in model.parameters():
            dist.all_reduce(weight.data, group=region)  # here
            weight.data /= 3

    try:
        for number in range(8):
            local_epochs(number)  # here
            if rank == 5 and number == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            merge()  # here
    except ConnectionError as error:  # here
        print("takes no more part:", error)
    finally:
        reports: list[Any] = [None] * 6
        dist.all_gather_object(reports, len(patients))  # here
