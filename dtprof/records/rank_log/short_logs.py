"""Short logs of several ranks decoded together: numpy's cost per call outweighs that per record in a short log.

Part of the reader. Each rank gets the tables that `segments.Records` decodes from its log alone.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dtprof.intervals import Mask
from dtprof.records import schema, tables
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.rank_log.segments import (
    Records,
    fill_operations,
    last_times,
    other_tables,
    sound_rows,
)
from dtprof.records.tables import Array, select

MOST_SHORT = 1 << 12
"""Most records of a log that is decoded together with others."""
MOST_TOGETHER = 1 << 14
"""Most records decoded together: their columns stay in the processor's cache."""
_WHOLE = f"V{schema.RECORD_SIZE}"


class ShortLog:
    """The undecoded records of one rank; a `segments.Taker`."""

    def __init__(self) -> None:
        """Start empty."""
        self.parts: list[Array] = []

    def take(self, rows: Array) -> int:
        """Copy the records; decoding checks them later."""
        self.parts.append(rows.view(_WHOLE).copy())
        return 0

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(map(len, self.parts))


def decode_logs(logs: Sequence[ShortLog]) -> list[Records] | None:
    """Return the records of each log; None where any are damaged: then the caller decodes each log alone."""
    decoded = [Records() for _ in logs]
    parts = [rows for log in logs for rows in log.parts]
    if not parts:
        return decoded
    raw = np.concatenate(parts).view(RECORD_DTYPE)
    rows, kind, damaged = sound_rows(raw)
    if damaged:
        return None
    # First row of each log among the written records, and the end of the last log.
    bounds = _count_before(raw["state"] != 0, [0, *itertools.accumulate(map(len, logs))])
    is_operation = kind <= schema.KIND["p2p"]
    operations = np.empty(np.count_nonzero(is_operation), tables.OPERATION)
    fill_operations(operations, select(rows, is_operation))
    for records, of_log, last_ns in _split(operations, _count_before(is_operation, bounds), decoded):
        records.operations.put(of_log)
        records.last_ns.append(last_ns)
    for table, chosen in other_tables(rows, kind):
        for records, of_log, last_ns in _split(table, _count_before(chosen, bounds), decoded):
            records.add(of_log, last_ns)
    return decoded


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


def _split(table: Array, bounds: Sequence[int], logs: Sequence[Records]) -> Iterator[tuple[Records, Array, int]]:
    """Yield the rows of each log that has any, and their last time; one pass finds that of all logs."""
    parts = [
        (log, begin, end) for log, (begin, end) in zip(logs, itertools.pairwise(bounds), strict=True) if begin < end
    ]
    if not parts:
        return
    last = np.maximum.reduceat(last_times(table), [begin for _, begin, _ in parts]).tolist()
    for (records, begin, end), last_ns in zip(parts, last, strict=True):
        yield records, table[begin:end], last_ns
