"""Members of a collective disagree on operation, root, type, reduction or sizes, even if the back end let it pass."""

from collections import Counter
from collections.abc import Iterable
from zlib import crc32

import numpy as np

from dtprof.diagnosis.argument_agreement import REDUCING, ROOTED, SIZES_AGREE, SPLIT, bad_pairs, disagreement
from dtprof.diagnosis.blocked_ranks import call_sites, victims
from dtprof.diagnosis.findings import Finding, at_line, group_words, rank_list
from dtprof.diagnosis.job_state import JobState, Operation
from dtprof.diagnosis.matched_collectives import at_position, at_same_positions, group_tables
from dtprof.job.groups import GroupId
from dtprof.records.codes import NONE, dtype_name, reduce_op_name
from dtprof.records.tables import Array

KINDS = (
    "collective-order-mismatch",
    "root-mismatch",
    "dtype-mismatch",
    "reduce-op-mismatch",
    "size-mismatch",
    "split-size-mismatch",
)
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
COMPARED = ("op", "dtype", "reduce_op", "peer", "numel")
WORDS = {
    "collective-order-mismatch": "operations",
    "root-mismatch": "roots",
    "dtype-mismatch": "element types",
    "reduce-op-mismatch": "reductions",
    "size-mismatch": "sizes",
    "split-size-mismatch": "split sizes",
}


def find_mismatches(job: JobState) -> list[Finding]:
    """Return findings for positions at which members made calls that do not go together, the first of each group.

    What follows a position with different operations is not compared: from there on all are shifted.
    """
    found = []
    for group, tables in group_tables(job).items():
        position = _first_difference(tables)
        splits = _first_bad_split(job, group, tables, before=position)
        if splits is not None:
            position = splits
        if position is not None:
            present = at_position(job, tables, position)
            if (kind := disagreement(present)) is not None:
                found.append(_finding(job, group, tables, present, kind=kind, seq=position))
    return sorted(found, key=lambda finding: finding.step or 0)


def find_blocking_mismatch(job: JobState, places: Iterable[tuple[GroupId, int]]) -> Finding | None:
    """Return the finding for positions in which ranks are held up and members made calls that do not go together."""
    groups = group_tables(job)
    for group, seq in places:
        tables = groups.get(group, {})
        present = at_position(job, tables, seq)
        if len(present) > 1 and (kind := disagreement(present)) is not None:
            return _finding(job, group, tables, present, kind=kind, seq=seq)
    return None


def _first_difference(tables: dict[int, Array]) -> int | None:
    reference = max(tables.values(), key=len)
    first: int | None = None
    for other in tables.values():
        a, b = at_same_positions(reference, other)
        if all(np.array_equal(a[column], b[column]) for column in COMPARED):
            continue
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
    sized = is_one_of(SIZES_AGREE) | (a["even"] & b["even"])
    differs = (
        (op != b["op"])
        | (typed & (a["dtype"] != b["dtype"]))
        | (reduced & (a["reduce_op"] != b["reduce_op"]))
        | (is_one_of(ROOTED) & (a["peer"] != b["peer"]))
        | (sized & (a["numel"] != b["numel"]) & (a["numel"] >= 0) & (b["numel"] >= 0))
    )
    return np.asarray(differs, bool)


def _first_bad_split(job: JobState, group: GroupId, tables: dict[int, Array], *, before: int | None) -> int | None:
    seqs = [table["seq"][table["op"] == _CODES[SPLIT]][-MAX_SPLITS:] for table in tables.values()]
    common = set(seqs[0].tolist()).intersection(*(some.tolist() for some in seqs[1:]))
    for seq in sorted(common):
        if before is not None and seq >= before:
            return None
        present = at_position(job, tables, seq)
        if len(present) == len(group.ranks) and bad_pairs(present):
            return int(seq)
    return None


def _finding(
    job: JobState,
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
    pairs = bad_pairs(present) if kind == "split-size-mismatch" else []
    if pairs:
        often = Counter(rank for a, b, *_ in pairs for rank in (a, b))
        most = max(often.values())
        culprits = tuple(sorted(rank for rank, count in often.items() if count == most))
    tie = 2 * len(culprits) >= len(present)
    new = _without_precedent(tables, shown, kind, seq) if tie else ()
    if new:
        culprits, tie = new, False
        usual = next(value for rank, value in shown.items() if rank not in new)
    group = job.group(group_key)
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
    held_up = () if passed else tuple(sorted({*victims(job, set(culprits)), *(set(present) - set(culprits))}))
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
