"""Find the processes that were started as a rank of a run and have left no record: they have not come to join yet."""

from collections.abc import Collection
from pathlib import Path

import psutil

from dtprof import settings

_INTERPRETERS = ("python", "pypy")


def find_starting(run: Path, *, recorded: Collection[int]) -> dict[int, int]:
    """Return ranks by the pid of their process on this host; of several of one rank the oldest that runs Python.

    Ranks are known by RANK in the environment that their launcher gave them: torchrun's, and those of its kind.

    Parameters:
        run: the run directory, as the job was given it.
        recorded: ranks that have left records: what else has their number are their workers.
    """
    found: dict[int, tuple[float, int]] = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            rank = environment.get("RANK", "")
            if environment.get(settings.ENV_RUN_DIR) != str(run) or not rank.isdecimal() or int(rank) in recorded:
                continue
            if not Path(process.exe()).name.startswith(_INTERPRETERS):
                continue
            this = process.create_time(), process.pid
        except (psutil.Error, OSError, ValueError):
            continue  # it has ended, or is none of ours; or its number is none
        found[int(rank)] = min(found.get(int(rank), this), this)
    return {pid: rank for rank, (_, pid) in sorted(found.items())}
