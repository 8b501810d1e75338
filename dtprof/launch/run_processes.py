"""The processes of a run on this host, by the variables that the job got."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from dtprof import settings

_INTERPRETERS = ("python", "pypy")


def python_processes(run: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yield each process of a run that runs Python, with its environment; those of other users are left out.

    Parameters:
        run: the run directory, as the job was given it.
    """
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if not is_of_run(run, environment) or not Path(process.exe()).name.startswith(_INTERPRETERS):
                continue
        except (psutil.Error, OSError):
            continue  # it has ended, or is of another user
        yield process, environment


def is_of_run(run: Path, environment: Mapping[str, str]) -> bool:
    """Say whether a process with this environment belongs to a run."""
    return environment.get(settings.ENV_RUN_DIR) == str(run)
