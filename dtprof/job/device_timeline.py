"""Put the records of a rank on the time of its device, where that was followed.

The host of a device runs ahead: when it issued an operation, or left a phase, says nothing about when that ran. Here
operations begin and end when the device began and ended them, waits are those of its streams, and phases run from mark
to mark on the stream that computes. All that reckons with times then does so with the device's. What of a rank has no
time on the device keeps that of the host and takes no part: operations on the CPU block nobody here, and operations on
the device without an interval count as not observed.

What a device does between two marks is not recorded. But where the host made the second one at the very moment at which
the device reached it, the stream was empty before: the host set the pace of that stretch, and it is host-bound.
"""

from dataclasses import replace

import numpy as np

from dtprof.intervals import NONE, Column, Intervals, Mask, pair, union
from dtprof.job.sound_records import is_any
from dtprof.records import codes, events
from dtprof.records.tables import SPAN, UNKNOWN_NS, Array, RankTables, join, select

CAUGHT_UP_NS = 50_000
"""A mark that the device reached so soon after the host made it found an empty stream; a launch takes 5 to 20 us."""


def place_on_device(tables: RankTables) -> RankTables:
    """Return the records of a rank on the time of its device; as they are where no device was followed."""
    intervals = select(tables.device_intervals, tables.device_intervals["end_ns"] != UNKNOWN_NS)
    if not len(intervals):
        return tables
    kind = intervals["kind"]
    phases = select(intervals, kind == codes.DEVICE_PHASE)
    computes = is_any(intervals["stream"], np.unique(phases["stream"]).tolist())
    if not len(phases):
        computes[:] = True
    about = intervals["row"] >= 0
    operations = _place_operations(
        tables.operations,
        select(intervals, (kind == codes.DEVICE_OPERATION) & about),
        select(intervals, (kind == codes.DEVICE_WAIT) & about & computes),
        computes[(kind == codes.DEVICE_OPERATION) & about],
    )
    spans = _place_spans(tables, phases)
    marks = _list_marks(select(intervals, (kind != codes.DEVICE_OPERATION) & computes))
    error_ns = int(np.median(intervals["error_ns"]))
    bound = _find_host_bound(marks, error_ns)
    ops = tables.ops
    if len(bound) and len(spans):
        ops = (*ops, events.HOST_BOUND)
        spans = join([spans, _as_spans(bound, op=len(ops) - 1, like=spans)])
    return replace(
        tables,
        ops=ops,
        operations=select(operations, np.argsort(operations["issued_ns"], kind="stable")),
        spans=select(spans, np.argsort(spans["begin_ns"], kind="stable")),
        device_error_ns=error_ns,
        host_lead_ns=int(np.median(marks[:, 1] - marks[:, 0])) if len(marks) else None,
    )


def _place_operations(operations: Array, ran: Array, waits: Array, computes: Mask) -> Array:
    """Return operations with the times of the device.

    One on the stream that computes blocks it from begin to end. One on another stream blocks whoever waits for it;
    where it was issued on that other stream (as FSDP does) nothing marks that wait: how long it blocked is not known.

    Parameters:
        ran: intervals of operations. waits: of the stream that computes.
        computes: which of `ran` were issued on the stream that computes.
    """
    placed = operations.copy()
    row, begin, end = ran["row"], ran["begin_ns"], ran["end_ns"]
    on_stream = (ran["flags"] & codes.DEVICE_ON_STREAM) != 0
    placed["state"][row] = codes.DONE
    placed["done_ns"][row] = end
    placed["device_ns"][row] = end - begin
    placed["issued_ns"][row] = begin
    placed["returned_ns"][row] = np.where(on_stream & computes, end, begin)
    placed["wait_begin_ns"][row] = UNKNOWN_NS
    placed["wait_ns"][row] = 0
    seen = codes.COMPLETION_SEEN
    placed["flags"][row] = np.where(computes, placed["flags"][row] | seen, placed["flags"][row] & ~np.uint8(seen))
    waits = select(waits, is_placed(placed)[waits["row"]])
    if len(waits):
        row = waits["row"]
        first = np.full(len(placed), np.iinfo(np.int64).max)
        np.minimum.at(first, row, waits["begin_ns"])
        placed["wait_begin_ns"][row] = first[row]
        np.add.at(placed["wait_ns"], row, waits["end_ns"] - waits["begin_ns"])
        # A stream may stand before an operation that has not begun: the wait is part of what it blocks.
        placed["issued_ns"][row] = np.minimum(placed["issued_ns"][row], first[row])
        placed["returned_ns"][row] = np.minimum(placed["returned_ns"][row], first[row])
        placed["flags"][row] |= np.uint8(seen)
    return placed


def is_placed(operations: Array) -> Mask:
    """Say which operations have the begin and the end that their device gave them."""
    followed = (operations["flags"] & codes.FOLLOWED) != 0
    placed: Mask = followed & (operations["device_ns"] >= 0) & (operations["done_ns"] != UNKNOWN_NS)
    return placed


def start_of(operations: Array) -> Column:
    """Return when operations started: on their device where that was followed, else when they were issued."""
    issued = np.ascontiguousarray(operations["issued_ns"])
    placed = is_placed(operations)
    if not placed.any():
        return issued
    return np.where(placed, operations["done_ns"] - operations["device_ns"], issued)


def _place_spans(tables: RankTables, phases: Array) -> Array:
    """Return the spans that the device passed through, with its times; and marks of steps, where it then stood."""
    spans = tables.spans
    if not len(phases):
        return spans[:0]
    order = np.lexsort((phases["op"], phases["host_begin_ns"]))
    phases = select(phases, order)
    at = np.searchsorted(phases["host_begin_ns"], spans["begin_ns"], "left")
    found = np.full(len(spans), -1, np.int64)
    # Spans that began at the same ns: of other names.
    for further in range(4):
        near = np.minimum(at + further, len(phases) - 1)
        same = (phases["host_begin_ns"][near] == spans["begin_ns"]) & (phases["op"][near] == spans["op"])
        found = np.where((found < 0) & same, near, found)
    placed = select(spans, found >= 0)
    placed["begin_ns"] = phases["begin_ns"][found[found >= 0]]
    placed["end_ns"] = phases["end_ns"][found[found >= 0]]
    step_ids = [number for number, name in enumerate(tables.ops) if name == events.STEP]
    steps = select(spans, is_any(spans["op"], step_ids) & (found < 0))
    if not len(steps):
        return placed
    marks = _list_marks(phases)
    next_mark = np.searchsorted(marks[:, 0], steps["end_ns"], "left")
    steps, next_mark = select(steps, next_mark < len(marks)), next_mark[next_mark < len(marks)]
    steps["begin_ns"] = steps["end_ns"] = marks[next_mark, 1]
    return join([placed, steps])


def _list_marks(intervals: Array) -> Intervals:
    """Return when the host made each mark and when the device reached it, in order."""
    marks = np.concatenate(
        [
            pair(intervals["host_begin_ns"], intervals["begin_ns"]),
            pair(intervals["host_end_ns"], intervals["end_ns"])[intervals["host_end_ns"] != UNKNOWN_NS],
        ]
    )
    marks = marks[np.lexsort((marks[:, 1], marks[:, 0]))]
    marks[:, 1] = np.maximum.accumulate(marks[:, 1]) if len(marks) else marks[:, 1]
    return marks


def _find_host_bound(marks: Intervals, error_ns: int) -> Intervals:
    """Return the stretches of the device at whose end it had caught up with the host."""
    if len(marks) < 2:
        return NONE
    caught_up = marks[1:, 1] - marks[1:, 0] <= CAUGHT_UP_NS + error_ns
    return union(pair(marks[:-1, 1], marks[1:, 1])[caught_up])


def _as_spans(stretches: Intervals, *, op: int, like: Array) -> Array:
    """Return stretches as spans of the thread that most spans are of."""
    threads, counts = np.unique(like["thread"], return_counts=True)
    spans = np.zeros(len(stretches), SPAN)
    spans["op"], spans["state"], spans["thread"], spans["stage"] = op, codes.DONE, threads[np.argmax(counts)], -1
    spans["begin_ns"], spans["end_ns"] = stretches.T
    return spans
