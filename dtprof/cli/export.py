"""`dtprof export`: a run in the format of another tool."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.cli.parsers import output_path
from dtprof.errors import OutputError, UsageError
from dtprof.session import engines

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.api.table import Table
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run

FORMATS = ("perfetto", "chrome", "kineto", "tensorboard", "parquet", "csv", "prometheus")
TRACES = ("perfetto", "chrome", "kineto", "tensorboard")
ARCHIVE = ".tar"
FOLDERS = ("kineto", "tensorboard", "parquet", "csv")
EPILOG = """\
formats:
  perfetto     one .pftrace file for https://ui.perfetto.dev, all ranks on one clock; where PATH ends in .tar, an
               archive of one such file a host, with a perfetto_manifest of the offsets of their clocks
  chrome       one .json.gz file for chrome://tracing and whatever reads trace events
  kineto       a folder of .pt.trace.json.gz, a rank a file, for HolisticTraceAnalysis and torch-tb-profiler
  tensorboard  a log directory: scalars, histograms, pictures, text, layout, and the traces of kineto
  parquet      a folder of tables with a declared schema; csv: the same as text
  prometheus   the figures of the summary as one file of metrics, for a Pushgateway or a textfile collector

examples:
  dtprof export dtprof-runs/20261121-101500-train --format perfetto -o train.pftrace
  dtprof export dtprof-runs/20261121-101500-train --format chrome --steps 100:110 -o train.json.gz
  dtprof export dtprof-runs/20261121-101500-train --format parquet -o tables

exit status: 0; 2 the run cannot be read, the output exists or cannot be written, a package is missing
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write a run for Perfetto, Chrome, TensorBoard, tables",
        description="Write a run in the format of another tool; its figures are those of `dtprof summary`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--format", required=True, choices=FORMATS, help="format to write")
    parser.add_argument(
        "-o",
        "--output",
        type=output_path,
        required=True,
        metavar="PATH",
        help=f"file to write; {_join(FOLDERS)}: folder",
    )
    parser.add_argument(
        "--steps",
        type=parse_steps,
        metavar="A:B",
        help="steps that a trace holds, both included (default: all, or the newest that fit)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite PATH")
    engines.add_options(parser)
    parser.set_defaults(run=run)


def _join(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def parse_steps(text: str) -> tuple[int, int]:
    """Return first and last step of A:B, or of a single number."""
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; expected A:B, for example 100:110")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; expected A:B, for example 100:110")
    return first, last


def run(arguments: argparse.Namespace) -> int:
    """Write the run and print where it lies."""
    from dtprof.session.executors import memory_pools

    if arguments.steps is not None and arguments.format not in TRACES:
        raise UsageError(f"--steps chooses what a trace holds; --format {arguments.format} writes every step")
    output: Path = arguments.output
    engine = engines.chosen_engine(arguments)
    memory_pools.use_one_pool()
    with prepared(output, folder=arguments.format in FOLDERS, force=arguments.force) as scratch:
        said = write(
            arguments.run_directory,
            arguments.format,
            scratch,
            arguments.steps,
            suffix=output.suffix,
            engine=engine,
        )
    for sentence in said:
        print(f"dtprof export: {sentence}", file=sys.stderr)
    print(output)
    print(f"next: {_next(arguments.format, output)}", file=sys.stderr)
    return 0


def write(
    run_directory: Path,
    kind: str,
    path: Path,
    steps: tuple[int, int] | None,
    *,
    suffix: str = "",
    engine: engines.Engine = engines.IN_THIS_PROCESS,
) -> list[str]:
    """Write a run in one format; return what is said of what is not in it.

    Parameters:
        suffix: what the name that the user gave ends with.

    Raises:
        NotARunError: the path holds no run that can be read.
        NothingToShowError: it has none of the steps.
        MissingDependencyError: a package is needed and not installed.
        SchedulerError, WorkerLostError: the engine cannot do it.
    """
    if kind == "tensorboard":
        from dtprof.cli.tensorboard import require_tensorboard

        require_tensorboard()
    opened = engines.open_run(run_directory, engine)
    with engines.executor_for(engine, opened) as executor:
        return write_opened(opened, kind, path, steps, suffix=suffix, executor=executor)


def write_opened(
    opened: "Run", kind: str, path: Path, steps: tuple[int, int] | None, *, suffix: str = "", executor: "Executor"
) -> list[str]:
    """Write a run that is open, as `write` does."""
    if kind in ("parquet", "csv"):
        return _write_tables(opened, kind, path, executor)
    if kind == "prometheus":
        from dtprof.analysis.run_summary import summarise
        from dtprof.interchange.exporters.prometheus_export import write_prometheus

        return write_prometheus(summarise(opened, executor), path)
    if kind == "tensorboard":
        from dtprof.cli.tensorboard import write_logs

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
    from dtprof import api
    from dtprof.analysis.run_summary import summarise
    from dtprof.api.record_tables import read_records
    from dtprof.api.result_tables import tabulate_results
    from dtprof.interchange.exporters.table_files import write_tables

    def pieces(summary: "Callable[[], Summary]") -> "Iterator[tuple[str, Table]]":
        for ranks in [[rank] for rank in opened.ranks] or [[]]:
            tables = [opened.load(rank) for rank in ranks]
            for name in api.RECORDS:
                yield name, read_records(name, tables)
        for name in api.RESULTS:
            yield name, tabulate_results(name, summary())

    with engines.beside(executor, lambda: summarise(opened, executor)) as summary:
        write_tables(pieces(summary), path, kind)
    return []


@contextmanager
def prepared(path: Path, *, folder: bool, force: bool) -> Iterator[Path]:
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
    if path.is_dir() and not _is_ours(path):
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


def _is_ours(folder: Path) -> bool:
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


def _next(kind: str, output: Path) -> str:
    path = shlex.quote(str(output))
    read_trace = f"from hta.trace_analysis import TraceAnalysis; TraceAnalysis(trace_dir={str(output)!r})"
    read_table = f"import pandas; print(pandas.read_parquet({str(output / 'ranks.parquet')!r}))"
    return {
        "perfetto": f"open https://ui.perfetto.dev and drop {path} on it; it stays on your machine",
        "chrome": f"open chrome://tracing or https://ui.perfetto.dev and load {path}",
        "kineto": _python(read_trace),
        "tensorboard": shlex.join(["tensorboard", "--logdir", str(output)]),
        "parquet": _python(read_table),
        "csv": shlex.join(["head", str(output / "ranks.csv")]),
        "prometheus": f"curl --data-binary {shlex.quote(f'@{output}')} http://PUSHGATEWAY:9091/metrics/job/dtprof",
    }[kind]


def _python(code: str) -> str:
    """Return the command that runs a line; in double quotes where that reads as it is."""
    plain = not set(code) & set('"\\$`!')
    return f'python -c "{code}"' if plain else shlex.join(["python", "-c", code])
