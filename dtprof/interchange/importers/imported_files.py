"""Files of any format that is known, read into a run: one process a core where there is much to read."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dtprof.errors import NotATraceError
from dtprof.interchange.importers import format_recognition, kineto_traces
from dtprof.interchange.importers.flight_recorder import import_dumps
from dtprof.interchange.importers.horovod import import_horovod
from dtprof.interchange.importers.imported_records import ImportedRank, ImportedRun
from dtprof.interchange.importers.straggler_analysis import import_straggler_analysis
from dtprof.interchange.importers.xla_traces import import_xla

MANY_BYTES = 32 << 20
"""Size of all files above which several processes are worth starting."""
MAX_PROCESSES = 8


def import_files(paths: Iterable[Path]) -> tuple[ImportedRun, tuple[str, ...]]:
    """Read files of one format; return the run, and the names of files of no known format.

    Raises:
        NotATraceError: they cannot be read, are of several formats, or are not of one job.
    """
    inputs = format_recognition.sort_inputs(list(paths))
    return _READERS[inputs.format](inputs.files), inputs.left_out


def _import_kineto(files: Sequence[Path]) -> ImportedRun:
    ranks, lacks = kineto_traces.join_ranks(list(zip(files, read_all(kineto_traces.read_kineto, files), strict=True)))
    return ImportedRun(
        format=kineto_traces.FORMAT,
        files=tuple(map(str, files)),
        ranks=tuple(ranks),
        cannot_tell=tuple(lacks),
        starts_at_epoch=True,
    )


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
        results = pool.map(_Reading(read), files, chunksize=1)
    for result in results:
        if isinstance(result, str):
            raise NotATraceError(result)
    return [result for result in results if isinstance(result, ImportedRank)]


class _Reading:
    """Reads a file in a process of its own, and brings the message of an error back."""

    def __init__(self, read: Callable[[Path], ImportedRank]) -> None:
        self._read = read

    def __call__(self, file: Path) -> ImportedRank | str:
        try:
            return self._read(file)
        except NotATraceError as error:
            return str(error)


_READERS: dict[str, Callable[[Sequence[Path]], ImportedRun]] = {
    format_recognition.KINETO: _import_kineto,
    format_recognition.FLIGHT_RECORDER: import_dumps,
    format_recognition.HOROVOD: import_horovod,
    format_recognition.XLA: import_xla,
    format_recognition.STRAGGLERS: import_straggler_analysis,
}
