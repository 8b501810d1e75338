"""The program's source: the places of its statements, and the exception handlers around its collectives.

`dtprof run` keeps them in the run where a job hangs or fails: a diagnosis on another machine, or after an edit, reads
what ran. What is not kept is read from the file itself, unless that was changed after the job had started.
"""

import functools
import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from dtprof.diagnosis.job_state import Handler
from dtprof.lint.program_order import SourcePlace, read_places
from dtprof.lint.sources import UNREADABLE
from dtprof.records import paths, writer
from dtprof.records.rank_log.strings import json_lines
from dtprof.records.user_files import is_user_file

MAX_FILES = 64
"""Source files that are kept of one host: a bound on the time of a launcher that has ended its job."""
MAX_RANKS = 256
"""Ranks whose records are asked for source files: those of a host, mostly alike."""
MAX_BYTES = 16_000_000
"""Of a kept document, unpacked; a larger one is not read."""
_FIELDS = tuple(field.name for field in (*fields(SourcePlace), *fields(Handler)))
REQUIRED = frozenset(
    (
        *("in_loop", "following", "loops", "branches", "block", "yields", "conditions", "counted", "by_rank"),
        *("naming_rank", "fixed_loops", "endless_loops", "ways_past", "handler"),
        *("text", "line", "call", "is_finally"),
    )
)
"""Fields whose absence would say that a place has none of these. What is added later has a default for `not known`."""

_Fact = TypeVar("_Fact")


class _Statement(msgspec.Struct):
    lines: list[int]
    place: SourcePlace


class _SourceFile(msgspec.Struct):
    statements: list[_Statement]
    handlers: dict[int, Handler]  # by the line of the collective


class _KeptProgram(msgspec.Struct):
    """What a node keeps, and which fields that dtprof knew."""

    fields: tuple[str, ...]
    files: dict[str, _SourceFile]


class ProgramSource:
    """The source files of a run, as they were when the job ran."""

    def __init__(self, run: Path, started_realtime_ns: int) -> None:
        """Read nothing yet."""
        self._run = run
        self._started_realtime_ns = started_realtime_ns
        self._read_places = functools.cache(self._places_of)
        self.find_handlers: Callable[[str], Mapping[int, Handler]] = functools.cache(self._handlers_of)

    @functools.cached_property
    def _kept(self) -> dict[str, _SourceFile]:
        found: dict[str, _SourceFile] = {}
        for node in paths.node_folders(self._run):
            found |= _read_kept(node / paths.PROGRAM)
        return found

    def find_place(self, file: str, line: int) -> SourcePlace | None:
        """Return the place of a line of a file; None where that is not known."""
        return self._read_places(file).get(line)

    def was_changed(self, file: str) -> bool:
        """Say whether a source file was changed after the job had started, and what it was is not kept."""
        path = Path(file)
        return file not in self._kept and path.is_file() and _was_changed(path, self._started_realtime_ns)

    def _places_of(self, file: str) -> Mapping[int, SourcePlace]:
        if (kept := self._kept.get(file)) is not None:
            return {line: statement.place for statement in kept.statements for line in statement.lines}
        return _read(file, read_places, self._started_realtime_ns)

    def _handlers_of(self, file: str) -> Mapping[int, Handler]:
        kept = self._kept.get(file)
        return kept.handlers if kept is not None else _read(file, _read_handlers, self._started_realtime_ns)


def keep_program(run: Path, host: str, started_realtime_ns: int) -> None:
    """Keep in the node's folder what a diagnosis reads of the user's source files that the ranks' records name.

    Raises:
        OSError: the folder cannot be written.
    """
    document = run / paths.node_folder_name(host) / paths.PROGRAM
    kept = _read_kept(document)
    wanted = islice((file for file in sorted(_recorded_files(run)) if file not in kept), MAX_FILES - len(kept))
    new = {file: source for file in wanted if (source := _parse(file, started_realtime_ns)) is not None}
    if new:
        data = msgspec.json.encode(_KeptProgram(fields=_FIELDS, files=kept | new))
        writer.write_whole(document, gzip.compress(data, compresslevel=1, mtime=0))


def _recorded_files(run: Path) -> set[str]:
    """Return the files of the user's that hold a call site, or a frame that leads to one."""
    return {
        file
        for strings in islice(run.glob(f"rank-*/{paths.STRINGS}"), MAX_RANKS)
        for row in json_lines(strings, [])
        if row.get("k") in ("site", "frame") and is_user_file(file := str(row.get("file", "")))
    }


def _parse(file: str, started_realtime_ns: int) -> _SourceFile | None:
    by_place: dict[SourcePlace, list[int]] = {}
    for line, place in _read(file, read_places, started_realtime_ns).items():
        by_place.setdefault(place, []).append(line)
    if not by_place:
        return None
    statements = [_Statement(lines, place) for place, lines in by_place.items()]
    return _SourceFile(statements, dict(_read(file, _read_handlers, started_realtime_ns)))


def _read_kept(document: Path) -> dict[str, _SourceFile]:
    try:
        with gzip.open(document) as stream:
            data = stream.read(MAX_BYTES + 1)
        program = msgspec.json.decode(data, type=_KeptProgram)
    except (OSError, EOFError, zlib.error, ValueError, msgspec.MsgspecError, RecursionError):
        return {}
    return program.files if REQUIRED.issubset(program.fields) else {}


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
