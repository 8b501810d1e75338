"""Read the files of other tools, dumps or traces, in several processes where they are large.

Runs are read by the executors of a session.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

MIN_BYTES = 16 << 20
"""Size of all files above which several processes are worth starting."""
MAX_PROCESSES = 8
Result = TypeVar("Result")


def read_files(read: Callable[[Path], Result], files: Sequence[Path]) -> Iterator[Result]:
    """Yield what `read` gives for each file, in order, and raise what it raises."""
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(files))
    size = sum(file.stat().st_size for file in files if file.exists())
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods() or size < MIN_BYTES:
        yield from map(read, files)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(read, files)
