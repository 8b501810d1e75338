"""Where analysis runs: in this process, in worker processes of this host, or on Dask."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dtprof import settings
from dtprof.errors import UsageError

if TYPE_CHECKING:
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run

ENGINES = ("local", "dask")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Where the analysis runs."""

    name: str = "local"
    scheduler: str = ""  # of Dask; empty: a cluster is made on this host
    jobs: int = 0  # 0: chosen by the size of the run
    owns_process: bool = False  # what asks for it is a command: nobody else's threads, objects or settings are here


IN_THIS_PROCESS = Engine(jobs=1)


def make_engine(name: str, *, scheduler: str = "", jobs: str = "", asked_for: bool = True) -> Engine:
    """Return an engine from its settings; a scheduler that nobody asked for by hand is for Dask alone.

    Raises:
        UsageError: there is no such engine, or they contradict each other.
    """
    if name not in ENGINES:
        raise UsageError(f"--engine (or {settings.ENGINE.env}) is {name!r}; expected {' or '.join(ENGINES)}")
    if name != "dask" and scheduler:
        if asked_for:
            raise UsageError(f"--scheduler was given with the engine {name}; expected --engine dask beside it")
        scheduler = ""
    if not jobs:
        return Engine(name=name, scheduler=scheduler)
    if not (jobs.isascii() and jobs.isdecimal() and int(jobs) > 0):
        raise UsageError(
            f"--jobs (or {settings.JOBS.env}) is {jobs!r}; expected a number of worker processes, for example 4; "
            "1 works in this process"
        )
    if scheduler:
        raise UsageError(
            "--jobs and --scheduler (or DTPROF_SCHEDULER) exclude each other: a running scheduler has its workers"
        )
    return Engine(name=name, jobs=int(jobs))


def open_run(path: Path, engine: Engine) -> "Run":
    """Open a run: one at a URL is fetched here where it is analysed here, else by the workers.

    Raises:
        NotARunError: the path holds no run that can be read.
        MissingDependencyError: a package that the URL needs is not installed.
    """
    from dtprof.records import reader

    return reader.open_piecemeal(path) if engine.name == "dask" else reader.open_run(path)


@contextmanager
def executor_for(engine: Engine, *runs: "Run") -> Iterator["Executor"]:
    """Give an executor for the work on runs.

    Raises:
        MissingDependencyError, SchedulerError: Dask cannot be used.
    """
    from dtprof.job.rank_executor import THIS_PROCESS

    if engine.name == "dask":
        from dtprof.session.executors.dask_cluster import DaskWorkers

        with DaskWorkers(scheduler=engine.scheduler, num=engine.jobs) as workers:
            yield workers
        return
    from dtprof.session.executors.worker_counts import choose_jobs

    if engine.jobs:
        jobs = min(engine.jobs, max((len(run.folders) for run in runs), default=1) or 1)
    else:
        jobs = max((choose_jobs(run.folders) for run in runs), default=1)
    if jobs == 1:
        yield THIS_PROCESS
        return
    from dtprof.session.executors.local_processes import LocalProcesses
    from dtprof.session.executors.memory_pools import give_back_large_blocks

    if engine.owns_process:
        give_back_large_blocks()  # what they send is large
    with LocalProcesses(jobs, forked=engine.owns_process and threading.active_count() == 1) as processes:
        yield processes


def at_hand(run: "Run", executor: "Executor") -> "Run":
    """Return a run as one whose ranks are read once, where processes of this command work on them.

    Each is looked at twice or more. Workers of Dask outlive the command, and what they keep would stay.
    """
    from dtprof.job.rank_executor import THIS_PROCESS

    if executor is THIS_PROCESS:
        return run.kept()
    from dtprof.session.executors.local_processes import LocalProcesses

    return run.kept(executor.num) if isinstance(executor, LocalProcesses) else run


@contextmanager
def beside(executor: "Executor", work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Start work that an executor mostly does, while this process goes on; return the function that waits for it.

    Without workers it is done in this process, once somebody asks for its result.
    """
    from dtprof.job.rank_executor import THIS_PROCESS

    if executor is THIS_PROCESS:
        yield functools.cache(work)
        return
    from concurrent.futures import ThreadPoolExecutor

    thread = ThreadPoolExecutor(1, thread_name_prefix="dtprof-beside")
    try:
        yield thread.submit(work).result
    finally:
        thread.shutdown(wait=False, cancel_futures=True)  # what fails here ends the workers, and so the work
