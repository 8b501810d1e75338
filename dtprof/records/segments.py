"""Read segment files into tables, a few thousand records at a time so that they stay in the processor's cache.

Part of the reader. Damaged records are left out and told of; records that were never written are nothing.
"""

import errno
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtprof.errors import NewerFormatError
from dtprof.records import archive, paths, schema, tables
from dtprof.records.archive import RECORD_DTYPE
from dtprof.records.tables import UNKNOWN_NS, Array, join, select

ITEM_SIZES = np.zeros(256, np.int64)
"""Bytes an element by code of the element type."""
ITEM_SIZES[: len(schema.DTYPES)] = [size for _, size in schema.DTYPES]
RECORDS_AT_ONCE = 2048
_NUM_STATES = len(schema.STATES)
_IS_KIND = np.zeros(256, np.bool_)
_IS_KIND[list(schema.KIND.values())] = True
_LONGEST_NS = 2.0**62
_TIMES = {
    kind: [name for name in kind.names or () if name.endswith("_ns") and name != "wait_ns"]
    for kind in (tables.OPERATION, tables.SPAN, tables.SAMPLE)
}
"""Columns of a time, by table."""


class OperationRows:
    """A table of operations that grows: as many as are expected lie in one block, so that they are not copied again."""

    def __init__(self, expected: int = 0) -> None:
        """Take room for so many; what is not used of it costs no memory."""
        self._block = np.empty(expected, tables.OPERATION)
        self._used = 0
        self._full: list[Array] = []

    def add(self, count: int) -> Array:
        """Return so many more rows, to be filled in."""
        if self._used + count > len(self._block):
            self._full = self.parts()
            self._block, self._used = np.empty(count, tables.OPERATION), 0
        self._used += count
        return self._block[self._used - count : self._used]

    def put(self, rows: Array) -> None:
        """Add rows that are filled in already."""
        self._full = [*self.parts(), rows]
        self._block, self._used = rows[:0], 0

    def parts(self) -> list[Array]:
        """Return all rows, in tables that follow one another."""
        return [*self._full, self._block[: self._used]] if self._used else self._full


class Taker(Protocol):
    """What records of segments are given to."""

    def take(self, rows: Array) -> int:
        """Take records as they lie in a segment, to be copied where they are kept; return how many are damaged."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """What segments hold, by kind; sorted by time once `joined`."""

    operations: OperationRows = field(default_factory=OperationRows)
    spans: list[Array] = field(default_factory=list)
    samples: list[Array] = field(default_factory=list)
    device_times: list[Array] = field(default_factory=list)  # as recorded
    last_ns: list[int] = field(default_factory=list)  # the last times of the tables, as they were taken

    def take(self, rows: Array) -> int:
        """Add records as they lie in a segment; return how many are damaged."""
        rows, kind, damaged = sound_rows(rows)
        is_operation = kind <= schema.KIND["p2p"]
        if count := int(np.count_nonzero(is_operation)):
            table = self.operations.add(count)
            fill_operations(table, rows if count == len(rows) else select(rows, is_operation))
            self.last_ns.append(last_time(table))
        if count == len(rows):
            return damaged
        for name, into, convert in (
            ("span", self.spans, to_spans),
            ("sample", self.samples, to_samples),
            ("device_time", self.device_times, np.copy),
        ):
            chosen = kind == schema.KIND[name]
            if np.count_nonzero(chosen):
                into.append(convert(select(rows, chosen)))
                if into is not self.device_times:
                    self.last_ns.append(last_time(into[-1]))
        return damaged

    def joined(self) -> tuple[Array, Array, Array, Array]:
        """Return the operations, spans, samples and device times."""
        return (
            by_time(self.operations.parts(), tables.OPERATION, "issued_ns"),
            by_time(self.spans, tables.SPAN, "begin_ns"),
            by_time(self.samples, tables.SAMPLE, "t_ns"),
            by_time(self.device_times, RECORD_DTYPE, "issued_ns"),
        )


def read_segment(path: Path, taker: Taker, problems: list[str]) -> dict[str, Any] | None:
    """Give away the records of a segment, or of its archive; return its header, None without one.

    Raises:
        NewerFormatError: it was written by a newer dtprof.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        if not paths.is_archive(path):
            try:
                with path.open("rb", buffering=0) as file:
                    head = file.read(schema.HEADER_SIZE)
                    size = os.fstat(file.fileno()).st_size
                    return _take(head, size, _read_chunks(file.fileno()), where, taker, problems)
            except FileNotFoundError:  # archived since the folder was listed
                path = paths.archive_of(path)
        data = archive.unpack(path.read_bytes())
    except OSError as error:
        problems.append(f"{where} cannot be read ({error.strerror})")
        return None
    except ValueError as error:
        problems.append(f"{where} is {error}: its events are lost")
        return None
    body = np.frombuffer(data, np.uint8, offset=schema.HEADER_SIZE)
    chunks = (body[i : i + _CHUNK_BYTES] for i in range(0, len(body), _CHUNK_BYTES))
    return _take(data[: schema.HEADER_SIZE], schema.SEGMENT_SIZE, chunks, where, taker, problems)


_CHUNK_BYTES = RECORDS_AT_ONCE * schema.RECORD_SIZE
Bytes = npt.NDArray[np.uint8]


def _read_chunks(file: int) -> Iterator[Bytes]:
    """Yield the records of a segment file in pieces; what was never written to on disk is passed over."""
    end = schema.HEADER_SIZE + schema.SEGMENT_CAPACITY * schema.RECORD_SIZE
    at = schema.HEADER_SIZE
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    while (at := _next_data(file, at)) < end:
        count = os.preadv(file, [memoryview(buffer.data)[: min(end, _next_hole(file, at)) - at]], at)
        if count <= 0:
            return
        yield buffer[:count]
        at += count


def _next_data(file: int, at: int) -> int:
    """Return where the next record may be: holes of a sparse file hold none."""
    try:
        found = os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        return schema.SEGMENT_SIZE if error.errno == errno.ENXIO else at
    return at + (found - at) // schema.RECORD_SIZE * schema.RECORD_SIZE


def _next_hole(file: int, at: int) -> int:
    """Return where data that begins at or before `at` ends, at the end of a record."""
    try:
        found = os.lseek(file, at, os.SEEK_HOLE)
    except OSError:
        return schema.SEGMENT_SIZE
    return at + -(-(found - at) // schema.RECORD_SIZE) * schema.RECORD_SIZE


def _take(
    head: bytes, size: int, chunks: Iterator[Bytes], where: str, taker: Taker, problems: list[str]
) -> dict[str, Any] | None:
    """Check the header of a segment of `size` bytes and give away its records."""
    if len(head) < schema.HEADER_STRUCT.size:
        problems.append(f"{where} is cut after {len(head)} bytes, inside its header: its events are lost")
        return None
    header = schema.unpack_header(head)
    if fault := find_fault(header, where):
        problems.append(fault)
        return None
    if size < schema.SEGMENT_SIZE:
        problems.append(f"{where} is cut after {size} of {schema.SEGMENT_SIZE} bytes: later events are lost")
    damaged = sum(
        taker.take(chunk[: len(chunk) // schema.RECORD_SIZE * schema.RECORD_SIZE].view(RECORD_DTYPE))
        for chunk in chunks
    )
    if damaged:
        problems.append(f"{where} holds {damaged} damaged records, left out")
    return header


def find_fault(header: dict[str, Any], where: Path | str) -> str:
    """Return why records behind a header cannot be read; nothing where they can.

    Raises:
        NewerFormatError: they were written by a newer dtprof.
    """
    if header["magic"] != schema.MAGIC:
        return f"{where} does not start with {schema.MAGIC!r}: it is not a segment, or was damaged"
    refuse_newer(header["format_version"], where)
    if header["byte_order"] != schema.BYTE_ORDER_MARK or header["record_size"] != schema.RECORD_SIZE:
        return (
            f"{where} has byte order {header['byte_order']:#x} and records of {header['record_size']} bytes; "
            f"expected {schema.BYTE_ORDER_MARK:#x} and {schema.RECORD_SIZE}"
        )
    return ""


def refuse_newer(version: object, where: Path | str) -> None:
    """Refuse a file of a format that this dtprof does not know.

    Raises:
        NewerFormatError: it is one.
    """
    if isinstance(version, int) and version > schema.FORMAT_VERSION:
        raise NewerFormatError(
            f"{where} is of format {version}; this dtprof reads formats up to {schema.FORMAT_VERSION}: "
            "read it with the dtprof that wrote it, or a newer one"
        )


def sound_rows(rows: Array) -> tuple[Array, npt.NDArray[np.uint8], int]:
    """Return the records that were written and are sound, the kind of each, and how many are damaged."""
    # Not the head but the state says what was written: a segment starts as zeros, and claims may pass each other.
    state = np.ascontiguousarray(rows["state"])
    if not state.all():
        rows, state = select(rows, state != 0), state[state != 0]
    kind = np.ascontiguousarray(rows["kind"])
    sound = (state < _NUM_STATES) & _IS_KIND[kind]
    damaged = len(rows) - int(np.count_nonzero(sound))
    if damaged:
        rows, kind = select(rows, sound), kind[sound]
    return rows, kind, damaged


def last_time(table: Array) -> int:
    """Return the last time that a table of operations, spans or samples holds."""
    return max(int(table[name].max()) for name in _TIMES[table.dtype])


def last_times(table: Array) -> npt.NDArray[np.int64]:
    """Return the last time that each row of such a table holds."""
    return functools.reduce(np.maximum, (table[name] for name in _TIMES[table.dtype]))


def count_at_most(files: Iterable[Path]) -> int:
    """Return how many records segments hold at most; holes of sparse files hold none."""
    count = 0
    for file in files:
        try:
            status = file.stat()
        except OSError:  # archived since the folder was listed
            continue
        used = schema.SEGMENT_SIZE if paths.is_archive(file) else min(status.st_size, 512 * status.st_blocks)
        count += min(schema.SEGMENT_CAPACITY, used // schema.RECORD_SIZE)
    return count


def by_time(parts: Sequence[Array], dtype: np.dtype[Any], column: str) -> Array:
    """Return the rows of all parts in order of time."""
    if not parts:
        return np.zeros(0, dtype)
    rows = join(parts)
    times = np.ascontiguousarray(rows[column])
    return select(rows, np.argsort(times, kind="stable")) if (times[1:] < times[:-1]).any() else rows


def _after(records: Array, column: str, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return absolute times from offsets to the issue; UNKNOWN_NS where not known."""
    offsets = np.ascontiguousarray(records[column])
    possible = (offsets >= 0) & (offsets < _LONGEST_NS)
    if not possible.all():
        offsets, known = np.where(possible, offsets, 0), known & possible
    times = records["issued_ns"].astype(np.int64) + offsets.astype(np.int64)
    return times if known.all() else np.where(known, times, UNKNOWN_NS)


def _copy_fields(table: Array, records: Array, columns: Sequence[tables.TableColumn]) -> None:
    for column in columns:
        if column.field:
            table[column.name] = records[column.field]


def fill_operations(table: Array, records: Array) -> None:
    _copy_fields(table, records, tables.OPERATIONS)
    state = records["state"]
    table["nbytes"] = records["numel"].astype(np.int64) * ITEM_SIZES[records["dtype"]]
    table["returned_ns"] = _after(records, "returned_after", state >= schema.STATE["returned"])
    table["wait_begin_ns"] = _after(records, "waited_from", records["waits"] > 0)
    waited = records["waited_for"]
    table["wait_ns"] = np.where((waited >= 0) & (waited < _LONGEST_NS), waited, 0)
    table["done_ns"] = _after(records, "done_after", state >= schema.STATE["done"])
    table["device_ns"] = UNKNOWN_NS


def to_spans(records: Array) -> Array:
    table = np.empty(len(records), tables.SPAN)
    _copy_fields(table, records, tables.SPANS)
    table["end_ns"] = _after(records, "done_after", records["state"] >= schema.STATE["done"])
    return table


def to_samples(records: Array) -> Array:
    table = np.empty(len(records), tables.SAMPLE)
    _copy_fields(table, records, tables.SAMPLES)
    return table
