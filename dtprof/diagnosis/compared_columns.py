"""What is compared of the collectives of ranks at the same positions of their groups, in columns."""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.diagnosis.argument_agreement import REDUCING, ROOTED, SIZES_AGREE, SPLIT
from dtprof.records import codes
from dtprof.records.tables import Array, RankTables

POSITION = np.dtype(
    [
        ("key", "u8"),  # number of the group and position in it
        ("arguments", "u8"),  # what all members must agree on
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("balance", "u8"),  # of an exchange: what is sent less what is expected, which is 0 over all members
        ("line", "u4"),  # checksum
        ("step", "i8"),
        ("rank", "i4"),
    ]
)
SEQ_BITS = np.uint64(40)

Numbers = npt.NDArray[np.uint64]


def key_of(groups: npt.NDArray[np.int64], seqs: npt.NDArray[np.int64]) -> Numbers:
    """Return one number for a position in a group."""
    return np.asarray((groups.astype(np.uint64) << SEQ_BITS) | seqs.astype(np.uint64), np.uint64)


def group_of(keys: Numbers) -> npt.NDArray[np.int64]:
    """Return the number of the group of each position."""
    return (keys >> SEQ_BITS).astype(np.int64)


def seq_of(keys: Numbers) -> npt.NDArray[np.int64]:
    """Return the position in its group."""
    return (keys & ((np.uint64(1) << SEQ_BITS) - np.uint64(1))).astype(np.int64)


def positions_of(
    rows: Array,
    tables: RankTables,
    *,
    groups: npt.NDArray[np.int64],
    members: Mapping[int, Sequence[int]],
    steppers: npt.NDArray[np.integer],
) -> Array:
    """Return what is compared of each collective, by position.

    Parameters:
        groups: the number of the group of each row.
        members: the ranks of each group, by its key in the tables.
        steppers: threads that make steps; where there are none, all are taken to be in step.
    """

    def those(names: Iterable[str]) -> npt.NDArray[np.bool_]:
        return np.asarray(np.array([name in names for name in tables.ops] or [False])[rows["op"]], np.bool_)

    found = np.zeros(len(rows), POSITION)
    found["key"] = key_of(groups, rows["seq"])
    ops = np.array([crc32(name.encode()) for name in tables.ops] or [0], np.uint64)[rows["op"]]
    agreeing = (np.where(those(names), rows[column], 0) for column, names in (("peer", ROOTED), ("numel", SIZES_AGREE)))
    found["arguments"] = _mixed(ops, *agreeing)
    found["dtype"] = np.where(those(("barrier",)), codes.NONE, rows["dtype"])
    found["reduce_op"] = np.where(those(REDUCING), rows["reduce_op"], codes.NONE)
    found["balance"] = _balances(rows, tables, members, exchanges=those((SPLIT,)))
    sites, at = np.unique(rows["site"], return_inverse=True)
    known = (tables.sites.get(number) for number in sites.tolist())
    lines = [crc32(f"{site.file}:{site.line}".encode()) if site is not None else 0 for site in known]
    found["line"] = np.array(lines or [0], np.uint32)[at]
    # Other threads keep no pace with steps.
    in_step = np.isin(rows["thread"], steppers) | ((rows["flags"] & codes.INFERRED_SITE) != 0)
    found["step"] = np.where(in_step, rows["step"], 0) if len(steppers) else rows["step"]
    found["rank"] = tables.rank
    return found[np.argsort(found["key"], kind="stable")]


def disagree(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Say which of the same positions of two ranks differ in what must agree."""
    differ = a["arguments"] != b["arguments"]
    for column in ("dtype", "reduce_op"):
        differ |= (a[column] != b[column]) & (a[column] != codes.NONE) & (b[column] != codes.NONE)
    return np.asarray(differ, np.bool_)


def pairs_of_places(a: Array, b: Array) -> Numbers:
    """Return one number for how lines and steps of the same positions of two ranks differ; 0 where they do not.

    A program may differ in lines by rank, and in steps by a constant: it differs in few ways, then, again and again.
    """
    ahead = b["step"] - a["step"]
    number = _mixed(group_of(a["key"]), a["rank"], b["rank"], a["line"], b["line"], ahead) | np.uint64(1)
    return np.where((a["line"] != b["line"]) | (ahead != 0), number, np.uint64(0))


def _balances(
    rows: Array, tables: RankTables, members: Mapping[int, Sequence[int]], *, exchanges: npt.NDArray[np.bool_]
) -> Numbers:
    """Return what each exchange sends less what it expects, so that it sums up to 0 where all pairs agree."""
    found = np.zeros(len(rows), np.uint64)
    for group in np.unique(rows["group"][exchanges]).tolist():
        ranks = members.get(group, ())
        if tables.rank not in ranks:
            continue
        mine = np.flatnonzero(exchanges & (rows["group"] == group))
        own, others = ranks.index(tables.rank), np.arange(len(ranks))
        even = rows["numel"][mine] // len(ranks)
        kinds, at = np.unique(np.stack([rows["tag"][mine], even]), axis=1, return_inverse=True)
        sizes = [_sizes(tables, tag, share, len(ranks)) for tag, share in kinds.T.tolist()]
        sent, wanted = np.array([one[0] for one in sizes]), np.array([one[1] for one in sizes])
        balance = (_mixed(own, others, sent) - _mixed(others, own, wanted)).sum(axis=1, dtype=np.uint64)
        found[mine] = balance[at.reshape(-1)]
    return found


def _sizes(tables: RankTables, tag: int, even: int, count: int) -> tuple[Sequence[int], Sequence[int]]:
    uneven = tables.sizes.get(tag)
    if uneven is None or len(uneven[0]) != count or len(uneven[1]) != count:
        return [even] * count, [even] * count
    return uneven


def _mixed(*values: npt.ArrayLike) -> Numbers:
    """Return a number that depends on all values, and on their order."""
    mixed = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            number = mixed * np.uint64(1_000_003) + np.asarray(value).astype(np.int64).astype(np.uint64)
            number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = np.asarray(number ^ (number >> np.uint64(31)), np.uint64)
    return mixed
