"""`dtprof overhead`: the cost of recording a command, measured in pairs."""

import argparse
import json

from dtprof.cli import job_command
from dtprof.errors import UsageError

DEFAULT_PAIRS = 6
EPILOG = """\
examples:
  dtprof overhead -- torchrun --nproc-per-node 4 train.py --steps 200
  dtprof overhead --pairs 12 --json -- python train.py > overhead.json

The command runs three times a pair, and twice before: each run must do the same work and end by itself with status 0.
Environment variables of dtprof run hold (DTPROF_NO_NATIVE, DTPROF_OUTPUT, ...).

exit status: 0 measured, whatever the answer; 2 not measured: a run failed, or dtprof was used wrongly (127: no such
command)
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "overhead",
        help="measure what recording adds to a command, in pairs",
        description="Run a command bare, recorded, and bare again, in turn; print what recording adds to its steps and "
        "its start, and the smallest difference that the noise of this machine lets one detect.",
        usage="dtprof overhead [options] -- COMMAND [ARGUMENT ...]",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--pairs", default=str(DEFAULT_PAIRS), metavar="N", help="pairs to measure, at least 2; 6 give 95 %% confidence"
    )
    parser.add_argument(
        "--no-step-clock",
        action="store_true",
        help="leave the bare runs untouched: only whole runs are timed, not steps and start-up",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    job_command.add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the result."""
    command = job_command.job_of(arguments, example=f"{job_command.EXAMPLE} --steps 200")
    num_pairs = _num_pairs(arguments.pairs)

    from dtprof.report.documents.overhead_json import overhead_json
    from dtprof.report.text.overhead_text import overhead_text
    from dtprof.session.overhead_measurement import measure_overhead

    measured = measure_overhead(command, num_pairs=num_pairs, step_clock=not arguments.no_step_clock)
    result, own, where = measured.pairs, measured.self_reported, measured.machine
    if arguments.json:
        print(json.dumps(overhead_json(result, own=own, command=command, where=where), indent=1))
    else:
        print(overhead_text(result, own=own, command=command, where=where))
    return 0


def _num_pairs(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) >= 2 and len(text) < 10):
        raise UsageError(f"--pairs is {text!r}; expected a whole number of at least 2, for example --pairs 6")
    return int(text)
