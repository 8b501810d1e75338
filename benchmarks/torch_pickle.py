"""Writes values as torch pickles Flight Recorder dumps: protocol 2, equal strings and shared frames once."""

import struct
from collections import Counter
from typing import Any


def as_torch_pickles(value: object) -> bytes:
    """Return the pickle of dictionaries, lists, pairs, strings, numbers and None."""
    writer = _Writer(_shared_frames(value))
    writer.write(value)
    if isinstance(value, dict):
        writer.remember(("whole", id(value)))
    return b"\x80\x02" + b"".join(writer.parts) + b"."


def encoded_text(text: str) -> bytes:
    """Return a string as it stands where it comes first."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _shared_frames(value: object) -> set[int]:
    """Return the identities of frames that several entries hold."""
    entries = value.get("entries", ()) if isinstance(value, dict) else ()
    counted = Counter(id(frame) for entry in entries for frame in entry.get("frames", ()))
    return {identity for identity, count in counted.items() if count > 1}


class _Writer:
    def __init__(self, shared: set[int]) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[object, int] = {}
        self._shared = shared

    def write(self, value: Any) -> None:
        put = self.parts.append
        if isinstance(value, str):
            if not self._written(("text", value)):
                put(encoded_text(value))
                self.remember(("text", value))
        elif value is None or isinstance(value, bool):
            put(b"N" if value is None else b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            put(_integer(value))
        elif isinstance(value, float):
            put(b"G" + struct.pack(">d", value))
        elif isinstance(value, dict):
            is_frame = id(value) in self._shared
            if is_frame and self._written(("frame", id(value))):
                return
            put(b"}(")
            for key, held in value.items():
                self.write(key)
                self.write(held)
            put(b"u")
            if is_frame:
                self.remember(("frame", id(value)))
        elif isinstance(value, list):
            put(b"](")
            for held in value:
                self.write(held)
            put(b"e")
        else:
            first, second = value
            self.write(first)
            self.write(second)
            put(b"\x86")

    def _written(self, key: object) -> bool:
        number = self._memo.get(key)
        if number is not None:
            self.parts.append(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
        return number is not None

    def remember(self, key: object) -> None:
        """Give what was written last the next number of the memo."""
        number = self._memo[key] = len(self._memo)
        self.parts.append(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
