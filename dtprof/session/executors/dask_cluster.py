"""Dask workers: of a cluster that is made on this host for the command, or of one whose scheduler is running."""

import asyncio
import json
import logging
import pickle
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Generic, TypeVar

from dtprof import __version__
from dtprof.errors import MissingDependencyError, SchedulerError, WorkerLostError
from dtprof.session.executors.worker_counts import count_cores

CONNECT_S = 10
WORKERS_S = 60
LOOK_S = 5
"""Interval at which the number of workers is polled: without any, Dask itself waits without end."""
LARGE_BYTES = 1 << 20
"""Larger tasks are sent apart from the graph."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class DaskWorkers:
    """Workers of a Dask cluster; one made here ends with the `with` block."""

    def __init__(self, *, scheduler: str, num: int) -> None:
        """Say which: the address or file of a scheduler; empty: a cluster of `num` workers on this host, 0: all cores.

        Raises:
            MissingDependencyError: Dask is not installed.
        """
        try:
            import distributed
        except ImportError as error:
            raise MissingDependencyError(
                f"the engine dask needs a package that cannot be loaded ({error}): pip install 'dtprof[dask]'"
            ) from error
        self._distributed: Any = distributed
        self._scheduler, self._num = scheduler, num or count_cores()
        self._ending = ExitStack()
        self._client: Any = None
        self.at_once = 2

    def __enter__(self) -> "DaskWorkers":
        """Start or join the cluster.

        Raises:
            SchedulerError: the scheduler does not answer, has no workers, or these cannot load this dtprof; a cluster
                on this host cannot be started.
        """
        with ExitStack() as started:
            self._client = started.enter_context(self._connect() if self._scheduler else self._start(started))
            self._check()
            self._ending = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave the cluster; end it where it was made here.

        What goes wrong in that is Dask's affair: it raises where a worker that was lost is being started again, and
        the error of the work, or its result, would be lost. Workers that are left end with this process.
        """
        with suppress(Exception):
            self._ending.close()

    def submit(self, work: Callable[[Task], Result], task: Task) -> "_Pending[Result]":
        """Hand over one task."""
        packed = pickle.dumps((work, task), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            sent = self._client.scatter(packed, hash=False) if len(packed) > LARGE_BYTES else packed
        except TimeoutError:
            raise self._all_lost() from None
        return _Pending(self._client.submit(_work, sent, pure=False), self)

    def wait_for(self, future: Any) -> Any:
        """Return the result of a future, as long as there are workers.

        Raises:
            WorkerLostError: it cannot be computed any more.
        """
        lost_s: float | None = None  # since when there are none
        timeout_s: float | None = LOOK_S
        while True:
            try:
                return future.result(timeout=timeout_s)
            except TimeoutError:
                if timeout_s is None:
                    raise  # by the work itself
                if future.done():  # to fetch it may take longer
                    timeout_s = None
                    continue
                now_s = time.monotonic()
                lost_s = None if self._has_workers() else lost_s or now_s
                if lost_s is not None and now_s - lost_s >= WORKERS_S:
                    raise self._all_lost() from None
            except UnboundLocalError:
                # Dask's client has no result where its timeout cancels it in the moment in which it ends.
                if future.status == "error":
                    raise  # by the work itself
            except self._distributed.CancelledError:
                raise WorkerLostError(
                    "the connection to the scheduler of Dask was lost before the work was done. See that it runs, and "
                    "on which host, and give the command again"
                ) from None
            except self._distributed.KilledWorker as error:
                raise WorkerLostError(
                    "workers of Dask ended before their work was done, several times: killed, or out of memory "
                    f"({error}). Give them more memory each, or use fewer"
                ) from None

    def _has_workers(self) -> bool:
        """Say whether the scheduler has workers; a scheduler that is gone raises in the tasks that wait for it."""
        try:
            return bool(self._client.scheduler_info()["workers"])
        except OSError:  # it is too busy to answer
            return True

    def _connect(self) -> Any:
        try:
            # Dask itself would wait without end for a file that is not there.
            named = _is_file(self._scheduler)
            address = json.loads(Path(self._scheduler).read_text())["address"] if named else self._scheduler
            with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
                thread.submit(asyncio.run, self._greet(address)).result()
            return self._distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, TimeoutError) as error:
            raise SchedulerError(
                f"no Dask scheduler answers at {self._scheduler} ({error}); expected the address of one that runs, "
                "for example tcp://host:8786, or its scheduler file"
            ) from error

    async def _greet(self, address: str) -> None:
        """Ask who is at an address: a client would try without end, and take long to let go.

        Raises:
            OSError, ValueError, TypeError, RuntimeError, TimeoutError: nobody, or no scheduler.
        """
        security = self._distributed.Security().get_connection_args("client")
        scheduler = self._distributed.rpc(address, connection_args=security, timeout=CONNECT_S)
        try:
            kind = (await asyncio.wait_for(scheduler.identity(), 1.5 * CONNECT_S))["type"]
        except TimeoutError:
            raise TimeoutError("what listens there does not answer as Dask does") from None
        finally:
            await scheduler.close_rpc()
        if kind != "Scheduler":
            raise ValueError(f"what answers is a {kind}")

    def _start(self, started: ExitStack) -> Any:
        scratch = started.enter_context(TemporaryDirectory(prefix="dtprof-dask-"))
        try:
            cluster = self._distributed.LocalCluster(
                n_workers=self._num,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # its default is one port, on all interfaces
                worker_dashboard_address="127.0.0.1:0",
                local_directory=scratch,
                silence_logs=logging.CRITICAL,
            )
        except RuntimeError as error:
            raise SchedulerError(
                f"no Dask worker can be started on this host ({str(error).strip().splitlines()[0]}): each imports the "
                "main module of the program again. Expected a file of its own that calls dtprof below "
                "`if __name__ == '__main__':`, a running scheduler, or the engine local"
            ) from error
        started.enter_context(cluster)
        return self._distributed.Client(cluster, set_as_default=False)

    def _check(self) -> None:
        where = self._scheduler or "the cluster on this host"
        try:
            self._client.wait_for_workers(1, timeout=WORKERS_S)
            versions = set(self._client.run(_version).values())
        except TimeoutError as error:
            raise SchedulerError(f"{where} has no workers after {WORKERS_S} s; start some{self._remedy()}") from error
        except OSError as error:
            raise SchedulerError(
                f"a worker of {where} cannot be reached ({error}); expected workers that run until the work is done"
            ) from error
        except (ImportError, AttributeError, RuntimeError) as error:
            raise SchedulerError(
                f"the workers of {where} cannot load dtprof {__version__} ({error}); install the same dtprof there"
            ) from error
        if versions != {__version__}:
            raise SchedulerError(
                f"the workers of {where} have dtprof {', '.join(sorted(versions))}, this one is {__version__}; "
                "install the same there"
            )
        self.at_once = 2 * max(1, sum(self._client.nthreads().values()))

    def _all_lost(self) -> WorkerLostError:
        return WorkerLostError(
            f"all workers of Dask ended before their work was done, and none came back in {WORKERS_S} s: killed, or "
            f"out of memory. Start them again{self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return how to start workers, to follow the sentence that asks for them."""
        option = "--scheduler-file " if _is_file(self._scheduler) else ""
        return f", for example: dask worker {option}{shlex.quote(self._scheduler)}" if self._scheduler else ""


def _is_file(scheduler: str) -> bool:
    return scheduler.endswith(".json")


def _version() -> str:
    return __version__


def _work(packed: bytes) -> Any:
    """Do a task, on a worker."""
    work, task = pickle.loads(packed)
    return work(task)


class _Pending(Generic[Result]):
    def __init__(self, future: Any, workers: DaskWorkers) -> None:
        self._future = future
        self._workers = workers

    def result(self) -> Result:
        try:
            result: Result = self._workers.wait_for(self._future)
        except FileNotFoundError as error:
            raise SchedulerError(
                f"a worker cannot read {error.filename}: workers read the run themselves. Expected one where all "
                "of them see it under this path: on a shared file system, or at a URL"
            ) from None
        return result
