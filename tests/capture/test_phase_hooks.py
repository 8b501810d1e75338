"""Pauses of the garbage collector: timed, and without a line of Python in the collector's callback."""

import gc
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from dtprof.capture import phase_hooks


class Timeout(Exception):
    """What the program's handler raises."""


@pytest.fixture
def pauses() -> Iterator[Any]:
    """Give what takes the pauses since the last call, with the collector's callback in place."""

    class Spans:
        finished_pauses: Any = None

    before = list(gc.callbacks)
    gc.callbacks.clear()  # others are Python (hypothesis has one): what a signal handler raises inside them is lost
    phase_hooks.CollectorPauses(Spans).install()  # type: ignore[arg-type]
    yield Spans.finished_pauses
    gc.callbacks[:] = before


@pytest.fixture
def much() -> Iterable[list[int]]:
    """Give so many objects that a collection takes some 100 ms."""
    return [[number] for number in range(500_000)]


@pytest.mark.usefixtures("much")
def test_long_collection_is_timed_and_short_ones_are_not(pauses: Any) -> None:
    list(pauses())
    gc.collect(0)
    started = time.monotonic_ns()
    gc.collect()
    ended = time.monotonic_ns()
    gc.collect(0)
    found = list(pauses())
    assert len(found) == 1
    assert started <= found[0][0] < found[0][1] <= ended
    assert found[0][1] - found[0][0] > 0.5 * (ended - started)
    assert list(pauses()) == []


def test_times_kept_are_bounded_and_stay_in_order(pauses: Any) -> None:
    for _ in range(phase_hooks.MOST_PAUSES + 7):
        gc.collect(0)
    started = time.monotonic_ns()
    callback: Any = gc.callbacks[-1]
    callback("start", {})
    time.sleep(2e-9 * phase_hooks.SHORTEST_PAUSE_NS)
    callback("stop", {})
    found = list(pauses())
    assert started <= found[-1][0] < found[-1][1]
    assert len(found) <= phase_hooks.MOST_PAUSES


def collect_and_wait() -> None:
    """Give a signal a long collection to come in, and time after it."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    gc.collect()
    time.sleep(10)


@pytest.mark.usefixtures("pauses", "much")
def test_exception_of_a_signal_handler_during_a_collection_comes_out() -> None:
    def handle(*_: object) -> None:
        raise Timeout

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(Timeout):
            collect_and_wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
