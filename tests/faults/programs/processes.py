"""Processes, threads, signals and files."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.corpus import back_end, faulty, healthy, train


@faulty("rank-exited", 2)
def sys_exit_after_a_bad_config(rank: int) -> None:
    dist.barrier()
    if rank == 2:
        print("no such split")
        sys.exit(0)  # here
    dist.all_reduce(torch.ones(4))


@faulty("rank-exited", 1)
def os_exit_with_status_0(rank: int) -> None:
    def leave(step: int) -> None:
        if rank == 1 and step == 3:
            os._exit(0)  # here

    train(rank, 6, leave)


@faulty("rank-crashed", 0)
def sys_exit_with_a_status(rank: int) -> None:
    def leave(step: int) -> None:
        if rank == 0 and step == 3:
            sys.exit(4)  # here

    train(rank, 6, leave)


@faulty("rank-killed", 0)
def a_segmentation_fault(rank: int) -> None:
    def fail(step: int) -> None:
        if rank == 0 and step == 2:
            signal.raise_signal(signal.SIGSEGV)

    train(rank, 5, fail)


@faulty("rank-killed", 1)
def an_abort_in_native_code(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 3:
            os.abort()
        dist.all_reduce(torch.ones(4))


@faulty("rank-frozen", 2)
def stopped_inside_a_step_of_messages(rank: int) -> None:
    for step in range(5):
        value = torch.ones(4)
        if rank:
            dist.recv(value, src=rank - 1)
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank < 2:
            dist.send(value, dst=rank + 1)
        dist.barrier()


@faulty("rank-stuck", 0)
def an_endless_loop(rank: int) -> None:
    def spin(step: int) -> None:
        while rank == 0 and step == 3:  # here
            pass

    train(rank, 5, spin)


@faulty("rank-stuck", 1)
def a_queue_that_stays_empty(rank: int) -> None:
    ready: queue.Queue[int] = queue.Queue()

    def take(step: int) -> None:
        if rank != 1 or step < 3:
            ready.put(step)
        ready.get()  # here

    train(rank, 6, take)


@faulty("rank-stuck", 2)
def a_named_pipe_nobody_writes_to(rank: int) -> None:
    path = Path(tempfile.mkdtemp()) / "tokens"
    os.mkfifo(path)

    def read(step: int) -> None:
        if rank == 2 and step == 2:
            path.read_bytes()  # here

    train(rank, 5, read)


@faulty("rank-stuck", 0)
def a_tool_that_does_not_return(rank: int) -> None:
    def upload(step: int) -> None:
        if rank == 0 and step == 2:
            subprocess.run(["sleep", "300"], check=True)  # here

    train(rank, 5, upload)


@faulty("rank-stuck", 1)
def two_threads_that_hold_each_others_lock(rank: int) -> None:
    first, second = threading.Lock(), threading.Lock()
    held = threading.Event()

    def write() -> None:
        with second:
            held.set()
            time.sleep(0.2)
            with first:
                pass

    def save(step: int) -> None:
        if rank == 1 and step == 2:
            thread = threading.Thread(target=write, daemon=True)
            with first:
                thread.start()
                held.wait()
                with second:  # here
                    pass

    train(rank, 5, save)


@faulty("rank-never-joined", 0, 2, joins=False, ranks=4)
def two_that_load_their_data_for_ever(rank: int) -> None:
    if rank in (0, 2):
        time.sleep(600)
    dist.init_process_group(back_end())  # here


@faulty("rank-crashed", 2, joins=False)
def one_that_fails_before_it_joins(rank: int) -> None:
    if rank == 2:
        raise ImportError("no module named flash")  # here
    dist.init_process_group(back_end())


@faulty("rank-killed", 1, joins=False)
def one_that_is_killed_before_it_joins(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group(back_end())


@healthy()
def signals_that_are_handled(rank: int) -> None:
    caught = []
    signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))

    def poke(step: int) -> None:
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    train(rank, 4, poke)


@healthy()
def helpers_in_other_processes(rank: int) -> None:
    def work(step: int) -> None:
        if rank == 0 and step == 1:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.1,))
            child.start()
            child.join()
            subprocess.run(["true"], check=True)

    train(rank, 4, work)


@healthy()
def one_thread_that_makes_all_calls(rank: int) -> None:
    wanted: queue.Queue[torch.Tensor | None] = queue.Queue()
    done: queue.Queue[torch.Tensor] = queue.Queue()

    def reduce() -> None:
        while (tensor := wanted.get()) is not None:
            dist.all_reduce(tensor)
            done.put(tensor)

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(5):
        wanted.put(torch.full((4,), float(rank)))
        done.get()
    wanted.put(None)
    thread.join()
    dist.barrier()


@faulty("rank-stuck", 1)
def a_queue_whose_reader_thread_has_raised(rank: int) -> None:
    batches: queue.Queue[int] = queue.Queue(maxsize=2)

    def read() -> None:
        for i in range(8):
            if rank == 1 and i == 5:
                raise ValueError("corrupt shard 5")
            batches.put(i)

    threading.Thread(target=read, daemon=True).start()
    train(rank, 8, lambda _: batches.get() and None)  # here


@healthy()
def a_queue_whose_reader_thread_hands_its_exception_over(rank: int) -> None:
    batches: queue.Queue[int | None] = queue.Queue(maxsize=2)

    def read() -> None:
        try:
            for i in range(8):
                if i == 5:
                    raise ValueError("corrupt shard 5")
                batches.put(i)
        finally:
            batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while batches.get() is not None:
        train(rank, 1)
    dist.barrier()


@healthy()
def exit_status_0_of_all(rank: int) -> None:
    train(rank, 4)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


@healthy()
def a_thread_that_writes_while_ranks_train(rank: int) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.01):
            pass

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    train(rank, 5)
    stop.set()
    thread.join()


@healthy()
def one_slow_first_step(rank: int) -> None:
    def compile_once(step: int) -> None:
        if step == 0:
            time.sleep(0.3 * (rank + 1))

    train(rank, 6, compile_once)
