"""JSON written by numpy: many objects of one shape at once.

A shape is a list of pieces: text that all objects share, and what differs. Pieces are filled in as wide as their widest
value, empty places as zero bytes, which no JSON holds; these are left out at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.interchange.exporters import protobuf_wire
from dtprof.interchange.exporters.protobuf_wire import Bytes, Piece, fill_all, size_of
from dtprof.intervals import Column

GROUP = 4
"""Digits that are looked up at once."""
SEPARATOR = b",\n"
Digits = npt.NDArray[np.uint32]


def _list_digits(pattern: str, count: int) -> Digits:
    texts = b"".join((pattern % number).encode().rjust(GROUP, b"\0") for number in range(count))
    return np.frombuffer(texts, np.uint32)


NARROW = 8
"""Digits of numbers that fit into 32 bits."""
LAST = np.concatenate([_list_digits("%d", 10_000), _list_digits("%04d", 10_000)])
"""The last four digits of numbers that have no more, then of those that have."""
HIGHER = np.concatenate([[np.uint32(0)], LAST[1:]])
"""The same of four digits before them."""
THOUSANDTHS = _list_digits(".%03d", 1000)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole number from 0 on; null for any below."""

    values: Column

    @cached_property
    def size(self) -> int:
        """Return the digits of the largest, in groups."""
        return _width_of(self.values)

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write its digits."""
        values = self.values[rows]
        _fill_whole(out, values)
        unknown = values < 0
        if unknown.any():
            out[unknown] = np.frombuffer(b"null".rjust(self.size, b"\0"), np.uint8)


@dataclass(frozen=True, kw_only=True)
class Microseconds:
    """A time from 0 ns on in us, with three decimals."""

    values: Column  # ns

    @cached_property
    def size(self) -> int:
        """Return the digits of the largest, in groups, and those after the point."""
        return _width_of(self.values // 1000) + GROUP

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write its digits."""
        values = self.values[rows].astype(np.uint64)
        whole = values // 1000
        _fill_whole(out[:, :-GROUP], whole)
        _place(out[:, -GROUP:], THOUSANDTHS[values - 1000 * whole])


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of some texts."""

    position: Column
    texts: Sequence[bytes]

    @cached_property
    def size(self) -> int:
        """Return the length of the longest."""
        return max(map(len, self.texts), default=0)

    @cached_property
    def table(self) -> npt.NDArray[np.void]:
        """Return the texts, all of one length."""
        padded = b"".join(text.ljust(self.size, b"\0") for text in self.texts)
        return np.frombuffer(padded, f"V{self.size}")

    def fill(self, out: Bytes, rows: slice) -> None:
        """Write the text."""
        if self.size:
            out.view(f"V{self.size}")[:, 0] = self.table[self.position[rows]]


def microseconds(times: Column) -> Piece:
    """Return times in ns as us; those before the first event of a run one by one."""
    if not len(times) or times.min() >= 0:
        return Microseconds(values=times)
    return Choice(position=np.arange(len(times)), texts=[b"%.3f" % (time / 1000) for time in times.tolist()])


def join_rows(pieces: Sequence[Piece | bytes], count: int) -> Iterator[bytes]:
    """Yield so many objects of one shape, one after the other."""
    size = size_of(pieces)
    at_once = max(1, protobuf_wire.BYTES_AT_ONCE // size)
    matrix = np.empty((min(count, at_once), size), np.uint8)
    for begin in range(0, count, at_once):
        out = matrix[: min(at_once, count - begin)]
        fill_all(out, pieces, begin=begin)
        flat = out.reshape(-1)
        yield flat[flat != 0].tobytes()


def _width_of(values: Column) -> int:
    """Return the bytes that the digits of the largest take, in groups."""
    largest = max(0, int(values.max())) if len(values) else 0
    return GROUP * -(-len(str(largest)) // GROUP)


def _fill_whole(out: Bytes, values: npt.NDArray[np.integer[Any]]) -> None:
    """Write digits from the right on, group by group; of those before the first nothing."""
    rest: npt.NDArray[Any] = values.astype(np.uint32 if out.shape[1] <= NARROW else np.uint64)
    table = LAST
    for end in range(out.shape[1], 0, -GROUP):
        above = rest // 10_000
        digits = (rest - 10_000 * above).astype(np.intp)
        if end > GROUP:
            digits += 10_000 * (above > 0)
        _place(out[:, end - GROUP : end], table.take(digits))
        rest, table = above, HIGHER


def _place(out: Bytes, words: Digits) -> None:
    out.view(np.uint32)[:, 0] = words
