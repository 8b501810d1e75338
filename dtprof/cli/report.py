"""`dtprof report`: write a run as one self-contained HTML page."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.cli.parsers import output_path
from dtprof.session import engines

if TYPE_CHECKING:
    from dtprof.report.figures.figure_source import Source
    from dtprof.report.pages.page_dashboard import Dashboard

EPILOG = """\
examples:
  dtprof report dtprof-runs/20261121-101500-train
  dtprof report runs/after --against runs/before
  dtprof report RUN --dashboard pipeline --dashboard mine.toml -o mine.html

exit status: 0 the file was written, 2 the run cannot be read or the file not written
"""
DEFAULT_FILE = "report.html"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a run as one interactive HTML file",
        description="Write one self-contained HTML file: it opens from disk and never asks the network for anything.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=output_path,
        metavar="FILE",
        help=f"file to write (default: RUN/{DEFAULT_FILE}; of a run at a URL NAME-{DEFAULT_FILE} here)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--dashboard",
        action="append",
        metavar="NAME|FILE.toml",
        help="page to write, may be given several times (default: all that have something to show)",
    )
    parser.add_argument(
        "--against", type=Path, metavar="OTHER", help="run directory to compare with, on a page of its own"
    )
    engines.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the pages and print where they lie."""
    engine = engines.chosen_engine(arguments)
    named = _load_named(arguments.dashboard) if arguments.dashboard else []
    chosen: Path | None = arguments.output
    if chosen is not None and "--output" in arguments.from_environment and chosen.is_dir():
        chosen = None  # DTPROF_OUTPUT is that of `dtprof run`
    if chosen is not None and chosen.exists():
        from dtprof.report.pages.html_file import refuse_taken  # before anything is worked out for it

        refuse_taken(chosen, force=arguments.force)
    source = read_source(arguments.run_directory, engine, against=arguments.against)
    from dtprof.report.pages import html_file, page_dashboard, page_panels

    pages = page_dashboard.name_apart(named) or page_dashboard.load_report(
        page_panels.panel_names(), available=source.available
    )
    output = chosen or _beside(arguments.run_directory)
    is_ours = chosen is None and html_file.is_own_report(output)
    html_file.write_html(source, pages, output, force=arguments.force or is_ours)
    print(output)
    print(f"next: open {shlex.quote(str(output))} in a browser", file=sys.stderr)
    return 0


def _load_named(names: Sequence[str]) -> "list[Dashboard]":
    from dtprof.report.pages import page_dashboard, page_panels

    return [page_dashboard.load_dashboard(name, page_panels.panel_names()) for name in names]


def read_source(path: Path, engine: engines.Engine, *, against: Path | None = None) -> "Source":
    """Read and analyse all that the pages show of a run; it is diagnosed while workers sum it up.

    Raises:
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    from dtprof.analysis.comparison.comparison_series import measure_run
    from dtprof.analysis.comparison.run_comparison import AT_LEAST, compare_runs
    from dtprof.analysis.memory.device_series import follow_devices, samples_each
    from dtprof.analysis.results import Summary
    from dtprof.analysis.timeline.run_closeup import examine
    from dtprof.diagnosis.reported_mismatches import list_told
    from dtprof.report.figures.figure_source import Source
    from dtprof.session.run_diagnosis import diagnose_opened

    runs = [engines.open_run(one, engine) for one in (against, path) if one is not None]
    summed_up: Future[Summary] = Future()
    with engines.executor_for(engine, *runs) as executor, ThreadPoolExecutor(1) as beside:
        beside.submit(importlib.import_module, "dtprof.report.pages.html_file")  # while workers start
        diagnosed = beside.submit(diagnose_opened, runs[-1], summed_up.result)
        try:
            summary, closeup = examine(runs[-1], executor)
            summed_up.set_result(summary)
        finally:
            summed_up.cancel()  # where that failed, else in vain
        figures = [measure_run(run, executor) for run in runs] if against is not None else []
        verdict = diagnosed.result()
    comparison = compare_runs(*figures, at_least=AT_LEAST) if figures else None
    nodes = runs[-1].node_samples(max_samples=samples_each(len(summary.hosts)))
    return Source(
        summary=summary,
        closeup=closeup,
        verdict=verdict,
        comparison=comparison,
        nodes=follow_devices(nodes.values()),
        told=list_told(runs[-1].mismatches, verdict, started_ns=runs[-1].manifest.started_realtime_ns),
    )


def _beside(run_directory: Path) -> Path:
    from dtprof.records import remote

    at_url = remote.url_of(run_directory) is not None
    return Path(f"{run_directory.name}-{DEFAULT_FILE}") if at_url else remote.plain(run_directory) / DEFAULT_FILE
