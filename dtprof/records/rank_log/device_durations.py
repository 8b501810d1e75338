"""Join durations measured on the device to recorded operations. Part of the reader."""

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.records import schema
from dtprof.records.tables import UNKNOWN_NS, Array

SLACK_NS = 100_000
"""How far outside the call a back end may seem to accept an operation: it reads another clock, mapped to the host's."""


def join(operations: Array, measured: Array) -> None:
    """Fill in `device_ns`, and completion where it was not known, of operations; both by time.

    Positions in the group are no key: back ends count otherwise (operations joined into one, some counted twice). But
    an operation is taken by its back end within the call that the hook recorded, and of the calls on one group the one
    issued last before that is it.
    """
    if not len(measured):
        return
    for group in distinct(measured["group"]):
        rows = np.flatnonzero(operations["group"] == group)
        if not len(rows):
            continue
        times = measured[measured["group"] == group]
        taken = times["issued_ns"].astype(np.int64)
        last = np.searchsorted(operations["issued_ns"][rows], taken + SLACK_NS, side="right") - 1
        # The slack may reach past the next issue: step back where the call before has not returned by then.
        before = rows[np.maximum(last - 1, 0)]
        last -= (
            (last > 0) & (operations["issued_ns"][rows[last]] > taken) & (operations["returned_ns"][before] >= taken)
        )
        possible = last >= 0
        possible[possible] &= taken[possible] <= operations["returned_ns"][rows[last[possible]]] + SLACK_NS
        chosen, times, taken = rows[last[possible]], times[possible], taken[possible]
        operations["device_ns"][chosen] = times["numel"].astype(np.int64)
        followed = (operations["flags"][chosen] & schema.FLAG["followed"]) != 0
        unknown = (operations["done_ns"][chosen] == UNKNOWN_NS) & ~followed
        seen = np.maximum(taken + times["done_after"].astype(np.int64), operations["issued_ns"][chosen])
        operations["done_ns"][chosen[unknown]] = seen[unknown]
        operations["state"][chosen[unknown]] = schema.STATE["done"]
        operations["flags"][chosen[unknown]] |= schema.FLAG["completion"] | schema.FLAG["polled"]


def find_operations(operations: Array, intervals: Array) -> None:
    """Fill in `row` of device intervals, and `device_ns` of operations: both carry the operation's group and position.

    Completion is left as it is: what is known of an operation on its device is in the intervals alone, so that rules
    for operations whose program waits for them on the host do not take it up.
    """
    if not len(intervals) or not len(operations):
        return
    about = np.flatnonzero(intervals["kind"] != schema.KIND["device_phase"])
    if not len(about):
        return
    p2p = (intervals["flags"][about] & schema.DEVICE_FLAG["p2p"]) != 0
    wanted = _places(intervals["group"][about], p2p, intervals["seq"][about])
    known = _places(operations["group"], operations["kind"] == schema.KIND["p2p"], operations["seq"])
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], wanted), len(order) - 1)
    row = order[at]
    intervals["row"][about] = np.where(known[row] == wanted, row, -1)
    _bound_by_waits(intervals)
    done = intervals[about]
    done = done[(done["kind"] == schema.KIND["device_operation"]) & (done["end_ns"] != UNKNOWN_NS) & (done["row"] >= 0)]
    operations["device_ns"][done["row"]] = done["end_ns"] - done["begin_ns"]


def _bound_by_waits(intervals: Array) -> None:
    """Let operations whose end was found by polling end no later than a stream's wait for them, which is exact."""
    waits = np.flatnonzero((intervals["kind"] == schema.KIND["device_wait"]) & (intervals["row"] >= 0))
    waits = waits[intervals["end_ns"][waits] != UNKNOWN_NS]
    polled = (intervals["kind"] == schema.KIND["device_operation"]) & (intervals["row"] >= 0)
    polled = np.flatnonzero(polled & (intervals["flags"] & schema.DEVICE_FLAG["polled"] != 0))
    if not len(waits) or not len(polled):
        return
    first = np.full(int(intervals["row"].max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, intervals["row"][waits], intervals["end_ns"][waits])
    ends = np.minimum(intervals["end_ns"][polled], first[intervals["row"][polled]])
    intervals["end_ns"][polled] = np.maximum(ends, intervals["begin_ns"][polled])


def _places(groups: Array, p2p: npt.NDArray[np.bool_], seqs: Array) -> npt.NDArray[np.int64]:
    """Return one number for each place in a group; messages count apart."""
    places: npt.NDArray[np.int64] = groups.astype(np.int64) << 33 | p2p.astype(np.int64) << 32 | seqs.astype(np.int64)
    return places
