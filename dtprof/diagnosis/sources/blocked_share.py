"""At most so much of a rank's steps passed in operations: what a job could gain if no rank were slow is not more.

All ranks need the same time for a step in the end. If some ranks, fewer than half, were as fast as the others, a step
could be shorter by no more than any of the others was blocked in it (analysis/stragglers/straggler_gains.py), hence by
no more than the median rank was. No clocks of hosts are compared, and no operations matched: one look at the columns
of each rank shows of most sound jobs that no search for stragglers can find one.
"""

import numpy as np

from dtprof.columns import median
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables


def find_blocked_share(rows: Array, tables: RankTables) -> float | None:
    """Return the mean time a step that a rank was blocked, as a share of its median step: no less than it was.

    None where it is not known: the program counts fewer than two steps, or a device runs operations.

    Parameters:
        rows: operations of the rank, by time.
    """
    if not len(rows) or (rows["flags"] & codes.DEVICE).any() or not _COMPUTES.isdisjoint(tables.ops):
        return None
    rows = rows[int(np.searchsorted(rows["step"], 0, side="right")) :]
    begins = np.flatnonzero(np.diff(rows["step"]))
    if len(begins) < 2:
        return None
    durations = np.diff(rows["issued_ns"][begins + 1])
    begin, end = begins[0] + 1, begins[-1] + 1
    rows = rows[begin:end]
    issued, done = rows["issued_ns"], rows["done_ns"]
    seen = (rows["flags"] & codes.COMPLETION_SEEN) != 0
    returned = np.where(rows["returned_ns"] == UNKNOWN_NS, issued, rows["returned_ns"])
    waited = seen & (rows["wait_begin_ns"] != UNKNOWN_NS)
    # What nobody waited for blocks the end of a backward pass, at most from its issue on until it is done.
    under_way = np.where(seen & ~waited & (done != UNKNOWN_NS), done, returned)
    before = np.maximum.accumulate(np.append(issued[:1], under_way[:-1]))
    blocked = int(np.maximum(under_way - np.maximum(issued, before), 0)[seen].sum())
    blocked += int((returned - issued)[waited].sum()) + int(rows["wait_ns"][waited].sum())
    return blocked / len(durations) / max(1.0, median(durations))


_COMPUTES = frozenset((events.DEVICE_BUSY, events.HOST_BUSY))
