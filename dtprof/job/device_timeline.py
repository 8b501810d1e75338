"""Put the records of a rank on the time of its device, where that was followed.

The host of a device runs ahead: when it issued an operation, or left a phase, says nothing about when that ran. Here
operations begin and end when the device began and ended them, waits are those of its streams, and phases run from mark
to mark on the stream that computes. All that reckons with times then does so with the device's. What of a rank has no
time on the device takes no part: operations on the CPU keep the host's times and block nobody here, and operations on
the device without an interval lie at the next mark and count as not observed.

What a device does between two marks is not recorded. But where the host made the second one at the very moment at which
the device reached it, the stream was empty before: the host set the pace of that stretch, and it is host-bound.
"""

from dataclasses import replace

import numpy as np

from dtprof.columns import distinct, is_any, median
from dtprof.intervals import NONE, Column, Intervals, Mask, accumulate_maximum, pair, union
from dtprof.records import codes, events
from dtprof.records.tables import SPAN, UNKNOWN_NS, Array, RankTables, join, select

CAUGHT_UP_NS = 50_000
"""A mark that the device reached so soon after the host made it found an empty stream; a launch takes 5 to 20 us."""


def place_on_device(tables: RankTables, error_ns: int | None = None) -> RankTables:
    """Return the records of a rank on the time of its device; as they are where no device was followed, or placed.

    Parameters:
        error_ns: of times of the device, where these are records of a stretch; None: the median over all intervals.
    """
    if tables.device_error_ns is not None:
        return tables
    intervals = tables.device_intervals
    if len(intervals):  # of most runs there are none: each call of numpy counts where a thousand ranks are read
        intervals = select(intervals, intervals["end_ns"] != UNKNOWN_NS)
    if not len(intervals):
        if error_ns is None:
            return tables
        # A stretch of a followed rank of which its device passed through nothing.
        return replace(tables, spans=tables.spans[:0], device_error_ns=error_ns)
    kind = intervals["kind"]
    phases = select(intervals, kind == codes.DEVICE_PHASE)
    computes = is_any(intervals["stream"], distinct(phases["stream"]).tolist())
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
    marks = _list_marks(select(intervals, computes))
    _place_unmarked(operations, marks)
    if error_ns is None:
        error_ns = int(median(intervals["error_ns"]))
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
        host_lead_ns=int(median(marks[:, 1] - marks[:, 0])) if len(marks) else None,
    )


def _place_operations(operations: Array, ran: Array, waits: Array, computes: Mask) -> Array:
    """Return operations with the times of the device.

    One on the stream that computes blocks it from begin to end. One on another stream blocks whoever waits for it;
    where it was issued on that other stream, and no wait for it is marked, how long it blocked is not known. It counts
    as issued when the caller's stream came to the call; `done_ns - device_ns` is when it started.

    Parameters:
        ran: intervals of operations. waits: of the stream that computes.
        computes: which of `ran` were issued on the stream that computes.
    """
    placed = operations.copy()
    on_stream = (ran["flags"] & codes.DEVICE_ON_STREAM) != 0
    row, begin, end = ran["row"], _behind_the_queue(operations, ran), ran["end_ns"]
    issued = np.where(computes, ran["reached_ns"], begin)
    placed["state"][row] = codes.DONE
    placed["done_ns"][row] = end
    placed["device_ns"][row] = end - begin
    placed["issued_ns"][row] = issued
    placed["returned_ns"][row] = np.where(on_stream & computes, end, issued)
    placed["wait_begin_ns"][row] = UNKNOWN_NS
    placed["wait_ns"][row] = 0
    seen = codes.COMPLETION_SEEN
    placed["flags"][row] = np.where(computes, placed["flags"][row] | seen, placed["flags"][row] & ~np.uint8(seen))
    waits = select(waits, is_placed(placed)[waits["row"]])
    if len(waits):
        row, times, covered = _share_waits(operations, ran, _without_nested(ran, waits))
        first = np.full(len(placed), np.iinfo(np.int64).max)
        np.minimum.at(first, row, times[:, 0])
        placed["wait_begin_ns"][row] = first[row]
        np.add.at(placed["wait_ns"], row, times[:, 1] - times[:, 0])
        # A stream may stand before an operation that has not begun: the wait is part of what it blocks.
        placed["issued_ns"][row] = np.minimum(placed["issued_ns"][row], first[row])
        placed["returned_ns"][row] = np.minimum(placed["returned_ns"][row], first[row])
        # Of operations on a group's own stream there are waits that no mark shows, as those of DDP's futures.
        aside = np.zeros(len(placed), np.bool_)
        aside[ran["row"]] = on_stream & ~computes
        covered = covered[aside[covered]]
        placed["flags"][covered] |= np.uint8(seen)
        free = covered[placed["wait_begin_ns"][covered] == UNKNOWN_NS]
        placed["wait_begin_ns"][free] = placed["done_ns"][free]
    return placed


def _without_nested(ran: Array, waits: Array) -> Array:
    """Return waits that do not overlap: of those marked at one time, for operations one behind the other, each its own.

    A stream that waits for a reduce-scatter and for the all-reduce behind it, each in a queue of its own, waits for the
    first until that ends, and for the second from then on. The first is marked around the second.
    """
    order = np.argsort(waits["host_begin_ns"], kind="stable")
    outer = order[:-1][waits["host_end_ns"][order[:-1]] >= waits["host_end_ns"][order[1:]]]
    if not len(outer):
        return waits
    waits = waits.copy()
    inner = order[1:][waits["host_end_ns"][order[:-1]] >= waits["host_end_ns"][order[1:]]]
    ends = np.full(int(max(ran["row"].max(), waits["row"].max())) + 1, -1, np.int64)
    ends[ran["row"]] = ran["end_ns"]
    for first, second in zip(outer.tolist(), inner.tolist(), strict=True):  # from the outermost inwards
        begin, end = waits["begin_ns"][first], waits["end_ns"][first]
        waits["end_ns"][first] = cut = min(max(int(ends[waits["row"][first]]), int(begin)), int(end))
        waits["begin_ns"][second] = min(max(int(waits["begin_ns"][second]), cut), int(waits["end_ns"][second]))
    return waits


def _queue_of(operations: Array, ran: Array) -> Column:
    """Return the queue that each operation ran in: the stream that it was issued on, or that of its group."""
    on_stream = (ran["flags"] & codes.DEVICE_ON_STREAM) != 0
    is_p2p = (ran["flags"] & codes.DEVICE_P2P) != 0
    # Single messages have a stream for each peer, batches of them that of the group.
    alone = is_p2p & ((ran["flags"] & codes.DEVICE_SEVERAL) == 0)
    peer = np.where(alone, operations["peer"][ran["row"]].astype(np.int64) + 1, 0)
    stream = np.where(on_stream, ran["stream"].astype(np.int64) + 1, 0)
    queue: Column = (ran["group"].astype(np.int64) << 48) | (stream << 24) | peer
    return queue


def _behind_the_queue(operations: Array, ran: Array) -> Column:
    """Return when operations began: one whose begin is only a mark on its caller's stream, behind those before it.

    A group's own stream works off its operations one after another.
    """
    begin = ran["begin_ns"].copy()
    marked = (ran["flags"] & (codes.DEVICE_EXACT | codes.DEVICE_ON_STREAM | codes.DEVICE_SEVERAL)) == 0
    rows = np.flatnonzero(marked)
    if len(rows) < 2:
        return begin
    queue = _queue_of(operations, ran)[rows]
    order = np.lexsort((operations["seq"][ran["row"][rows]], queue))
    rows, queue = rows[order], queue[order]
    is_first = np.concatenate(([True], queue[1:] != queue[:-1]))
    ends = accumulate_maximum(ran["end_ns"][rows], is_first)
    before = np.where(is_first, begin[rows], np.concatenate((ends[:1], ends[:-1])))
    begin[rows] = np.minimum(np.maximum(begin[rows], before), ran["end_ns"][rows])
    return begin


def _share_waits(operations: Array, ran: Array, waits: Array) -> tuple[Column, Intervals, Column]:
    """Return which operations blocked the stream in its waits, and when; and of which that is known.

    Who waits for an operation also waits for those before it in its queue: each blocks until its own end. What had
    ended when the stream came to wait for one behind it blocked nobody.
    """
    queue = _queue_of(operations, ran)
    # Of a batch, whose operations end together, the waited one comes first: the others block nobody.
    waited = np.zeros(len(operations), np.bool_)
    waited[waits["row"]] = True
    order = np.lexsort((~waited[ran["row"]], ran["end_ns"], queue))
    rows, queue, ends = ran["row"][order], queue[order], ran["end_ns"][order]
    place = np.full(len(operations), -1, np.int64)
    place[rows] = np.arange(len(rows))
    last = place[waits["row"]]
    begins = np.flatnonzero(np.concatenate(([True], queue[1:] != queue[:-1])))
    first_of_queue = begins[np.searchsorted(begins, np.arange(len(rows)), "right") - 1]
    # The earliest in the queue that was still to end when the wait began; those of other queues end elsewhere.
    position = np.lexsort((np.concatenate((ends, waits["begin_ns"])), np.concatenate((queue, queue[last]))))
    is_wait = position >= len(rows)
    passed = np.empty(len(waits), np.int64)
    passed[position[is_wait] - len(rows)] = np.cumsum(~is_wait)[is_wait]
    first = np.minimum(np.maximum(passed, first_of_queue[last]), last)
    counts = last - first + 1
    which = np.repeat(np.arange(len(waits)), counts)
    at = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
    begin, end = waits["begin_ns"][which], waits["end_ns"][which]
    until = np.where(at == last[which], end, np.clip(ends[at], begin, end))
    since = np.where(at == first[which], begin, np.concatenate((begin[:1], until[:-1])))
    furthest = np.full(len(rows), -1, np.int64)
    np.maximum.at(furthest, first_of_queue[last], last)
    covered = rows[np.arange(len(rows)) <= furthest[first_of_queue]]
    return rows[at], pair(np.minimum(since, until), until), covered


def _place_unmarked(operations: Array, marks: Intervals) -> None:
    """Move operations that their device is not known to have reached to the host's next mark.

    When they ran is not known; but it is in this step of the device, which may be far behind the host's.
    """
    rows = np.flatnonzero(((operations["flags"] & codes.DEVICE) != 0) & ~is_placed(operations))
    if not len(rows) or not len(marks):
        return
    at = np.searchsorted(marks[:, 0], operations["issued_ns"][rows], "left")
    operations["issued_ns"][rows] = operations["returned_ns"][rows] = marks[np.minimum(at, len(marks) - 1), 1]
    operations["done_ns"][rows] = operations["wait_begin_ns"][rows] = UNKNOWN_NS


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
            pair(intervals["host_begin_ns"], intervals["reached_ns"]),
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
    order = np.argsort(like["begin_ns"], kind="stable")
    before = np.searchsorted(like["begin_ns"][order], spans["begin_ns"], "right") - 1
    spans["step"] = like["step"][order[np.maximum(before, 0)]]
    return spans
