"""Worker processes of this host.

Why not concurrent.futures.ProcessPoolExecutor: beside a program with threads, where nothing may fork, its workers
import the program's main module again, which runs a script without a `__main__` guard once more. Forked, it is as fast
(`dtprof summary` of 8 ranks of 152,000 events: 3.54 s of processor time against 3.55 s, medians of 4 pairs on a loaded
machine of 2 cores, 2026-11-23), but it does not say how a worker ended, and before Python 3.14 cannot end workers in
the middle of a task.
"""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import dtprof
from dtprof.errors import WorkerLostError
from dtprof.records.reader import Run
from dtprof.session.executors import worker_process

ENDING_S = 5
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Task = TypeVar("Task")
Result = TypeVar("Result")


class _Process(Protocol):
    """The common interface of `subprocess.Popen` and a forked process."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status, or the number of the signal that ended it, negated.

        Raises:
            subprocess.TimeoutExpired: it has not ended yet.
        """


class _Forked:
    """A copy of this process that does nothing but tasks."""

    def __init__(self, tasks: int, results: int, others: Sequence[int]) -> None:
        """Fork; the caller gives the worker's ends of its pipes, and those that the worker must close."""
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=worker_process.work_as_copy, args=(tasks, results, others), daemon=True)
        self._process.start()
        self.kill = self._process.kill

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, as `subprocess.Popen` does."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self._process.exitcode


@dataclass(frozen=True)
class _Worker:
    process: _Process
    tasks: BinaryIO
    results: BinaryIO


@dataclass(frozen=True, eq=False)
class _Waiting:
    work: Callable[[Any], Any]
    task: Any
    place: Hashable  # the first rank it reads; None: it reads none
    result: Future[Any]


class LocalProcesses:
    """Processes that do tasks and end with this one.

    Work on ranks is given to the worker that had these ranks before, and may have kept them; to another where that one
    is busy and there is nothing else to do.

    They are fresh interpreters, which know nothing of the program that this process runs; or forked: copies of this
    process, which begin at once and have loaded what it has. Only a command that has no threads yet may fork.
    """

    def __init__(self, num: int, *, forked: bool = False) -> None:
        """Set the number."""
        self.at_once = 2 * num
        self.num = num
        self._forked = forked
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._waiting: deque[_Waiting] = deque()
        self._had: dict[Hashable, _Worker] = {}  # by the first rank of a task
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="dtprof-worker")

    def __enter__(self) -> "LocalProcesses":
        """Start them, away from the terminal: Ctrl-C is for this process, which ends them."""
        try:
            if self._forked:
                # What all share is not to be touched, and so copied, by a worker that looks for garbage; nor is this
                # process to look through its modules each time it takes in results.
                gc.freeze()
            for _ in range(self.num):
                started = self._fork() if self._forked else _start()
                self._workers.append(started)
                self._idle.append(started)
        except OSError as error:
            self.__exit__(type(error), error, None)
            raise WorkerLostError(
                f"worker {len(self._workers) + 1} of {self.num} cannot be started ({error.strerror}); "
                "use fewer, for example --jobs 1"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End them; at once where the work was cut short."""
        gc.unfreeze()
        if kind is not None:
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        while self._waiting:
            self._waiting.popleft().result.cancel()
        for worker in self._workers:
            for pipe in (worker.tasks, worker.results):
                with suppress(OSError):  # what it did not take
                    pipe.close()
        for worker in self._workers:
            worker.process.wait()

    def submit(self, work: Callable[[Task], Result], task: Task) -> Future[Result]:
        """Hand over one task."""
        waiting = _Waiting(work, task, _place_of(task), Future())
        with self._lock:
            self._waiting.append(waiting)
        self._threads.submit(self._serve)
        return waiting.result

    def _serve(self) -> None:
        """Have an idle worker do one of the waiting tasks: there is a worker for every thread."""
        with self._lock:
            worker, waiting = self._match()
            self._idle.remove(worker)
            self._waiting.remove(waiting)
            if waiting.place is not None:
                self._had[waiting.place] = worker
        try:
            result = _let_do(worker, waiting.work, waiting.task)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
            outcome: Callable[[], None] = partial(waiting.result.set_exception, error)
        else:
            outcome = partial(waiting.result.set_result, result)
        with self._lock:
            self._idle.append(worker)
        outcome()

    def _match(self) -> "tuple[_Worker, _Waiting]":
        """Return an idle worker and the task it is to do."""
        fresh = None
        for waiting in self._waiting:
            had = self._had.get(waiting.place)
            if had in self._idle:
                return had, waiting
            if had is None and fresh is None:
                fresh = waiting
        return self._idle[0], fresh or self._waiting[0]

    def _fork(self) -> _Worker:
        taken, tasks = os.pipe()
        results, given = os.pipe()
        others = [pipe.fileno() for worker in self._workers for pipe in (worker.tasks, worker.results)]
        process = _Forked(taken, given, [tasks, results, *others])
        os.close(taken)
        os.close(given)
        return _Worker(process, os.fdopen(tasks, "wb"), os.fdopen(results, "rb"))


def _let_do(worker: _Worker, work: Callable[[Task], Result], task: Task) -> Result:
    try:
        pickle.dump((work, task), worker.tasks, protocol=pickle.HIGHEST_PROTOCOL)
        worker.tasks.flush()
        result, error = pickle.load(worker.results)
    except (OSError, EOFError, pickle.UnpicklingError):
        raise WorkerLostError(
            f"a worker process ended before its work was done ({_how_ended(worker.process)}). "
            "Fewer need less memory: --jobs 1 works in one process"
        ) from None
    if error is not None:
        raise error
    done: Result = result
    return done


def _place_of(task: object) -> Hashable:
    """Return the first of the ranks whose records a task reads."""
    records = getattr(task, "records", None)
    return next(iter(records.folders), None) if isinstance(records, Run) else None


def _start() -> _Worker:
    ours = str(Path(dtprof.__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": f"{ours}{os.pathsep}{others}" if others else ours}
    command = [sys.executable, "-P", "-m", worker_process.__name__]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    return _Worker(process, cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout))


def _how_ended(process: _Process) -> str:
    try:
        status = process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return f"killed by signal {-status}, perhaps for want of memory" if status < 0 else f"exit status {status}"
