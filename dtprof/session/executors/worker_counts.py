"""The number of worker processes that pay for a run; imports of small runs come on top."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

PAYS_FROM_BYTES = 48_000_000
"""Records of a run, on disk, from which workers save more than their start takes (measured: analysis-speed.md)."""
RANK_COSTS_BYTES = 100_000
"""A rank without records costs as much as so many bytes of them."""
ARCHIVED = 4
"""A byte of an archive costs as much as so many plain ones."""
SAMPLED = 16


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
