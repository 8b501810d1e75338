"""The program's source: the places of its statements, and the exception handlers around its collectives.

A file that was changed after the job had started says nothing of what ran, and is not read.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from dtprof.diagnosis.job_state import Handler
from dtprof.lint.program_order import SourcePlace, read_places
from dtprof.lint.sources import UNREADABLE

_Fact = TypeVar("_Fact")


def finder_of_places(started_realtime_ns: int) -> Callable[[str, int], SourcePlace | None]:
    """Return the function that gives the place of a line of a file; None where that cannot be read."""
    read = functools.cache(lambda file: _read(file, read_places, started_realtime_ns))
    return lambda file, line: read(file).get(line)


def finder_of_handlers(started_realtime_ns: int) -> Callable[[str], Mapping[int, Handler]]:
    """Return the function that gives the handlers and finally blocks around the collectives of a file, by line."""
    return functools.cache(lambda file: _read(file, _read_handlers, started_realtime_ns))


def finder_of_changes(started_realtime_ns: int) -> Callable[[str], bool]:
    """Return the function that says whether a source file was changed after the job had started."""
    return functools.cache(lambda name: Path(name).is_file() and _was_changed(Path(name), started_realtime_ns))


def _was_changed(file: Path, started_realtime_ns: int) -> bool:
    return file.stat().st_mtime_ns >= started_realtime_ns


def _read(name: str, read: Callable[[Path], Mapping[int, _Fact]], started_realtime_ns: int) -> Mapping[int, _Fact]:
    file = Path(name)
    try:
        is_source = file.suffix == ".py" and file.is_file()
        return read(file) if is_source and not _was_changed(file, started_realtime_ns) else {}
    except UNREADABLE:
        return {}


def _read_handlers(file: Path) -> dict[int, Handler]:
    from dtprof.lint.linting import calls_in_handlers  # all of lint, which few verdicts need

    return {
        call.place.line: Handler(
            text=call.handler.text, line=call.handler.line, call=call.place.text, is_finally=call.is_finally
        )
        for call in calls_in_handlers(file)
    }
