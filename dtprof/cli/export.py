"""`dtprof export`: a run in the format of another tool."""

import argparse
import re
import sys
import textwrap
from pathlib import Path

from dtprof.cli import engine_options, run_argument
from dtprof.cli.parsers import output_path
from dtprof.errors import UsageError
from dtprof.session.run_exports import FOLDERS, FORMATS, TRACES, export_run

EPILOG = """\
formats:
{formats}

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
        epilog=EPILOG.format(formats="\n".join(_describe(name) for name in FORMATS)),
    )
    run_argument.add_run(parser)
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
    engine_options.add_options(parser)


def _describe(name: str) -> str:
    return textwrap.fill(FORMATS[name].words, 118, initial_indent=f"  {name:<13}", subsequent_indent=" " * 15)


def _join(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def parse_steps(text: str) -> tuple[int, int]:
    """Return first and last step of A:B, or of a single number."""
    match = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; expected A:B, for example 100:110")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; expected A:B, for example 100:110")
    return first, last


def run(arguments: argparse.Namespace) -> int:
    """Write the run and print where it lies."""
    if arguments.steps is not None and arguments.format not in TRACES:
        raise UsageError(f"--steps chooses what a trace holds; --format {arguments.format} writes every step")
    output: Path = arguments.output
    remarks = export_run(
        arguments.run_directory,
        arguments.format,
        output,
        engine_options.chosen_engine(arguments),
        steps=arguments.steps,
        force=arguments.force,
    )
    for remark in remarks:
        print(f"dtprof export: {remark}", file=sys.stderr)
    print(output)
    print(f"next: {FORMATS[arguments.format].next_command(output)}", file=sys.stderr)
    return 0
