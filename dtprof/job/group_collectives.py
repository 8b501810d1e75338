"""The collectives of each group in columns, member by member: the one schema in which ranks are compared.

Records, dumps and the followers of a running job fill these columns; `job/agreement.py` says where members disagree.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct, is_any
from dtprof.intervals import Column, Mask
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation, RankCollectives, Ranks
from dtprof.records import codes
from dtprof.records.events import FROM_ROOT, TO_ROOT
from dtprof.records.sites import Site
from dtprof.records.tables import Array, RankTables, select

COMPARED = np.dtype(
    [
        ("seq", "i8"),
        ("op", "u4"),  # checksum of its name
        ("peer", "i4"),  # root; -1: none, or not known
        ("dtype", "u1"),  # codes.NONE: none, or not known
        ("reduce_op", "u1"),  # likewise
        ("numel", "i8"),  # -1: not known
        ("sized", "?"),  # every member must bring as many elements
        ("balance", "u8"),  # of an exchange: what is sent less what is expected, which is 0 over all members
        ("line", "u4"),  # checksum of its file and line, and those of its callers; 0: not known
        ("step", "i8"),
        ("in_step", "?"),  # issued by a thread that makes steps, or on its behalf
    ]
)
COLLECTIVE = np.dtype(
    [
        *COMPARED.descr,
        ("forwards", "i8"),  # forward passes started before it
        ("updates", "i8"),  # steps of optimizers begun before it, also those that no backward pass preceded
        ("thread", "u2"),
        ("flags", "u1"),
        ("waits", "u1"),
        ("state", "u1"),
        ("issued_ns", "i8"),
        ("row", "i8"),  # in the operations of the rank
    ]
)
SIZES_AGREE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
SPLIT = "all_to_all"
MAX_SPLITS = 1024
"""Exchanges of a group whose splits are compared once a job is over, the newest."""

Splits = tuple[Sequence[int], Sequence[int]]
"""Of an uneven exchange: what goes to, and comes from, each member, in rows."""
Elements = list[int] | None
Numbers = npt.NDArray[np.uint64]
Tables = Mapping[int, Array]
"""The collectives of one group, by member: tables of COLLECTIVE by sequence number."""


def agrees_in_size(op: str, c10d_name: str) -> bool:
    """Say whether every member must bring as many elements: to an all_gather, where it is into one tensor."""
    return op in SIZES_AGREE or c10d_name.replace("_", "").startswith("allgatherbase")


def checksum(text: str) -> int:
    """Return the number of an interned name."""
    return crc32(text.encode())


def line_of(site: Site | None) -> int:
    """Return a number for a line of the program and the callers that led there; 0 where it is not known."""
    return checksum(" ".join(f"{file}:{line}" for file, line in site.call_path)) if site is not None else 0


def compare_columns(
    rows: Array,
    tables: RankTables,
    schema: np.dtype[np.void],
    *,
    steppers: npt.NDArray[np.integer],
    max_splits: int = 0,
) -> Array:
    """Return operations of one rank in the columns of a schema that begins with COMPARED; those it adds stay 0.

    Parameters:
        rows: collectives whose names are known.
        steppers: threads that make steps; where there are none, all are taken to be in step.
        max_splits: exchanges of each group whose splits are summed up, the last; 0 for all.
    """

    ids = np.ascontiguousarray(rows["op"])
    nobody = np.zeros(len(rows), np.bool_)

    def are(names: Collection[str]) -> Mask:
        named = np.array([name in names for name in tables.ops], np.bool_)
        return named[ids] if named.any() else nobody

    table = np.zeros(len(rows), schema)
    table["op"] = np.array([checksum(name) for name in tables.ops] or [0], np.uint32)[ids]
    table["peer"] = np.where(are((*FROM_ROOT, *TO_ROOT)), rows["peer"], -1)
    table["dtype"] = np.where(are(("barrier",)), codes.NONE, rows["dtype"])
    table["reduce_op"] = np.where(are(REDUCING), rows["reduce_op"], codes.NONE)
    names = itertools.zip_longest(tables.ops, tables.raw_ops, fillvalue="")
    table["sized"] = np.array([agrees_in_size(*both) for both in names] or [False], np.bool_)[ids]
    if (exchanges := are((SPLIT,))).any():
        table["balance"] = _balances(rows, tables, exchanges=exchanges, newest=max_splits)
    sites, at = np.unique(rows["site"], return_inverse=True)
    table["line"] = np.array([line_of(tables.sites.get(site)) for site in sites.tolist()] or [0], np.uint32)[at]
    on_behalf = (rows["flags"] & codes.INFERRED_SITE) != 0
    table["in_step"] = on_behalf | is_any(rows["thread"], steppers.tolist()) if len(steppers) else True
    for name in ("seq", "numel", "step", "thread", "flags", "waits", "state", "issued_ns"):
        if name in (schema.names or ()):
            table[name] = rows[name]
    return table


class Begins(NamedTuple):
    """When spans of a kind began."""

    earlier: int  # as many began before the first of `ns`
    ns: npt.NDArray[np.int64]  # ascending

    def before(self, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many began before each time."""
        return np.asarray(self.earlier + np.searchsorted(self.ns, times_ns), np.int64)


def index_collectives(
    tables: RankTables,
    keys: Mapping[int, GroupId],
    rows: Array,
    operation: Callable[[int], Operation],
    *,
    first: int,
    forwards: Begins,
    updates: Begins,
    steppers: npt.NDArray[np.integer],
) -> RankCollectives:
    """Return the collectives of each group in columns, by position.

    Parameters:
        first: the row to begin with.
        forwards: of forward passes.
        updates: of the steps of optimizers.
        steppers: threads that make steps; where there are none, all are taken to be in step.
    """
    chosen = first + np.flatnonzero(rows["kind"][first:] != codes.POINT_TO_POINT)
    chosen = chosen[np.lexsort((rows["seq"][chosen], rows["group"][chosen]))]
    collectives = select(rows, chosen)
    table = compare_columns(collectives, tables, COLLECTIVE, steppers=steppers, max_splits=MAX_SPLITS)
    table["row"] = chosen
    table["forwards"] = forwards.before(collectives["issued_ns"])
    table["updates"] = updates.before(collectives["issued_ns"])
    return RankCollectives(groups=split_by_group(table, collectives["group"], keys), operation=operation)


def split_by_group(table: Array, numbers: npt.NDArray[np.integer], keys: Mapping[int, GroupId]) -> dict[GroupId, Array]:
    """Return the rows of each group that is known, given the number of the group of each row, ascending."""
    bounds = np.flatnonzero(np.diff(numbers.astype(np.int64), prepend=-1, append=-1)).tolist()
    parts = ((keys.get(int(numbers[begin])), table[begin:end]) for begin, end in itertools.pairwise(bounds))
    return {key: part for key, part in parts if key is not None}


def group_tables(ranks: Ranks) -> dict[GroupId, dict[int, Array]]:
    """Return, for each group of which two members left a record, their collectives by position."""
    groups: dict[GroupId, dict[int, Array]] = {}
    for rank in ranks.values():
        for group, table in rank.collectives.groups.items():
            if group.ranks:
                groups.setdefault(group, {})[rank.rank] = table
    return {group: tables for group, tables in groups.items() if len(tables) > 1}


def rows_at(tables: Tables, seq: int) -> dict[int, Array]:
    """Return the row of one position of each member that issued it."""
    places = {rank: int(np.searchsorted(table["seq"], seq)) for rank, table in tables.items()}
    rows = {rank: tables[rank][at : at + 1] for rank, at in places.items()}
    return {rank: row for rank, row in rows.items() if (row["seq"] == seq).any()}


def at_position(ranks: Ranks, tables: Tables, seq: int) -> dict[int, Operation]:
    """Return the operations of one position."""
    return {rank: ranks[rank].collectives.operation(int(row["row"][0])) for rank, row in rows_at(tables, seq).items()}


def find_common(seqs: Sequence[Column]) -> list[Column]:
    """Return where each member has the positions that all have, ascending, each once."""
    if not all(map(len, seqs)):
        return [np.zeros(0, np.int64) for _ in seqs]
    if all((own[1:] - own[:-1] == 1).all() for own in seqs):  # as a rule
        begins = [int(own[0]) for own in seqs]
        begin, end = max(begins), min(int(own[-1]) for own in seqs) + 1
        return [np.arange(begin - own, max(begin, end) - own) for own in begins]
    common = functools.reduce(np.intersect1d, seqs)
    return [np.intersect1d(common, member_seqs, return_indices=True)[2] for member_seqs in seqs]


def at_same_positions(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rows of two members of a group that are at the same positions in it."""
    if np.array_equal(a["seq"], b["seq"]):  # as a rule
        return a, b
    mine, theirs = find_common((a["seq"], b["seq"]))
    return select(a, mine), select(b, theirs)


def program_calls(table: Array) -> Array:
    """Return the calls of threads of the program: those of autograd's own are made while another waits for them."""
    known = (table["line"] != 0) & (table["thread"] != 0)
    return select(table, known & ((table["flags"] & codes.INFERRED_SITE) == 0))


def is_of_one_thread(table: Array) -> bool:
    """Say whether one thread made all calls."""
    return bool((table["thread"] == table["thread"][:1]).all())


def mix(*values: npt.ArrayLike) -> Numbers:
    """Return a number that depends on all values, and on their order."""
    mixed = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            number = mixed * np.uint64(1_000_003) + np.asarray(value).astype(np.int64).astype(np.uint64)
            number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = np.asarray(number ^ (number >> np.uint64(31)), np.uint64)
    return mixed


def _balances(rows: Array, tables: RankTables, *, exchanges: Mask, newest: int) -> Numbers:
    """Return sent less expected bytes of each exchange, which sum to 0 where all pairs agree."""
    balances = np.zeros(len(rows), np.uint64)
    for number in distinct(rows["group"][exchanges]).tolist():
        group = tables.groups.get(number)
        if group is None or tables.rank not in group.ranks:
            continue
        mine = np.flatnonzero(exchanges & (rows["group"] == number))[-newest:]
        member, others = group.ranks.index(tables.rank), np.arange(len(group.ranks))
        numel = rows["numel"][mine]
        # A job repeats few splits: each kind of them is summed up once.
        _, kinds, at = np.unique(mix(rows["tag"][mine], numel), return_index=True, return_inverse=True)
        splits = [(tables.sizes.get(int(rows["tag"][mine[kind]])), int(numel[kind])) for kind in kinds]
        row, size = usual_row(splits), len(others)
        fit = (known if known and all(len(side) == size for side in known) else None for known, _ in splits)
        sizes = [exchanged(own, count, size, row) for own, (_, count) in zip(fit, splits, strict=True)]
        sent, wanted = (np.array(side) for side in zip(*sizes, strict=True))
        balance = (mix(member, others, sent) - mix(others, member, wanted)).sum(axis=1, dtype=np.uint64)
        balances[mine] = balance[at]
    return balances


def _row_elements(splits: Splits, numel: int) -> int | None:
    """Return the elements of a row of an uneven exchange, whose splits count rows; None of no rows.

    The size is that of all sent, or of all received by a rank that sends none.
    """
    rows = sum(splits[0]) or sum(splits[1])
    return numel // rows if rows and numel % rows == 0 else None


def usual_row(exchanges: Iterable[tuple[Splits | None, int]]) -> int:
    """Return the elements of a row, as the first of some exchanges with any has them: splits, and elements in all."""
    rows = (_row_elements(splits, numel) for splits, numel in exchanges if splits is not None)
    return next(filter(None, rows), 1)


def exchanged(splits: Splits | None, numel: int, count: int, row: int) -> tuple[Elements, Elements]:
    """Return the elements that an exchange sends to, and expects from, each of `count` members.

    None for a side whose splits are not those of the group. Without splits, shares are even.

    Parameters:
        row: elements of a row, where the exchange does not tell.
    """
    if splits is None:
        return [numel // count] * count, [numel // count] * count
    row = _row_elements(splits, numel) or row
    sent, wanted = ([row * split for split in side] if len(side) == count else None for side in splits)
    return sent, wanted
