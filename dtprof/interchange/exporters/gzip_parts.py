"""Gzip files of parts that are compressed apart, by workers, and make up one stream as RFC 1952 has it.

Some readers of traces take the first of several members of a file for all of it; so the parts are one member: what zlib
makes of each ends at a whole byte, and the checksum of all follows from those of the parts.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LEVEL = 1
HEADER = bytes.fromhex("1f8b0800 00000000 04ff")  # no name, no time, compressed fast
LAST_BLOCK = b"\x03\x00"  # of a stream: an empty one
RAW = -zlib.MAX_WBITS
POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""The polynomials 1 and, shifted, x, x**2 and so on, whose lowest powers are the highest bits."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some bytes, compressed."""

    packed: bytes
    size: int  # of what was packed
    checksum: int


def pack(pieces: Iterable[bytes]) -> Part:
    """Compress pieces of a file as one part."""
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW)
    packed, size, checksum = [], 0, 0
    for piece in pieces:
        packed.append(deflate.compress(piece))
        size += len(piece)
        checksum = zlib.crc32(piece, checksum)
    packed.append(deflate.flush(zlib.Z_SYNC_FLUSH))
    return Part(packed=b"".join(packed), size=size, checksum=checksum)


def write_parts(parts: Iterable[Part], path: Path) -> None:
    """Write a gzip file of parts."""
    size, checksum = 0, 0
    with path.open("wb") as file:
        file.write(HEADER)
        for part in parts:
            file.write(part.packed)
            size += part.size
            checksum = join_checksums(checksum, part.checksum, part.size)
        file.write(LAST_BLOCK + checksum.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little"))


def join_checksums(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two texts together, of which the second is so many bytes long."""
    power, bits = ONE >> 8, size  # x**8: a byte
    while bits:
        if bits & 1:
            first = _multiply(first, power)
        power, bits = _multiply(power, power), bits >> 1
    return first ^ second


def _multiply(first: int, second: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    while first:
        if first & ONE:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (POLYNOMIAL if second & 1 else 0)
    return product
