"""Join what back ends measured on the device to the operations that the hook recorded. Part of the reader."""

import numpy as np

from dtprof.records import schema
from dtprof.records.tables import UNKNOWN_NS, Array

SLACK_NS = 100_000
"""How far outside the call a back end may seem to have taken an operation: it reads another clock, mapped to ours."""


def join(operations: Array, measured: Array) -> None:
    """Fill in `device_ns`, and completion where it was not known, of operations; both by time.

    Positions in the group are no key: back ends count otherwise (operations joined into one, some counted twice). But
    an operation is taken by its back end within the call that the hook recorded, and of the calls on one group the one
    issued last before that is it.
    """
    if not len(measured):
        return
    for group in np.unique(measured["group"]):
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
        unknown = operations["done_ns"][chosen] == UNKNOWN_NS
        seen = np.maximum(taken + times["done_after"].astype(np.int64), operations["issued_ns"][chosen])
        operations["done_ns"][chosen[unknown]] = seen[unknown]
        operations["state"][chosen[unknown]] = schema.STATE["done"]
        operations["flags"][chosen[unknown]] |= schema.FLAG["completion"] | schema.FLAG["polled"]
