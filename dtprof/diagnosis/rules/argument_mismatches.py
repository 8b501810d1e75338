"""Collectives whose members do not agree on what they do, also where the back end let them pass."""

from collections import Counter
from collections.abc import Iterable
from zlib import crc32

import numpy as np

from dtprof.diagnosis.findings import Finding, at_line, group_words, rank_list
from dtprof.diagnosis.job_state import Evidence, Operation
from dtprof.diagnosis.rules.rank_deaths import call_sites, victims
from dtprof.job.groups import GroupId
from dtprof.records.codes import NONE, dtype_name, reduce_op_name
from dtprof.records.tables import Array, select

SIZES_AGREE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
SPLIT = "all_to_all"
MAX_SPLITS = 1024
"""Exchanges of a group whose splits are compared, the newest."""
_CODES = {name: crc32(name.encode()) for name in (*SIZES_AGREE, *ROOTED, *REDUCING, SPLIT, "barrier")}
PRECEDENT = {
    "root-mismatch": ("peer",),
    "dtype-mismatch": ("dtype",),
    "reduce-op-mismatch": ("reduce_op",),
    "size-mismatch": ("numel",),
}
"""By what a call counts as made before, beside its operation and line."""
WORDS = {
    "collective-order-mismatch": "operations",
    "root-mismatch": "roots",
    "dtype-mismatch": "element types",
    "reduce-op-mismatch": "reductions",
    "size-mismatch": "sizes",
    "split-size-mismatch": "split sizes",
}


def find_mismatches(evidence: Evidence) -> list[Finding]:
    """Return findings for positions at which members made calls that do not go together, the first of each group.

    What follows a position with different operations is not compared: from there on all are shifted.
    """
    found = []
    for group, tables in group_tables(evidence).items():
        position = _first_difference(tables)
        splits = _first_bad_split(evidence, group, tables, before=position)
        if splits is not None:
            position = splits
        if position is not None:
            present = at_position(evidence, tables, position)
            if (kind := disagreement(present)) is not None:
                found.append(_finding(evidence, group, tables, present, kind=kind, seq=position))
    return sorted(found, key=lambda finding: finding.step or 0)


def find_blocking_mismatch(evidence: Evidence, places: Iterable[tuple[GroupId, int]]) -> Finding | None:
    """Return the finding for positions in which ranks are held up and members made calls that do not go together."""
    groups = group_tables(evidence)
    for group, seq in places:
        tables = groups.get(group, {})
        present = at_position(evidence, tables, seq)
        if len(present) > 1 and (kind := disagreement(present)) is not None:
            return _finding(evidence, group, tables, present, kind=kind, seq=seq)
    return None


def group_tables(evidence: Evidence) -> dict[GroupId, dict[int, Array]]:
    """Return, for each group of which two members left a record, their collectives by position."""
    groups: dict[GroupId, dict[int, Array]] = {}
    for rank in evidence.ranks.values():
        for group, table in rank.sweep.groups.items() if rank.sweep is not None else ():
            if group.ranks:
                groups.setdefault(group, {})[rank.rank] = table
    return {group: tables for group, tables in groups.items() if len(tables) > 1}


def at_position(evidence: Evidence, tables: dict[int, Array], seq: int) -> dict[int, Operation]:
    """Return the operations of one position."""
    present = {}
    for rank, table in tables.items():
        at = int(np.searchsorted(table["seq"], seq))
        sweep = evidence.ranks[rank].sweep
        if sweep is not None and at < len(table) and table["seq"][at] == seq:
            present[rank] = sweep.operation(int(table["row"][at]))
    return present


def _first_difference(tables: dict[int, Array]) -> int | None:
    reference, *others = tables.values()
    first: int | None = None
    for other in others:
        _, mine, theirs = np.intersect1d(reference["seq"], other["seq"], return_indices=True)
        a, b = select(reference, mine), select(other, theirs)
        differs = _differ(a, b)
        if differs.any():
            seq = int(a["seq"][np.argmax(differs)])
            first = seq if first is None else min(first, seq)
    return first


def _differ(a: Array, b: Array) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    op = a["op"]

    def is_one_of(names: Iterable[str]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        return np.isin(op, [_CODES[name] for name in names])

    typed = (a["dtype"] != NONE) & (b["dtype"] != NONE) & ~is_one_of(["barrier"])
    reduced = (a["reduce_op"] != NONE) & (b["reduce_op"] != NONE) & is_one_of(REDUCING)
    differs = (
        (op != b["op"])
        | (typed & (a["dtype"] != b["dtype"]))
        | (reduced & (a["reduce_op"] != b["reduce_op"]))
        | (is_one_of(ROOTED) & (a["peer"] != b["peer"]))
        | (is_one_of(SIZES_AGREE) & (a["numel"] != b["numel"]))
    )
    return np.asarray(differs, bool)


def disagreement(present: dict[int, Operation]) -> str | None:
    """Return the kind of mismatch of the operations at one position, None where they agree."""
    operations = list(present.values())
    op = operations[0].op
    if len({o.op for o in operations}) > 1:
        return "collective-order-mismatch"
    if op in ROOTED and len({o.peer for o in operations}) > 1:
        return "root-mismatch"
    if op != "barrier" and len({o.dtype for o in operations} - {NONE}) > 1:
        return "dtype-mismatch"
    if op in REDUCING and len({o.reduce_op for o in operations} - {NONE}) > 1:
        return "reduce-op-mismatch"
    if (op in SIZES_AGREE or all(o.even_sizes for o in operations)) and len({o.numel for o in operations}) > 1:
        return "size-mismatch"
    if op == SPLIT and _bad_pairs(present):
        return "split-size-mismatch"
    return None


def _bad_pairs(present: dict[int, Operation]) -> list[tuple[int, int, int, int]]:
    """Return (sender, receiver, elements sent, elements expected) of an all_to_all where these differ."""
    ranks = next(iter(present.values())).group.ranks
    pairs = []
    if all(o.sizes is None for o in present.values()):
        sent = {rank: o.numel for rank, o in present.items()}
        a = min(sent)
        pairs = [(a, b, sent[a] // len(ranks), sent[b] // len(ranks)) for b in sent if sent[b] != sent[a]]
    else:
        for a, mine in present.items():
            for b, theirs in present.items():
                given = _share(mine, ranks.index(b), len(ranks), incoming=False)
                wanted = _share(theirs, ranks.index(a), len(ranks), incoming=True)
                if given is not None and wanted is not None and given != wanted:
                    pairs.append((a, b, given, wanted))
    return pairs


def _share(operation: Operation, place: int, size: int, *, incoming: bool) -> int | None:
    if operation.sizes is None:
        return operation.numel // size
    sizes = operation.sizes[1 if incoming else 0]
    return sizes[place] if len(sizes) == size else None


def _first_bad_split(evidence: Evidence, group: GroupId, tables: dict[int, Array], *, before: int | None) -> int | None:
    seqs = [table["seq"][table["op"] == _CODES[SPLIT]][-MAX_SPLITS:] for table in tables.values()]
    common = set(seqs[0].tolist()).intersection(*(some.tolist() for some in seqs[1:]))
    for seq in sorted(common):
        if before is not None and seq >= before:
            return None
        present = at_position(evidence, tables, seq)
        if len(present) == len(group.ranks) and _bad_pairs(present):
            return int(seq)
    return None


def _finding(
    evidence: Evidence,
    group_key: GroupId,
    tables: dict[int, Array],
    present: dict[int, Operation],
    *,
    kind: str,
    seq: int,
) -> Finding:
    shown = {rank: _show(kind, operation) for rank, operation in present.items()}
    counted = Counter(shown.values())
    usual = counted.most_common(1)[0][0]
    culprits = tuple(sorted(rank for rank, value in shown.items() if value != usual))
    pairs = _bad_pairs(present) if kind == "split-size-mismatch" else []
    if pairs:
        often = Counter(rank for a, b, *_ in pairs for rank in (a, b))
        most = max(often.values())
        culprits = tuple(sorted(rank for rank, count in often.items() if count == most))
    tie = 2 * len(culprits) >= len(present)
    new = _without_precedent(tables, shown, kind, seq) if tie else ()
    if new:
        culprits, tie = new, False
        usual = next(value for rank, value in shown.items() if rank not in new)
    group = evidence.group(group_key)
    sites = call_sites(present)
    passed = all(operation.done for operation in present.values())
    facts = [f"rank {rank}: {shown[rank]}{at_line(sites.get(rank))}" for rank in sorted(shown)[:8]]
    facts[:0] = [
        f"rank {a} sends {given:,} elements to rank {b}, which expects {want:,}" for a, b, given, want in pairs[:4]
    ]
    if passed:
        facts.append("the back end let it pass: results are silently wrong")
    if new:
        facts.append(
            f"as many ranks on either side: {rank_list(new)} made this call for the first time, the others not"
        )
    if tie:
        facts.append("as many ranks on either side: which one is wrong is a guess")
    op = next((o.op for rank, o in present.items() if shown[rank] == usual), present[culprits[0]].op)
    has = "has" if len(culprits) == 1 else "have"
    tail = (
        f"{rank_list(culprits)} {'does' if len(culprits) == 1 else 'do'} not fit ({op})"
        if pairs
        else f"{rank_list(culprits)} {has} {shown[culprits[0]]}, the others {usual} ({op})"
    )
    held_up = () if passed else tuple(sorted({*victims(evidence, set(culprits)), *(set(present) - set(culprits))}))
    return Finding(
        kind=kind,
        summary=f"Position #{seq} of {group_words(group)} meets different {WORDS[kind]}: {tail}.",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=0.75 if new else 0.6 if tie else 0.9,
        group=group,
        op=op,
        seq=seq,
        step=present[culprits[0]].step,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=tuple(facts),
        advice=("Compare the two lines: every member must make the same call at this position.",),
    )


def _without_precedent(tables: dict[int, Array], shown: dict[int, str], kind: str, seq: int) -> tuple[int, ...]:
    """Return the ranks of the one of two values whose call no member had made before; nothing where that is not one."""
    fields = ["op", "line", *PRECEDENT.get(kind, ())]
    before = np.concatenate([table[table["seq"] < seq][fields] for table in tables.values()])
    new = [rank for rank in shown if not np.isin(tables[rank][tables[rank]["seq"] == seq][fields], before).all()]
    sides = [[rank for rank in shown if shown[rank] == value] for value in set(shown.values())]
    return tuple(sorted(new)) if new in sides and 2 * len(new) == len(shown) and len(sides) == 2 else ()


def _show(kind: str, operation: Operation) -> str:
    if kind == "root-mismatch":
        return f"rank {operation.peer_rank}" if operation.peer_rank >= 0 else str(operation.peer)
    if kind == "dtype-mismatch":
        return dtype_name(operation.dtype)
    if kind == "reduce-op-mismatch":
        return reduce_op_name(operation.reduce_op)
    if kind == "size-mismatch":
        return f"{operation.numel:,} elements"
    if kind == "split-size-mismatch":
        return "even splits" if operation.sizes is None else f"splits {list(operation.sizes[0][:8])}"
    return operation.op
