"""Convert recordings of other tools into a run."""

from collections.abc import Sequence
from pathlib import Path

from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_records import ImportedRun
from dtprof.interchange.importers.imported_run import check_output, clear_output, write_imported
from dtprof.launch.run_directory import refuse_foreign_files


def import_run(paths: Sequence[Path], output: Path, *, force: bool) -> tuple[ImportedRun, tuple[str, ...]]:
    """Write a run of the files of one job; return it and the files of no known format.

    Raises:
        OutputError: the output is taken, or cannot be written.
        NotATraceError: no file is of a known format, or one cannot be read.
    """
    check_output(output, paths, force=force)
    refuse_foreign_files(output)
    imported, left_out = import_files(paths)
    # What was there goes only once the input is read: a bad path costs nobody a run.
    clear_output(output)
    write_imported(imported, output)
    return imported, left_out
