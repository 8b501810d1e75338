"""The fence around everything dtprof does in and beside the user's job: an error is told once, never raised."""

import functools
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from dtprof.errors import DtprofError

P = ParamSpec("P")
R = TypeVar("R")

MOST_ALIKE = 5
"""Errors of one kind at one place that are told: a text may name something else each time."""
WARNED, TOLD = ".warned", ".told"
"""Marks of what was said: in the folder of a node by its processes, in a run by its launchers."""
_warned: dict[str, str] = {}
"""What was said, and what about."""
_shared: list[Path] = []
_notes: list[Callable[[str], None]] = []
_homes: list[Path] = []


def on_note(sink: Callable[[str], None]) -> None:
    """Send every warning of this process to the run as well, the earlier ones now."""
    _notes[:] = [sink]  # a forked process has had its parent's
    for text in _warned:
        _note(text)


def share_warnings(folder: Path) -> None:
    """Let the processes that share this folder print each warning once between them."""
    _shared[:] = [folder]


def keep_in(run: Path) -> None:
    """Know the run directory that all work is for: once it is gone, whatever fails has one cause, and that is told."""
    _homes[:] = [run]


def is_gone() -> bool:
    """Say, once, where the run directory is gone."""
    gone = next((home for home in _homes if not home.exists()), None)
    if gone is not None:
        warn_once(f"{gone} was moved or deleted: nothing more of the job is kept; the job itself is not touched")
    return gone is not None


def warn_once(text: str, about: str = "") -> None:
    """Print one line on stderr, the first time only, and put it in the run.

    Of texts about the same, where that is given, only the first few are told.
    """
    if text in _warned or (about and list(_warned.values()).count(about) >= MOST_ALIKE):
        return
    _warned[text] = about
    if all(is_first(folder, text, mark=WARNED) for folder in _shared):
        say(text)
    _note(text)


def say(text: str) -> None:
    """Print one line on stderr; a program may have closed that, or put anything in its place."""
    line = f"dtprof: {text}\n"
    try:
        stream: Any = sys.stderr
        try:
            descriptor = stream.fileno()
        except (OSError, AttributeError):
            stream.write(line)
            stream.flush()
        else:
            # Past its buffer: a line left in there would fail at exit, and change the exit status of the job.
            os.write(descriptor, line.encode("utf-8", "backslashreplace"))
    except Exception:
        return  # it is noted in the run


def _note(text: str) -> None:
    for note in _notes:
        try:
            note(text)
        except Exception:  # not even that can be told
            _notes.remove(note)
            return


def is_first(folder: Path, text: str, *, mark: str) -> bool:
    """Say whether none of the processes that share the folder has told this yet, and mark it there as told.

    Where that cannot be kept each is the first.
    """
    try:
        (folder / f"{mark}-{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def report(what: str, error: Exception, consequence: str = "is not recorded in this process") -> None:
    """Say what an error of dtprof's own means for the user, once.

    Raises:
        Exception: the error, where it is not ours: the job's handler of a signal raised it while our code ran.
    """
    if raised_by_signal_handler(error):
        raise error
    if isinstance(error, (OSError, DtprofError)) and is_gone():
        return
    about = f"{what} {consequence}: {type(error).__name__}"
    warn_once(f"{about}: {error}", about)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Say whether an exception comes out of a handler that the program has set for a signal."""
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number)))}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


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
