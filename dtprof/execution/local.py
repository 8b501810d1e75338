"""Worker processes of this host, and how many of them pay."""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

import dtprof
from dtprof.errors import WorkerLostError

PAYS_FROM_BYTES = 24_000_000
"""Records of a run, on disk, from which workers save more than their start takes (measured: analysis-speed.md)."""
RANK_COSTS_BYTES = 100_000
"""A rank without records costs as much as so many bytes of them."""
ARCHIVED = 4
"""A byte of an archive costs as much as so many plain ones."""
SAMPLED = 16
ENDING_S = 5
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Task = TypeVar("Task")
Result = TypeVar("Result")


class LocalProcesses:
    """Fresh interpreters that do tasks. They know nothing of the program that this process runs, and end with it."""

    def __init__(self, num: int) -> None:
        """Set the number."""
        self.at_once = 2 * num
        self._num = num
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="dtprof-worker")

    def __enter__(self) -> "LocalProcesses":
        """Start them, away from the terminal: Ctrl-C is for this process, which ends them."""
        ours = str(Path(dtprof.__file__).parents[1])
        others = os.environ.get("PYTHONPATH")
        environment = os.environ | ONE_THREAD | {"PYTHONPATH": f"{ours}{os.pathsep}{others}" if others else ours}
        command = [sys.executable, "-P", "-m", "dtprof.execution.worker"]
        for _ in range(self._num):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            self._processes.append(process)
            self._idle.put(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End them; at once where the work was cut short."""
        if kind is not None:
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what it did not take
                    if pipe is not None:
                        pipe.close()
            process.wait()

    def submit(self, work: Callable[[Task], Result], task: Task) -> Future[Result]:
        """Hand over one task."""
        return self._threads.submit(self._let_do, work, task)

    def _let_do(self, work: Callable[[Task], Result], task: Task) -> Result:
        """Have an idle process do a task: there is one for every thread."""
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((work, task), process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise WorkerLostError(
                f"a worker process ended before its work was done ({_how_ended(process)}). Fewer need less memory: "
                "--jobs 1 works in one process"
            ) from None
        finally:
            self._idle.put(process)
        if error is not None:
            raise error
        done: Result = result
        return done


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return f"killed by signal {-status}, perhaps for want of memory" if status < 0 else f"exit status {status}"


def count_cores() -> int:
    """Return how many cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup 2, or no limit
        return cores


def choose_jobs(folders: Mapping[int, Sequence[tuple[int, Path]]]) -> int:
    """Return how many worker processes to use for a run; 1: none. `folders` is `Run.folders`."""
    cores = count_cores()
    newest = [attempts[-1][1] for attempts in folders.values()]
    if cores < 2 or len(newest) < 2:
        return 1
    sample = newest[:: -(-len(newest) // SAMPLED)]
    cost = sum(map(_cost_bytes, sample)) * len(newest) / len(sample)
    return min(cores, len(newest)) if cost >= PAYS_FROM_BYTES else 1


def _cost_bytes(rank_folder: Path) -> int:
    """Return about how many bytes of records a rank has; holes of sparse files are none."""
    cost = RANK_COSTS_BYTES
    try:
        for file in rank_folder.glob("events.*"):
            status = file.stat()
            used = min(status.st_size, 512 * status.st_blocks)
            cost += ARCHIVED * used if file.suffix == ".z" else used
    except OSError:
        return cost
    return cost
