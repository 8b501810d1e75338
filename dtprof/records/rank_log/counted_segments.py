"""Count the oldest records of a long log instead of loading them, for readers of the newest operations of a rank.

Part of the reader. The segment in which the newest operations begin is counted up to there, and loaded from there on.
Only the counted columns are unpacked from archives. Where an old record is damaged or that of a failed operation,
nothing is counted, and the caller reads the log whole.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.columns import count_alike, distinct
from dtprof.intervals import Mask
from dtprof.records import events, paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.rank_log.segments import (
    RECORDS_AT_ONCE,
    Records,
    count_at_most,
    find_fault,
    read_segment,
    sound_rows,
)
from dtprof.records.tables import UNKNOWN_NS, Array, Past, ids_named, select

_P2P = schema.KIND["p2p"]
_SPAN = schema.KIND["span"]
_DONE = schema.STATE["done"]
_FAILED = schema.STATE["failed"]
_SKIPPED = schema.FLAG["skipped"]
_KINDS = ("state", "kind")
_COUNTED = (*_KINDS, "op", "group", "flags", "step", "issued_ns")
_POSITIONS = (*_KINDS, "group", "seq")
_MESSAGES = (*_KINDS, "op", "group", "peer", "tag")
_KEPT_SPANS = (events.NEW_GROUP, events.CHECKPOINT, events.COMPILE)
"""Rare spans, which are loaded from old segments, too."""

WORTH_IT = 4
"""Records for each wanted operation, from which on not to load them all costs less."""
Kinds = npt.NDArray[np.uint8]
ReadColumns = Callable[[Sequence[str]], Array | None]
"""Returns the sound records of a segment, with these columns at least; None where it cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where the newest operations of a log begin."""

    segment: int  # index of the file
    rows: Array  # the records of that segment; valid until this thread looks for another cut
    row: int  # the first of these to be loaded
    header: dict[str, Any]  # of that segment
    problems: tuple[str, ...]  # in reading it

    def load(self, records: Records) -> None:
        """Decode the rows from the cut on."""
        for at in range(self.row, len(self.rows), RECORDS_AT_ONCE):
            records.take(self.rows[at : at + RECORDS_AT_ONCE])


def find_newest(files: Sequence[Path], *, of_all: int, of_each: int) -> Cut | None:
    """Return where the wanted operations begin; None where the log holds not much more than these.

    Args:
        files: segments of a rank, in order.
        of_all: operations of all ranks of the job together.
        of_each: operations of this rank, at least.
    """
    held, wanted = count_at_most(files), min(of_each, of_all)
    if held <= wanted:
        return None
    wanted = max(of_each, of_all // max(1, _find_world_size(files)))
    if held < WORTH_IT * wanted:
        return None
    count = 0
    for i in range(len(files) - 1, -1, -1):
        keeper = _Keeper()
        problems: list[str] = []
        header = read_segment(files[i], keeper, problems)
        rows, kind, damaged = sound_rows(keeper.rows())
        if header is None or damaged:
            continue  # damaged, or just created: the reader loads it without counting
        is_operation = kind <= _P2P
        own = int(np.count_nonzero(is_operation))
        if count + own < wanted:
            count += own
            continue
        row = int(np.flatnonzero(is_operation)[own - (wanted - count)]) if wanted > count else len(rows)
        return Cut(segment=i, rows=rows, row=row, header=header, problems=tuple(problems))
    return None


def _find_world_size(files: Sequence[Path]) -> int:
    """Return the number of ranks by the newest segment that can be read; 0 where none can."""
    return next((int(header["world_size"]) for header in read_heads(reversed(files))), 0)


def read_heads(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the headers of segments, without their records; of those that can be read."""
    for file in files:
        try:
            with file.open("rb", buffering=0) as opened:
                head = opened.read(schema.HEADER_SIZE)
        except OSError:  # archived since the folder was listed
            continue
        if len(head) == schema.HEADER_SIZE and (header := schema.unpack_header(head))["magic"] == schema.MAGIC:
            yield header


def count_past(
    files: Sequence[Path], cut: Cut, newest: Array, names: Sequence[str]
) -> tuple[Past, list[Array], list[dict[str, Any]]] | None:
    """Count the records before the cut, and read their spans that matter.

    Parameters:
        files: the segments before that of the cut, in order.
        newest: operations (tables.OPERATION) from the cut on.
        names: of operations and spans, by id.

    Returns:
        What was counted, tables of spans, and the headers in order; None where a closer look is needed.
    """
    counter = _Counter(newest, names)
    headers = []
    if not counter.take(cut.rows[: cut.row], lambda _: cut.rows[: cut.row]):
        return None
    for file in reversed(files):
        segment = _read(file, _COUNTED)
        if segment is None or not counter.take(segment.rows, functools.partial(_read_rows, file)):
            return None
        headers.append(segment.header)
    return counter.past(), counter.spans, headers[::-1]


class _Keeper:
    """Keeps the records of a segment as they are, until its thread keeps those of another.

    In memory of the thread: to map and unmap some MB for each segment takes longer than to copy it.
    """

    def __init__(self) -> None:
        if len(getattr(_OF_THREAD, "rows", ())) != schema.SEGMENT_CAPACITY:
            _OF_THREAD.rows = np.empty(schema.SEGMENT_CAPACITY, RECORD_DTYPE)
        self._rows: Array = _OF_THREAD.rows
        self._used = 0

    def take(self, rows: Array) -> int:
        end = self._used + len(rows)
        # Bytes: numpy copies records field by field.
        self._rows[self._used : end].view(np.uint8)[:] = rows.view(np.uint8)
        self._used = end
        return 0  # it takes them as they are

    def rows(self) -> Array:
        return self._rows[: self._used]


_OF_THREAD = threading.local()


class _Counter:
    """Counts segments, newest first."""

    def __init__(self, newest: Array, names: Sequence[str]) -> None:
        self.spans: list[Array] = []
        self._is = {name: ids_named(names, (name,)) for name in (events.DATA, events.FORWARD)}
        self._is_kept = ids_named(names, _KEPT_SPANS)
        p2p = newest["kind"] == _P2P
        self._known = np.zeros(1 << 17, np.bool_)
        self._known[newest["group"].astype(np.int64) * 2 + p2p] = True
        self._counts: dict[tuple[int, bool], int] = {}
        self._messages: Counter[tuple[int, int, int, int]] = Counter()
        self._batches = self._exhausted = self._forwards = 0
        self._newest_is_exhaustion: bool | None = None
        self._has_steps = bool(len(newest)) and int(newest["step"][-1]) > 0
        issued = newest["issued_ns"][newest["step"] > 0] if self._has_steps else newest["issued_ns"]
        self._next_ns = int(issued[0]) if len(issued) else None
        self._longest_gap_ns = 0

    def past(self) -> Past:
        """Return the counts."""
        return Past(
            counts=self._counts,
            messages=dict(self._messages),
            batches=self._batches,
            exhausted=self._exhausted,
            newest_is_exhaustion=bool(self._newest_is_exhaustion),
            forwards=self._forwards,
            longest_gap_ns=self._longest_gap_ns,
        )

    def take(self, rows: Array, read: ReadColumns) -> bool:
        """Count the sound records of a segment; return False where it needs a closer look."""
        rows, kind, _ = sound_rows(rows)
        is_operation = kind <= _P2P
        # By column: whole records, 64 bytes each, take several times as long to copy as what is counted of them.
        if (rows["state"][is_operation] == _FAILED).any():
            return False
        return self._take_operations(rows, kind, is_operation, read) and self._take_spans(rows, kind == _SPAN, read)

    def _take_operations(self, rows: Array, kind: Kinds, is_operation: Mask, read: ReadColumns) -> bool:
        # Operations before the first step are set-up; without steps all count.
        counts = is_operation & (rows["step"] > 0) if self._has_steps else is_operation
        issued = np.sort(rows["issued_ns"][counts].astype(np.int64), kind="stable")
        if len(issued):
            following = [] if self._next_ns is None else [self._next_ns]
            gaps = np.diff(np.append(issued, following))
            self._longest_gap_ns = max(self._longest_gap_ns, int(gaps.max(initial=0)))
            self._next_ns = int(issued[0])
        p2p = kind[is_operation] == _P2P
        keys = np.flatnonzero(np.bincount(rows["group"][is_operation].astype(np.int64) * 2 + p2p, minlength=0))
        if not self._known[keys].all() and not self._find_positions(read):
            return False
        return not p2p.any() or self._count_messages(read)

    def _find_positions(self, read: ReadColumns) -> bool:
        """Record the last positions of groups without newer operations."""
        columns = read(_POSITIONS)
        if columns is None:
            return False
        rows = select(columns, columns["kind"] <= _P2P)
        key = rows["group"].astype(np.int64) * 2 + (rows["kind"] == _P2P)
        for new in distinct(key[~self._known[key]]).tolist():
            self._counts[new >> 1, bool(new & 1)] = int(rows["seq"][key == new].max()) + 1
            self._known[new] = True
        return True

    def _count_messages(self, read: ReadColumns) -> bool:
        found = read(_MESSAGES)
        if found is None:
            return False
        p2p = found["kind"] == _P2P
        columns = [found[name][p2p].astype(np.int64) for name in ("group", "op", "peer", "tag")]
        for *message, count in zip(*(column.tolist() for column in count_alike(columns)), strict=True):
            self._messages[message[0], message[1], message[2], message[3]] += count
        return True

    def _take_spans(self, rows: Array, is_span: Mask, read: ReadColumns) -> bool:
        op, flags = rows["op"][is_span], rows["flags"][is_span]
        is_kept = self._is_kept[op] | (rows["state"][is_span] < _DONE)
        if is_kept.any():
            whole = read(RECORD_DTYPE.names or ())
            if whole is None:
                return False
            records = Records()
            records.take(whole)
            self.spans += [
                select(table, self._is_kept[table["op"]] | (table["end_ns"] == UNKNOWN_NS)) for table in records.spans
            ]
            op, flags = op[~is_kept], flags[~is_kept]
        exhausted = (flags[self._is[events.DATA][op]] & _SKIPPED) != 0
        if len(exhausted) and self._newest_is_exhaustion is None:
            self._newest_is_exhaustion = bool(exhausted[-1])
        self._exhausted += int(exhausted.sum())
        self._batches += int((~exhausted).sum())
        self._forwards += int(np.count_nonzero(self._is[events.FORWARD][op]))
        return True


def _read_rows(file: Path, columns: Sequence[str]) -> Array | None:
    segment = _read(file, columns)
    return None if segment is None else segment.rows


@dataclass(frozen=True, kw_only=True)
class _Segment:
    header: dict[str, Any]
    rows: Array  # archive.RECORD_DTYPE, or columns of it


def _read(file: Path, columns: Sequence[str]) -> _Segment | None:
    """Return the records of a segment, with these columns at least; None where anything in it is damaged."""
    try:
        try:
            data = file.read_bytes()
        except FileNotFoundError:  # archived since the folder was listed
            file = paths.archive_of(file)
            data = file.read_bytes()
        if len(data) < schema.HEADER_SIZE:
            return None
        header = schema.unpack_header(data[: schema.HEADER_SIZE])
        if find_fault(header, file):
            return None
        if paths.is_archive(file):
            rows = archive.unpack_columns(data, np.dtype([(name, RECORD_DTYPE[name]) for name in columns]))
        else:
            count = (len(data) - schema.HEADER_SIZE) // schema.RECORD_SIZE
            rows = np.frombuffer(data, RECORD_DTYPE, count, schema.HEADER_SIZE)
    except (OSError, ValueError):
        return None
    rows, _, damaged = sound_rows(rows)
    return None if damaged else _Segment(header=header, rows=rows)
