"""`dtprof stacks`: the merged call stacks of every rank now: which ranks differ, and from which line on."""

import argparse
import json

from dtprof.cli import run_argument
from dtprof.cli.next_command import say_next

EPILOG = """\
examples:
  dtprof stacks dtprof-runs/20261121-101500-train
  dtprof stacks dtprof-runs/20261121-101500-train --native --all-threads
  dtprof stacks dtprof-runs/20261121-101500-train --json | jq '.groups[0].ranks'

Each process is stopped for some milliseconds while its stack is read; the job goes on. Where the job has ended, the
stacks are those that `dtprof run` kept when the job last made no progress.
exit status: 0; 2 no stack can be had
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "stacks",
        help="merge the stacks of all ranks: which ranks differ, from which line on",
        description="Sample the Python stacks of all ranks of a running job on this host, and merge equal ones: "
        "the ranks that differ from the rest come first, with the line from which they differ.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
    parser.add_argument("--native", action="store_true", help="include frames of C and C++ code (takes longer)")
    parser.add_argument("--all-threads", action="store_true", help="include the other threads of each rank")
    parser.add_argument(
        "--kept", action="store_true", help="print the stacks stored in the run, even while the job runs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")


def run(arguments: argparse.Namespace) -> int:
    """Print the stacks."""
    from dtprof.report.documents.stacks_json import stacks_json
    from dtprof.report.text.stacks_text import stacks_text
    from dtprof.session.stack_samples import read_or_sample

    path = arguments.run_directory
    samples = read_or_sample(path, native=arguments.native, stored_only=arguments.kept)
    if arguments.json:
        document = stacks_json(samples.stacks, taken=samples.taken, t_ns=samples.t_ns, notes=samples.notes)
        print(json.dumps(document, indent=1))
    else:
        print(stacks_text(samples.stacks, all_threads=arguments.all_threads, notes=samples.notes))
        say_next("diagnose", path)
    return 0
