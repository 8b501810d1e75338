"""Find the processes that were started as a rank of a run and have left no record: they have not come to join yet."""

from collections.abc import Collection
from pathlib import Path

import psutil

from dtprof import settings

_INTERPRETERS = ("python", "pypy")


def find_starting(run: Path, *, recorded: Collection[int]) -> dict[int, int]:
    """Return ranks by the pid of their process on this host; of several of one rank the oldest that runs Python.

    Ranks are known by RANK in the environment that their launcher gave them: torchrun's, and those of its kind. A
    launcher may have been given one itself, its node's, as Kubernetes' operators do: what starts others by their own
    RANK or LOCAL_RANK is no rank.

    Parameters:
        run: the run directory, as the job was given it.
        recorded: ranks that have left records: what else has their number are their workers.
    """
    seen = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            rank = environment.get("RANK", "")
            if environment.get(settings.ENV_RUN_DIR) != str(run) or not rank.isdecimal():
                continue
            if Path(process.exe()).name.startswith(_INTERPRETERS):
                place = int(rank), environment.get("LOCAL_RANK")
                seen[process.pid] = process.create_time(), process.ppid(), place
        except (psutil.Error, OSError, ValueError):
            continue  # it has ended, or is none of ours; or its number is none
    launchers = {parent for _, parent, place in seen.values() if parent in seen and seen[parent][2] != place}
    found: dict[int, tuple[float, int]] = {}
    for pid, (begun, _, (rank_number, _)) in seen.items():
        if pid not in launchers and rank_number not in recorded:
            found[rank_number] = min(found.get(rank_number, (begun, pid)), (begun, pid))
    return {pid: rank_number for rank_number, (_, pid) in sorted(found.items())}
