"""A number that stands for the members of a group in the call that makes it. Standard library only."""

import zlib
from collections.abc import Iterable
from typing import Any


def checksum_of(members: Iterable[Any]) -> int:
    """Return the checksum of ranks, or of lists of ranks; 0 for none given, which means all.

    Raises:
        TypeError, ValueError: they are no ranks.
    """
    listed = [sorted(part) if isinstance(part, Iterable) else int(part) for part in members]
    return zlib.crc32(repr(listed).encode()) & 0x7FFFFFFF if listed else 0
