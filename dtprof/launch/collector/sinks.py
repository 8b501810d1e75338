"""Where a launcher sends its part of a run: a collector over HTTP, or object storage through fsspec."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dtprof.records import schema


class SinkError(Exception):
    """What was to be sent has not arrived, and may later."""


class SinkFullError(SinkError):
    """The other end has no room."""


class SinkRefusedError(Exception):
    """The other end will not take it, now or later."""


class UnknownLauncherError(SinkError):
    """The other end has forgotten the launcher: it is to open its run again."""


@dataclass(frozen=True, kw_only=True)
class LauncherCard:
    """What a launcher says of itself when it begins, or goes on."""

    launcher: str  # 32 hexadecimal digits, chosen at random
    name: str  # of the run
    is_named: bool  # the user chose the name: another job's run of that name is an error
    job: str | None  # equal on all hosts of a job
    joins: bool
    host: str

    def document(self) -> dict[str, object]:
        """Return the opening of a run as the collector expects it."""
        return {**self.__dict__, "format": schema.FORMAT_VERSION}


@dataclass(kw_only=True)
class Opened:
    """The run at the other end."""

    name: str
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # size, time of the version in ns
    appends: bool = True  # lines, and records of segments that are still written to; else files are replaced whole


class Sink(Protocol):
    """Receives files of a run; every method raises SinkError, or SinkRefusedError."""

    tail_every_s: float
    """After which the newest records may be sent again."""

    def open(self, card: LauncherCard) -> Opened:
        """Begin, or go on after either end was gone."""

    def put(self, name: str, data: bytes | Path, *, mtime_ns: int) -> None:
        """Send a whole file."""

    def put_manifest(self, data: bytes) -> None:
        """Send the manifest of the launcher."""

    def append(self, name: str, at: int, data: bytes) -> int:
        """Append lines at an offset; return the size that the other end has now."""

    def patch(self, name: str, packed: bytes) -> None:
        """Send records of a segment."""

    def delete(self, name: str) -> None:
        """Remove a file."""

    def end(self) -> None:
        """Say that everything was sent."""

    def close(self) -> None:
        """Let go of connections."""
