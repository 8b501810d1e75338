"""`dtprof tensorboard`: export a run and open it in TensorBoard."""

import argparse
import shlex
import sys

from dtprof.cli import engine_options, run_argument
from dtprof.session.tensorboard_view import view_run
from dtprof.typed_quantities import parse_port

EPILOG = """\
example:
  dtprof tensorboard dtprof-runs/20261121-101500-train --port 6007

While the job runs, the steps that it ends are added; texts and pictures anew once it has ended. Ctrl-C ends
TensorBoard; `dtprof export --format tensorboard` keeps the log directory.

exit status: 0; 2 the run cannot be read, the port is taken, tensorboard is not installed; else that of TensorBoard
"""
PORT = 6006


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "tensorboard",
        help="open a run in TensorBoard",
        description="Export a run to a temporary log directory and start TensorBoard on it, on this machine only.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
    parser.add_argument("--port", default=str(PORT), metavar="P", help="port to listen on (default: %(default)s)")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, and stay until TensorBoard ends."""
    port = parse_port(arguments.port, option="--port", example=PORT, least=1)

    def announce(name: str, remarks: list[str]) -> None:
        for remark in remarks:
            print(f"dtprof tensorboard: {remark}", file=sys.stderr)
        print(f"http://localhost:{port}/", flush=True)
        export_command = shlex.join(["dtprof", "export", name, "--format", "tensorboard", "-o", "DIR"])
        print(f"next: open it in a browser; Ctrl-C ends it. {export_command} keeps what it shows", file=sys.stderr)

    return view_run(arguments.run_directory, engine_options.chosen_engine(arguments), port=port, announce=announce)
