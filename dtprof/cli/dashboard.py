"""`dtprof dashboard`: the pages of `dtprof report`, live in a browser while the job runs."""

import argparse
import sys
from pathlib import Path

from dtprof import settings
from dtprof.cli.run_argument import no_run_error
from dtprof.typed_quantities import parse_port

DEFAULT_PORT = 8265
EPILOG = """\
examples:
  dtprof dashboard dtprof-runs/20261121-101500-train
  dtprof dashboard dtprof-runs                            all runs in the folder, in a list
  ssh -L 8265:localhost:8265 NODE dtprof dashboard RUN    from another machine, through ssh

Only this machine can reach it, unless --host says otherwise: then the printed address carries a token without which
nothing is answered. Nothing can be changed through it. Ctrl-C ends it; the job does not notice.
exit status: 0; 2 there is no such run, or the port is taken
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "dashboard",
        help="serve the pages of the report, live while the job runs",
        description="Serve the pages of `dtprof report` over the newest steps of a running job, renewed as it goes on, "
        "without losing zoom or selection.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="RUN",
        help=f"run directory, or a folder of runs (default: {settings.RUNS})",
    )
    parser.add_argument(
        "--port", default=str(DEFAULT_PORT), metavar="P", help="port (default: %(default)s; 0: any that is free)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--dashboard",
        action="append",
        metavar="NAME|FILE.toml",
        help="page to show, may be given several times (default: all that have something to show)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from dtprof.session.live_views import serve_pages

    store = Path(settings.RUNS)
    if arguments.path is None and not store.is_dir():
        raise no_run_error("dashboard")
    port = parse_port(arguments.port, option="--port", example=DEFAULT_PORT)

    def announce(address: str, num_runs: int) -> None:
        print(address, flush=True)
        print("dtprof: open it in a browser; Ctrl-C ends it, the job does not notice", file=sys.stderr, flush=True)
        if not num_runs:
            print("dtprof: no run is here yet; record one with dtprof run -- COMMAND", file=sys.stderr, flush=True)

    serve_pages(
        arguments.path or store,
        host=arguments.host,
        port=port,
        dashboards=arguments.dashboard or (),
        announce=announce,
    )
    return 0
