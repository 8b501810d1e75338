"""Archives of sealed segments: records by column, predicted from each other and compressed.

The launcher turns `events.NNNNN` into `events.NNNNN.z` while the job runs. Lossless: every byte of every record comes
back, damaged ones too. A file is the header of the segment (with its marks), the number of records, and one block a
column of the record in order: coding (1 byte), length (4 bytes), zlib data.
"""

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtprof.records import paths, schema

RECORD_DTYPE = np.dtype(
    {
        "names": [field.name for field in schema.RECORD],
        "formats": [np.dtype("<" + field.code.replace("B", "u1")) for field in schema.RECORD],
        "offsets": [field.offset for field in schema.RECORD],
        "itemsize": schema.RECORD_SIZE,
    }
)
PLAIN, RESIDUAL_4, RESIDUAL_8 = range(3)
"""Codings of a column: its bytes, or the residuals of a prediction as zigzag integers of 4 or 8 bytes."""
LEVEL = 1
_COUNT = struct.Struct("<Q")
_BLOCK = struct.Struct("<BI")
_EXACT = 2.0**53

Ints = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]


def pack(segment: bytes) -> bytes:
    """Return the archive of a segment file.

    Raises:
        ValueError: the file is too short to be a segment.
    """
    if len(segment) < schema.HEADER_SIZE:
        raise ValueError(f"a segment of {len(segment)} bytes; its header alone takes {schema.HEADER_SIZE}")
    body = segment[schema.HEADER_SIZE :]
    records = np.frombuffer(body[: len(body) // schema.RECORD_SIZE * schema.RECORD_SIZE], RECORD_DTYPE)
    parts = [segment[: schema.HEADER_SIZE], _COUNT.pack(len(records))]
    for field in schema.RECORD:
        coding, column = _encode(field.name, records)
        data = zlib.compress(_shuffle(column), LEVEL)
        parts += [_BLOCK.pack(coding, len(data)), data]
    return b"".join(parts)


def unpack(archive: bytes) -> bytes:
    """Return the segment file that an archive was made of.

    Raises:
        ValueError: the archive is cut or damaged.
    """
    return archive[: schema.HEADER_SIZE] + unpack_columns(archive, RECORD_DTYPE).tobytes()


def unpack_columns(archive: bytes, columns: np.dtype[np.void]) -> Records:
    """Return columns of the records that an archive was made of.

    Parameters:
        columns: those wanted, as in RECORD_DTYPE, and those before them that they are predicted from.

    Raises:
        ValueError: the archive is cut or damaged.
    """
    at = schema.HEADER_SIZE + _COUNT.size
    if len(archive) < at:
        raise ValueError(f"cut after {len(archive)} bytes, inside the header")
    (count,) = _COUNT.unpack_from(archive, schema.HEADER_SIZE)
    if count > schema.SEGMENT_CAPACITY:
        raise ValueError(f"claims {count} records; a segment has room for {schema.SEGMENT_CAPACITY}")
    records = np.zeros(count, columns)
    wanted = set(columns.names or ())
    for field in schema.RECORD:
        try:
            coding, length = _BLOCK.unpack_from(archive, at)
            at += _BLOCK.size
            if field.name in wanted:
                _decode(field.name, coding, zlib.decompress(archive[at : at + length]), records)
            at += length
            if at > len(archive):
                raise ValueError(f"{len(archive)} of at least {at} bytes")
        except (struct.error, zlib.error, ValueError, KeyError) as error:
            raise ValueError(f"cut or damaged in its column {field.name!r} ({error})") from error
    return records


def check_lengths(archive: bytes) -> None:
    """Check that an archive is whole, by the header of its segment and the lengths of its columns.

    Raises:
        ValueError: it is cut, longer than its columns, or none.
    """
    at = schema.HEADER_SIZE + _COUNT.size
    if len(archive) < at or archive[: len(schema.MAGIC)] != schema.MAGIC:
        raise ValueError("cut inside the header, or of another kind of file")
    (count,) = _COUNT.unpack_from(archive, schema.HEADER_SIZE)
    if count > schema.SEGMENT_CAPACITY:
        raise ValueError(f"one of {count} records; a segment has room for {schema.SEGMENT_CAPACITY}")
    for field in schema.RECORD:
        if at + _BLOCK.size > len(archive):
            raise ValueError(f"cut before its column {field.name!r}")
        at += _BLOCK.size + _BLOCK.unpack_from(archive, at)[1]
    if at != len(archive):
        raise ValueError(f"of {len(archive)} bytes; its columns take {at}")


def archive_segment(path: Path) -> None:
    """Replace a sealed segment file by its archive; a reader finds one of them at any moment.

    Its rank may drop the segment at any moment, too: then there is neither.

    Raises:
        OSError: the folder cannot be read or written to.
        ValueError: the file is no segment.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    target = paths.archive_of(path)
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_bytes(pack(data))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    try:
        path.unlink()
    except FileNotFoundError:  # dropped by its rank meanwhile, for want of room
        target.unlink(missing_ok=True)


def _prediction(name: str, records: Records) -> Ints | None:
    """Return the prediction of a column from the columns before it in the record; None: it is kept as it is."""
    if name == "seq":
        return _next_in_group(records)
    if name == "issued_ns":
        return np.concatenate([np.zeros(min(1, len(records)), np.int64), records["issued_ns"].view("<i8")[:-1]])
    if name == "returned_after":
        return np.zeros(len(records), np.int64)
    waited = records["waits"] > 0
    if name == "waited_from":
        return np.where(waited, _whole(records["returned_after"]), 0)
    if name == "waited_for":
        return np.zeros(len(records), np.int64)
    if name == "done_after":
        return np.where(waited, _whole(records["waited_from"]) + _whole(records["waited_for"]), 0)
    return None


def _whole(column: npt.NDArray[np.float32]) -> Ints:
    """Return float times as integers, 0 where they are none."""
    wide = column.astype(np.float64)
    sound = np.isfinite(wide) & (np.abs(wide) < _EXACT)
    whole: Ints = np.where(sound, wide, 0).astype(np.int64)
    return whole


def _next_in_group(records: Records) -> Ints:
    """Return the position after that of the record before in the same group and kind."""
    order, first = _by_group(records)
    seq = records["seq"].astype(np.int64)
    expected = np.zeros(len(records), np.int64)
    after = np.concatenate([np.zeros(min(1, len(records)), np.int64), seq[order][:-1] + 1])
    expected[order] = np.where(first, 0, after)
    return expected


def _by_group(records: Records) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return the order of the records by group and kind, and which of them, in that order, are the first of theirs."""
    key = records["group"].astype(np.int64) * 256 + records["kind"]
    order = np.argsort(key, kind="stable")
    key = key[order]
    return order, np.concatenate([np.ones(min(1, len(key)), np.bool_), key[1:] != key[:-1]])


def _encode(name: str, records: Records) -> tuple[int, npt.NDArray[np.generic]]:
    """Return the coding of a column and the numbers to keep."""
    column = records[name]
    expected = _prediction(name, records)
    if expected is None:
        return PLAIN, column
    if column.dtype.kind == "f":
        values = _whole(column)
        if not np.array_equal(values.astype(np.float32).view(np.uint32), column.view(np.uint32)):
            return PLAIN, column  # not whole nanoseconds, or nothing a hook writes
    else:
        values = column.view("<i8") if column.dtype.itemsize == 8 else column.astype(np.int64)
    residual = values - expected
    zigzag = ((residual << 1) ^ (residual >> 63)).view(np.uint64)
    if len(zigzag) == 0 or int(zigzag.max()) < 2**32:
        return RESIDUAL_4, zigzag.astype("<u4")
    return RESIDUAL_8, zigzag.astype("<u8")


def _decode(name: str, coding: int, data: bytes, records: Records) -> None:
    """Fill a column in; those before it are there."""
    column = records[name]
    width = {PLAIN: column.dtype.itemsize, RESIDUAL_4: 4, RESIDUAL_8: 8}[coding]
    if len(data) != width * len(records):
        raise ValueError(f"{len(data)} bytes for {len(records)} records")
    planes = np.frombuffer(data, np.uint8).reshape(width, len(records))
    if coding == PLAIN:
        column[...] = np.ascontiguousarray(planes.T).view(column.dtype).reshape(-1)
        return
    zigzag = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1).astype(np.uint64)
    residual = (zigzag >> np.uint64(1)).view(np.int64) ^ -(zigzag & np.uint64(1)).view(np.int64)
    if name == "issued_ns":
        column[...] = np.cumsum(residual).view(np.uint64)
        return
    if name == "seq":
        _fill_seq(records, residual)
        return
    expected = _prediction(name, records)
    if expected is None:
        raise ValueError("a prediction where none is made")
    column[...] = residual + expected


def _fill_seq(records: Records, residual: Ints) -> None:
    """Undo `_next_in_group`: within a group, positions are running sums of the residuals, one more each time."""
    order, first = _by_group(records)
    steps = residual[order] + ~first
    total = np.cumsum(steps)
    starts = np.flatnonzero(first)
    before = np.concatenate([np.zeros(min(1, len(starts)), np.int64), total[starts[1:] - 1]])
    seq = np.zeros(len(records), np.int64)
    seq[order] = total - np.repeat(before, np.diff(np.append(starts, len(records))))
    records["seq"] = seq.astype(np.uint32)


def _shuffle(column: npt.NDArray[np.generic]) -> bytes:
    """Return the lowest bytes of all numbers, then the next, ...: bytes that hardly change become neighbours."""
    plain: Bytes = np.ascontiguousarray(column).view(np.uint8)
    return plain.reshape(-1, column.dtype.itemsize).T.tobytes()
