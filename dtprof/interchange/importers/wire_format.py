"""Messages of Protocol Buffers without their descriptions: fields by number, as their wire format holds them.

https://protobuf.dev/programming-guides/encoding: a field is a key, its number and kind in one varint, and a value.
"""

import struct
from collections.abc import Iterator

from dtprof.errors import NotATraceError

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
_MAX_SHIFT = 63
_WIDTHS = {FIXED_64: 8, FIXED_32: 4}
Value = int | memoryview
"""A varint, or the bytes of a field of any other kind."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field, in the order of the message.

    Raises:
        NotATraceError: the message breaks off, or is none.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == BYTES:
            width, at = _varint(message, at)
        elif kind in _WIDTHS:
            width = _WIDTHS[kind]
        else:
            raise NotATraceError(f"found a field of kind {kind} at byte {at:,} of a message; expected 0, 1, 2 or 5.")
        if at + width > end:
            raise NotATraceError(f"a field of {width:,} bytes begins at byte {at:,} of a message of {end:,}.")
        yield number, message[at : at + width]
        at += width


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift <= _MAX_SHIFT:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise NotATraceError(f"a number breaks off at byte {at:,} of a message of {len(message):,}.")


def signed(value: int) -> int:
    """Return the number of a varint that may be negative."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text(value: Value) -> str:
    """Return the text of a field; empty where it is a number."""
    return "" if isinstance(value, int) else bytes(value).decode(errors="replace")


def numbers(value: Value) -> list[int]:
    """Return the integers of a repeated field, of which packed ones are in one value."""
    if isinstance(value, int):
        return [signed(value)]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(signed(number))
    return found


def real(value: Value) -> float:
    """Return the number of a field of 8 bytes; 0 where it is none."""
    if isinstance(value, int) or len(value) != _WIDTHS[FIXED_64]:
        return 0.0
    (number,) = struct.unpack("<d", value)
    return float(number)
