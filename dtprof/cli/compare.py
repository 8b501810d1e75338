"""`dtprof compare`: what differs between two runs beyond their noise."""

import argparse
import json
from pathlib import Path

from dtprof.cli import engine_options
from dtprof.typed_quantities import parse_share

DEFAULT_AT_LEAST = "1%"
EPILOG = """\
examples:
  dtprof compare runs/before runs/after
  dtprof compare runs/before runs/after --json | jq '.changes[] | select(.verdict == "larger")'

How it judges is defined in docs/reference/metrics.md.
exit status: 0 compared, whatever the answer; 2 a run cannot be
read, or dtprof was used wrongly
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compare",
        help="show what differs between two runs beyond their noise",
        description="Compare two runs step by step: step time and its parts, communication, bubbles and memory, of the "
        "job and of each rank, with confidence intervals; and say how small a difference could have been detected.",
        epilog=EPILOG,
    )
    parser.add_argument("run_a", type=Path, metavar="A", help="run directory, the earlier one or the baseline")
    parser.add_argument("run_b", type=Path, metavar="B", help="run directory to compare with it")
    parser.add_argument(
        "--at-least",
        default=DEFAULT_AT_LEAST,
        metavar="SHARE",
        help="smaller differences do not count: a share of the step for times, of the figure for sizes (default: 1%%)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    at_least = parse_share("--at-least", arguments.at_least)

    from dtprof.report.documents.comparison_json import comparison_json
    from dtprof.report.text.comparison_text import comparison_text
    from dtprof.session.run_measurement import compare

    engine = engine_options.chosen_engine(arguments)
    result = compare(arguments.run_a, arguments.run_b, engine, at_least=at_least)
    print(json.dumps(comparison_json(result), indent=1) if arguments.json else comparison_text(result))
    return 0
