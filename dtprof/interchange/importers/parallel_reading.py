"""Read files in several processes where there is much to read."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dtprof.interchange.importers.imported_records import ImportedRank

MANY_BYTES = 32 << 20
"""Size of all files above which several processes are worth starting."""
MAX_PROCESSES = 8


def read_all(read: Callable[[Path], ImportedRank], files: Sequence[Path]) -> list[ImportedRank]:
    """Read each file, several at a time where they are large.

    Raises:
        NotATraceError: one cannot be read.
    """
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(files))
    size = sum(file.stat().st_size for file in files)
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods() or size < MANY_BYTES:
        return [read(file) for file in files]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(read, files, chunksize=1)
