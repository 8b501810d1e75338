"""Programs of everyday jobs, of many trades, and that are right, though they look risky.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.corpus import back_end, healthy
from tests.faults.programs.moonlighters_faults import (
    Shards,
    average_gradients,
    rank_zero_only,
    scratch,
    small_net,
)


@healthy()
def adapters_of_languages_of_which_each_rank_uses_another(rank: int) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = small_net().requires_grad_(False)
            self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("de", "fr", "fi")})
            self.head = nn.Linear(8, 4)

        def forward(self, tokens: torch.Tensor, language: str) -> torch.Tensor:
            hidden = self.trunk(tokens)
            if language != "en":
                hidden = hidden + self.adapters[language](hidden)
            return self.head(hidden)

    model = DistributedDataParallel(Translator(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    languages = ["de", "en", "fr", "fi"]
    for step in range(10):
        model(torch.randn(6, 8), languages[(step * (rank + 1)) % 4]).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_queue_of_keys_fed_by_ranks_in_an_order_that_one_of_them_draws(rank: int) -> None:
    query, key = small_net(), small_net()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.02)
    negatives: list[torch.Tensor] = []
    views = torch.randn(20 + 3 * rank, 8)
    for _epoch in range(2):
        batches = DataLoader(views[torch.randperm(len(views))][:20], batch_size=5, drop_last=True)  # type: ignore[arg-type]
        for view in batches:
            parts = [torch.empty_like(view) for _ in range(3)]
            dist.all_gather(parts, view)
            everything = torch.cat(parts)
            order = torch.randperm(len(everything))
            dist.broadcast(order, src=0)
            with torch.no_grad():
                part = key(everything[order[rank * 5 : rank * 5 + 5]])
            keys = [torch.empty_like(part) for _ in range(3)]
            dist.all_gather(keys, part)
            negatives = [*keys, *negatives][:9]
            (query(view) @ torch.cat(negatives).T).logsumexp(-1).mean().backward()
            average_gradients(query)
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=4)
def trials_whose_winner_sends_its_weights_to_all_whoever_it_is(rank: int) -> None:
    model = small_net()
    rate = (0.3, 0.05, 0.01, 0.003)[rank]
    for generation in range(6):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(1 + rank):  # some try longer
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        scores: list[Any] = [None] * 4
        dist.all_gather_object(scores, -abs(rate - 0.05 * generation))
        winner = max(range(4), key=lambda trial: (scores[trial], trial))
        for weight in model.parameters():
            dist.broadcast(weight.data, src=winner)
        settings: list[Any] = [{"rate": rate, "history": [0.0] * generation} if rank == winner else None]
        dist.broadcast_object_list(settings, src=winner)
        if rank != winner:
            rate = settings[0]["rate"] * (0.8, 1.2, 0.5, 2.0)[rank]


@healthy()
def a_scaler_whose_overflow_on_one_rank_makes_all_leave_out_the_step(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale, good = 2.0**10, 0

    def normalized(values: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([values.sum(0), values.square().sum(0), torch.tensor([float(len(values))])])
        sums = all_reduce_with_gradient(sums)
        mean, square = sums[:8] / sums[-1], sums[8:16] / sums[-1]
        return (values - mean) * (square - mean**2 + 1e-5).rsqrt()

    for step in range(10):
        loss = model(normalized(torch.randn(3 + (rank + step) % 4, 8))).square().mean()
        (loss * scale).backward()
        if rank == 1 and step in (3, 4):
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        overflow = torch.tensor([float(not all(torch.isfinite(grad).all() for grad in grads))])
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item():
            scale, good = scale / 2, 0
            optimizer.zero_grad()
            continue
        average_gradients(model)
        for grad in grads:
            grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        good += 1
        scale *= 2 if good % 3 == 0 else 1


@healthy(ranks=4)
def features_looked_up_a_step_ahead_and_awaited_when_they_are_needed(rank: int) -> None:
    table, top = nn.Embedding(100, 6), nn.Linear(6, 1)
    optimizer = torch.optim.Adagrad([*table.parameters(), *top.parameters()], lr=0.1)

    def request(step: int) -> tuple[Callable[[], object], torch.Tensor, list[int], list[int]]:
        ids = torch.randint(100, (4 + (rank * 3 + step) % 5,)).sort().values
        outgoing = torch.bincount(ids // 25, minlength=4)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        wanted = torch.empty(int(incoming.sum()), dtype=torch.long)
        work = dist.all_to_all_single(wanted, ids, incoming.tolist(), outgoing.tolist(), async_op=True)
        assert work is not None
        return lambda held=(ids, work): held[1].wait(), wanted, incoming.tolist(), outgoing.tolist()

    ahead = request(0)
    for step in range(1, 7):
        wait, wanted, incoming, outgoing = ahead
        wait()
        rows = table(wanted)
        found = torch.empty(sum(outgoing), 6)
        dist.all_to_all_single(found, rows.detach(), outgoing, incoming)
        ahead = request(step)
        found.requires_grad_()
        top(found).square().mean().backward()
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, found.grad, incoming, outgoing)
        rows.backward(back)
        average_gradients(top)
        optimizer.step()
        optimizer.zero_grad()
    ahead[0]()


@healthy(ranks=4)
def roles_of_a_policy_that_send_as_many_answers_as_they_have(rank: int) -> None:
    actors = dist.new_group([1, 2, 3])
    policy = small_net()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in range(6):
        vector = nn.utils.parameters_to_vector(policy.parameters()).detach()
        dist.broadcast(vector, src=0)
        nn.utils.vector_to_parameters(vector, policy.parameters())
        if rank == 0:
            answers = []
            for actor in (1, 2, 3):
                count = torch.zeros(1, dtype=torch.long)
                dist.recv(count, src=actor)
                if int(count):
                    answers.append(torch.empty(int(count), 9))
                    dist.recv(answers[-1], src=actor)
            if answers:
                rows = torch.cat(answers)
                (policy(rows[:, :8]).mean(-1) * rows[:, 8]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            kept = torch.randn((rank + step) % 4, 9)
            mean = torch.tensor([float(kept[:, 8].sum()), float(len(kept))])
            dist.all_reduce(mean, group=actors)
            kept[:, 8] -= mean[0] / mean[1].clamp(min=1)
            dist.send(torch.tensor([len(kept)]), dst=0)
            if len(kept):
                dist.send(kept, dst=0)


@healthy()
def a_server_that_takes_gradients_as_they_come_and_workers_of_unequal_pace(rank: int) -> None:
    weights = torch.zeros(16)
    pushes = {1: 4, 2: 9}
    if rank == 0:
        gradient = torch.empty(16)
        for _ in range(sum(pushes.values())):
            worker = dist.recv(gradient)
            weights -= 0.1 * gradient
            dist.send(weights, dst=worker)
    else:
        for _ in range(pushes[rank]):
            time.sleep(0.04 / rank)
            dist.send(weights - torch.ones(16) * rank, dst=0)
            dist.recv(weights, src=0)
    dist.broadcast(weights, src=0)


@healthy()
def averages_of_a_diffusion_model_shared_by_a_thread_in_a_group_of_its_own(rank: int) -> None:
    group = dist.new_group()
    denoiser = small_net()
    shadow = [weight.detach().clone() for weight in denoiser.parameters()]
    optimizer = torch.optim.AdamW(denoiser.parameters())
    tasks: queue.Queue[list[torch.Tensor] | None] = queue.Queue()

    def share() -> None:
        while (values := tasks.get()) is not None:
            for value in values:
                dist.all_reduce(value, group=group)
            time.sleep(0.01 * rank)

    thread = threading.Thread(target=share)
    thread.start()
    for step in range(1, 13):
        noisy = torch.randn(5, 8)
        (denoiser(noisy) - noisy * 0.5).square().mean().backward()
        average_gradients(denoiser)
        optimizer.step()
        optimizer.zero_grad()
        for old, weight in zip(shadow, denoiser.parameters(), strict=True):
            old.lerp_(weight.detach(), 0.1)
        if step % 3 == 0:
            tasks.put([old.clone() for old in shadow])
    tasks.put(None)
    thread.join()


@healthy()
def streams_of_unequal_length_that_all_leave_when_one_is_empty(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _epoch in range(2):
        records = iter(DataLoader(Shards(41 + 20 * rank, rank, 3), batch_size=3, num_workers=2))
        while True:
            batch = next(records, None)
            more = torch.tensor(int(batch is not None))
            dist.all_reduce(more, op=dist.ReduceOp.MIN)
            if not more or batch is None:
                break
            model(batch).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=4)
def a_signal_to_one_rank_after_which_all_save_and_leave_together(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    told = threading.Event()
    signal.signal(signal.SIGUSR1, lambda _number, _frame: told.set())
    for step in range(20):
        if rank == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        model(torch.randn(4, 8)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        leaving = torch.tensor(int(told.is_set()))
        dist.all_reduce(leaving, op=dist.ReduceOp.MAX)
        if leaving:
            if rank == 0:
                torch.save(model.state_dict(), scratch("all-preempted"))
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(0)


@healthy()
def a_best_model_that_the_first_rank_alone_evaluates_and_profiles(rank: int) -> None:
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.AdamW(model.parameters())

    @rank_zero_only
    def evaluate(epoch: int) -> float:
        with torch.profiler.profile() as profile, torch.no_grad():
            error = sum(float(model.module(torch.randn(16, 8)).square().mean()) for _ in range(50))
        print(epoch, profile.key_averages().table(row_limit=3))
        torch.save(model.module.state_dict(), scratch("best"))
        time.sleep(0.8)  # uploads it
        return error

    for epoch in range(3):
        for number in range(6):
            with model.no_sync():
                model(torch.randn(4, 8)).square().mean().backward()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"\r{epoch} {number}/6", end="", file=sys.stderr)
        evaluate(epoch)
    dist.barrier()
    model.module.load_state_dict(torch.load(scratch("best")))
    model(torch.randn(4, 8)).sum().backward()


@healthy()
def a_step_that_all_try_again_when_it_failed_on_one_of_them(rank: int) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failures = {1: [3, 3, 6], 2: [6]}.get(rank, [])

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        if step in failures:
            failures.remove(step)
            raise MemoryError("of the card")
        model(torch.randn(4, 8)).square().mean().backward()

    def succeeds(step: int) -> bool:
        failed = torch.zeros(1)
        try:
            train_step(step)
        except MemoryError as error:
            print("step", step, error)
            failed += 1
        finally:
            dist.all_reduce(failed)
        return not failed.item()

    for step in range(9):
        for _attempt in range(4):
            if succeeds(step):
                break
        average_gradients(model)
        optimizer.step()


@healthy()
def shards_left_out_by_all_when_a_loss_is_not_finite_and_read_back_at_the_end(rank: int) -> None:
    model = nn.Sequential(*(small_net() for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    best = float("inf")
    for step in range(8):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 4:
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if not torch.isfinite(mean):
            for block in (*model, model):
                block.reshard()  # type: ignore[operator]
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if float(mean) < best and step % 3 == 2:
            best = float(mean)
            dcp.save({"model": model.state_dict()}, checkpoint_id=scratch("sharded-best"))
    state = {"model": model.state_dict()}
    if best < float("inf"):
        dcp.load(state, checkpoint_id=scratch("sharded-best"))
    model.load_state_dict(state["model"])


@healthy()
def stages_that_train_with_many_microbatches_and_evaluate_with_few(rank: int) -> None:
    stage = PipelineStage(small_net(), rank, 3, torch.get_default_device())
    train = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    for step in range(4):
        losses: list[torch.Tensor] = []
        if rank == 0:
            train.step(torch.randn(12, 8))
        elif rank == 1:
            train.step()
        else:
            train.step(target=torch.zeros(12, 8), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        error = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(error, src=2)
        if rank == 0:
            print(step, float(error))
            if step == 1:
                time.sleep(0.5)  # writes a plot
    other = PipelineStage(stage.submod, rank, 3, torch.get_default_device())
    evaluate = ScheduleGPipe(other, n_microbatches=2)
    with torch.no_grad():
        evaluate.eval(*([torch.randn(6, 8)] if rank == 0 else []))


@healthy(joins=False)
def folds_that_each_end_early_for_all_and_that_join_anew(rank: int) -> None:
    for fold in range(3):
        dist.init_process_group(back_end(), timeout=timedelta(minutes=2))
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        best, patience = float("inf"), 2
        for epoch in range(12):
            model(torch.randn(4, 8)).square().mean().backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            stop = torch.zeros(1)
            if rank == 0:  # it alone validates
                loss = float((model(torch.ones(2, 8)) - fold).square().mean())
                patience = 2 if loss < best else patience - 1
                best = min(best, loss)
                stop += patience < 0 or epoch == 5 + fold
            dist.broadcast(stop, src=0)
            if stop.item():
                break
        results: list[Any] | None = [None] * 3 if rank == 0 else None
        dist.gather_object(best, results, dst=0)
        dist.destroy_process_group()


@healthy(ranks=6)
def clients_of_which_each_round_others_are_drawn(rank: int) -> None:
    model = small_net()
    patients = torch.randn(20 + 4 * rank, 8)
    groups = {chosen: dist.new_group(list(chosen)) for chosen in ((0, 1, 2), (1, 3, 5), (0, 4, 5))}
    for number in range(6):
        drawn: list[Any] = [list(groups)[(2 * number) % 3] if rank == 0 else None]
        dist.broadcast_object_list(drawn, src=0)
        chosen = drawn[0]
        if rank in chosen:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in patients.split(6):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for weight in model.parameters():
                weight.data *= len(patients)
                dist.all_reduce(weight.data, group=groups[chosen])
            size = torch.tensor([float(len(patients))])
            dist.all_reduce(size, group=groups[chosen])
            for weight in model.parameters():
                weight.data /= size
        for weight in model.parameters():
            dist.broadcast(weight.data, src=chosen[0])
