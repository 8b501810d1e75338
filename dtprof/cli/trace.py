"""`dtprof trace`: the windows of torch.profiler that a run holds, joined to its records; take one now."""

import argparse
import json
import math
import sys

from dtprof import settings
from dtprof.cli import engine_options, run_argument
from dtprof.errors import UsageError

DEFAULT_STEPS = 3
DEFAULT_TOP = 10
DEFAULT_TIMEOUT_S = 300.0
EPILOG = """\
examples:
  dtprof run --trace-steps 10:13 --trace-ranks 0,5 -- torchrun --nproc-per-node 8 train.py
  dtprof trace dtprof-runs/20261121-101500-train
  dtprof trace dtprof-runs/20261121-101500-train --now --steps 2 --ranks 0
  dtprof trace dtprof-runs/20261121-101500-train --now --memory

With --now each rank begins at the end of the step at hand; the trace opens in https://ui.perfetto.dev, the memory of a
GPU in https://pytorch.org/memory_viz.
exit status: 0; 1 some rank did not take it; 2 there is none, or no rank can be asked
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "trace",
        help="list profiler windows joined to the records, or take one now",
        description="List the windows of torch.profiler that ranks took, which recorded operations are in them, and "
        "what took the time; with --now, let the ranks of a running job on this host take one.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
    parser.add_argument("--ranks", default="", metavar="LIST", help="ranks such as 0,5 or 0-3,8 (default: all)")
    parser.add_argument(
        "--top", type=_count, default=DEFAULT_TOP, metavar="N", help="operators and kernels to list (default: 10)"
    )
    parser.add_argument("--now", action="store_true", help="take a window of the next steps of the running job")
    parser.add_argument("--steps", type=_count, metavar="N", help="with --now: steps it takes (default: 3)")
    parser.add_argument(
        "--memory", action="store_true", help="with --now: a snapshot of memory; a window only with --steps"
    )
    parser.add_argument(
        "--timeout",
        default=f"{DEFAULT_TIMEOUT_S:g}",
        metavar="S",
        help="with --now: seconds to wait for the ranks (default: 300)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engine_options.add_options(parser)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= settings.MOST_TRACED_STEPS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {settings.MOST_TRACED_STEPS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--timeout is {text!r}; expected a number of seconds above 0, for example --timeout 60")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Print the windows, after taking one where that is asked for."""
    from dtprof.report.documents.trace_json import trace_json
    from dtprof.report.text.trace_text import trace_text
    from dtprof.session.trace_windows import list_windows, take_windows

    if not arguments.now and (arguments.steps or arguments.memory):
        given = "--steps" if arguments.steps else "--memory"
        raise UsageError(f"{given} says what to take of a running job; expected --now as well")
    timeout_s = _seconds(arguments.timeout)
    path, engine = arguments.run_directory, engine_options.chosen_engine(arguments)
    if arguments.now:
        steps = arguments.steps or (0 if arguments.memory else DEFAULT_STEPS)
        windows = take_windows(
            path, engine, ranks=arguments.ranks, steps=steps, memory=arguments.memory, timeout_s=timeout_s
        )
    else:
        windows = list_windows(path, engine, ranks=arguments.ranks)
    for failure in windows.failures:
        print(f"dtprof trace: {failure}", file=sys.stderr)
    windows.require_any()
    if arguments.json:
        print(json.dumps(trace_json(windows.ranks, top=arguments.top, cannot_tell=windows.missing), indent=1))
    else:
        print(trace_text(windows.ranks, top=arguments.top, cannot_tell=windows.missing))
    return 1 if windows.failures else 0
