"""Read segment files into tables, a few thousand records at a time so that they stay in the processor's cache.

Part of the reader. Damaged records are omitted and reported; slots that were never written hold no record.
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
from dtprof.records import paths, schema, tables
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE
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
    for kind in (tables.OPERATION, tables.SPAN, tables.SAMPLE, tables.DEVICE_INTERVAL, RECORD_DTYPE)
}
"""Columns with a time, by type of table."""


class OperationRows:
    """A growing table of operations; the expected number of rows lies in one block, which is never copied."""

    def __init__(self, expected: int = 0) -> None:
        """Reserve rows; the kernel provides memory only for those that are written."""
        self._block = np.empty(expected, tables.OPERATION)
        self._used = 0
        self._full: list[Array] = []

    def add(self, count: int) -> Array:
        """Return `count` new rows for the caller to fill in."""
        if self._used + count > len(self._block):
            self._full = self.parts()
            self._block, self._used = np.empty(count, tables.OPERATION), 0
        self._used += count
        return self._block[self._used - count : self._used]

    def put(self, rows: Array) -> None:
        """Add a filled table."""
        self._full = [*self.parts(), rows]
        self._block, self._used = rows[:0], 0

    def parts(self) -> list[Array]:
        """Return all rows as tables, in order."""
        return [*self._full, self._block[: self._used]] if self._used else self._full


class Taker(Protocol):
    """Receives the records of segments."""

    def take(self, rows: Array) -> int:
        """Take records in the layout of a segment, in memory valid during the call; return how many are damaged."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of segments by kind; sorted by time once `joined`."""

    operations: OperationRows = field(default_factory=OperationRows)
    spans: list[Array] = field(default_factory=list)
    samples: list[Array] = field(default_factory=list)
    device_times: list[Array] = field(default_factory=list)  # as recorded
    device_intervals: list[Array] = field(default_factory=list)
    last_ns: list[int] = field(default_factory=list)  # the last time of each table

    def take(self, rows: Array) -> int:
        """Decode records in the layout of a segment; return how many are damaged."""
        rows, kind, damaged = sound_rows(rows)
        is_operation = kind <= schema.KIND["p2p"]
        if count := int(np.count_nonzero(is_operation)):
            table = self.operations.add(count)
            fill_operations(table, rows if count == len(rows) else select(rows, is_operation))
            self.last_ns.append(last_time(table))
        if count < len(rows):
            for table, _ in other_tables(rows, kind):
                self.add(table)
        return damaged

    def add(self, table: Array, last_ns: int | None = None) -> None:
        """Add a table of any kind but operations, with its last time where the caller knows it."""
        if table.dtype == RECORD_DTYPE:
            self.device_times.append(table)
            return
        tables_of_kind = {
            tables.SPAN: self.spans,
            tables.SAMPLE: self.samples,
            tables.DEVICE_INTERVAL: self.device_intervals,
        }
        tables_of_kind[table.dtype].append(table)
        self.last_ns.append(last_time(table) if last_ns is None else last_ns)

    def joined(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return the operations, spans, samples, device times and device intervals."""
        return (
            by_time(self.operations.parts(), tables.OPERATION, "issued_ns"),
            by_time(self.spans, tables.SPAN, "begin_ns"),
            by_time(self.samples, tables.SAMPLE, "t_ns"),
            by_time(self.device_times, RECORD_DTYPE, "issued_ns"),
            by_time(self.device_intervals, tables.DEVICE_INTERVAL, "begin_ns"),
        )


def read_segment(path: Path, taker: Taker, problems: list[str]) -> dict[str, Any] | None:
    """Pass the records of a segment, or of its archive, to a taker; return its header, None without one.

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
    """Yield the records of a segment file in chunks, without the holes of a sparse file."""
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
    """Return the offset of the next record that is not in a hole of a sparse file."""
    try:
        data = os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        return schema.SEGMENT_SIZE if error.errno == errno.ENXIO else at
    return at + (data - at) // schema.RECORD_SIZE * schema.RECORD_SIZE


def _next_hole(file: int, at: int) -> int:
    """Return the end of the data around `at`, rounded up to a whole record."""
    try:
        hole = os.lseek(file, at, os.SEEK_HOLE)
    except OSError:
        return schema.SEGMENT_SIZE
    return at + -(-(hole - at) // schema.RECORD_SIZE) * schema.RECORD_SIZE


def _take(
    head: bytes, size: int, chunks: Iterator[Bytes], where: str, taker: Taker, problems: list[str]
) -> dict[str, Any] | None:
    """Check the header of a segment of `size` bytes and pass its records to the taker."""
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
    """Return why the records behind a header cannot be read; empty where they can.

    Raises:
        NewerFormatError: a newer dtprof wrote them.
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
    """Refuse a file of a newer format.

    Raises:
        NewerFormatError: its version is above `schema.FORMAT_VERSION`.
    """
    if isinstance(version, int) and version > schema.FORMAT_VERSION:
        raise NewerFormatError(
            f"{where} is of format {version}; this dtprof reads formats up to {schema.FORMAT_VERSION}: "
            "read it with the dtprof that wrote it, or a newer one"
        )


def sound_rows(rows: Array) -> tuple[Array, npt.NDArray[np.uint8], int]:
    """Return the sound records, the kind of each, and the number of damaged ones."""
    # The state, not the head of the segment, marks a written record: threads complete their claims in any order.
    state = np.ascontiguousarray(rows["state"])
    if not state.all():
        written = np.flatnonzero(state)
        end = int(written[-1]) + 1 if len(written) else 0
        rows, state = rows[:end], state[:end]  # as a rule the rest of a page is not written yet: nothing is copied
        if len(written) < end:
            rows, state = select(rows, written), state[written]
    kind = np.ascontiguousarray(rows["kind"])
    sound = (state < _NUM_STATES) & _IS_KIND[kind]
    damaged = len(rows) - int(np.count_nonzero(sound))
    if damaged:
        rows, kind = select(rows, sound), kind[sound]
    return rows, kind, damaged


def last_time(table: Array) -> int:
    """Return the last time in a table."""
    return max(int(table[name].max()) for name in _TIMES[table.dtype])


def last_times(table: Array) -> npt.NDArray[np.int64]:
    """Return the last time in each row of a table."""
    return functools.reduce(np.maximum, (table[name] for name in _TIMES[table.dtype]))


def count_at_most(files: Iterable[Path]) -> int:
    """Return an upper bound of the records in segments; holes of sparse files hold none."""
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
    """Return the rows of all parts, sorted by time."""
    if not parts:
        return np.zeros(0, dtype)
    rows = join(parts)
    times = np.ascontiguousarray(rows[column])
    return select(rows, np.argsort(times, kind="stable")) if (times[1:] < times[:-1]).any() else rows


def _after(records: Array, column: str, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return absolute times from offsets to the issue; UNKNOWN_NS where unknown."""
    offsets = np.ascontiguousarray(records[column])
    if not _are_possible(offsets):
        possible = (offsets >= 0) & (offsets < _LONGEST_NS)
        offsets, known = np.where(possible, offsets, 0), known & possible
    times = records["issued_ns"].astype(np.int64) + offsets.astype(np.int64)
    return times if known.all() else np.where(known, times, UNKNOWN_NS)


def _are_possible(offsets: npt.NDArray[np.float32]) -> bool:
    """Say whether all can be times; NaN cannot."""
    return not len(offsets) or bool(offsets.min() >= 0 and offsets.max() < _LONGEST_NS)


def _copy_fields(table: Array, records: Array, columns: Sequence[tables.TableColumn]) -> None:
    for column in columns:
        if column.field:
            table[column.name] = records[column.field]


def other_tables(rows: Array, kind: npt.NDArray[np.uint8]) -> Iterator[tuple[Array, npt.NDArray[np.bool_]]]:
    """Yield the tables of all kinds but operations, each with the mask of its rows.

    Device intervals that failed are left out: their end is not known, or a jump of the device's clock made it doubtful.
    """
    for chosen, convert in (
        (kind == schema.KIND["span"], to_spans),
        (kind == schema.KIND["sample"], to_samples),
        (kind == schema.KIND["device_time"], np.copy),
        ((kind >= schema.KIND["device_operation"]) & (rows["state"] != schema.STATE["failed"]), to_device_intervals),
    ):
        if np.count_nonzero(chosen):
            yield convert(select(rows, chosen)), chosen


def fill_operations(table: Array, records: Array) -> None:
    _copy_fields(table, records, tables.OPERATIONS)
    state = np.ascontiguousarray(records["state"])
    table["nbytes"] = table["numel"] * ITEM_SIZES[records["dtype"]]
    table["returned_ns"] = _after(records, "returned_after", state >= schema.STATE["returned"])
    table["wait_begin_ns"] = _after(records, "waited_from", records["waits"] > 0)
    waited = np.ascontiguousarray(records["waited_for"])
    table["wait_ns"] = waited if _are_possible(waited) else np.where((waited >= 0) & (waited < _LONGEST_NS), waited, 0)
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


def to_device_intervals(records: Array) -> Array:
    table = np.empty(len(records), tables.DEVICE_INTERVAL)
    _copy_fields(table, records, tables.DEVICE_INTERVALS)
    table["end_ns"] = _after(records, "done_after", records["state"] >= schema.STATE["done"])
    host_ns = np.maximum(records["returned_after"], 0).astype(np.int64)
    is_operation = records["kind"] == schema.KIND["device_operation"]
    both = ~is_operation & (table["end_ns"] != UNKNOWN_NS)
    table["host_end_ns"] = np.where(both, table["host_begin_ns"] + host_ns, UNKNOWN_NS)
    table["reached_ns"] = table["begin_ns"] - np.where(is_operation, host_ns, 0)
    table["row"] = -1
    return table
