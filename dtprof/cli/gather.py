"""`dtprof gather`: the folders of the nodes of one job become one run."""

import argparse
import shlex
import sys
from pathlib import Path

from dtprof.cli.parsers import output_path

EPILOG = """\
example:
  dtprof gather node-0/run node-1/run -o runs/whole

A job whose hosts share no file system has a run directory on each. Bring them to one place, under names of their own,
and give them all.
exit status: 0 gathered; 2 they are not of one job, or cannot be read or written
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "gather",
        help="join the run directories of one job's nodes",
        description="Join the run directories that `dtprof run` has written on each host of one job into one. Files "
        "are linked where the file system can do that, else copied; what is given is left as it is.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "node_directories", type=Path, nargs="+", metavar="NODE_DIR", help="run directory that one launcher has written"
    )
    parser.add_argument(
        "-o", "--output", type=output_path, required=True, metavar="RUN", help="run directory to create"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the run in the output directory, and join also where commands differ",
    )


def run(arguments: argparse.Namespace) -> int:
    """Gather, and print the missing parts."""
    from dtprof.session.node_runs import gather_folders

    gathered = gather_folders(arguments.node_directories, arguments.output, force=arguments.force)
    for remark in gathered.remarks:
        print(f"dtprof gather: {remark}", file=sys.stderr)
    if gathered.missing:
        missing = ", ".join(map(str, gathered.missing))
        print(f"dtprof gather: these ranks are in none of the folders: {missing}", file=sys.stderr)
    print(arguments.output)
    print(f"next: dtprof summary {shlex.quote(str(arguments.output))}", file=sys.stderr)
    return 0
