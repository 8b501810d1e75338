"""Ranks entered two groups in opposite orders, and it did not block this time."""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import combinations

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.diagnosis.blocked_ranks import call_sites, operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.sibling_groups import are_siblings
from dtprof.formatting import list_ranks
from dtprof.job.group_collectives import at_position, find_common, group_tables
from dtprof.job.groups import GroupId
from dtprof.job.iteration_pattern import usual_operation
from dtprof.job.order_replay import find_ring
from dtprof.records.tables import Array

Seqs = npt.NDArray[np.int64]

MAX_GROUPS = 64
"""Groups of which the order is compared, those with most members in common with others first."""


def find_order_risk(case: Case) -> list[Finding]:
    """Return findings for pairs of collectives that two ranks issued in opposite orders, and that went well."""
    job = case.job
    groups = group_tables(job.ranks)
    chosen = sorted(groups, key=lambda group: (-len(group.ranks), group.name))[:MAX_GROUPS]
    found = []
    for a, b in combinations(chosen, 2):
        shared = sorted(set(groups[a]) & set(groups[b]))
        orders = _find_orders(groups[a], groups[b], shared if len(shared) > 1 else ())
        if (pair := _first_inversion(groups[b], orders)) is not None:
            ranks, positions = pair
            fewest = _fewest(orders, positions[0]) or _fewest(_pooled_orders(job, groups, a, b), positions[0])
            culprits = tuple(rank for rank in fewest if rank in shared) or ranks
            found.append(_risk(job, (a, b), (groups[a], groups[b]), ranks, positions, culprits))
    return found or [*_find_ring_risk(job, groups)]


def _find_ring_risk(job: JobState, groups: dict[GroupId, dict[int, Array]]) -> Iterator[Finding]:
    """Give the finding for ranks that would wait for one another in more than two groups if every call blocked."""
    ring = find_ring(groups)
    first = {
        rank: at_position(job.ranks, {rank: groups[group][rank]}, seq)[rank] for rank, (group, seq) in ring.items()
    }
    if len({operation.group for operation in first.values()}) < 2:
        return
    ranks = tuple(sorted(first))
    # Who leaves the order of its own rounds closes the ring; where none does, or all, the orders of all of them do.
    odd = tuple(rank for rank in ranks if usual_operation(job.ranks[rank].operations, first[rank]) is not None)
    culprits = odd if len(odd) < len(ranks) and odd else ranks
    operation = first[culprits[0]]
    names = sorted({group_words(job.group(own.group)) for own in first.values()})
    left = f"; {list_ranks(culprits)} {'leaves' if len(culprits) == 1 else 'leave'} the order of earlier rounds"
    yield Finding(
        kind="group-order-risk",
        severity="warning",
        summary=f"{capitalised(ranks)} enter {len(names)} groups in orders that form a ring ({', '.join(names[:4])})"
        f"{left if culprits != ranks else ''}; it did not hang this time, and can hang.",
        culprit_ranks=culprits,
        grade=0.85,
        group=job.group(operation.group),
        op=operation.op,
        seq=operation.seq,
        step=operation.step,
        call_sites=call_sites({rank: own for rank, own in first.items() if rank not in culprits}),
        culprit_call_sites=call_sites({rank: own for rank, own in first.items() if rank in culprits}),
        evidence=tuple(f"rank {rank} first enters {operation_words(job, first[rank])}" for rank in ranks[:8]),
        advice=("Issue the operations of all groups in one order on every rank that is a member of several.",),
    )


def _find_orders(a: dict[int, Array], b: dict[int, Array], shared: Collection[int]) -> dict[int, tuple[Seqs, Seqs]]:
    """Return by rank the positions of its calls on `a`, and which call on `b` comes next after each.

    Two ranks that differ in it have opposite orders. Ranks that call from several threads are left out: their order is
    nobody's program.
    """
    orders: dict[int, tuple[Seqs, Seqs]] = {}
    for rank in shared:
        if len({*distinct(a[rank]["thread"]).tolist(), *distinct(b[rank]["thread"]).tolist()}) == 1:
            before = np.searchsorted(b[rank]["issued_ns"], a[rank]["issued_ns"])
            following = np.r_[b[rank]["seq"], b[rank]["seq"][-1] + 1][before]
            known = (before > 0) | (b[rank]["seq"][0] == 0)
            orders[rank] = a[rank]["seq"][known], following[known]
    return orders


def _pooled_orders(
    job: JobState, groups: dict[GroupId, dict[int, Array]], a: GroupId, b: GroupId
) -> dict[int, tuple[Seqs, Seqs]]:
    """Return the orders of all ranks that are in one of both groups, or a sibling of it, each."""
    of_a, of_b = (
        {rank: table for other in groups if are_siblings(job, group, other) for rank, table in groups[other].items()}
        for group in (a, b)
    )
    return _find_orders(of_a, of_b, sorted(set(of_a) & set(of_b)))


def _first_inversion(
    b: dict[int, Array], orders: dict[int, tuple[Seqs, Seqs]]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the two ranks, and the positions in both groups, of the first pair in opposite orders."""
    first_rank = next(iter(orders), -1)
    for rank, (seqs, nexts) in orders.items():
        mine, theirs = find_common((orders[first_rank][0], seqs))
        usual = orders[first_rank][1][mine]
        for at in np.flatnonzero(usual != nexts[theirs])[:1].tolist():
            low, seq = int(min(usual[at], nexts[theirs][at])), int(seqs[theirs][at])
            if all(low in b[r]["seq"] for r in (first_rank, rank)):
                return (first_rank, rank), (seq, low)
    return None


def _fewest(orders: dict[int, tuple[Seqs, Seqs]], seq: int) -> tuple[int, ...]:
    """Return the ranks in which, unlike in most, another call of the second group follows a call of the first."""
    following = {rank: int(nexts[seqs == seq][0]) for rank, (seqs, nexts) in orders.items() if seq in seqs}
    ((usual, most), *_) = Counter(following.values()).most_common(1) or [(0, 0)]
    return tuple(rank for rank, own in following.items() if own != usual) if 2 * most > len(following) else ()


def _risk(
    job: JobState,
    keys: tuple[GroupId, GroupId],
    tables: tuple[dict[int, Array], dict[int, Array]],
    ranks: tuple[int, int],
    positions: tuple[int, int],
    culprits: tuple[int, ...],
) -> Finding:
    sites, facts = {}, []
    firsts = []
    for rank in ranks:
        both = zip(tables, positions, strict=True)
        pair = [at_position(job.ranks, {rank: table[rank]}, seq)[rank] for table, seq in both]
        pair.sort(key=lambda operation: operation.issued_ns)
        facts.append(f"rank {rank}: " + ", then ".join(operation_words(job, operation) for operation in pair))
        firsts.append(pair[0])
        if pair[0].site is not None:
            sites[rank] = pair[0].site
    names = " and ".join(group_words(job.group(key)) for key in keys)
    return Finding(
        kind="group-order-risk",
        severity="warning",
        summary=f"{capitalised(ranks)} enter {names} in opposite orders; it did not hang this time, and can hang.",
        culprit_ranks=culprits,
        grade=0.85,
        group=job.group(keys[0]),
        op=firsts[0].op,
        seq=positions[0],
        step=firsts[0].step,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=tuple(facts),
        advice=("Issue the operations of both groups in the same order on every rank that is a member of both.",),
    )


RULES: Declared = (Rule(kinds=("group-order-risk",), stages=(Stage.RISK,), find=find_order_risk),)
