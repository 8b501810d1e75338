"""When each operation kept the program from going on: inside the call, in waits, and at the end of a backward pass.

Known only where completion is observed (gloo on CPU tensors). Each operation has two stretches at most:
1. the call, from issue to return;
2. the wait, from the first `Work.wait()` for as long as waits lasted. DDP waits for futures in C++, which no record
   shows: operations issued inside a backward span that nobody waited for block the thread from the return of the last
   of them until the last is done, each from the completion of the one before (in order of issue) to its own.

Imported runs tell instead when their device, or their host, computed. There an operation keeps the program for as long
as it is under way and nothing computes.
"""

from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.steps.phase_intervals import BUSY
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.columns import is_any
from dtprof.intervals import NONE, Column, Intervals, Mask, measure_before, pair, subtract, union
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """Stretches of blocked time, one row an operation, empty where begin equals end."""

    call: Intervals
    wait: Intervals
    known: Mask  # completion is observed, so that these two are all there is
    counts: Mask  # on a thread that runs the steps, or on behalf of its backward pass
    of_steps: Mask  # not by a thread beside the steps, such as that of a checkpoint: it need not keep them waiting
    covered: Intervals = field(default_factory=lambda: NONE)  # times in which nothing counts as blocked

    @property
    def exposure_known(self) -> Mask:
        """Say of which operations it is known how long they kept the steps from going on."""
        return self.known & self.of_steps

    def length(self, begin: Column, end: Column) -> Column:
        """Return how much of each of these stretches is not covered."""
        plain = end - begin
        if not len(self.covered):
            return plain
        return plain - (measure_before(self.covered, end) - measure_before(self.covered, begin))

    def uncovered(self, times: Intervals) -> Intervals:
        """Return the part of these times that no interval covers."""
        return subtract(times, self.covered) if len(self.covered) else times


def find_blocked(tables: RankTables, operations: Array, phases: dict[str, Intervals], steps: RankSteps) -> Blocked:
    """Find the blocked stretches of each operation of one rank."""
    if len(phases[events.DEVICE_BUSY]) or len(phases[events.HOST_BUSY]):
        return _while_nothing_computes(operations, union(np.concatenate([phases[busy] for busy in BUSY])))
    issued = operations["issued_ns"]
    known = (operations["flags"] & codes.COMPLETION_SEEN) != 0
    returned = np.where(operations["returned_ns"] == UNKNOWN_NS, issued, operations["returned_ns"])
    waited = known & (operations["wait_begin_ns"] != UNKNOWN_NS)
    begin = np.where(waited, np.maximum(operations["wait_begin_ns"], returned), returned)
    end = np.where(waited, np.maximum(operations["wait_begin_ns"] + operations["wait_ns"], begin), begin)
    unwaited = known & ~waited & (operations["done_ns"] != UNKNOWN_NS)
    counts = is_any(operations["thread"], steps.threads) | ((operations["flags"] & codes.INFERRED_SITE) != 0)
    of_steps = counts | ((operations["flags"] & codes.DEVICE) != 0) | (not steps.threads)
    if tables.device_error_ns is not None:
        # A stream is blocked whatever thread issued it: backward passes have one of their own. What blocks the host
        # alone does not count.
        counts = (operations["flags"] & codes.DEVICE) != 0
    _wait_for_backward(begin, end, operations, unwaited & counts, phases[events.BACKWARD])
    if tables.hook == "python":
        _wait_in_forward(end, operations, unwaited & counts, phases[events.FORWARD])
    return Blocked(
        call=pair(issued, np.where(known, returned, issued)),
        wait=pair(begin, end),
        known=known,
        counts=counts,
        of_steps=of_steps,
    )


def _while_nothing_computes(operations: Array, busy: Intervals) -> Blocked:
    """Return the time of each operation; its wait is the part after the last computation.

    Of operations under way together the one issued first keeps the program until it is done, then the next.
    """
    issued, done = operations["issued_ns"], operations["done_ns"]
    known = ((operations["flags"] & codes.COMPLETION_SEEN) != 0) & (done != UNKNOWN_NS)
    end = np.where(known, done, issued)
    done_before = np.maximum.accumulate(np.concatenate(([0], end)))[:-1]
    issued = np.minimum(np.maximum(issued, done_before), end)
    before = np.searchsorted(busy[:, 0], end, "left") - 1
    tail = np.clip(np.where(before >= 0, busy[np.maximum(before, 0), 1], issued), issued, end)
    return Blocked(
        call=pair(issued, tail),
        wait=pair(tail, end),
        known=known,
        counts=np.ones(len(operations), np.bool_),
        of_steps=np.ones(len(operations), np.bool_),
        covered=busy,
    )


def _wait_for_backward(begin: Column, end: Column, operations: Array, unwaited: Mask, backward: Intervals) -> None:
    """Fill in the waits at the end of each backward pass."""
    rows, span = _issued_inside(operations, unwaited, backward)
    if not len(rows):
        return
    returned = begin[rows]
    done = np.minimum(operations["done_ns"][rows], backward[span, 1])
    last = np.r_[np.flatnonzero(np.diff(span)), len(span) - 1]  # of each backward pass
    blocked_from = returned[last][np.searchsorted(span[last], span)]
    # Backward passes follow one another, and `done` is clipped to its own: one running maximum serves them all.
    done_before = np.r_[0, np.maximum.accumulate(done)[:-1]]
    begin[rows] = np.maximum(blocked_from, done_before)
    end[rows] = np.maximum(done, begin[rows])


def _wait_in_forward(end: Column, operations: Array, unwaited: Mask, forward: Intervals) -> None:
    """Fill in the waits of DDP's forward (it broadcasts buffers one by one), which the Python hook does not see."""
    rows, span = _issued_inside(operations, unwaited, forward)
    end[rows] = np.maximum(end[rows], np.minimum(operations["done_ns"][rows], forward[span, 1]))


def _issued_inside(operations: Array, chosen: Mask, spans: Intervals) -> tuple[Column, Column]:
    """Return the chosen operations issued inside a span, by time of issue, and the span of each."""
    issued = operations["issued_ns"]
    span = np.searchsorted(spans[:, 0], issued, "right") - 1
    inside = chosen & (span >= 0)
    inside[inside] = issued[inside] < spans[span[inside], 1]
    rows = np.flatnonzero(inside)
    return rows, span[rows]
