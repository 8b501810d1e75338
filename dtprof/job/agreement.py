"""Disagreements of the members of a group on a collective: the argument, and the ranks in the minority.

A finished job, its dumps and a running one are judged by the same comparison.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.intervals import Mask
from dtprof.job.group_collectives import (
    MAX_SPLITS,
    SPLIT,
    Tables,
    at_position,
    at_same_positions,
    checksum,
    exchanged,
    find_common,
    rows_at,
    usual_row,
)
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation, Ranks
from dtprof.records.codes import NONE
from dtprof.records.tables import Array, join, select

_UNKNOWN = {"peer": -1, "dtype": NONE, "reduce_op": NONE, "numel": -1}
_COLUMNS = ("op", *_UNKNOWN)

_MIN_EARLIER, _MOST_EARLIER = 2, 8
"""Exchanges at a line before one of them is said to have changed, and those looked at."""

BadPair = tuple[int, int, int, int]
"""Sender, receiver, elements sent, elements expected."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A collective on which the members of its group do not agree."""

    argument: str  # as columns and Operation name it, or sizes; of several the first
    seq: int
    operations: dict[int, Operation]  # of the members that left a record
    values: dict[int, Hashable]  # what each of them has
    minority: tuple[int, ...]
    is_new: bool  # as many on either side, and only the minority makes this call for the first time
    is_tie: bool  # as many on either side, and nothing tells which is wrong
    bad_pairs: list[BadPair]  # of an exchange
    has_changed: bool = False  # the rank in the minority exchanged otherwise in all calls at this line before


def disagree(a: Array, b: Array) -> Mask:
    """Say at which of the same positions two members disagree; the splits of exchanges take all members to compare."""
    differ = np.zeros(len(a), np.bool_)
    for column in _COLUMNS:
        differ |= _differ_in(column, a, b)
    return differ


def find_disagreement(ranks: Ranks, group: GroupId, tables: Tables) -> Disagreement | None:
    """Return the first of a group: after a position with different operations all others are shifted."""
    reference = max(tables.values(), key=len)
    suspects = set(_find_unbalanced(tables)) if len(tables) == len(group.ranks) else set()
    for other in tables.values():
        a, b = at_same_positions(reference, other)
        suspects.update(a["seq"][disagree(a, b)][:1].tolist())
    judged = (disagreement_at(ranks, tables, seq) for seq in sorted(suspects))
    return next((disagreement for disagreement in judged if disagreement is not None), None)


def disagreement_at(ranks: Ranks, tables: Tables, seq: int) -> Disagreement | None:
    """Return the arguments in which the members that reached a position disagree; None where they agree."""
    rows = rows_at(tables, seq)
    if len(rows) < 2:
        return None
    table, operations = join([*rows.values()]), at_position(ranks, tables, seq)
    for column in _COLUMNS:
        known = select(table, table[column] != _UNKNOWN.get(column, 0))
        if len(known) and _differ_in(column, table, known[:1]).any():
            return _judge(tables, operations, column, seq, [])
    pairs = _find_bad_pairs(operations) if table["op"][0] == checksum(SPLIT) else []
    return (
        _judge(tables, operations, "sizes", seq, pairs, changed=_changed(ranks, tables, seq, pairs)) if pairs else None
    )


def sizes_at(ranks: Ranks, tables: Tables, seq: int) -> Disagreement | None:
    """Return how the sizes at a position differ, whether or not the operation asks for equal ones; None: they agree.

    A gather may take uneven tensors. Where the backend crashes in one, the sizes may be why.
    """
    operations = at_position(ranks, tables, seq)
    sizes = {rank: _size_of_one(rank, operation) for rank, operation in operations.items()}
    return _judge(tables, operations, "numel", seq, [], sizes) if len(set(sizes.values()) - {-1}) > 1 else None


def _size_of_one(rank: int, operation: Operation) -> int:
    """Return the elements of one member: a root that scatters holds those of all."""
    members = len(operation.group.ranks)
    is_of_all = operation.op in ("scatter", "gather") and operation.peer_rank == rank and operation.numel % members == 0
    return operation.numel // members if is_of_all and operation.numel >= 0 else operation.numel


def _differ_in(column: str, a: Array, b: Array) -> Mask:
    differ: Mask = a[column] != b[column]
    if column in _UNKNOWN and differ.any():
        differ &= (a[column] != _UNKNOWN[column]) & (b[column] != _UNKNOWN[column])
        if column == "numel":
            differ &= a["sized"] & b["sized"]
    return differ


def _judge(
    tables: Tables,
    operations: dict[int, Operation],
    argument: str,
    seq: int,
    pairs: list[BadPair],
    values: Mapping[int, Hashable] | None = None,
    changed: Collection[int] = (),
) -> Disagreement:
    """Say who is in the minority: of an exchange, the ranks of most pairs that do not fit.

    Parameters:
        changed: of the ranks of such a pair the one that leaves what it did before, where that is known.
    """
    values = values or {rank: _value_of(operation, argument) for rank, operation in operations.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    minority = {rank for rank, value in values.items() if value != usual}
    is_even = all(operation.sizes is None for operation in operations.values())
    if pairs and (not is_even or 2 * len(minority) >= len(values)):
        often = Counter(rank for sender, receiver, *_ in pairs for rank in (sender, receiver))
        minority = {rank for rank, count in often.items() if count == max(often.values())}
        minority = minority.intersection(changed) or minority
    has_changed = bool(minority.issubset(changed))
    is_tie = 2 * len(minority) >= len(values)
    new = _without_precedent(tables, values, argument, seq) if is_tie else set()
    return Disagreement(
        argument=argument,
        seq=seq,
        operations=operations,
        values=dict(values),
        minority=tuple(sorted(new or minority)),
        is_new=bool(new),
        is_tie=is_tie and not new,
        bad_pairs=pairs,
        has_changed=has_changed,
    )


def _value_of(operation: Operation, argument: str) -> Hashable:
    if argument == "sizes":
        return operation.sizes[0] if operation.sizes is not None else operation.numel
    value: Hashable = getattr(operation, argument)
    return value


def _without_precedent(tables: Tables, values: Mapping[int, Hashable], argument: str, seq: int) -> set[int]:
    """Return the half of the ranks whose call no member had made before; nothing where new and old do not part so."""
    columns = list(dict.fromkeys(("op", "line", argument if argument in _UNKNOWN else "op")))
    before = np.concatenate([table[table["seq"] < seq][columns] for table in tables.values()])
    new = {rank for rank, row in rows_at(tables, seq).items() if not np.isin(row[columns], before).all()}
    sides = [{rank for rank in values if values[rank] == value} for value in set(values.values())]
    return new if new in sides and 2 * len(new) == len(values) and len(sides) == 2 else set()


def _find_unbalanced(tables: Tables) -> list[int]:
    """Return the positions of exchanges at which sent and expected sizes differ in total."""
    exchanges = [select(table, table["op"] == checksum(SPLIT))[-MAX_SPLITS:] for table in tables.values()]
    places = find_common([table["seq"] for table in exchanges])
    balance = sum(table["balance"][at] for table, at in zip(exchanges, places, strict=True))
    seqs: list[int] = exchanges[0]["seq"][places[0]][balance != 0].tolist()
    return seqs


def _find_bad_pairs(operations: Mapping[int, Operation]) -> list[BadPair]:
    """Return the pairs of an exchange of which one member sends another size than the other expects."""
    ranks = next(iter(operations.values())).group.ranks
    if all(operation.sizes is None for operation in operations.values()):
        sent = {rank: operation.numel for rank, operation in operations.items()}
        usual = Counter(sent[rank] for rank in sorted(sent)).most_common(1)[0][0]
        first = min(rank for rank in sent if sent[rank] == usual)
        others = (rank for rank in sent if sent[rank] != usual)
        return [(first, rank, sent[first] // len(ranks), sent[rank] // len(ranks)) for rank in others]
    row = _usual_row(operations)
    pairs = []
    for sender, mine in operations.items():
        for receiver, theirs in operations.items():
            given = _share(mine, ranks.index(receiver), row, incoming=False)
            wanted = _share(theirs, ranks.index(sender), row, incoming=True)
            if given is not None and wanted is not None and given != wanted:
                pairs.append((sender, receiver, given, wanted))
    return pairs


def _usual_row(operations: Mapping[int, Operation]) -> int:
    return usual_row((operation.sizes, operation.numel) for operation in operations.values())


def _changed(ranks: Ranks, tables: Tables, seq: int, pairs: Sequence[BadPair]) -> set[int]:
    """Return the one rank of a pair of an exchange that leaves what it did before, if one does and there is one pair.

    Its share was the same in each exchange before at this line, and differs now. Where both shares change or vary, as
    those of tokens that are routed otherwise each time, what one sends in total may have been the same: who sends as
    much as ever would send what is missing elsewhere.
    """
    if len(pairs) != 1:
        return set()
    ((sender, receiver, given, wanted),) = pairs
    sent, expected, totals = list[int | None](), list[int | None](), list[int]()
    for earlier in _earlier_at_line(tables, sender, seq):
        before = at_position(ranks, tables, earlier)
        mine, theirs = before.get(sender), before.get(receiver)
        if mine is None or theirs is None:
            continue
        members, row = mine.group.ranks, _usual_row(before)
        sent.append(_share(mine, members.index(receiver), row, incoming=False))
        expected.append(_share(theirs, members.index(sender), row, incoming=True))
        totals.append(_elements_sent(mine))
    if len(sent) < _MIN_EARLIER:
        return set()
    sides = ((sender, sent, given), (receiver, expected, wanted))
    changes = {rank for rank, known, now in sides if len({*known}) == 1 and known[0] != now}
    if len(changes) == 1 or len({*totals}) > 1:
        return changes if len(changes) == 1 else set()
    now = at_position(ranks, tables, seq)[sender]
    return {sender if _elements_sent(now) != totals[0] else receiver}


def _earlier_at_line(tables: Tables, rank: int, seq: int) -> list[int]:
    """Return the newest positions before one at which a rank made the same operation at the same line."""
    table = tables[rank]
    (row,) = rows_at({rank: table}, seq).values()
    is_alike = (table["op"] == row["op"]) & (table["line"] == row["line"]) & (table["seq"] < seq) & (row["line"] != 0)
    found: list[int] = table["seq"][is_alike][-_MOST_EARLIER:].tolist()
    return found


def _elements_sent(operation: Operation) -> int:
    return operation.numel if operation.sizes is None or any(operation.sizes[0]) else 0


def _share(operation: Operation, place: int, row: int, *, incoming: bool) -> int | None:
    """Return the elements for, or from, one member; None where the splits are not those of the group."""
    elements = exchanged(operation.sizes, operation.numel, len(operation.group.ranks), row)[incoming]
    return elements[place] if elements is not None else None
