"""Find the processes that were started as a rank of a run and have left no record: they have not joined yet."""

from collections.abc import Collection
from pathlib import Path

import psutil

from dtprof.launch.run_processes import python_processes


def find_starting(run: Path, *, recorded: Collection[int]) -> dict[int, int]:
    """Return ranks by the pid of their process on this host; of several of one rank the oldest that runs Python.

    A rank has RANK in its environment, from torchrun or a similar launcher. A launcher may have RANK itself, that of
    its node, as Kubernetes operators set it: a process that starts others with another RANK or LOCAL_RANK is no rank.

    Parameters:
        run: the run directory, as the job was given it.
        recorded: ranks that have left records; other processes with their number are their workers.
    """
    candidates = {}
    for process, environment in python_processes(run):
        rank = environment.get("RANK", "")
        if not rank.isdecimal():
            continue
        try:
            place = int(rank), environment.get("LOCAL_RANK")
            candidates[process.pid] = process.create_time(), process.ppid(), place
        except (psutil.Error, OSError, ValueError):
            continue  # it has ended, or its RANK is no number
    launchers = {
        parent for _, parent, place in candidates.values() if parent in candidates and candidates[parent][2] != place
    }
    oldest: dict[int, tuple[float, int]] = {}
    for pid, (created_s, _, (rank_number, _)) in candidates.items():
        if pid not in launchers and rank_number not in recorded:
            oldest[rank_number] = min(oldest.get(rank_number, (created_s, pid)), (created_s, pid))
    return {pid: rank_number for rank_number, (_, pid) in sorted(oldest.items())}
