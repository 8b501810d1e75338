"""Views of a running job: the ranks on a terminal, the pages of the report in a browser."""

import functools
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dtprof.records import remote
from dtprof.session.engines import IN_THIS_PROCESS, open_run


def watch_on_terminal(path: Path, *, once: bool) -> bool:
    """Show the activity of ranks until the job has ended or the user leaves; say whether it ended well.

    Parameters:
        once: print one screen; so it is where stdout cannot be redrawn.

    Raises:
        NotARunError: the path holds no run that can be read.
        UsageError: it is a URL.
    """
    from rich.console import Console

    from dtprof.monitor.run_monitor import Monitor
    from dtprof.monitor.terminal import terminal_loop

    console = Console()
    monitor = Monitor(remote.folder_here(path, purpose="dtprof top follows files as a job writes them"))
    try:
        fixed = once or not sys.stdout.isatty() or console.is_dumb_terminal
        snapshot = terminal_loop.print_once(monitor) if fixed else terminal_loop.watch(monitor, console)
    finally:
        monitor.close()
    return snapshot.has_ended and snapshot.exit_status == 0 and not snapshot.alarms


def serve_pages(
    path: Path, *, host: str, port: int, dashboards: Sequence[str] = (), announce: Callable[[str, int], None]
) -> None:
    """Serve the pages of a run, or of all runs in a folder, until Ctrl-C.

    Parameters:
        port: 0 for any that is free.
        dashboards: pages by name or file; none: all that have something to show.
        announce: called once the pages can be opened, with their address and the number of runs.

    Raises:
        NotARunError: there is no run.
        UsageError: the path is a URL, a page is not known, or the port is taken.
    """
    from dtprof.analysis.results import Summary
    from dtprof.diagnosis.findings import Verdict
    from dtprof.monitor.web.page_feed import Feed
    from dtprof.monitor.web.web_server import Runs, is_loopback, listen, make_app
    from dtprof.records.rank_log.counted_segments import KnownCounts
    from dtprof.report.figures.figure_source import Source
    from dtprof.report.pages import page_dashboard, page_panels
    from dtprof.report.pages.page_dashboard import Dashboard
    from dtprof.session.run_diagnosis import diagnose_run, diagnose_running
    from dtprof.session.uvicorn_server import address_of, serve

    folder = remote.folder_here(path, purpose="dtprof dashboard follows files as a job writes them").resolve()
    valid = page_panels.panel_names()
    named = page_dashboard.name_apart(page_dashboard.load_dashboard(name, valid) for name in dashboards)

    @functools.cache
    def load(available: frozenset[str]) -> Sequence[Dashboard]:
        return page_dashboard.load_report(valid, available=available)

    def choose(source: Source) -> Sequence[Dashboard]:
        return named or load(frozenset(source.available))

    def make_feed(run_directory: Path) -> Feed:
        counts = KnownCounts()

        def diagnose(path: Path, summary: Summary | None, *, goes_well: bool) -> Verdict:
            if summary is None:
                return diagnose_run(path)
            return diagnose_running(path, summary=summary, goes_well=goes_well, counts=counts)

        return Feed(run_directory, pages=choose, diagnose=diagnose)

    runs = Runs(folder, make_feed)
    num_runs = len(runs.entries())
    if not num_runs and (runs.is_one or not folder.is_dir()):
        open_run(folder, IN_THIS_PROCESS)  # says what is wrong
    # Whoever reaches another address than loopback must know the token.
    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    with listen(host, port) as listening:
        query = f"?token={token}" if token else ""
        announce(f"http://{address_of(listening, host)}/{query}", num_runs)
        try:
            serve(make_app(runs, token=token), listening)
        finally:
            runs.close()
