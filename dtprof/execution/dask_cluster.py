"""Dask workers: of a cluster that is made on this host for the command, or of one whose scheduler is running."""

import json
import logging
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Generic, TypeVar

from dtprof import __version__
from dtprof.errors import MissingDependencyError, SchedulerError, WorkerLostError
from dtprof.execution.sizes import count_cores

CONNECT_S = 10
WORKERS_S = 60
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
            SchedulerError: the scheduler does not answer, has no workers, or these cannot load this dtprof.
        """
        with ExitStack() as started:
            self._client = started.enter_context(self._connect() if self._scheduler else self._start(started))
            self._check()
            self._ending = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave the cluster; end it where it was made here."""
        self._ending.close()

    def submit(self, work: Callable[[Task], Result], task: Task) -> "_Pending[Result]":
        """Hand over one task."""
        packed = pickle.dumps((work, task), protocol=pickle.HIGHEST_PROTOCOL)
        sent = self._client.scatter(packed, hash=False) if len(packed) > LARGE_BYTES else packed
        return _Pending(self._client.submit(_work, sent, pure=False), self._distributed)

    def _connect(self) -> Any:
        try:
            # Dask itself would wait without end for a file that is not there.
            named = self._scheduler.endswith(".json")
            address = json.loads(Path(self._scheduler).read_text())["address"] if named else self._scheduler
            return self._distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            raise SchedulerError(
                f"no Dask scheduler answers at {self._scheduler} ({error}); expected the address of one that runs, "
                "for example tcp://host:8786, or its scheduler file"
            ) from error

    def _start(self, started: ExitStack) -> Any:
        scratch = started.enter_context(TemporaryDirectory(prefix="dtprof-dask-"))
        cluster = self._distributed.LocalCluster(
            n_workers=self._num,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # its default is one port, on all interfaces
            worker_dashboard_address="127.0.0.1:0",
            local_directory=scratch,
            silence_logs=logging.CRITICAL,
        )
        started.enter_context(cluster)
        return self._distributed.Client(cluster, set_as_default=False)

    def _check(self) -> None:
        where = self._scheduler or "the cluster on this host"
        try:
            self._client.wait_for_workers(1, timeout=WORKERS_S)
            versions = set(self._client.run(_version).values())
        except TimeoutError as error:
            raise SchedulerError(
                f"{where} has no workers after {WORKERS_S} s; start some, for example: dask worker {where}"
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


def _version() -> str:
    return __version__


def _work(packed: bytes) -> Any:
    """Do a task, on a worker."""
    work, task = pickle.loads(packed)
    return work(task)


class _Pending(Generic[Result]):
    def __init__(self, future: Any, distributed: Any) -> None:
        self._future = future
        self._distributed = distributed

    def result(self) -> Result:
        try:
            result: Result = self._future.result()
        except (self._distributed.KilledWorker, self._distributed.CancelledError) as error:
            raise WorkerLostError(
                f"workers of Dask ended before their work was done, several times: killed, or out of memory ({error}). "
                "Give them more memory each, or use fewer"
            ) from None
        except FileNotFoundError as error:
            raise SchedulerError(
                f"a worker cannot read {error.filename}: workers read the run themselves. Expected one where all "
                "of them see it under this path: on a shared file system, or at a URL"
            ) from None
        return result
