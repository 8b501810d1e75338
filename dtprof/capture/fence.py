"""The fence around everything dtprof does inside the user's job: an error is noted and warned of once, never raised."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_warned: set[str] = set()
_notes: list[Callable[[str], None]] = []


def on_note(sink: Callable[[str], None]) -> None:
    """Send every later note to the run as well."""
    _notes.append(sink)


def warn_once(text: str) -> None:
    """Print one line on stderr, the first time only, and put it in the run."""
    if text in _warned:
        return
    _warned.add(text)
    print(f"dtprof: {text}", file=sys.stderr, flush=True)
    for note in _notes:
        note(text)


def fenced(what: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator that turns any error of dtprof's own into a warning about `what`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                warn_once(f"{what} is not recorded in this process: {type(error).__name__}: {error}")
                return None

        return guarded

    return decorate
