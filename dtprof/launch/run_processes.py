"""The processes of a run on this host, by the variables that the job got."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from dtprof import settings

_INTERPRETERS = ("python", "pypy")


REREAD_EVERY = 12
"""Searches after which processes of other jobs are read again: a pid may have been given to a new process unseen."""


class ProcessSearch:
    """Searches for the processes of a run again and again; reads the environment of each foreign process rarely.

    A host may run thousands of processes, and a job may take hours before it starts a rank.
    """

    def __init__(self, run: Path) -> None:
        """Know of no process yet."""
        self.run = run
        self._foreign: set[int] = set()
        self._foreign_last: set[int] = set()
        self._num_searches = 0

    def find(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Yield each Python process of the run with its environment, as `python_processes` does."""
        if self._num_searches % REREAD_EVERY == 0:
            self._foreign.clear()
        self._num_searches += 1
        pids = set(psutil.pids())
        self._foreign &= pids
        found, own = [], set()
        for process, environment in _processes(self.run, sorted(pids - self._foreign)):
            own.add(process.pid)
            if _is_python(process):
                found.append((process, environment))
        # Seen twice: what was only just forked has yet to execute its program, with its environment.
        self._foreign |= (pids - own) & self._foreign_last
        self._foreign_last = pids - own
        return iter(found)


def python_processes(run: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yield each process of a run that runs Python, with its environment; those of other users are left out.

    Parameters:
        run: the run directory, as the job was given it.
    """
    return (found for found in _processes(run, psutil.pids()) if _is_python(found[0]))


def _processes(run: Path, pids: Collection[int]) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for pid in pids:
        try:
            process = psutil.Process(pid)
            environment = process.environ()
        except (psutil.Error, OSError):
            continue  # it has ended, or is of another user
        if is_of_run(run, environment):
            yield process, environment


def _is_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name.startswith(_INTERPRETERS)
    except (psutil.Error, OSError):
        return False  # it has ended


def is_of_run(run: Path, environment: Mapping[str, str]) -> bool:
    """Say whether a process with this environment belongs to a run, by whichever path the run is named."""
    given = environment.get(settings.ENV_RUN_DIR)
    if not given or given == str(run):
        return bool(given)
    with suppress(OSError):
        return run.samefile(given)
    return False


def end_leftovers(run: Path, pids: Collection[int]) -> None:
    """Kill processes of this very run that outlived their launcher; a reused pid is left alone."""
    for process, _ in _processes(run, pids):
        with suppress(psutil.Error):
            process.kill()
