"""Write a run in the format of another tool, whole or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.errors import OutputError
from dtprof.session.engines import IN_THIS_PROCESS, Engine, beside, executor_for, open_run

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.interchange.public_tables.table import Table
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run

FORMATS = ("perfetto", "chrome", "kineto", "tensorboard", "parquet", "csv", "prometheus")
TRACES = ("perfetto", "chrome", "kineto", "tensorboard")
ARCHIVE = ".tar"
FOLDERS = ("kineto", "tensorboard", "parquet", "csv")


def export_run(
    path: Path,
    kind: str,
    output: Path,
    engine: Engine,
    *,
    steps: tuple[int, int] | None = None,
    force: bool = False,
) -> list[str]:
    """Write a run to `output`, which appears once all is written; return remarks on what is left out.

    Parameters:
        kind: of FORMATS.
        steps: first and last step of a trace; None: all, or the newest that fit.
        force: replace an earlier export.

    Raises:
        OutputError: the output is taken, holds what dtprof did not write, or cannot be written.
        NotARunError, NothingToShowError, MissingDependencyError, SchedulerError, WorkerLostError: as `write_run`.
    """
    from dtprof.session.executors import memory_pools

    memory_pools.use_one_pool()
    with _replacing(output, folder=kind in FOLDERS, force=force) as scratch:
        return write_run(path, kind, scratch, steps, suffix=output.suffix, engine=engine)


def write_run(
    run_directory: Path,
    kind: str,
    path: Path,
    steps: tuple[int, int] | None,
    *,
    suffix: str = "",
    engine: Engine = IN_THIS_PROCESS,
) -> list[str]:
    """Write a run in one format; return remarks on what is left out.

    Parameters:
        suffix: what the name that the user gave ends with.

    Raises:
        NotARunError: the path holds no run that can be read.
        NothingToShowError: it has none of the steps.
        MissingDependencyError: a package is needed and not installed.
        SchedulerError, WorkerLostError: the engine cannot do it.
    """
    if kind == "tensorboard":
        from dtprof.session.tensorboard_view import require_tensorboard

        require_tensorboard()
    opened = open_run(run_directory, engine)
    with executor_for(engine, opened) as executor:
        return write_opened(opened, kind, path, steps, suffix=suffix, executor=executor)


def write_opened(
    opened: "Run", kind: str, path: Path, steps: tuple[int, int] | None, *, suffix: str = "", executor: "Executor"
) -> list[str]:
    """Write a run that is open, as `write_run` does."""
    if kind in ("parquet", "csv"):
        return _write_tables(opened, kind, path, executor)
    if kind == "prometheus":
        from dtprof.analysis.run_summary import summarise
        from dtprof.interchange.exporters.prometheus_export import write_prometheus

        return write_prometheus(summarise(opened, executor), path)
    if kind == "tensorboard":
        from dtprof.session.tensorboard_view import write_logs

        logs, said = write_logs(opened, path, executor, steps=steps)
        logs.close()
        return said
    from dtprof.analysis.timeline.operation_detail import read_detail

    detail = read_detail(opened, executor)
    if kind == "perfetto" and suffix == ARCHIVE:
        from dtprof.interchange.exporters.perfetto_archive import write_perfetto_archive

        return write_perfetto_archive(detail, path, steps=steps)
    if kind == "perfetto":
        from dtprof.interchange.exporters.perfetto_trace import write_perfetto

        return write_perfetto(detail, path, steps=steps, executor=executor)
    if kind == "chrome":
        from dtprof.interchange.exporters.chrome_trace import write_chrome

        return write_chrome(detail, path, steps=steps, executor=executor)
    from dtprof.interchange.exporters.kineto_export import write_kineto

    return write_kineto(detail, path, steps=steps, executor=executor)


def _write_tables(opened: "Run", kind: str, path: Path, executor: "Executor") -> list[str]:
    """Write the records of a rank at a time, each read once, then the results, which workers compute meanwhile."""
    from dtprof.analysis.run_summary import summarise
    from dtprof.interchange.exporters.table_files import write_tables
    from dtprof.interchange.public_tables.record_tables import RECORDS, read_records
    from dtprof.interchange.public_tables.result_tables import RESULTS, tabulate_results

    def pieces(summary: "Callable[[], Summary]") -> "Iterator[tuple[str, Table]]":
        for ranks in [[rank] for rank in opened.ranks] or [[]]:
            tables = [opened.load(rank) for rank in ranks]
            for name in RECORDS:
                yield name, read_records(name, tables)
        for name in RESULTS:
            yield name, tabulate_results(name, summary())

    with beside(executor, lambda: summarise(opened, executor)) as summary:
        write_tables(pieces(summary), path, kind)
    return []


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
    """Say whether a folder holds nothing but what an export writes."""
    endings = (".parquet", ".csv", ".pt.trace.json.gz")
    return all(
        one.name in ("schema.json", "dtprof.json")
        or one.name.endswith(endings)
        or one.name.startswith("events.out.tfevents.")
        for one in folder.rglob("*")
        if not one.is_dir()
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(NotADirectoryError):  # of a path below a file, which is said once it is written
            path.unlink(missing_ok=True)
