"""`dtprof collect`: keep the runs that other hosts send, or send runs that lie on this host."""

import argparse
import sys
from pathlib import Path

from dtprof import settings
from dtprof.cli.parsers import output_path
from dtprof.errors import UsageError
from dtprof.typed_quantities import parse_number, parse_port

MOST_GB = 1e9
EPILOG = """\
examples:
  dtprof collect -o /var/lib/dtprof --listen 0.0.0.0:8266 --tls-cert cert.pem --tls-key key.pem
  DTPROF_COLLECT_TOKEN_FILE=~/.dtprof-token dtprof run --collect collector:8266 -- torchrun train.py
  dtprof collect --send dtprof-runs --target collector:8266  what a host has kept meanwhile

The token is that of DTPROF_COLLECT_TOKEN_FILE or DTPROF_COLLECT_TOKEN, else one is made in
FOLDER/.collect-token. Runs that grow are read as any other: dtprof dashboard FOLDER.
exit status: 0; 1 a run could not be sent; 2 it cannot listen
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "collect",
        help="keep the runs that hosts without a common folder send",
        description="Keep the runs that `dtprof run --collect` sends from other hosts while their jobs run. All "
        "launchers of a job send to one run directory, which every command reads while it grows.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "-o", "--output", type=output_path, metavar="FOLDER", help=f"folder of runs (default: {settings.RUNS})"
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:8266", metavar="ADDRESS:PORT", help="where to listen (default: %(default)s)"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate in PEM, with those between")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument("--plain", action="store_true", help="let other hosts send without TLS")
    parser.add_argument("--max-gb", metavar="N", help="disk space for all runs, in GiB (default: what the disk has)")
    parser.add_argument(
        "--send",
        type=Path,
        action="append",
        metavar="RUN",
        help="send a run, or those in a folder, instead of listening",
    )
    parser.add_argument(
        "--target", metavar="TARGET", help=f"with --send: HOST:PORT or a URL (default: {settings.COLLECT.env})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Listen until Ctrl-C, or send."""
    from dtprof.session.run_collection import CollectorSettings, send_runs, serve_collector

    def say(text: str) -> None:
        print(f"dtprof collect: {text}", file=sys.stderr, flush=True)

    if arguments.send:
        target = arguments.target or settings.from_environment(settings.COLLECT)
        if not target:
            raise UsageError("--send needs to know where to; expected --target HOST:PORT or a URL")
        problems = send_runs(arguments.send, target, say=say)
        for problem in problems:
            say(problem)
        return 1 if problems else 0
    host, _, port = arguments.listen.rpartition(":")
    host = host.strip("[]")
    if not host:
        raise UsageError(f"--listen is {arguments.listen!r}; expected ADDRESS:PORT, for example 0.0.0.0:8266")
    serve_collector(
        CollectorSettings(
            store=arguments.output or Path(settings.RUNS),
            host=host,
            port=parse_port(port, option="--listen", example=8266),
            max_gb=parse_number("--max-gb", arguments.max_gb, example="500", below=MOST_GB)
            if arguments.max_gb is not None
            else 0.0,
            certificate=arguments.tls_cert,
            key=arguments.tls_key,
            is_plain=arguments.plain,
        ),
        say=say,
        announce=lambda address: print(address, flush=True),
    )
    return 0
