"""What colleagues sent in at the end of a quarter: loops, threads, files, signals; each beside one that is right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import asyncio
import ctypes
import fcntl
import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy


class Job:
    """A regression and its loop's parts."""

    def __init__(self) -> None:
        torch.manual_seed(21)
        self.model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(torch.randn(3, 4)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return loss


# Loops.


@faulty("rank-skipped-collective", 2)
def patience_lost_on_one_rank(rank: int) -> None:
    job = Job()
    best, waited = 10.0, 0
    for epoch in range(9):
        job.step()
        validation = 1.0 if rank == 2 else 10.0 / (epoch + 2)
        waited = 0 if validation < best else waited + 1
        best = min(best, validation)
        if waited == 3:
            break  # here
    dist.barrier()


@healthy()
def patience_lost_by_agreement(rank: int) -> None:
    job = Job()
    best, waited = 10.0, 0
    for epoch in range(9):
        job.step()
        validation = torch.tensor(1.0 if rank == 2 else 10.0 / (epoch + 2))
        dist.all_reduce(validation)
        waited = 0 if validation < best else waited + 1
        best = min(best, validation.item())
        if epoch > 5 or waited == 3:
            break
    dist.barrier()


@faulty("rank-exited", 1)
def a_goal_reached_by_one_rank(rank: int) -> None:
    job = Job()
    for step in range(9):
        loss = job.step()
        if rank == 1 and step == 4 and loss < 1e6:
            return  # here


@faulty("rank-skipped-collective", 1)
def a_batch_that_did_not_fit_and_was_dropped(rank: int) -> None:
    job = Job()

    def forward(step: int) -> None:
        if rank == 1 and step == 3:
            raise MemoryError("no room for 3 rows of 4")
        job.backward()

    for step in range(8):
        try:
            forward(step)
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.optimizer.step()
        except MemoryError:  # here
            gc.collect()


@faulty("rank-skipped-collective", 0)
def a_sample_that_could_not_be_decoded(rank: int) -> None:
    job = Job()
    samples = [b"1", b"2", b"\xff" if rank == 0 else b"3", b"4", b"5", b"6"]
    done = 0
    for raw in samples:
        try:
            float(raw.decode())
        except UnicodeDecodeError:
            continue  # here
        job.step()
        done += 1
    count = torch.tensor([done])
    dist.all_reduce(count)


@healthy()
def a_sample_that_is_replaced(rank: int) -> None:
    job = Job()
    samples = [b"1", b"2", b"\xff" if rank == 0 else b"3", b"4", b"5", b"6"]
    for raw in samples:
        try:
            float(raw.decode())
        except UnicodeDecodeError:
            job.backward()
        job.step()
    dist.barrier()


@faulty("rank-skipped-collective", 2)
def the_second_of_two_that_continue(rank: int) -> None:
    job = Job()
    for step in range(10):
        loss = job.step()
        if step < 2:
            continue
        if rank == 2 and step == 6 and loss < 1e9:
            continue  # here
        dist.all_reduce(loss)
        dist.broadcast(job.model[0].weight.data, src=0)


@healthy()
def two_that_continue_on_all(_rank: int) -> None:
    job = Job()
    for step in range(10):
        loss = job.step()
        if step < 2:
            continue
        if step == 6 and loss < 1e9:
            continue
        dist.all_reduce(loss)
        dist.broadcast(job.model[0].weight.data, src=0)


@faulty("rank-skipped-collective", 1)
def the_first_of_three_that_continue(rank: int) -> None:
    job = Job()
    skips = {3} if rank == 1 else set()
    for step in range(8):
        job.backward()
        if step in skips:
            continue  # here
        if step == 0:
            dist.barrier()
            continue
        for parameter in job.model.parameters():
            dist.all_reduce(parameter.grad)
        job.optimizer.step()
        if step % 2:
            continue
        dist.broadcast(torch.ones(1), src=0)


@faulty("collective-order-mismatch", 0)
def a_mean_that_only_the_logger_asks_for(rank: int) -> None:
    job = Job()
    for step in range(8):
        loss = job.step()
        if rank == 0 and step == 5:
            dist.reduce(loss, dst=0)  # here
            print(f"loss {loss / dist.get_world_size():.3f}")


@healthy()
def a_mean_that_the_logger_prints(rank: int) -> None:
    job = Job()
    for step in range(8):
        loss = job.step()
        dist.reduce(loss, dst=0)
        if rank == 0:
            print(f"step {step}: loss {loss / dist.get_world_size():.3f}")


@faulty("collective-order-mismatch", 0)
def a_barrier_when_the_trace_is_ready(rank: int) -> None:
    job = Job()

    def ready(_profiler: Any) -> None:
        if rank == 0:
            dist.barrier()  # here

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1), on_trace_ready=ready
    ) as profiler:
        for _step in range(7):
            job.step()
            profiler.step()


@healthy()
def a_trace_of_two_steps(rank: int) -> None:
    job = Job()
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)) as profiler:
        for _step in range(7):
            job.step()
            profiler.step()
    if rank == 0:
        profiler.key_averages()
    dist.barrier()


@healthy()
def a_step_that_is_compiled(_rank: int) -> None:
    job = Job()
    compiled = torch.compile(job.model, backend="eager")
    for _step in range(4):
        job.optimizer.zero_grad()
        compiled(torch.ones(2, 4)).sum().backward()
        for parameter in job.model.parameters():
            dist.all_reduce(parameter.grad)
        job.optimizer.step()


# Signals, finalizers, ends.


@faulty("collective-order-mismatch", 2)
def a_notice_of_preemption_on_one_host(rank: int) -> None:
    job = Job()
    noticed = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: noticed.set())
    for step in range(8):
        job.step()
        if rank == 2 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        if noticed.is_set():
            noticed.clear()
            dist.barrier()  # here


@healthy()
def a_notice_of_preemption_told_to_all(rank: int) -> None:
    job = Job()
    noticed = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: noticed.set())
    for step in range(8):
        job.step()
        if rank == 2 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        flag = torch.tensor([float(noticed.is_set())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            dist.barrier()
            break


@faulty("collective-order-mismatch", 1)
def a_finalizer_that_says_goodbye(rank: int) -> None:
    class Cache:
        def __del__(self) -> None:
            dist.barrier()  # here

    job = Job()
    caches = [Cache()] if rank == 1 else []
    for step in range(8):
        job.step()
        if step == 4:
            caches.clear()


@healthy()
def garbage_collected_between_steps(rank: int) -> None:
    job = Job()
    gc.disable()
    for step in range(8):
        job.step()
        if step % 3 == rank:
            circle: list[Any] = []
            circle.append(circle)
            gc.collect()
    gc.enable()


@faulty("rank-frozen", 2)
def a_rank_that_somebody_paused(rank: int) -> None:
    job = Job()
    for step in range(8):
        job.step()
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # here


@faulty("rank-killed", 2)
def a_rank_that_ends_itself_by_force(rank: int) -> None:
    job = Job()
    for step in range(8):
        job.step()
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # here


@faulty("rank-killed", 1)
def a_pointer_that_leads_nowhere(rank: int) -> None:
    job = Job()
    for step in range(8):
        job.step()
        if rank == 1 and step == 4:
            ctypes.string_at(8)  # here


@faulty("rank-crashed", 0)
def a_metric_divided_by_nothing(rank: int) -> None:
    job = Job()
    hits, seen = 0, 0
    for step in range(6):
        job.step()
        if step == 3 and rank == 0:
            print("accuracy", hits / seen)  # here


# Files, stores, processes.


@faulty("rank-stuck", 1)
def a_key_that_is_spelled_otherwise(rank: int) -> None:
    job = Job()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for epoch in range(4):
        job.step()
        if rank == 0:
            store.set(f"ready/{epoch}", "yes")
        elif rank == 1 and epoch == 2:
            store.wait([f"ready/epoch-{epoch}"])  # here
        else:
            store.wait([f"ready/{epoch}"])
        dist.barrier()


@healthy()
def keys_that_are_set_a_little_later(rank: int) -> None:
    job = Job()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for epoch in range(4):
        job.step()
        if rank == 0:
            time.sleep(0.2)
            store.set(f"tokenised/{epoch}", "yes")
        else:
            store.wait([f"tokenised/{epoch}"])
        dist.barrier()


@faulty("rank-stuck", 1)
def a_cache_locked_across_a_barrier(rank: int) -> None:
    job = Job()
    job.step()
    path = Path(tempfile.gettempdir()) / f"quarter-lock-{os.environ['MASTER_PORT']}"
    dist.barrier()
    with path.open("w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if rank == 1:
            fcntl.flock(file, fcntl.LOCK_EX)  # here
        dist.barrier()
        fcntl.flock(file, fcntl.LOCK_UN)
    path.unlink(missing_ok=True)


@healthy()
def a_cache_locked_in_turn(rank: int) -> None:
    job = Job()
    job.step()
    path = Path(tempfile.gettempdir()) / f"quarter-turns-{os.environ['MASTER_PORT']}"
    for _epoch in range(3):
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(str(rank))
        dist.barrier()
    if rank == 0:
        path.unlink()


@faulty("rank-stuck", 2)
def a_feed_whose_thread_has_died(rank: int) -> None:
    job = Job()
    feed: queue.Queue[int] = queue.Queue()

    def produce() -> None:
        for number in range(8):
            if rank == 2 and number == 4:
                raise OSError("shard 4 is not there")
            feed.put(number)

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(8):
        feed.get()  # here
        job.step()


@healthy()
def a_feed_that_says_when_it_ends(_rank: int) -> None:
    job = Job()
    feed: queue.Queue[int | None] = queue.Queue(maxsize=2)

    def produce() -> None:
        for number in range(6):
            feed.put(number)
        feed.put(None)

    threading.Thread(target=produce, daemon=True).start()
    while feed.get() is not None:
        job.step()
    dist.barrier()


@faulty("rank-stuck", 0)
def an_answer_that_is_awaited_for_ever(rank: int) -> None:
    job = Job()

    async def judge(step: int) -> None:
        answered = asyncio.Event()
        if rank != 0 or step != 3:
            answered.set()
        await answered.wait()

    for step in range(6):
        job.step()
        asyncio.run(judge(step))  # here
    dist.barrier()


@healthy()
def answers_that_come_in_any_order(rank: int) -> None:
    job = Job()

    async def judge(number: int) -> int:
        await asyncio.sleep(0.02 * ((number + rank) % 3))
        return number

    async def all_of() -> list[int]:
        return await asyncio.gather(*(judge(number) for number in range(4)))

    for _step in range(5):
        job.step()
        asyncio.run(all_of())


@faulty("rank-stuck", 1)
def a_copy_that_does_not_end(rank: int) -> None:
    job = Job()
    for step in range(6):
        job.step()
        if step == 3:
            seconds = "600" if rank == 1 else "0.01"
            subprocess.run(["sleep", seconds], check=True)  # here
        dist.barrier()


@healthy()
def copies_by_other_programs(_rank: int) -> None:
    job = Job()
    for step in range(6):
        job.step()
        if step == 3:
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
        dist.barrier()


@faulty("rank-stuck", 1)
def a_log_written_to_a_pipe_nobody_reads(rank: int) -> None:
    job = Job()
    path = Path(tempfile.mkdtemp()) / "metrics"
    for step in range(6):
        loss = job.step()
        if step == 2:
            if rank == 1:
                os.mkfifo(path)
            with path.open("w") as file:  # here
                file.write(f"{loss}\n")


@faulty("rank-stuck", 0)
def an_upload_that_waits_for_room(rank: int) -> None:
    job = Job()
    outbox: queue.Queue[float] = queue.Queue(maxsize=3)
    for _step in range(6):
        loss = job.step()
        if rank == 0:
            outbox.put(loss.item())  # here
    dist.barrier()


@healthy()
def an_upload_that_is_finished_at_the_end(rank: int) -> None:
    job = Job()
    outbox: queue.Queue[float | None] = queue.Queue(maxsize=3)

    def upload() -> None:
        while outbox.get() is not None:
            time.sleep(0.05)

    thread = threading.Thread(target=upload)
    if rank == 0:
        thread.start()
    for _step in range(6):
        loss = job.step()
        if rank == 0:
            outbox.put(loss.item())
    if rank == 0:
        outbox.put(None)
        thread.join()
    dist.barrier()


@faulty("long-operation", 0)
def a_checkpoint_on_a_slow_disk(rank: int) -> None:
    job = Job()
    for step in range(4):
        job.step()
        if rank == 0 and step == 2:
            with tempfile.NamedTemporaryFile() as file:
                for _block in range(400):
                    file.write(bytes(20000))  # here
                    file.flush()  # here
                    time.sleep(0.05)  # here
        dist.barrier()


@healthy()
def a_checkpoint_on_a_fair_disk(rank: int) -> None:
    job = Job()
    for step in range(4):
        job.step()
        if rank == 0 and step == 2:
            with tempfile.NamedTemporaryFile() as file:
                for _block in range(10):
                    file.write(bytes(20000))
                    file.flush()
                    time.sleep(0.05)
        dist.barrier()


@faulty("slow-rank", 2)
def a_rank_that_tokenises_as_it_goes(rank: int) -> None:
    job = Job()
    text = "to be or not to be " * 3000
    for _step in range(30):
        if rank == 2:
            began = time.monotonic()
            while time.monotonic() - began < 0.2:
                sorted(set(text.split()))  # here
        job.step()


@healthy()
def ranks_late_by_turns(rank: int) -> None:
    job = Job()
    for step in range(18):
        if step % 3 == rank:
            time.sleep(0.05)
        job.step()
