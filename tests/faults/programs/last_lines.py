"""Ranks that are stopped, killed or crash away from their last record: the exact line, or none; and sound ones.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. `# not
here` marks the line of the last record, at which nothing happened.
"""

import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.faults.corpus import faulty, healthy


def send_soon(name: str, after_s: float = 0.5) -> None:
    """Have another process send a signal to this one, soon."""
    command = f"sleep {after_s}; kill -{name} {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)


@faulty("rank-frozen", 1)
def stopped_while_it_counts_words(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 1 and step == 2:
            send_soon("STOP")
            end = time.monotonic() + 30
            words = 0
            while time.monotonic() < end:  # here
                words += len(str(words))  # here


@faulty("rank-frozen", 2)
def stopped_while_it_multiplies_matrices(rank: int) -> None:
    large = torch.ones(1200, 1200)
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 2 and step == 1:
            send_soon("STOP")
            for _ in range(4000):
                large = large @ large / 1200  # here


class Pictures(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@faulty("rank-frozen", 0)
def stopped_while_it_reads_a_sample(rank: int) -> None:
    class Stopping(Pictures):
        def __getitem__(self, index: int) -> torch.Tensor:
            if self.rank == 0 and index == 7:
                signal.raise_signal(signal.SIGSTOP)  # here
            return super().__getitem__(index)

    for batch in DataLoader(Stopping(rank), batch_size=2):
        dist.all_reduce(batch.sum())  # not here


@faulty("rank-killed", 1)
def killed_by_another_process_while_it_computes(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 1 and step == 2:
            send_soon("KILL")
            end = time.monotonic() + 30
            while time.monotonic() < end:
                torch.ones(100).sum()


@faulty("rank-killed", 2)
def killed_by_raise_signal(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 2 and step == 2:
            signal.raise_signal(signal.SIGKILL)  # here


@faulty("rank-killed", 0)
def ended_by_a_term_signal_while_it_computes(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 0 and step == 1:
            send_soon("TERM")
            end = time.monotonic() + 30
            while time.monotonic() < end:  # here
                torch.ones(100).sum()  # here


@faulty("rank-killed", 1)
def an_alarm_without_a_handler(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 1 and step == 2:
            signal.alarm(1)
            time.sleep(30)  # here


@faulty("rank-killed", 2)
def a_page_that_is_gone_from_its_file(rank: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 8192)
        file.flush()
        shown = mmap.mmap(file.fileno(), 8192)
        for step in range(3):
            dist.all_reduce(torch.ones(4))  # not here
            if rank == 2 and step == 1:
                os.ftruncate(file.fileno(), 0)
                torch.tensor(shown[4096])  # here


@faulty("rank-killed", 1)
def a_crash_in_a_thread_that_prefetches(rank: int) -> None:
    def prefetch() -> None:
        time.sleep(0.5)
        ctypes.string_at(8)  # here

    for step in range(3):
        dist.all_reduce(torch.ones(4))  # not here
        if rank == 1 and step == 1:
            threading.Thread(target=prefetch).start()
            time.sleep(20)


@faulty("rank-killed", 0)
def an_abort_behind_a_caught_exception(rank: int) -> None:
    def give_up() -> None:
        os.abort()  # here

    for step in range(3):
        dist.all_reduce(torch.ones(4))  # not here
        try:
            if rank == 0 and step == 1:
                raise ValueError("no such file")
        except ValueError:
            give_up()


@healthy()
def stopped_for_a_moment(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:
            command = f"sleep 1; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
            signal.raise_signal(signal.SIGSTOP)


@healthy()
def a_term_signal_with_a_handler(rank: int) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()


@healthy()
def an_alarm_that_raises_and_is_caught(rank: int) -> None:
    def late(number: int, _: object) -> None:
        raise TimeoutError(f"signal {number}")

    signal.signal(signal.SIGALRM, late)
    for _ in range(3):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(5 if rank == 0 else 0.01)
        except TimeoutError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        dist.all_reduce(torch.ones(4))


@healthy()
def a_worker_process_that_crashes_and_is_started_again(rank: int) -> None:
    forking = multiprocessing.get_context("fork")
    for step in range(3):
        if rank == 2:
            worker = forking.Process(target=os.abort if step == 0 else int)
            worker.start()
            worker.join()
        dist.all_reduce(torch.ones(4))


@healthy()
def ignored_signals(_: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGHUP)
        dist.all_reduce(torch.ones(4))


@healthy()
def faulthandler_with_a_file_of_its_own(_: int) -> None:
    with Path(tempfile.gettempdir(), f"stacks-{os.getpid()}").open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR2, file)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR2)
            dist.all_reduce(torch.ones(4))
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.disable()
    Path(file.name).unlink()
