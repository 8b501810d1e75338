"""Protocol buffers written by numpy: many messages of one shape at once, and single ones.

A shape is a list of pieces: bytes that all messages share, and numbers that differ, padded to one width. A varint may
be padded: readers take 0x80 for seven more bits of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtprof.intervals import Column, Floats

Bytes = npt.NDArray[np.uint8]
BYTES_AT_ONCE = 1 << 20
"""Messages filled together: as many as fit the cache of a core."""
WORD = 8
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class Piece(Protocol):
    """A part of every message, or JSON object, that differs from one to the next."""

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
        _place(out, _padded(self.values[rows], min(self.size, WORD), ends=self.size <= WORD))
        for position in range(WORD, self.size):
            more = 0x80 if position < self.size - 1 else 0
            out[:, position] = (self.values[rows] >> (7 * position)) & 0x7F | more


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
        _place(out, values.astype(values.dtype.newbyteorder("<"), copy=False))


@dataclass(frozen=True, kw_only=True)
class KnownOr:
    """A field whose number may be -1: then another field of the same size is written in its place."""

    known: int  # field number
    values: Column
    otherwise: bytes  # shorter than `size` or equal, ends with a varint that is padded
    size: int

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write one field or the other."""
        values = self.values[rows]
        tag = _tag(self.known, VARINT)
        out[:, : len(tag)] = np.frombuffer(tag, np.uint8)
        Varint(values=np.maximum(values, 0), size=self.size - len(tag)).fill(out[:, len(tag) :], slice(None))
        unknown = values < 0
        if unknown.any():
            out[unknown] = np.frombuffer(pad_last_varint(self.otherwise, self.size), np.uint8)


Pieces = list[Piece | bytes]


def width_of(values: Column, *, least: int = 1) -> int:
    """Return how many bytes the largest of the numbers takes as a varint."""
    largest = int(values.max()) if len(values) else 0
    return max(least, (largest.bit_length() + 6) // 7)


def number(field: int, values: Column) -> Pieces:
    """Return a field that holds a number."""
    return [_tag(field, VARINT), Varint(values=values, size=width_of(values))]


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


def write_all(pieces: Sequence[Piece | bytes], count: int) -> Bytes:
    """Return so many messages of one shape, one a row."""
    out = np.empty((count, size_of(pieces)), np.uint8)
    fill_all(out, pieces)
    return out


def fill_all(out: Bytes, pieces: Sequence[Piece | bytes], *, begin: int = 0) -> None:
    """Write messages of one shape, one per row, from number `begin` on: shared bytes first, then differing ones."""
    blank = b"".join(piece if isinstance(piece, bytes) else bytes(piece.size) for piece in pieces)
    shared = np.frombuffer(blank, np.uint8)
    at_once = max(1, BYTES_AT_ONCE // len(blank))
    for first in range(0, len(out), at_once):
        part = out[first : first + at_once]
        part[:] = shared
        at = 0
        for piece in pieces:
            if isinstance(piece, bytes):
                at += len(piece)
            else:
                piece.fill(part[:, at : at + piece.size], slice(begin + first, begin + first + len(part)))
                at += piece.size


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
    """Lengthen bytes that end with a varint without changing their value."""
    missing = size - len(encoded)
    if missing <= 0:
        return encoded
    return encoded[:-1] + bytes([encoded[-1] | 0x80]) + b"\x80" * (missing - 1) + b"\0"


def _tag(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def _padded(values: Column, size: int, *, ends: bool) -> npt.NDArray[np.uint64]:
    """Return each number spread over the lowest bytes of a word, seven bits a byte; the rest of it is in no byte.

    Parameters:
        ends: the last of so many bytes is the last of the number.
    """
    spread = values.astype("<u8")
    for bytes_before, low in (
        (4, 0x0FFFFFFF),
        (2, 0x3FFF << 32 | 0x3FFF),
        (1, 0x7F << 48 | 0x7F << 32 | 0x7F << 16 | 0x7F),
    ):
        if size > bytes_before:  # the bits above so many bytes of seven move up to where those of eight end
            above = spread & np.uint64(low << 7 * bytes_before)
            spread &= np.uint64(low)
            above <<= np.uint64(bytes_before)
            spread |= above
    more = int.from_bytes(b"\x80" * (size - 1 if ends else size), "little")
    spread |= np.uint64(more)
    return spread


def _place(out: Bytes, words: npt.NDArray[Any]) -> None:
    """Write the first bytes of each word, as many as a row has."""
    size = min(out.shape[1], words.itemsize)
    first = words.view(np.uint8).reshape(-1, words.itemsize)[:, :size]
    whole = f"V{size}"  # moved at once
    out[:, :size].view(whole)[:] = first.view(whole)
