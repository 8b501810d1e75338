"""`dtprof top`: what every rank of a running job does now, on a terminal."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.cli.next_command import say_next

if TYPE_CHECKING:
    from rich.console import Console

    from dtprof.monitor.run_monitor import Moment, Monitor

EPILOG = """\
examples:
  dtprof top dtprof-runs/20261121-101500-train
  dtprof top dtprof-runs/20261121-101500-train --once     print one screen and end

columns: step = steps ended; step time, comm (exposed communication) and wait (of that, waiting for late ranks) are
means of the newest steps; for = how long the rank has been at what it does now. Where not all ranks fit, those that
ended badly, are slow or behind are shown.
exit status: 0; 2 there is no such run
"""
INTERVAL_S = 1.0
FEWEST_LINES = 10


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "top",
        help="watch the ranks of a running job on a terminal",
        description="Watch a running job: what every rank does now and for how long, the rate of its steps, its waits "
        "and memory, and what is wrong. Ends when the job has ended, or with q.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory of a job that runs")
    parser.add_argument("--once", action="store_true", help="print one screen; the default where stdout is no terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Watch until the job has ended or the user has seen enough."""
    from rich.console import Console

    from dtprof.monitor.run_monitor import Monitor
    from dtprof.records import remote

    console = Console()
    monitor = Monitor(
        remote.folder_here(arguments.run_directory, purpose="dtprof top follows files as a job writes them")
    )
    try:
        # A dumb terminal cannot be redrawn.
        once = arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal
        moment = _print_once(monitor) if once else _watch(monitor, console)
    finally:
        monitor.close()
    ended_well = moment.has_ended and moment.exit_status == 0 and not moment.alarms
    say_next("summary" if ended_well else "diagnose", arguments.run_directory)
    return 0


def _print_once(monitor: "Monitor") -> "Moment":
    from rich.console import Console

    from dtprof.monitor.terminal.top_screen import WIDTH, render_screen

    moment = monitor.look()
    lines = max(FEWEST_LINES, len(moment.ranks) + len(moment.alarms) + FEWEST_LINES)
    Console(width=WIDTH).print(render_screen(moment, monitor.run, height=lines, keys=""))
    return moment


def _watch(monitor: "Monitor", console: "Console") -> "Moment":
    """Redraw until the job has ended or q is pressed; the last screen stays."""
    from rich.live import Live

    from dtprof.errors import NotARunError
    from dtprof.monitor.terminal.top_screen import render_reading, render_screen

    def draw(moment: "Moment") -> None:
        screen = render_screen(moment, monitor.run, height=console.height - 1, width=console.width)
        live.update(screen, refresh=True)

    with (
        _in_order_at_sigterm(),
        _keys() as wait_for_key,
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        live.update(render_reading(monitor.run, monitor.num_ranks), refresh=True)
        moment = monitor.look(summarises=False)
        draw(moment)  # what the ranks do is known long before the means
        moment = monitor.look()
        draw(moment)
        while not moment.has_ended and wait_for_key(INTERVAL_S) not in ("q", "Q", "\x03"):
            try:
                moment = monitor.look()
            except NotARunError:  # it was moved or deleted: what was seen last stays
                break
            draw(moment)
    last = render_screen(moment, monitor.run, height=console.height - 1, width=console.width, keys="")
    console.print(last)
    return moment


@contextmanager
def _in_order_at_sigterm() -> Iterator[None]:
    """Leave by an exception at SIGTERM, or the terminal would stay as it is while it is drawn on."""

    def leave(_signal: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits for a key; keys come at once and are not shown."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return os.read(file, 64).decode("utf-8", "replace")[-1:] if ready else ""

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
