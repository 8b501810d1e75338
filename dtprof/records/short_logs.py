"""Short logs of several ranks decoded in one go: of few records most of the time goes into calls, not into columns.

Part of the reader. What each rank gets is what it would get alone.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dtprof.records import schema, tables
from dtprof.records.archive import RECORD_DTYPE
from dtprof.records.segments import Records, fill_operations, last_times, sound_rows, to_samples, to_spans
from dtprof.records.tables import Array, select

MOST_SHORT = 1 << 12
"""Records of a log that is decoded together with others, at most."""
MOST_TOGETHER = 1 << 14
"""Records of logs decoded together: columns of so many stay in the processor's cache."""
_WHOLE = f"V{schema.RECORD_SIZE}"
Mask = npt.NDArray[np.bool_]


class ShortLog:
    """The records of one rank as they lie in its segments; a `segments.Taker`."""

    def __init__(self) -> None:
        """Start empty."""
        self.parts: list[Array] = []

    def take(self, rows: Array) -> int:
        """Keep a copy; which are damaged is seen when they are decoded."""
        self.parts.append(rows.view(_WHOLE).copy())
        return 0

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self.parts))


def decode_logs(logs: Sequence[ShortLog]) -> list[Records] | None:
    """Return the records of each log; None where any are damaged, so that each log is to be read alone."""
    found = [Records() for _ in logs]
    parts = [rows for log in logs for rows in log.parts]
    if not parts:
        return found
    raw = np.concatenate(parts).view(RECORD_DTYPE)
    rows, kind, damaged = sound_rows(raw)
    if damaged:
        return None
    # Where the records of each log begin among those that were written, and the end of the last.
    bounds = _count_before(raw["state"] != 0, [0, *itertools.accumulate(map(len, logs))])
    is_operation = kind <= schema.KIND["p2p"]
    operations = np.empty(np.count_nonzero(is_operation), tables.OPERATION)
    fill_operations(operations, select(rows, is_operation))
    spans, samples, device_times = (kind == schema.KIND[name] for name in ("span", "sample", "device_time"))
    for records, own, last_ns in _share_out(operations, _count_before(is_operation, bounds), found):
        records.operations.put(own)
        records.last_ns.append(last_ns)
    for records, own, last_ns in _share_out(to_spans(select(rows, spans)), _count_before(spans, bounds), found):
        records.spans.append(own)
        records.last_ns.append(last_ns)
    for records, own, last_ns in _share_out(to_samples(select(rows, samples)), _count_before(samples, bounds), found):
        records.samples.append(own)
        records.last_ns.append(last_ns)
    if device_times.any():
        measured = select(rows, device_times)
        for records, (begin, end) in zip(found, itertools.pairwise(_count_before(device_times, bounds)), strict=True):
            records.device_times.append(measured[begin:end])
    return found


def decode_each(logs: Sequence[ShortLog]) -> list[Records]:
    """Return the records of each log, without those that are damaged."""
    together = decode_logs(logs) if sum(map(len, logs)) <= MOST_TOGETHER else None
    return together if together is not None else [_decode_alone(log) for log in logs]


def _decode_alone(log: ShortLog) -> Records:
    """Return the records of one log, without those that are damaged."""
    records = Records()
    for rows in log.parts:
        records.take(rows.view(RECORD_DTYPE))
    return records


def _count_before(chosen: Mask, bounds: Sequence[int]) -> list[int]:
    """Return how many rows are chosen before each of these positions."""
    counts: list[int] = np.concatenate(([0], np.cumsum(chosen)))[bounds].tolist()
    return counts


def _share_out(table: Array, bounds: Sequence[int], found: Sequence[Records]) -> Iterator[tuple[Records, Array, int]]:
    """Yield the rows of each log that has any, and the last time of them."""
    some = [(records, *own) for records, own in zip(found, itertools.pairwise(bounds), strict=True) if own[0] < own[1]]
    if not some:
        return
    last = np.maximum.reduceat(last_times(table), [begin for _, begin, _ in some]).tolist()
    for (records, begin, end), last_ns in zip(some, last, strict=True):
        yield records, table[begin:end], last_ns
