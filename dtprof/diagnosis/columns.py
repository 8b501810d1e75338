"""The collectives of a rank in columns, so that whole runs are compared at once."""

import itertools
from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.analysis import codes
from dtprof.diagnosis.evidence import GroupKey, Operation, Sweep
from dtprof.tables import Array, RankTables, select

SWEPT = np.dtype(
    [
        ("seq", "i8"),
        ("op", "u4"),  # checksum of its name
        ("place", "u4"),  # checksum of its line and function
        ("line", "u4"),  # checksum of its line
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("peer", "i4"),
        ("numel", "i8"),
        ("step", "i8"),
        ("forwards", "i8"),  # forward passes begun before it
        ("thread", "u2"),
        ("in_step", "?"),  # issued by a thread that makes steps, or on its behalf
        ("flags", "u1"),
        ("waits", "u1"),
        ("state", "u1"),
        ("issued_ns", "i8"),
        ("row", "i8"),  # in the operations of the rank
    ]
)
COPIED = ("seq", "dtype", "reduce_op", "peer", "numel", "step", "thread", "flags", "waits", "state", "issued_ns")


def sweep(
    tables: RankTables,
    keys: dict[int, GroupKey],
    rows: Array,
    operation: Callable[[int], Operation],
    *,
    first: int,
    forwards_before: int,
    forwards_ns: npt.NDArray[np.int64],
    steppers: npt.NDArray[np.integer],
) -> Sweep:
    """Return the collectives of each group in columns, by position.

    Parameters:
        first: the row to begin with.
        forwards_before: forward passes begun before the first of `forwards_ns`.
        steppers: threads that make steps; where there are none, all are taken to be in step.
    """
    newest = rows[first:]
    table = np.zeros(len(newest), SWEPT)
    for name in COPIED:
        table[name] = newest[name]
    table["row"] = np.arange(first, len(rows))
    table["forwards"] = forwards_before + np.searchsorted(forwards_ns, newest["issued_ns"])
    table["in_step"] = (newest["flags"] & codes.INFERRED_SITE) != 0
    if len(steppers) == 1:  # as a rule
        table["in_step"] |= newest["thread"] == steppers[0]
    else:
        table["in_step"] |= np.isin(newest["thread"], steppers) if len(steppers) else True
    table["op"] = np.array([crc32(name.encode()) for name in tables.ops] or [0], np.uint32)[newest["op"]]
    places = {n: crc32(f"{site.file}:{site.line}:{site.function}".encode()) for n, site in tables.sites.items()}
    lines = {n: crc32(f"{site.file}:{site.line}".encode()) for n, site in tables.sites.items()}
    sites, at = np.unique(newest["site"], return_inverse=True)
    table["place"] = np.array([places.get(n, 0) for n in sites.tolist()], np.uint32)[at]
    table["line"] = np.array([lines.get(n, 0) for n in sites.tolist()], np.uint32)[at]
    groups = {}
    chosen = np.flatnonzero(newest["kind"] != codes.POINT_TO_POINT)
    chosen = chosen[np.lexsort((newest["seq"][chosen], newest["group"][chosen]))]
    table, group_ids = select(table, chosen), newest["group"][chosen]
    bounds = [0, *(np.flatnonzero(np.diff(group_ids)) + 1).tolist(), len(chosen)]
    for begin, end in itertools.pairwise(bounds):
        key = keys.get(int(group_ids[begin])) if begin < end else None
        if key is not None:
            groups[key] = table[begin:end]
    return Sweep(groups=groups, operation=operation)
