"""Count the oldest records of a long log instead of loading them, for readers of the newest operations of a rank.

Part of the reader. The segment in which the newest operations begin is counted up to there, and loaded from there on.
Only the counted columns are unpacked from archives. Where an old record is damaged or that of a failed operation,
nothing is counted, and the caller reads the log whole.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.columns import count_alike
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
MOST_RECORDS, MOST_FOR_EACH = 1 << 20, 64
"""Records that are loaded, in all and for each wanted operation: a rank may issue few operations, or none."""
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

    Parameters:
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
    count = loaded = 0
    for i in range(len(files) - 1, -1, -1):
        keeper = _Keeper()
        problems: list[str] = []
        header = read_segment(files[i], keeper, problems)
        rows, kind, damaged = sound_rows(keeper.rows())
        if header is None or damaged:
            continue  # damaged, or just created: the reader loads it without counting
        is_operation = kind <= _P2P
        own = int(np.count_nonzero(is_operation))
        loaded += len(rows)
        if count + own < wanted and loaded < min(MOST_RECORDS, MOST_FOR_EACH * wanted):
            count += own
            continue
        missing = wanted - count
        first = len(rows) if missing <= 0 else 0
        row = int(np.flatnonzero(is_operation)[own - missing]) if 0 < missing <= own else first
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


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """The counts of some records, and their spans that matter."""

    positions: Mapping[tuple[int, bool], int]  # by id of the group and p2p: operations issued up to the last of them
    messages: Mapping[tuple[int, int, int, int], int]  # by id of the group, id of the operation, peer and tag
    batches: int
    exhausted: int
    newest_is_exhaustion: bool | None  # None: no data loader was asked
    forwards: int
    updates: int
    issued_ns: tuple[int, int] | None  # when the first and the last operation were issued that gaps are taken between
    longest_gap_ns: int
    spans: tuple[Array, ...]
    headers: tuple[dict[str, Any], ...]

    def followed_by(self, later: "_Counts") -> "_Counts":
        """Return the counts of these records and of later ones."""
        spent = self.newest_is_exhaustion if later.newest_is_exhaustion is None else later.newest_is_exhaustion
        gap_ns = max(self.longest_gap_ns, later.longest_gap_ns)
        if self.issued_ns is not None and later.issued_ns is not None:
            gap_ns = max(gap_ns, later.issued_ns[0] - self.issued_ns[1])
        return _Counts(
            positions={**self.positions, **later.positions},
            messages=Counter(self.messages) + Counter(later.messages),
            batches=self.batches + later.batches,
            exhausted=self.exhausted + later.exhausted,
            newest_is_exhaustion=spent,
            forwards=self.forwards + later.forwards,
            updates=self.updates + later.updates,
            issued_ns=_span_of(self.issued_ns, later.issued_ns),
            longest_gap_ns=gap_ns,
            spans=(*self.spans, *later.spans),
            headers=(*self.headers, *later.headers),
        )


def _span_of(earlier: tuple[int, int] | None, later: tuple[int, int] | None) -> tuple[int, int] | None:
    if earlier is None or later is None:
        return later or earlier
    return earlier[0], later[1]


@dataclass
class KnownCounts:
    """What was counted of the sealed segments of ranks, for readers that ask again and again while the job runs."""

    _known: dict[Path, tuple[Path, int, bool, _Counts]] = field(default_factory=dict)  # by folder

    def of(self, files: Sequence[Path], *, has_steps: bool) -> tuple[int, _Counts | None]:
        """Return of how many of the first of these segments the counts are known, and these."""
        first, number, had_steps, counts = self._known.get(files[0].parent, (None, 0, False, None))
        if first != _unpacked(files[0]) or had_steps != has_steps or number > len(files):
            return 0, None
        return number, counts

    def put(self, files: Sequence[Path], counts: _Counts, *, has_steps: bool) -> None:
        """Remember the counts of these segments, the first of a rank."""
        self._known[files[0].parent] = _unpacked(files[0]), len(files), has_steps, counts


def _is_sealed(file: Path, counts: _Counts) -> bool:
    """Say whether the rank will not write to a segment again: it writes to the newest two."""
    return paths.is_archive(file) or any(header["marks"] & schema.MARK["sealed"] for header in counts.headers)


def _unpacked(file: Path) -> Path:
    """Return the name of a segment, whether it has been archived or not."""
    return file.with_suffix("") if paths.is_archive(file) else file


def count_past(
    files: Sequence[Path], cut: Cut, newest: Array, names: Sequence[str], known: KnownCounts | None = None
) -> tuple[Past, list[Array], list[dict[str, Any]]] | None:
    """Count the records before the cut, and read their spans that matter.

    Parameters:
        files: the segments before that of the cut, in order.
        newest: operations (tables.OPERATION) from the cut on.
        names: of operations and spans, by id.
        known: what earlier calls have counted, to which this one adds; None: all is counted.

    Returns:
        What was counted, tables of spans, and the headers in order; None where a closer look is needed.
    """
    counter = _Counter(newest, names, counts_all=known is not None)
    counts = counter.count(cut.rows[: cut.row], lambda _: cut.rows[: cut.row])
    if counts is None:
        return None
    number, counted = known.of(files, has_steps=counter.has_steps) if known is not None and files else (0, None)
    of_files: list[_Counts] = []
    for file in reversed(files[number:]):
        segment = _read(file, _COUNTED)
        if segment is None:
            return None
        found = counter.count(segment.rows, functools.partial(_read_rows, file), segment.header)
        if found is None:
            return None
        of_files.append(found)
    for at, found in enumerate(reversed(of_files), start=number + 1):
        counted = found if counted is None else counted.followed_by(found)
        if known is not None and _is_sealed(files[at - 1], found):
            known.put(files[:at], counted, has_steps=counter.has_steps)
    counts = counts if counted is None else counted.followed_by(counts)
    return counter.past(counts), list(counts.spans), list(counts.headers)


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
    """Counts records, newest first."""

    def __init__(self, newest: Array, names: Sequence[str], *, counts_all: bool) -> None:
        """Count what came before the newest operations of a rank.

        Parameters:
            newest: these, as in `count_past`.
            names: of operations and spans, by id.
            counts_all: count the positions of all groups; otherwise of those alone that have no newer operations.
        """
        self._is = {name: ids_named(names, (name,)) for name in (events.DATA, events.FORWARD, events.OPTIMIZER)}
        self._is_kept = ids_named(names, _KEPT_SPANS)
        self._counts_all = counts_all
        self._known = np.zeros(1 << 17, np.bool_)
        self._known[newest["group"].astype(np.int64) * 2 + (newest["kind"] == _P2P)] = not counts_all
        self.has_steps = bool(len(newest)) and int(newest["step"][-1]) > 0
        issued = newest["issued_ns"][newest["step"] > 0] if self.has_steps else newest["issued_ns"]
        self._next_ns = int(issued[0]) if len(issued) else None

    def past(self, counts: _Counts) -> Past:
        """Return the counts as a table has them."""
        gap_ns = counts.longest_gap_ns
        if counts.issued_ns is not None and self._next_ns is not None:
            gap_ns = max(gap_ns, self._next_ns - counts.issued_ns[1])
        return Past(
            counts=counts.positions,
            messages=counts.messages,
            batches=counts.batches,
            exhausted=counts.exhausted,
            newest_is_exhaustion=bool(counts.newest_is_exhaustion),
            forwards=counts.forwards,
            updates=counts.updates,
            longest_gap_ns=gap_ns,
        )

    def count(self, rows: Array, read: ReadColumns, header: dict[str, Any] | None = None) -> _Counts | None:
        """Count the sound records of a segment; return None where it needs a closer look."""
        rows, kind, _ = sound_rows(rows)
        is_operation, is_span = kind <= _P2P, kind == _SPAN
        # By column: whole records, 64 bytes each, take several times as long to copy as what is counted of them.
        state = rows["state"]
        if (state[is_operation] == _FAILED).any():
            return None
        p2p = kind[is_operation] == _P2P
        positions = self._find_positions(rows["group"][is_operation].astype(np.int64) * 2 + p2p, read)
        messages = _count_messages(read) if p2p.any() else Counter[tuple[int, int, int, int]]()
        if positions is None or messages is None:
            return None
        # Operations before the first step are set-up; without steps all count.
        counts = is_operation & (rows["step"] > 0) if self.has_steps else is_operation
        issued = np.sort(rows["issued_ns"][counts].astype(np.int64), kind="stable")
        op, flags = rows["op"][is_span], rows["flags"][is_span]
        is_open = state[is_span] < _DONE
        is_kept = self._is_kept[op] | is_open
        spans: tuple[Array, ...] = ()
        if is_kept.any():
            kept = self._read_spans(read)
            if kept is None:
                return None
            spans = tuple(kept)
            op, flags = op[~is_kept], flags[~is_kept]
        exhausted = (flags[self._is[events.DATA][op]] & _SKIPPED) != 0
        return _Counts(
            positions=positions,
            messages=messages,
            batches=int((~exhausted).sum()),
            exhausted=int(exhausted.sum()),
            newest_is_exhaustion=bool(exhausted[-1]) if len(exhausted) else None,
            forwards=int(np.count_nonzero(self._is[events.FORWARD][op])),
            updates=int(np.count_nonzero(self._is[events.OPTIMIZER][op])),
            issued_ns=(int(issued[0]), int(issued[-1])) if len(issued) else None,
            longest_gap_ns=int(np.diff(issued).max(initial=0)),
            spans=spans,
            headers=(header,) if header is not None else (),
        )

    def _find_positions(self, keys: npt.NDArray[np.int64], read: ReadColumns) -> dict[tuple[int, bool], int] | None:
        """Return the last positions of groups; those that are known already may be left out."""
        there = np.flatnonzero(np.bincount(keys, minlength=0))
        if self._known[there].all():
            return {}
        columns = read(_POSITIONS)
        if columns is None:
            return None
        rows = select(columns, columns["kind"] <= _P2P)
        key = rows["group"].astype(np.int64) * 2 + (rows["kind"] == _P2P)
        found = {}
        for new in there[~self._known[there]].tolist():
            found[new >> 1, bool(new & 1)] = int(rows["seq"][key == new].max()) + 1
            self._known[new] = not self._counts_all
        return found

    def _read_spans(self, read: ReadColumns) -> list[Array] | None:
        """Return the spans that matter, in tables."""
        whole = read(RECORD_DTYPE.names or ())
        if whole is None:
            return None
        records = Records()
        records.take(whole)
        return [select(table, self._is_kept[table["op"]] | (table["end_ns"] == UNKNOWN_NS)) for table in records.spans]


def _count_messages(read: ReadColumns) -> Counter[tuple[int, int, int, int]] | None:
    found = read(_MESSAGES)
    if found is None:
        return None
    p2p = found["kind"] == _P2P
    columns = [found[name][p2p].astype(np.int64) for name in ("group", "op", "peer", "tag")]
    return Counter(
        {
            (message[0], message[1], message[2], message[3]): count
            for *message, count in zip(*(column.tolist() for column in count_alike(columns)), strict=True)
        }
    )


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
