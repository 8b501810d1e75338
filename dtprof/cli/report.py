"""`dtprof report`: write a run as one self-contained HTML page."""

import argparse
import shlex
import sys
from pathlib import Path

from dtprof.cli import engine_options, run_argument
from dtprof.cli.parsers import output_path
from dtprof.session.report_writing import DEFAULT_FILE, write_report

HTML = (".html", ".htm")
EPILOG = """\
examples:
  dtprof report dtprof-runs/20261121-101500-train
  dtprof report runs/after --against runs/before
  dtprof report RUN --dashboard pipeline --dashboard mine.toml -o mine.html

exit status: 0 the file was written, 2 the run cannot be read or the file not written
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a run as one interactive HTML file",
        description="Write one self-contained HTML file: it opens from disk and never asks the network for anything.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
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
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the pages and print where they lie."""
    output: Path | None = arguments.output
    if output is not None and "--output" in arguments.from_environment and output.is_dir():
        output = None  # DTPROF_OUTPUT is that of `dtprof run`
    written = write_report(
        arguments.run_directory,
        engine_options.chosen_engine(arguments),
        output=output,
        dashboards=arguments.dashboard or (),
        against=arguments.against,
        force=arguments.force,
    )
    print(written)
    if written.suffix in HTML:
        print(f"next: open {shlex.quote(str(written))} in a browser", file=sys.stderr)
    else:
        print(f"next: name it {shlex.quote(f'{written}.html')}: browsers show other files as text", file=sys.stderr)
    return 0
