"""Chrome trace files, as torch.profiler, XLA and Horovod write them, read piece by piece.

Only one piece of a file is in memory at a time. Everything behind damage is lost, and reported.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import msgspec

from dtprof.errors import NotATraceError

PIECE_BYTES = 256 << 10
"""Read at a time: small enough to stay in the processor's cache."""
MAX_HEAD_BYTES = 64 << 20
TAIL_BYTES = 1 << 16
"""Where the end of the last whole event is looked for at the end of a piece."""
MAX_PIECE_BYTES = 256 << 20
"""The longest event, with all that lies before it in a piece."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_LAST = re.compile(rb"\}\s*(\])(?=\s*(?:[,}]|$))")
MAX_LISTS_AFTER = 16
"""Lists of objects among the facts that follow the events."""
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")

Event = TypeVar("Event", bound=msgspec.Struct)


class TraceFile(Generic[Event]):
    """One trace file: `events` yields its events piece by piece, after which `facts` and `problems` are complete."""

    def __init__(self, path: Path, event: type[Event]) -> None:
        """The path of the events and the fields to read of each."""
        self.path = path
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []
        self.count = 0
        self._pieces = msgspec.json.Decoder(list[event])  # type: ignore[valid-type]
        self._event = event

    def events(self) -> Iterator[list[Event]]:
        """Yield the events.

        Raises:
            NotATraceError: the file cannot be read, or holds no trace.
        """
        try:
            with open_trace(self.path) as file:
                yield from self._read(file)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if not self.count:
                raise NotATraceError(
                    f"{self.path} cannot be read: {reason}. Expected a whole trace; copy it again."
                ) from None
            self._lost(reason)

    def _read(self, file: IO[bytes]) -> Iterator[list[Event]]:
        rest = self._head(file)
        ended = False
        while not ended:
            piece = file.read(PIECE_BYTES)
            ended = not piece
            rest += piece
            if not ended and len(rest) < PIECE_BYTES:
                continue
            events, rest, sound = self._split(rest, ended=ended)
            self.count += len(events)
            if events:
                yield events
            if not sound:
                return

    def _head(self, file: IO[bytes]) -> bytes:
        """Read up to the first event; return the bytes read beyond."""
        head = b""
        while len(head) < MAX_HEAD_BYTES:
            piece = file.read(PIECE_BYTES)
            head += piece
            if head[:64].lstrip()[:1] == b"[":
                return head.lstrip()[1:]
            if match := _EVENTS.search(head, max(0, len(head) - len(piece) - 64)):
                self._take_facts(head[: match.end()] + b"]}")
                return head[match.end() :]
            if not piece:
                break
        begins = head[:30].decode("ascii", "replace")
        raise NotATraceError(
            f"{self.path} holds no trace events: it begins with {begins!r}; expected JSON with `traceEvents`. "
            "Give the files that the profiler wrote, one for each rank."
        )

    def _split(self, data: bytes, *, ended: bool) -> tuple[list[Event], bytes, bool]:
        """Return the whole events, the bytes after them, and whether reading can go on."""
        if ended:
            return self._last(data)
        boundaries = list(_BETWEEN.finditer(data, max(0, len(data) - TAIL_BYTES)))
        if not boundaries:
            if len(data) > MAX_PIECE_BYTES:
                self._lost(f"no end of an event in {len(data) >> 20} MiB")
                return [], b"", False
            return [], data, True
        boundary = boundaries[-1]
        events = self._decode(data[: boundary.start() + 1])
        if events is not None:
            return events, data[boundary.end() :], True
        # The last boundary may lie inside an event, or the array may have ended within this piece, or there is damage.
        events, at = self._longest(data)
        if at:
            rest = data[at:]
            if rest.lstrip()[:1] == b",":
                return events, rest.lstrip()[1:], True
            if rest.lstrip()[:1] == b"]":
                return events, b"", False
        self._lost("what follows is no JSON")
        return events, b"", False

    def _last(self, data: bytes) -> tuple[list[Event], bytes, bool]:
        """Return the events of the last piece, and take the facts after them."""
        text = data.strip()
        if not text:
            self._lost("the file ends there")
            return [], b"", False
        ends = [match.start(1) for match in _LAST.finditer(text)][-MAX_LISTS_AFTER:]
        for end in [*reversed(ends), *([0] if text[:1] == b"]" else [])]:
            events = self._decode(text[:end].rstrip().rstrip(b","))
            if events is not None:
                self._take_facts(b"{" + text[end + 1 :].strip().lstrip(b","))
                return events, b"", False
        events, _ = self._longest(text)
        self._lost("the file ends inside an event" if events or self.count else "the first event is cut or damaged")
        return events, b"", False

    def _longest(self, data: bytes) -> tuple[list[Event], int]:
        """Return the events before the first damage, and where they end."""
        ends = [match.start() + 1 for match in _BETWEEN.finditer(data)]
        if (last := data.rfind(b"}")) >= 0:
            ends.append(last + 1)
        low, high, best = 0, len(ends), 0
        while low < high:
            middle = (low + high) // 2
            if self._decode(data[: ends[middle]]) is None:
                high = middle
            else:
                low, best = middle + 1, ends[middle]
        return (self._decode(data[:best]) or [], best) if best else ([], 0)

    def _decode(self, data: bytes) -> list[Event] | None:
        """Return the events of a list without its brackets; None where it is no JSON."""
        try:
            return self._pieces.decode(b"[" + data + b"]")
        except msgspec.ValidationError:
            pass
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        try:
            rows = msgspec.json.decode(b"[" + data + b"]", type=list[Any])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        events: list[Event] = []
        for row in rows:
            try:
                events.append(msgspec.convert(row, self._event, strict=False))
            except (msgspec.ValidationError, RecursionError):
                self._refuse()
        return events

    def _refuse(self) -> None:
        text = "events with values of an unexpected type were left out"
        if text not in self.problems:
            self.problems.append(text)

    def _take_facts(self, text: bytes) -> None:
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError):
            return
        self.facts |= {key: value for key, value in facts.items() if key != "traceEvents"}

    def _lost(self, reason: str) -> None:
        self.problems.append(f"cut or damaged after {self.count:,} events and more ({reason}): what follows is lost")


def open_trace(path: Path) -> IO[bytes]:
    """Open a file, compressed or not, by its first bytes.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def is_json(head: bytes) -> bool:
    """Say whether a file that begins so may be JSON."""
    return head.lstrip()[:1] in (b"{", b"[")


def read_head(path: Path) -> bytes:
    """Return the first MiB of a file, unpacked.

    Raises:
        OSError, EOFError, zlib.error: it cannot be read.
    """
    with open_trace(path) as file:
        return file.read(1 << 20)
