"""`dtprof dashboard`: the pages of `dtprof report`, live in a browser while the job runs."""

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtprof.analysis.results import Summary
    from dtprof.diagnosis.findings import Verdict
    from dtprof.monitor.web.page_feed import Feed
    from dtprof.report.figures.figure_source import Source
    from dtprof.report.pages.page_dashboard import Dashboard

DEFAULT_PORT = 8265
TICK_S = 0.5
"""After which Ctrl-C ends the server at the latest."""
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="run directory, or a folder of runs")
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    import asyncio
    import secrets

    import uvicorn

    from dtprof.cli.ports import parse_port
    from dtprof.monitor.web.page_feed import Feed
    from dtprof.monitor.web.web_server import Runs, is_loopback, listen, make_app
    from dtprof.records import remote
    from dtprof.records.reader import open_run
    from dtprof.report.pages import page_dashboard, page_panels
    from dtprof.session.run_diagnosis import diagnose_run

    class CalmServer(uvicorn.Server):
        """Wakes seldom while nobody asks: uvicorn wakes ten times a second, a tenth of what watching costs."""

        async def main_loop(self) -> None:
            while not self.should_exit:
                await asyncio.sleep(TICK_S)

    wanted = parse_port(arguments.port, option="--port", example=DEFAULT_PORT)
    path = remote.folder_here(arguments.path, purpose="dtprof dashboard follows files as a job writes them").resolve()
    valid = page_panels.panel_names()
    named = page_dashboard.name_apart(page_dashboard.load_dashboard(name, valid) for name in arguments.dashboard or ())

    @functools.cache
    def load(available: frozenset[str]) -> "Sequence[Dashboard]":
        return page_dashboard.load_report(valid, available=available)

    def choose(source: "Source") -> "Sequence[Dashboard]":
        return named or load(frozenset(source.available))

    def diagnose(run_directory: Path, summary: "Summary | None") -> "Verdict":
        """Beside a job that runs, compare its newest operations, and take stragglers from the summary of the pages."""
        return diagnose_run(run_directory, summary=summary, in_a_hurry=summary is not None)

    def make_feed(run_directory: Path) -> "Feed":
        return Feed(run_directory, pages=choose, diagnose=diagnose)

    runs = Runs(path, make_feed)
    if not runs.entries() and (runs.is_one or not path.is_dir()):
        open_run(path)  # says what is wrong
    token = None if is_loopback(arguments.host) else secrets.token_urlsafe(16)
    with listen(arguments.host, wanted) as listening:
        port = listening.getsockname()[1]
        name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        address = f"http://{name}:{port}/" + (f"?token={token}" if token else "")
        print(address, flush=True)
        print("dtprof: open it in a browser; Ctrl-C ends it, the job does not notice", file=sys.stderr, flush=True)
        try:
            config = uvicorn.Config(make_app(runs, token=token), log_level="error", access_log=False, lifespan="off")
            CalmServer(config).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            runs.close()
    return 0
