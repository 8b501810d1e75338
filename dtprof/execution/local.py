"""Worker processes of this host."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

import dtprof
from dtprof.errors import WorkerLostError

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
        pipe = subprocess.PIPE
        try:
            for _ in range(self._num):
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
                self._processes.append(process)
                self._idle.put(process)
        except OSError as error:
            self.__exit__(type(error), error, None)
            raise WorkerLostError(
                f"worker {len(self._processes) + 1} of {self._num} cannot be started ({error.strerror}); "
                "use fewer, for example --jobs 1"
            ) from error
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
