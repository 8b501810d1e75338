"""Read lines at even distances of a long file of lines, so that the cost does not grow with the file."""

from collections.abc import Iterator
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 20
FEW_BYTES = 1 << 10
"""A file of fewer bytes a line asked for is read as a whole."""


def choose_lines(opened: BinaryIO, size: int, num_lines: int) -> Iterator[bytes]:
    """Yield the first line, then whole lines at even distances, all of them where they are few."""
    yield opened.readline(MAX_LINE_BYTES)
    if size <= num_lines * FEW_BYTES:
        yield from opened
        return
    begin = opened.tell()
    for number in range(num_lines):
        opened.seek(begin + (size - begin) * number // num_lines)
        opened.readline(MAX_LINE_BYTES)  # the rest of the line that this place lies in
        yield opened.readline(MAX_LINE_BYTES)
