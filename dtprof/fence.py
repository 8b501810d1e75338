"""The fence around all code of dtprof in and beside the user's job: an error is reported once, never raised."""

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
F = TypeVar("F", bound=Callable[..., Any])

MOST_ALIKE = 5
"""Most errors of one kind at one place that are reported: each text may name another file or object."""
WARNED, REPORTED = ".warned", ".told"
"""Prefixes of marker files: of warnings, in the folder of a node; of verdicts and mismatches, in a run."""
_warned: dict[str, str] = {}
"""Warnings printed so far, and the kind of each."""
_shared: list[Path] = []
_notes: list[Callable[[str], None]] = []
_homes: list[Path] = []


def stands_in(function: F) -> F:
    """Mark a function that replaces one of torch's: a warning blames its caller, as without dtprof.

    Where a warning names how many callers up it is to blame, Python passes over frames of its import system, which it
    knows by the names of their files.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (importlib._bootstrap)")
    return function


def hide_frame(error: BaseException) -> None:
    """Take the frame of the caller, which has caught the error and raises it again, out of the error's traceback.

    For functions of dtprof that stand in for others: a program's tracebacks are as without dtprof.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
        if sys.version_info < (3, 11):
            _set_caught_traceback(error)


def _set_caught_traceback(error: BaseException) -> None:
    """Have `raise` take the traceback of the error that is being handled from the error.

    Python 3.10 keeps it a second time, beside the error, and would put the removed frame back. A function of Python's
    stable ABI sets both; where ctypes is missing, the frame stays.
    """
    try:
        import ctypes
    except ImportError:
        return
    caught = (type(error), error, error.__traceback__)
    for item in caught:  # the function keeps the references that it is given
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    ctypes.pythonapi.PyErr_SetExcInfo(*map(ctypes.py_object, caught))


def on_note(sink: Callable[[str], None]) -> None:
    """Write every warning of this process into the run as well, the earlier ones now."""
    _notes[:] = [sink]  # instead of the sink that a forked process inherits
    for text in _warned:
        _note(text)


def share_warnings(folder: Path) -> None:
    """Print each warning once among the processes that share this folder."""
    _shared[:] = [folder]


def set_run(run: Path) -> None:
    """Set the run directory of this process: once it is gone, every failure has that cause, reported once."""
    _homes[:] = [run]


def is_run_gone() -> bool:
    """Say whether the run directory is gone, and warn once if so."""
    gone = next((home for home in _homes if not home.exists()), None)
    if gone is not None:
        warn_once(f"{gone} was moved or deleted: nothing more of the job is kept; the job itself is not touched")
    return gone is not None


def warn_once(text: str, about: str = "") -> None:
    """Print a line on stderr, the first time only, and write it into the run.

    Of texts of one kind, given by `about`, only the first few are printed.
    """
    if text in _warned or (about and list(_warned.values()).count(about) >= MOST_ALIKE):
        return
    _warned[text] = about
    if all(is_first(folder, text, mark=WARNED) for folder in _shared):
        say(text)
    _note(text)


def say(text: str) -> None:
    """Print one line on stderr, which the program may have closed or replaced by anything."""
    line = f"dtprof: {text}\n"
    try:
        stream: Any = sys.stderr
        try:
            descriptor = stream.fileno()
        except (OSError, AttributeError):
            stream.write(line)
            stream.flush()
        else:
            # Past the buffer: a line left there would fail at exit, and change the exit status of the job.
            os.write(descriptor, line.encode("utf-8", "backslashreplace"))
    except Exception:
        return  # the run has it as a note


def _note(text: str) -> None:
    for note in _notes:
        try:
            note(text)
        except Exception:  # the log cannot be written either
            _notes.remove(note)
            return


def is_first(folder: Path, text: str, *, mark: str) -> bool:
    """Say whether no process that shares the folder has reported this text, and mark it as reported.

    Where no marker can be written every process is the first.
    """
    try:
        (folder / f"{mark}-{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def report(what: str, error: Exception, consequence: str = "is not recorded in this process") -> None:
    """Report once the consequence of an error of dtprof for the user.

    Raises:
        Exception: the error itself, where a signal handler of the job raised it inside dtprof's code.
    """
    if raised_by_signal_handler(error):
        raise error
    if isinstance(error, (OSError, DtprofError)) and is_run_gone():
        return
    about = f"{what} {consequence}: {type(error).__name__}"
    warn_once(f"{about}: {error}", about)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Say whether a signal handler of the program raised an exception."""
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
    """Return a decorator that turns any error of dtprof into a warning that names its consequence for the user."""

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
