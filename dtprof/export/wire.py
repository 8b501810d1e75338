"""Protocol buffers written by numpy: many messages of one shape at once, and single ones.

A shape is a list of pieces: bytes that all messages share, and numbers that differ, padded to one width. A varint may
be padded: readers take 0x80 for seven more bits of zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtprof.analysis.intervals import Column

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
ROWS_AT_ONCE = 1 << 14
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class Piece(Protocol):
    """A part of every message that differs from message to message."""

    @property
    def size(self) -> int:
        """Bytes that it takes in each."""

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write it for some messages, one a row."""


@dataclass(frozen=True, kw_only=True)
class Varint:
    """A number from 0 on, padded."""

    values: Column
    size: int

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write seven bits a byte, the lowest first."""
        _fill_varint(out, self.values[rows], self.size)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A number as it lies in memory: of four or eight bytes, whole or not."""

    values: npt.NDArray[Any]

    @property
    def size(self) -> int:
        """Return the bytes of its type."""
        return self.values.itemsize

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write its bytes, the lowest first."""
        values = np.ascontiguousarray(self.values[rows])
        out[:] = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, self.size)


@dataclass(frozen=True, kw_only=True)
class KnownOr:
    """A field whose number may be -1: then another field of the same size stands for it."""

    known: int  # field number
    values: Column
    otherwise: bytes  # shorter than `size` or equal, ends with a varint that is padded
    size: int

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write one field or the other."""
        values = self.values[rows]
        tag = _tag(self.known, VARINT)
        out[:, : len(tag)] = np.frombuffer(tag, np.uint8)
        _fill_varint(out[:, len(tag) :], np.maximum(values, 0), self.size - len(tag))
        unknown = values < 0
        if unknown.any():
            out[unknown] = np.frombuffer(pad_last_varint(self.otherwise, self.size), np.uint8)


Pieces = list[Piece | bytes]


def width_of(values: Column, *, least: int = 1) -> int:
    """Return how many bytes the largest of the numbers takes as a varint."""
    largest = int(values.max()) if len(values) else 0
    return max(least, (largest.bit_length() + 6) // 7)


def number(field: int, values: Column, *, width: int | None = None) -> Pieces:
    """Return a field that holds a number."""
    return [_tag(field, VARINT), Varint(values=values, size=width or width_of(values))]


def fixed64(field: int, values: Column) -> Pieces:
    """Return a field that holds a number of eight bytes."""
    return [_tag(field, FIXED64), Fixed(values=values.astype(np.uint64))]


def double(field: int, values: Floats) -> Pieces:
    """Return a field that holds a float of eight bytes."""
    return [_tag(field, FIXED64), Fixed(values=values.astype(np.float64))]


def single(field: int, values: Floats) -> Pieces:
    """Return a field that holds a float of four bytes."""
    return [_tag(field, FIXED32), Fixed(values=values.astype(np.float32))]


def message(field: int, pieces: Sequence[Piece | bytes]) -> Pieces:
    """Return a field that holds a message."""
    return [_tag(field, LENGTH) + varint(size_of(pieces)), *pieces]


def size_of(pieces: Sequence[Piece | bytes]) -> int:
    """Return the bytes of one message."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces)


def write_all(pieces: Sequence[Piece | bytes], count: int) -> Iterator[memoryview]:
    """Yield so many messages of one shape, one after the other."""
    size = size_of(pieces)
    for first in range(0, count, ROWS_AT_ONCE):
        rows = slice(first, min(count, first + ROWS_AT_ONCE))
        out = np.empty((rows.stop - rows.start, size), np.uint8)
        at = 0
        for piece in pieces:
            if isinstance(piece, bytes):
                out[:, at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            else:
                piece.fill(out[:, at : at + piece.size], rows)
                at += piece.size
        yield out.data


def varint(value: int) -> bytes:
    """Return one number; below 0 as 64 bits of two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def one_number(field: int, value: int) -> bytes:
    """Return a field of a single message that holds a number."""
    return _tag(field, VARINT) + varint(value)


def one_text(field: int, text: str) -> bytes:
    """Return a field of a single message that holds a text."""
    return one_message(field, text.encode(errors="replace"))


def one_message(field: int, *parts: bytes) -> bytes:
    """Return a field of a single message that holds a message of these fields."""
    body = b"".join(parts)
    return _tag(field, LENGTH) + varint(len(body)) + body


def pad_last_varint(encoded: bytes, size: int) -> bytes:
    """Make bytes that end with a varint longer without changing what they say."""
    missing = size - len(encoded)
    if missing <= 0:
        return encoded
    return encoded[:-1] + bytes([encoded[-1] | 0x80]) + b"\x80" * (missing - 1) + b"\0"


def _tag(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def _fill_varint(out: Bytes, values: Column, size: int) -> None:
    for position in range(size):
        more = 0x80 if position < size - 1 else 0
        out[:, position] = (values >> (7 * position)) & 0x7F | more
