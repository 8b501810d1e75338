"""Count the oldest segments of a long log instead of loading them, for readers of the newest operations of a rank.

Part of the reader. Only the counted columns are unpacked from archives. Where an old segment holds damage or a failed
operation, nothing is counted, and the caller reads the log whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.records import events, paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.rank_log.segments import Records, count_at_most, find_fault, read_segment, sound_rows
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


def first_of_newest(files: Sequence[Path], *, of_all: int, of_each: int) -> int:
    """Return the index of the first of the newest segments that together hold the wanted operations.

    Args:
        files: segments of a rank, in order.
        of_all: operations of all ranks of the job together.
        of_each: operations of this rank, at least.
    """
    wanted, count = min(of_each, of_all), 0
    if len(files) < 2 or count_at_most(files) <= wanted:
        return 0
    for i in range(len(files) - 1, 0, -1):
        segment = _read(files[i], _KINDS)
        if segment is None:
            continue  # damaged, or just created: the reader loads it without counting
        wanted = max(of_each, of_all // max(1, segment.header["world_size"]))
        count += int(np.count_nonzero(segment.rows["kind"] <= _P2P))
        if count >= wanted:
            return i
    return 0


def count_past(
    files: Sequence[Path], newest: Array, names: Sequence[str]
) -> tuple[Past, list[Array], list[dict[str, Any]]] | None:
    """Count the records of old segments, and read their spans that matter.

    Parameters:
        files: the segments, in order.
        newest: operations (tables.OPERATION) of the segments after them.
        names: of operations and spans, by id.

    Returns:
        What was counted, tables of spans, and the headers in order; None where a closer look is needed.
    """
    counter = _Counter(newest, names)
    headers = []
    for file in reversed(files):
        segment = _read(file, _COUNTED)
        if segment is None or not counter.take(segment.rows, file):
            return None
        headers.append(segment.header)
    return counter.past(), counter.spans, headers[::-1]


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
        # Operations before the first step are set-up; without steps all count.
        self._has_steps = bool(len(newest)) and int(newest["step"][-1]) > 0
        issued = self._that_count(newest)["issued_ns"]
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

    def take(self, rows: Array, file: Path) -> bool:
        """Count the records of a segment; return False where it needs a closer look."""
        operations = select(rows, rows["kind"] <= _P2P)
        if (operations["state"] == _FAILED).any():
            return False
        spans = select(rows, rows["kind"] == _SPAN)
        return self._take_operations(operations, file) and self._take_spans(spans, file)

    def _that_count(self, operations: Array) -> Array:
        return select(operations, operations["step"] > 0) if self._has_steps else operations

    def _take_operations(self, rows: Array, file: Path) -> bool:
        issued = np.sort(self._that_count(rows)["issued_ns"].astype(np.int64), kind="stable")
        if len(issued):
            following = [] if self._next_ns is None else [self._next_ns]
            gaps = np.diff(np.append(issued, following))
            self._longest_gap_ns = max(self._longest_gap_ns, int(gaps.max(initial=0)))
            self._next_ns = int(issued[0])
        p2p = rows["kind"] == _P2P
        keys = np.flatnonzero(np.bincount(rows["group"].astype(np.int64) * 2 + p2p, minlength=0))
        if not self._known[keys].all() and not self._find_positions(file):
            return False
        return not p2p.any() or self._count_messages(file)

    def _find_positions(self, file: Path) -> bool:
        """Record the last positions of groups without newer operations."""
        segment = _read(file, _POSITIONS)
        if segment is None:
            return False
        rows = select(segment.rows, segment.rows["kind"] <= _P2P)
        key = rows["group"].astype(np.int64) * 2 + (rows["kind"] == _P2P)
        for new in np.unique(key[~self._known[key]]).tolist():
            self._counts[new >> 1, bool(new & 1)] = int(rows["seq"][key == new].max()) + 1
            self._known[new] = True
        return True

    def _count_messages(self, file: Path) -> bool:
        segment = _read(file, _MESSAGES)
        if segment is None:
            return False
        rows = select(segment.rows, segment.rows["kind"] == _P2P)
        columns = [rows[name].astype(np.int64) for name in ("group", "op", "peer", "tag")]
        messages, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
        for (group, op, peer, tag), count in zip(messages.tolist(), counts.tolist(), strict=True):
            self._messages[group, op, peer, tag] += count
        return True

    def _take_spans(self, rows: Array, file: Path) -> bool:
        is_kept = self._is_kept[rows["op"]] | (rows["state"] < _DONE)
        if is_kept.any():
            problems: list[str] = []
            records = Records()
            if read_segment(file, records, problems) is None or problems:
                return False
            self.spans += [
                select(table, self._is_kept[table["op"]] | (table["end_ns"] == UNKNOWN_NS)) for table in records.spans
            ]
            rows = select(rows, ~is_kept)
        exhausted = (rows["flags"][self._is[events.DATA][rows["op"]]] & _SKIPPED) != 0
        if len(exhausted) and self._newest_is_exhaustion is None:
            self._newest_is_exhaustion = bool(exhausted[-1])
        self._exhausted += int(exhausted.sum())
        self._batches += int((~exhausted).sum())
        self._forwards += int(np.count_nonzero(self._is[events.FORWARD][rows["op"]]))
        return True


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
