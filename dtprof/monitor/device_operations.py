"""Operations of a running rank that are issued and not completed on its device, from its new records.

The record of an operation settles when its call has returned; when its device completes it, another record says.
"""

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.records import codes
from dtprof.records.run_follower import Growth
from dtprof.records.tables import OPERATION, Array, join, select

MAX_OPEN = 4096
"""Operations of a rank that are kept as open, the newest."""
LEFT_BEHIND = 2
"""Steps of a device after which it is never known to complete earlier operations."""
Keys = npt.NDArray[np.uint64]
_NO_KEYS: Keys = np.zeros(0, np.uint64)


class OpenDeviceOperations:
    """Keeps the operations that the device of one rank has still to complete."""

    def __init__(self) -> None:
        """Know of no operation."""
        self._attempt = -1
        self._begin()

    def _begin(self) -> None:
        self._rows: Array = np.zeros(0, OPERATION)  # settled, and not completed
        self._ended: Keys = _NO_KEYS  # completed before their records settled
        self._newest: dict[int, int] = {}  # by group, the newest collective that was completed
        self._step = 0  # of the newest operation that was completed
        self._begun: Keys = _NO_KEYS

    def take(self, growth: Growth) -> Array:
        """Return the open operations of the rank, as tables.OPERATION, in the order of issue."""
        tables = growth.tables
        if tables.attempt != self._attempt:
            self._attempt = tables.attempt
            self._begin()
        settled, unsettled = _followed(tables.operations), _followed(growth.open_operations)
        parts = (self._rows, settled, unsettled, self._ended, tables.device_intervals, growth.open_device_intervals)
        if not any(map(len, parts)):  # most ranks, at every poll: nothing runs on a device
            self._begun = _NO_KEYS
            return self._rows
        ended = _of_operations(tables.device_intervals)
        self._ended = np.concatenate((self._ended, _keys(ended, ended["flags"] & codes.DEVICE_P2P != 0)))
        collectives = ended[ended["flags"] & codes.DEVICE_P2P == 0]
        for group in distinct(collectives["group"]).tolist():
            newest = int(collectives["seq"][collectives["group"] == group].max())
            self._newest[group] = max(self._newest.get(group, -1), newest)
        self._step = max(self._step, int(ended["step"].max(initial=0)))
        known = join([self._rows, settled])
        self._rows = self._still_open(known)[-MAX_OPEN:]
        open_rows = join([self._rows, self._still_open(unsettled)])
        self._ended = self._ended[~np.isin(self._ended, _row_keys(known))]  # their operations are gone for good
        begun = _of_operations(growth.open_device_intervals)
        self._begun = _keys(begun, begun["flags"] & codes.DEVICE_P2P != 0)
        return select(open_rows, np.argsort(open_rows["issued_ns"], kind="stable"))

    def front(self, rows: Array) -> Array:
        """Return the first of these operations that the device started, else the first it did not; at most one."""
        begun = rows[np.isin(_row_keys(rows), self._begun)]
        return (begun if len(begun) else rows)[:1]

    def _still_open(self, rows: Array) -> Array:
        if not len(rows):
            return rows
        newest = np.array([self._newest.get(group, -1) for group in rows["group"].tolist()], np.int64)
        is_p2p = rows["kind"] == codes.POINT_TO_POINT
        behind = np.where(is_p2p, rows["step"] + LEFT_BEHIND < self._step, rows["seq"] <= newest)
        return select(rows, ~(behind | np.isin(_row_keys(rows), self._ended)))


def _followed(rows: Array) -> Array:
    wanted = codes.DEVICE | codes.FOLLOWED
    chosen = ((rows["flags"] & wanted) == wanted) & (rows["state"] != codes.FAILED)
    return select(rows, chosen) if chosen.any() else rows[:0]


def _of_operations(intervals: Array) -> Array:
    return select(intervals, intervals["kind"] == codes.DEVICE_OPERATION)


def _row_keys(rows: Array) -> Keys:
    return _keys(rows, rows["kind"] == codes.POINT_TO_POINT)


def _keys(rows: Array, is_p2p: npt.NDArray[np.bool_]) -> Keys:
    groups, seqs = rows["group"].astype(np.uint64), rows["seq"].astype(np.uint64)
    return np.asarray(groups << np.uint64(34) | is_p2p.astype(np.uint64) << np.uint64(33) | seqs, np.uint64)
