"""`dtprof report`: write a run as one self-contained HTML page."""

import argparse
import shlex
import sys
from pathlib import Path

from dtprof.cli import engines

EPILOG = """\
example:
  dtprof report dtprof-runs/20261121-101500-train

exit status: 0 the page was written, 2 the run cannot be read or the page not written
"""
DEFAULT_FILE = "report.html"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a run as one interactive HTML page",
        description="Write one self-contained HTML file: it opens from disk and never asks the network for anything.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: RUN/{DEFAULT_FILE}; of a run at a URL NAME-{DEFAULT_FILE} here)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--dashboard", default="overview", metavar="NAME|FILE.toml", help="page to write (default: %(default)s)"
    )
    engines.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print where it lies."""
    from dtprof.cli.summary import summarise
    from dtprof.report import html, page_dashboard, page_panels

    dashboard = page_dashboard.load_dashboard(arguments.dashboard, page_panels.panel_names())
    summary = summarise(arguments.run_directory, engines.chosen_engine(arguments))
    output = arguments.output or _beside(arguments.run_directory)
    is_ours = arguments.output is None and html.is_own_report(output)
    html.write_html(summary, dashboard, output, force=arguments.force or is_ours)
    print(output)
    print(f"next: open {shlex.quote(str(output))} in a browser", file=sys.stderr)
    return 0


def _beside(run_directory: Path) -> Path:
    from dtprof.run_format import remote

    at_url = remote.url_of(run_directory) is not None
    return Path(f"{run_directory.name}-{DEFAULT_FILE}") if at_url else remote.plain(run_directory) / DEFAULT_FILE
