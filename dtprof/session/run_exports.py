"""Write a run in the format of another tool, whole or not at all."""

import fnmatch
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.errors import OutputError
from dtprof.session.engines import Engine, at_hand, beside, executor_for, open_run
from dtprof.session.run_measurement import summarise_fully

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.analysis.timeline.operation_detail import RunDetail
    from dtprof.interchange.public_tables.table import Table
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run


def export_run(
    path: Path,
    kind: str,
    output: Path,
    engine: Engine,
    *,
    steps: tuple[int, int] | None = None,
    force: bool = False,
) -> list[str]:
    """Write a run to `output`, which appears once all is written; return remarks on omitted parts.

    Parameters:
        kind: of FORMATS.
        steps: first and last step of a trace; None: all, or the newest that fit.
        force: replace an earlier export.

    Raises:
        OutputError: the output is taken, holds what dtprof did not write, or cannot be written.
        NotARunError: the path holds no run that can be read.
        NothingToShowError, MissingDependencyError, SchedulerError, WorkerLostError: as `write_export`.
    """
    from dtprof.session.executors import memory_pools

    memory_pools.use_one_pool()
    with _replacing(output, folder=FORMATS[kind].is_folder, force=force) as scratch:
        FORMATS[kind].require()
        opened = open_run(path, engine)
        with executor_for(engine, opened) as executor:
            run = at_hand(opened, executor)
            return write_export(run, kind, scratch, steps, suffix=output.suffix, executor=executor)


def write_export(
    run: "Run", kind: str, path: Path, steps: tuple[int, int] | None, *, suffix: str = "", executor: "Executor"
) -> list[str]:
    """Write a run that is open in one format; return remarks on omitted parts.

    Parameters:
        suffix: the end of the file name that the user gave, which chooses between one trace and an archive.

    Raises:
        NothingToShowError: it has none of the steps.
        MissingDependencyError: a package is needed and not installed.
        SchedulerError, WorkerLostError: the executor cannot do it.
    """
    return FORMATS[kind].write(_Export(run=run, kind=kind, path=path, steps=steps, suffix=suffix, executor=executor))


@dataclass(frozen=True, kw_only=True)
class _Export:
    """What is written, and where."""

    run: "Run"
    kind: str
    path: Path
    steps: tuple[int, int] | None
    suffix: str
    executor: "Executor"

    def detail(self, max_events: int) -> "RunDetail":
        """Read the parts of a run that a trace of at most so many events shows."""
        from dtprof.analysis.timeline.operation_detail import read_detail

        return read_detail(self.run, self.executor, steps=self.steps, max_events=max_events)


def _write_perfetto(export: _Export) -> list[str]:
    from dtprof.interchange.exporters.perfetto_trace import MAX_EVENTS, write_perfetto

    if export.suffix == ARCHIVE:
        from dtprof.interchange.exporters.perfetto_archive import write_perfetto_archive

        return write_perfetto_archive(export.detail(MAX_EVENTS), export.path, steps=export.steps)
    return write_perfetto(export.detail(MAX_EVENTS), export.path, steps=export.steps, executor=export.executor)


def _write_chrome(export: _Export) -> list[str]:
    from dtprof.interchange.exporters.chrome_trace import MAX_EVENTS, write_chrome

    return write_chrome(export.detail(MAX_EVENTS), export.path, steps=export.steps, executor=export.executor)


def _write_kineto(export: _Export) -> list[str]:
    from dtprof.interchange.exporters.kineto_export import MAX_EVENTS, write_kineto

    return write_kineto(export.detail(MAX_EVENTS), export.path, steps=export.steps, executor=export.executor)


def _write_tensorboard(export: _Export) -> list[str]:
    from dtprof.session.tensorboard_view import write_logs

    logs, remarks = write_logs(export.run, export.path, export.executor, steps=export.steps)
    logs.close()
    return remarks


def _write_prometheus(export: _Export) -> list[str]:
    from dtprof.interchange.exporters.prometheus_export import write_prometheus

    return write_prometheus(summarise_fully(export.run, export.executor), export.path)


def _write_tables(export: _Export) -> list[str]:
    """Write the records, rank by rank, each read once, then the results, which workers compute meanwhile."""
    from dtprof.analysis.map_reduce.long_log_survey import load_in_ranges
    from dtprof.interchange.exporters.table_files import write_tables
    from dtprof.interchange.public_tables.record_tables import RECORDS, read_records
    from dtprof.interchange.public_tables.result_tables import RESULTS, tabulate_results

    def pieces(summary: "Callable[[], Summary]") -> "Iterator[tuple[str, Table]]":
        for rank in export.run.ranks:
            for tables in load_in_ranges(export.run, rank):
                yield from ((name, read_records(name, [tables])) for name in RECORDS)
        if not export.run.ranks:
            yield from ((name, read_records(name, [])) for name in RECORDS)
        for name in RESULTS:
            yield name, tabulate_results(name, summary())

    with beside(export.executor, lambda: summarise_fully(export.run, export.executor)) as summary:
        write_tables(pieces(summary), export.path, export.kind)
    return []


def _require_tensorboard() -> None:
    from dtprof.session.tensorboard_view import require_tensorboard

    require_tensorboard()


def _run_python(code: str) -> str:
    """Return the command that runs a line; in double quotes where that reads as it is."""
    is_plain = not set(code) & set('"\\$`!')
    return f'python -c "{code}"' if is_plain else shlex.join(["python", "-c", code])


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One format."""

    words: str  # what is written, and for whom
    write: Callable[[_Export], list[str]]
    next_command: Callable[[Path], str]  # what to do with what was written
    files: tuple[str, ...] = ()  # patterns of the names of its files where it is a folder
    is_trace: bool = False  # steps of it can be chosen
    require: Callable[[], None] = lambda: None  # says so where a package is missing

    @property
    def is_folder(self) -> bool:
        """Say whether it is a folder of files."""
        return bool(self.files)


FORMATS = {
    "perfetto": ExportFormat(
        words="one .pftrace file for https://ui.perfetto.dev, all ranks on one clock; where PATH ends in .tar, an "
        "archive of one such file a host, with a perfetto_manifest of the offsets of their clocks",
        write=_write_perfetto,
        next_command=lambda path: (
            f"open https://ui.perfetto.dev and drop {shlex.quote(str(path))} on it; it stays on your machine"
        ),
        is_trace=True,
    ),
    "chrome": ExportFormat(
        words="one .json.gz file for chrome://tracing and whatever reads trace events",
        write=_write_chrome,
        next_command=lambda path: f"open chrome://tracing or https://ui.perfetto.dev and load {shlex.quote(str(path))}",
        is_trace=True,
    ),
    "kineto": ExportFormat(
        words="a folder of .pt.trace.json.gz, a rank a file, for HolisticTraceAnalysis and torch-tb-profiler",
        write=_write_kineto,
        next_command=lambda path: _run_python(
            f"from hta.trace_analysis import TraceAnalysis; TraceAnalysis(trace_dir={str(path)!r})"
        ),
        files=("*.pt.trace.json.gz",),
        is_trace=True,
    ),
    "tensorboard": ExportFormat(
        words="a log directory: scalars, histograms, pictures, text, layout, and the traces of kineto",
        write=_write_tensorboard,
        next_command=lambda path: shlex.join(["tensorboard", "--logdir", str(path)]),
        files=("events.out.tfevents.*", "*.pt.trace.json.gz"),
        is_trace=True,
        require=_require_tensorboard,
    ),
    "parquet": ExportFormat(
        words="a folder of tables with a declared schema",
        write=_write_tables,
        next_command=lambda path: _run_python(
            f"import pandas; print(pandas.read_parquet({str(path / 'ranks.parquet')!r}))"
        ),
        files=("*.parquet", "schema.json"),
    ),
    "csv": ExportFormat(
        words="the same tables as text",
        write=_write_tables,
        next_command=lambda path: shlex.join(["head", str(path / "ranks.csv")]),
        files=("*.csv", "schema.json"),
    ),
    "prometheus": ExportFormat(
        words="the figures of the summary as one file of metrics, for a Pushgateway or a textfile collector",
        write=_write_prometheus,
        next_command=lambda path: (
            f"curl --data-binary {shlex.quote(f'@{path}')} http://PUSHGATEWAY:9091/metrics/job/dtprof"
        ),
    ),
}
TRACES = tuple(name for name, export in FORMATS.items() if export.is_trace)
FOLDERS = tuple(name for name, export in FORMATS.items() if export.is_folder)
ARCHIVE = ".tar"
"""Suffixes of paths where Perfetto gets an archive of one trace a host."""


@contextmanager
def _replacing(path: Path, *, folder: bool, force: bool) -> Iterator[Path]:
    """Give a place beside PATH to write to, and put it in its place once everything is written.

    Raises:
        OutputError: PATH is taken, holds what dtprof did not write, or cannot be written.
    """
    if path.name in ("", ".."):
        raise OutputError(f"{str(path)!r} is no name of a file or folder to make; give one with -o")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; give another path with -o, or --force to overwrite it")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OutputError(f"{path} is neither a file nor a directory; give another path with -o")
    if path.is_file() and folder:
        raise OutputError(f"{path} is a file; this format is a folder: give its name with -o")
    if path.is_dir() and not folder:
        raise OutputError(f"{path} is a directory; this format is one file: give its name with -o")
    if path.is_dir() and not _is_export(path):
        raise OutputError(f"{path} holds files that dtprof did not write; give another path with -o")
    scratch = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(scratch)
        yield scratch
        _remove(path)
        scratch.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); give another path with -o") from error
    finally:
        _remove(scratch)


def _is_export(folder: Path) -> bool:
    """Say whether a folder holds nothing but the files of an export."""
    patterns = {pattern for export in FORMATS.values() for pattern in export.files}
    return all(
        any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)
        for file in folder.rglob("*")
        if not file.is_dir()
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(NotADirectoryError):  # of a path below a file, which is said once it is written
            path.unlink(missing_ok=True)
