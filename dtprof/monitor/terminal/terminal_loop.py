"""Keep the screen of `dtprof top` on a terminal: redraw it, wait for keys, leave the terminal as it was."""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from dtprof.errors import NotARunError
from dtprof.monitor.run_monitor import JobSnapshot, Monitor
from dtprof.monitor.terminal.top_screen import WIDTH, render_reading, render_screen

INTERVAL_S = 1.5
"""As htop has it. A screen of 8 ranks costs some 8 ms of processor time: once a second is a percent of a core."""
MOST_HEAD_LINES = 100
"""More than alarms, advice and the facts of a job take above its ranks."""


def print_once(monitor: Monitor) -> JobSnapshot:
    """Print one screen of all ranks; return what it shows."""
    snapshot = monitor.poll()
    lines = MOST_HEAD_LINES + len(snapshot.ranks)
    console = Console(width=WIDTH)
    with console.capture() as screen:
        console.print(render_screen(snapshot, monitor.run, height=lines, keys=""))
    print("\n".join(line.rstrip() for line in screen.get().splitlines()))
    return snapshot


def watch(monitor: Monitor, console: Console) -> JobSnapshot:
    """Redraw until the job has ended or q is pressed; the last screen stays."""

    def draw(snapshot: JobSnapshot) -> None:
        screen = render_screen(snapshot, monitor.run, height=console.height - 1, width=console.width)
        live.update(screen, refresh=True)

    with (
        _in_order_at_sigterm(),
        _keys() as wait_for_key,
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        live.update(render_reading(monitor.run, monitor.num_ranks), refresh=True)
        snapshot = monitor.poll(summarises=False)
        draw(snapshot)  # what the ranks do is known long before the means
        snapshot = monitor.poll()
        draw(snapshot)
        while not snapshot.has_ended and wait_for_key(INTERVAL_S) not in ("q", "Q", "\x03"):
            try:
                snapshot = monitor.poll()
            except NotARunError:  # it was moved or deleted: what was seen last stays
                break
            draw(snapshot)
    last = render_screen(snapshot, monitor.run, height=console.height - 1, width=console.width, keys="")
    console.print(last)
    return snapshot


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
