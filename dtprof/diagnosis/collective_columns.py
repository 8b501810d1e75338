"""The collectives of a rank in columns, so that whole runs are compared at once."""

import itertools
from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.diagnosis.job_state import Operation, RankCollectives
from dtprof.job.groups import GroupId
from dtprof.records import codes
from dtprof.records.tables import Array, RankTables, select

COLLECTIVE = np.dtype(
    [
        ("seq", "i8"),
        ("op", "u4"),  # checksum of its name
        ("place", "u4"),  # checksum of its line and function
        ("line", "u4"),  # checksum of its line
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("peer", "i4"),
        ("numel", "i8"),  # -1: not known
        ("even", "?"),  # every member must bring as much, though the operation does not require it by name
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
ONE_TENSOR = "_allgather_base_"
"""The all_gather into one tensor, to which every member must bring as much."""
COPIED = ("seq", "dtype", "reduce_op", "peer", "numel", "step", "thread", "flags", "waits", "state", "issued_ns")


def index_collectives(
    tables: RankTables,
    keys: dict[int, GroupId],
    rows: Array,
    operation: Callable[[int], Operation],
    *,
    first: int,
    forwards_before: int,
    forwards_ns: npt.NDArray[np.int64],
    steppers: npt.NDArray[np.integer],
) -> RankCollectives:
    """Return the collectives of each group in columns, by position.

    Parameters:
        first: the row to begin with.
        forwards_before: forward passes begun before the first of `forwards_ns`.
        steppers: threads that make steps; where there are none, all are taken to be in step.
    """
    chosen = first + np.flatnonzero(rows["kind"][first:] != codes.POINT_TO_POINT)
    seq, group_ids = rows["seq"][chosen], rows["group"][chosen]
    order = np.lexsort((seq, group_ids))
    chosen, group_ids = chosen[order], group_ids[order]
    newest = select(rows, chosen)
    table = np.empty(len(newest), COLLECTIVE)
    for name in COPIED:
        table[name] = newest[name]
    table["even"] = np.array([name == ONE_TENSOR for name in tables.raw_ops] or [False])[newest["op"]]
    table["row"] = chosen
    table["forwards"] = forwards_before + np.searchsorted(forwards_ns, newest["issued_ns"])
    in_step = (newest["flags"] & codes.INFERRED_SITE) != 0
    if len(steppers) == 1:  # as a rule
        in_step |= newest["thread"] == steppers[0]
    else:
        in_step |= np.isin(newest["thread"], steppers) if len(steppers) else True
    table["in_step"] = in_step
    table["op"] = np.array([crc32(name.encode()) for name in tables.ops] or [0], np.uint32)[newest["op"]]
    sites, at = np.unique(newest["site"], return_inverse=True)
    known = [tables.sites.get(n) for n in sites.tolist()]
    lines = [f"{site.file}:{site.line}" if site is not None else "" for site in known]
    places = [f"{line}:{site.function}" if site is not None else "" for line, site in zip(lines, known, strict=True)]
    for name, texts in (("line", lines), ("place", places)):
        table[name] = np.array([crc32(text.encode()) for text in texts], np.uint32)[at]
    groups = {}
    bounds = [0, *(np.flatnonzero(np.diff(group_ids)) + 1).tolist(), len(chosen)]
    for begin, end in itertools.pairwise(bounds):
        key = keys.get(int(group_ids[begin])) if begin < end else None
        if key is not None:
            groups[key] = table[begin:end]
    return RankCollectives(groups=groups, operation=operation)
