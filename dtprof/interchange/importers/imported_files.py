"""The importers, one format a file, and the run that one of them reads from files.

To add an importer, copy a file that declares an IMPORTER and name it here.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from dtprof.interchange.importers.format_recognition import sort_inputs
from dtprof.interchange.importers.imported_records import ImportedRun, Importer

MODULES = ("kineto_traces", "xla_traces", "horovod", "flight_recorder", "straggler_analysis")
"""Modules of this folder that declare an IMPORTER, in the order in which they are asked whether a file is theirs."""

IMPORTERS: tuple[Importer, ...] = tuple(import_module(f"{__package__}.{name}").IMPORTER for name in MODULES)


def import_files(paths: Iterable[Path]) -> tuple[ImportedRun, tuple[str, ...]]:
    """Read files of one format; return the run, and the names of files of no known format.

    Raises:
        NotATraceError: they cannot be read, are of several formats, or are not of one job.
    """
    inputs = sort_inputs(list(paths), IMPORTERS)
    return inputs.importer.read(inputs.files), inputs.left_out
