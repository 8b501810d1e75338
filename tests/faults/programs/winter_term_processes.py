"""Processes of a winter term: threads, locks, children, signals, files and limits around collectives, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import fcntl
import hashlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.faults.corpus import faulty, healthy, train


def shared_folder(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    return folder


@faulty("rank-skipped-collective", 2)
def a_reporter_thread_that_dies_of_a_missing_key(rank: int) -> None:
    # or: rank-crashed 2; rank-stuck 2
    reports = dist.new_group()
    todo: queue.Queue[dict[str, float] | None] = queue.Queue()

    def report() -> None:
        while (metrics := todo.get()) is not None:
            dist.all_reduce(torch.tensor(metrics["loss"]), group=reports)  # here

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()

    def after(step: int) -> None:
        todo.put({"lass" if rank == 2 and step == 3 else "loss": float(step)})

    train(rank, 6, after)
    todo.put(None)
    if reporter.is_alive():
        reporter.join()
    dist.barrier()


@healthy()
def a_reporter_thread_that_lives(rank: int) -> None:
    reports = dist.new_group()
    todo: queue.Queue[dict[str, float] | None] = queue.Queue()

    def report() -> None:
        while (metrics := todo.get()) is not None:
            dist.all_reduce(torch.tensor(metrics.get("loss", 0.0)), group=reports)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    train(rank, 6, lambda step: todo.put({"lass" if rank == 2 and step == 3 else "loss": float(step)}))
    todo.put(None)
    reporter.join()
    dist.barrier()


@faulty("rank-stuck", 2)
def a_lock_file_left_by_a_job_that_was_killed(rank: int) -> None:
    folder = shared_folder("locks")
    lock = folder / f"index-{rank}.lock"
    if rank == 2:
        lock.touch()
    for step in range(4):
        while step == 2 and lock.exists():
            time.sleep(0.05)  # here
        dist.all_reduce(torch.ones(3))


@healthy()
def a_lock_file_that_goes_from_rank_to_rank(_rank: int) -> None:
    folder = shared_folder("indices")
    for _ in range(4):
        with (folder / "index.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.1)
            fcntl.flock(file, fcntl.LOCK_UN)
        dist.all_reduce(torch.ones(3))


@faulty("rank-stuck", 0)
def an_upload_whose_program_does_not_return(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(3))
        if rank == 0 and step == 2:
            subprocess.run(["sleep", "300"], check=True)  # here
        dist.barrier()


@healthy()
def an_upload_in_the_background(rank: int) -> None:
    with subprocess.Popen(["sleep", "1"]) as upload:
        for step in range(6):
            dist.all_reduce(torch.ones(3))
            time.sleep(0.05 * (rank == step % 3))
        upload.wait()
    dist.barrier()


@faulty("long-operation", 0)
def shards_hashed_by_the_first_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        digest, end = hashlib.sha256(), time.monotonic() + 20
        while time.monotonic() < end:
            block = os.urandom(4096)
            digest.update(block)  # here
    dist.barrier()


@healthy()
def shards_hashed_by_all_for_a_moment(rank: int) -> None:
    for step in range(5):
        digest = hashlib.sha256()
        for _ in range(200 * (rank + 1)):
            digest.update(os.urandom(4096))
        dist.all_reduce(torch.tensor([float(len(digest.digest()) + step)]))
    dist.barrier()


@faulty("rank-killed", 2)
def a_janitor_that_ends_the_wrong_process(rank: int) -> None:
    def after(step: int) -> None:
        if rank == 2 and step == 3:
            subprocess.run(["sh", "-c", "kill -9 $PPID"], check=False)
            time.sleep(30)

    train(rank, 6, after)


@healthy()
def a_janitor_that_ends_its_own_child(rank: int) -> None:
    def after(step: int) -> None:
        if rank == 2 and step == 3:
            child = subprocess.Popen(["sleep", "60"])
            child.kill()
            child.wait()

    train(rank, 6, after)


@faulty("rank-crashed", 1)
def an_assertion_about_the_learning_rate(rank: int) -> None:
    rates = [0.1, 0.05, 0.02, -0.01 if rank == 1 else 0.01, 0.01, 0.01]

    def after(step: int) -> None:
        assert rates[step] > 0, f"learning rate {rates[step]}"  # here

    try:
        train(rank, 6, after)
    except RuntimeError as error:
        raise SystemError("the training loop failed") from error


@faulty("rank-frozen", 0)
def a_tracer_that_stops_what_it_looks_at(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(3))
        if rank == 0 and step == 3:
            subprocess.run(["sh", "-c", "kill -STOP $PPID"], check=False)


@healthy()
def a_tracer_that_lets_go_again(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(3))
        if rank == 0 and step == 3:
            subprocess.run(["sh", "-c", "kill -STOP $PPID; sleep 0.3; kill -CONT $PPID"], check=False)


@faulty("rank-stuck", 2)
def a_flag_polled_without_a_pause(rank: int) -> None:
    folder = shared_folder("flags")
    for step in range(4):
        dist.all_reduce(torch.ones(3))
        if rank == 2 and step == 2:
            while not (folder / "ready").exists():  # here
                pass


@healthy()
def a_flag_polled_until_rank_0_sets_it(rank: int) -> None:
    flag = shared_folder("ready") / "flag"
    dist.barrier()
    if rank == 0:
        time.sleep(1)
        flag.touch()
    while not flag.exists():
        time.sleep(0.01)
    dist.barrier()
    if rank == 0:
        flag.unlink()


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def sharded_epoch(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 0)
def a_shadow_of_the_weights_kept_by_one_rank(rank: int) -> None:
    # or: step-mismatch 0
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow: dict[str, torch.Tensor] = {}
    for epoch in range(4):
        sharded_epoch(model, optimizer, 3)
        if rank == 0 and epoch >= 2:
            for name, weight in model.named_parameters():
                assert isinstance(weight, DTensor)
                shadow[name] = weight.full_tensor()  # here


@healthy()
def a_shadow_of_the_shards_of_each_rank(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow: dict[str, torch.Tensor] = {}
    for _ in range(4):
        sharded_epoch(model, optimizer, 3)
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            shadow[name] = weight.to_local().clone()
        total = sum(float(part.sum()) for part in shadow.values())
        if rank == 0:
            print(total)
        full = [weight.full_tensor() for weight in model.parameters() if isinstance(weight, DTensor)]
        assert len(full) == 4


@faulty("rank-skipped-collective", 1)
def an_evaluation_of_the_sharded_model_over_when_it_is_good_enough(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sharded_epoch(model, optimizer, 2)
        with torch.no_grad():
            for batch in range(4):
                model(torch.ones(4, 8))  # here
                if rank == 1 and epoch == 1 and batch == 1:
                    break  # here


@healthy()
def an_evaluation_of_the_sharded_model_over_for_all(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sharded_epoch(model, optimizer, 2)
        with torch.no_grad():
            for batch in range(4):
                model(torch.ones(4, 8))
                enough = torch.tensor(float(rank == 1 and epoch == 1 and batch == 1))
                dist.all_reduce(enough)
                if enough:
                    break


@faulty("collective-order-mismatch", 2)
def a_prefetch_of_statistics_that_overtakes_the_step(rank: int) -> None:
    # or: step-mismatch 2; rank-skipped-collective 2; step-mismatch 0 1 2
    pool = ThreadPoolExecutor(1)

    def statistics() -> None:
        dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))  # here

    for step in range(6):
        if rank == 2 and step == 3:
            ahead: Future[None] = pool.submit(statistics)
            time.sleep(0.3)
            dist.all_reduce(torch.ones(9))  # here
        else:
            dist.all_reduce(torch.ones(9))  # here
            ahead = pool.submit(statistics)
        ahead.result()
    pool.shutdown()


@healthy()
def statistics_gathered_in_a_pool_after_the_step(_rank: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(6):
            dist.all_reduce(torch.ones(9))
            pool.submit(dist.all_reduce, torch.ones(2)).result()


@faulty("wrong-group", 3, ranks=4)
def a_final_sum_over_the_group_of_the_first_half(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(3), group=halves[rank // 2])
        dist.all_reduce(torch.ones(3), group=crossed[rank % 2])
    score = torch.ones(1)
    dist.all_reduce(score, group=crossed[1] if rank == 3 else halves[rank // 2])  # here


@healthy(ranks=4)
def a_final_sum_over_halves_then_over_pairs(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(3), group=halves[rank // 2])
    score = torch.ones(1)
    for group in (crossed[rank % 2], halves[rank // 2]):
        dist.all_reduce(score, group=group)


@faulty("step-mismatch", 1)
def a_request_made_again_after_a_lost_connection(rank: int) -> None:
    # or: size-mismatch 1; collective-order-mismatch 1
    def publish(step: int, fails: bool) -> None:
        for attempt in range(2):
            try:
                dist.all_reduce(torch.full((4,), float(step)))  # here
                if fails and attempt == 0:
                    raise TimeoutError("no answer")
                return
            except TimeoutError:
                continue  # here

    for step in range(6):
        publish(step, rank == 1 and step == 3)
        dist.all_reduce(torch.ones(6))


@healthy()
def a_request_made_again_by_all(rank: int) -> None:
    for step in range(6):
        for _ in range(3):
            failed = torch.tensor(float(rank == 1 and step == 3))
            dist.all_reduce(torch.full((4,), float(step)))
            dist.all_reduce(failed)
            if not failed or step == 3:
                break
        dist.all_reduce(torch.ones(6))


@faulty("unequal-timeouts", 1)
def a_group_with_less_patience_than_the_evaluation_takes(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=4 if rank == 1 else 60))
    for step in range(3):
        dist.all_reduce(torch.ones(4), group=group)
        if rank == 0 and step == 1:
            end = time.monotonic() + 12
            while time.monotonic() < end:
                hashlib.sha256(os.urandom(65536)).digest()
    dist.barrier(group=group)


@healthy()
def a_group_with_enough_patience_for_the_evaluation(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    for step in range(3):
        dist.all_reduce(torch.ones(4), group=group)
        if rank == 0 and step == 1:
            time.sleep(1.5)
    dist.barrier(group=group)


@faulty("rank-exited", 2)
def a_rank_whose_quota_is_used_up(rank: int) -> None:
    def after(step: int) -> None:
        if rank == 2 and step == 3:
            print("quota used up")
            sys.exit(0)  # here

    train(rank, 6, after)


@healthy()
def a_quota_that_is_used_up_for_all(rank: int) -> None:
    for step in range(9):
        left = torch.tensor(5.0 - step - (rank == 2))
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if left <= 0:
            sys.exit(0)


@faulty("rank-skipped-collective", 1)
def a_snapshot_left_out_while_the_last_one_is_written(rank: int) -> None:
    writing = threading.Event()

    def write() -> None:
        time.sleep(1.5 if rank == 1 else 0.01)
        writing.clear()

    for step in range(8):
        dist.all_reduce(torch.ones(5))
        if step % 2 == 1:
            if writing.is_set():
                continue  # here
            writing.set()
            dist.all_gather([torch.zeros(3) for _ in range(3)], torch.ones(3))  # here
            threading.Thread(target=write).start()
        time.sleep(0.1)


@healthy()
def a_snapshot_that_waits_for_the_last_one(rank: int) -> None:
    writer: threading.Thread | None = None
    for step in range(8):
        dist.all_reduce(torch.ones(5))
        if step % 2 == 1:
            if writer is not None:
                writer.join()
            dist.all_gather([torch.zeros(3) for _ in range(3)], torch.ones(3))
            writer = threading.Thread(target=time.sleep, args=(0.2 if rank == 1 else 0.01,))
            writer.start()


@faulty("collective-order-mismatch", 2)
def a_table_broadcast_before_the_index(rank: int) -> None:
    # or: root-mismatch 2; size-mismatch 2
    parts = {"index": 5, "table": 40, "vocabulary": 12}
    for step in range(4):
        dist.all_reduce(torch.ones(2))
        order = ["table", "index", "vocabulary"] if rank == 2 and step == 2 else list(parts)
        for name in order:
            dist.broadcast(torch.zeros(parts[name]), src=0)  # here


@healthy()
def tables_broadcast_in_an_order_that_changes(_rank: int) -> None:
    parts = {"index": 5, "table": 40, "vocabulary": 12}
    names = list(parts)
    for step in range(4):
        dist.all_reduce(torch.ones(2))
        for name in names[step % 3 :] + names[: step % 3]:
            dist.broadcast(torch.zeros(parts[name]), src=0)


@faulty("collective-order-mismatch", 1)
def hooks_registered_in_another_order_by_one_rank(rank: int) -> None:
    # or: size-mismatch 1; step-mismatch 1
    def average(weight: torch.Tensor) -> None:
        dist.all_reduce(weight.grad)  # here

    def watch(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        dist.all_reduce(weight.grad.norm())  # here

    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    for weight in model.parameters():
        for hook in (watch, average) if rank == 1 else (average, watch):
            weight.register_post_accumulate_grad_hook(hook)
    for _ in range(5):
        model(torch.ones(2, 6)).sum().backward()
        model.zero_grad()
