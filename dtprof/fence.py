"""The fence around everything dtprof does in and beside the user's job: an error is told once, never raised."""

import functools
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_warned: set[str] = set()
_shared: list[Path] = []
_notes: list[Callable[[str], None]] = []


def on_note(sink: Callable[[str], None]) -> None:
    """Send every later note to the run as well."""
    _notes.append(sink)


def share_warnings(folder: Path) -> None:
    """Let the processes that share this folder print each warning once between them."""
    _shared[:] = [folder]


def warn_once(text: str) -> None:
    """Print one line on stderr, the first time only, and put it in the run."""
    if text in _warned:
        return
    _warned.add(text)
    if all(_is_first(folder, text) for folder in _shared):
        print(f"dtprof: {text}", file=sys.stderr, flush=True)
    for note in _notes:
        note(text)


def _is_first(folder: Path, text: str) -> bool:
    try:
        (folder / f".warned-{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def report(what: str, error: Exception, consequence: str = "is not recorded in this process") -> None:
    """Say what an error of dtprof's own means for the user, once."""
    warn_once(f"{what} {consequence}: {type(error).__name__}: {error}")


def fenced(
    what: str, consequence: str = "is not recorded in this process"
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator that turns any error of dtprof's own into a warning of what that means for the user."""

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                report(what, error, consequence)
                return None

        return guarded

    return decorate
