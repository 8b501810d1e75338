"""`dtprof top`: the activity of every rank of a running job, on a terminal."""

import argparse

from dtprof.cli import run_argument
from dtprof.cli.next_command import say_next

EPILOG = """\
examples:
  dtprof top dtprof-runs/20261121-101500-train
  dtprof top dtprof-runs/20261121-101500-train --once     print one screen and end

columns: step = steps ended; step time, comm (exposed communication) and wait (of that, waiting for late ranks) are
means of the newest steps; for = how long the rank has been at what it does now. Where not all ranks fit, those that
ended badly, are slow or behind are shown.
exit status: 0; 2 there is no such run
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "top",
        help="watch the ranks of a running job on a terminal",
        description="Watch a running job: what every rank does now and for how long, the rate of its steps, its waits "
        "and memory, and what is wrong. Ends when the job has ended, or with q.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser, words="run directory of a job that runs")
    parser.add_argument("--once", action="store_true", help="print one screen; the default where stdout is no terminal")


def run(arguments: argparse.Namespace) -> int:
    """Watch until the job has ended or the user has seen enough."""
    from dtprof.session.live_views import watch_on_terminal

    ended_well = watch_on_terminal(arguments.run_directory, once=arguments.once)
    say_next("summary" if ended_well else "diagnose", arguments.run_directory)
    return 0
