"""Groups that ranks enter in different orders: cycles of waits, and orders that could become one."""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.job_state import Evidence, Operation
from dtprof.diagnosis.rules.argument_mismatches import at_position, group_tables
from dtprof.diagnosis.rules.rank_deaths import call_sites
from dtprof.diagnosis.wait_graph import Wait, find_waits
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array

MAX_GROUPS = 64
"""Groups of which the order is compared, those with most members in common with others first."""


def find_group_cycle(evidence: Evidence, waits: dict[int, tuple[Wait, ...]], cycle: tuple[int, ...]) -> Finding | None:
    """Return the finding for ranks that wait for one another in collectives of several groups."""
    fronts = {rank: waits[rank][0].operation for rank in cycle}
    if len({front.group for front in fronts.values()}) < 2 or any(front.p2p for front in fronts.values()):
        return None
    everyone = {rank: own[0].operation for rank, own in waits.items() if not own[0].operation.p2p}
    wrong = _wrong_handle(evidence, fronts, everyone) or _handle_of_absent(evidence, fronts, everyone)
    if wrong is not None:
        return wrong
    counted = Counter(front.group for front in everyone.values())
    least = min(counted[front.group] for front in fronts.values())
    few = tuple(rank for rank, front in sorted(fronts.items()) if counted[front.group] == least)
    culprits = few if 2 * len(few) < len(everyone) else cycle
    waiting = {rank: front for rank, front in everyone.items() if rank not in culprits}
    first = fronts[culprits[0]]
    facts = [f"rank {r} waits in {_words(evidence, front)}" for r, front in sorted(fronts.items())[:8]]
    if culprits == cycle:
        facts.append("which of them is in the wrong order cannot be told")
    names = " and ".join(sorted({group_words(evidence.group(front.group)) for front in fronts.values()}))
    return Finding(
        kind="group-order-inversion",
        summary=f"{capitalised(cycle)} wait for one another in a cycle: {names} are entered in opposite order; "
        f"{rank_list(culprits)} {'is' if len(culprits) == 1 else 'are'} in {_words(evidence, first)}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(waiting)),
        confidence=0.9 if culprits != cycle else 0.8,
        group=evidence.group(first.group),
        op=first.op,
        seq=first.seq,
        step=first.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=call_sites({rank: fronts[rank] for rank in culprits}),
        evidence=tuple(facts),
        advice=("Enter groups in the same order on every rank that is a member of both.",),
    )


def _words(evidence: Evidence, operation: Operation) -> str:
    return f"{operation.op} #{operation.seq} of {group_words(evidence.group(operation.group))}{at_line(operation.site)}"


def _wrong_handle(evidence: Evidence, fronts: dict[int, Operation], everyone: dict[int, Operation]) -> Finding | None:
    """Return the finding for a rank that made the call of its peers, at the same line, on another group than ever."""
    for rank, mine in fronts.items():
        if mine.site is None or _used_before(evidence, mine, mine.group) or _comes_next(evidence, rank, mine):
            continue
        peers = {
            r: other
            for r, other in everyone.items()
            if (other.site, other.op) == (mine.site, mine.op)
            and other.group != mine.group
            and rank in other.group.ranks
        }
        usual = {r: o for r, o in peers.items() if _used_before(evidence, o, o.group)}
        if not usual:
            continue
        return _wrong_finding(evidence, rank, mine, usual, everyone)
    return None


def _comes_next(evidence: Evidence, rank: int, operation: Operation) -> bool:
    """Say whether the group is that of the call that follows this line in the program: then two calls were swapped."""
    following = [
        after.group
        for before, after in pairwise(evidence.ranks[rank].operations)
        if (before.site, before.op) == (operation.site, operation.op) and before.done
    ]
    return bool(following) and following.count(operation.group) * 2 > len(following)


def find_wrong_handle(evidence: Evidence) -> Finding | None:
    """Return the finding for a rank whose peers wait for it in a call that it made on another group."""
    everyone = {rank: own[0].operation for rank, own in find_waits(evidence).items() if not own[0].operation.p2p}
    return _handle_of_absent(evidence, everyone, everyone)


def _handle_of_absent(
    evidence: Evidence, fronts: dict[int, Operation], everyone: dict[int, Operation]
) -> Finding | None:
    """Return the finding where the call on the wrong group met a peer's next call there, and went well or did not fit.

    Peers wait at a line for a rank whose newest call of that line was made on a group that it never took there before.
    """
    for front in sorted(fronts.values(), key=lambda operation: operation.issued_ns):
        for rank in front.group.ranks:
            own = evidence.ranks.get(rank)
            if own is None or front.site is None or own.counts.get((front.group, False), 0) > front.seq:
                continue
            *before, newest = [o for o in own.operations if (o.site, o.op) == (front.site, front.op)] or [front]
            if (
                len(before) > 1
                and (newest.done or (newest.failed and _was_met(evidence, rank, newest)))
                and newest.group != front.group
                and {o.group for o in before} == {front.group}
            ):
                usual = {r: o for r, o in everyone.items() if (o.group, o.seq) == (front.group, front.seq)}
                return _wrong_finding(evidence, rank, newest, usual, everyone)
    return None


def _was_met(evidence: Evidence, rank: int, call: Operation) -> bool:
    """Say whether another member made the call at this position of the group: nobody's limit ended it unmet."""
    members = (evidence.ranks[other] for other in call.group.ranks if other != rank and other in evidence.ranks)
    return any(member.counts.get((call.group, False), 0) > call.seq for member in members)


def _wrong_finding(
    evidence: Evidence, rank: int, mine: Operation, usual: dict[int, Operation], everyone: dict[int, Operation]
) -> Finding:
    """Return the finding for a rank that made a call on another group than the peers that wait for it."""
    meant = next(iter(usual.values()))
    waiting = {r: o for r, o in everyone.items() if r != rank}
    return Finding(
        kind="wrong-group",
        summary=f"Rank {rank} made {_words(evidence, mine)}, where its peers use "
        f"{group_words(evidence.group(meant.group))}.",
        culprit_ranks=(rank,),
        waiting_ranks=tuple(sorted(waiting)),
        confidence=0.85,
        group=evidence.group(meant.group),
        op=mine.op,
        seq=meant.seq,
        step=mine.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=call_sites({rank: mine}),
        evidence=(
            f"this line was used with {group_words(evidence.group(meant.group))} before, and with "
            f"{group_words(evidence.group(mine.group))} never",
            f"{wait_words(tuple(sorted(usual)))} in {_words(evidence, meant)}",
        ),
        advice=("Pass the same group as the other ranks do at this line.",),
    )


def _used_before(evidence: Evidence, operation: Operation, group: GroupId) -> bool:
    """Say whether any rank ended a call at this line on this group."""
    return any(
        o.site == operation.site and o.group == group and o.done and o is not operation
        for rank in evidence.ranks.values()
        for o in rank.operations
    )


def find_order_risk(evidence: Evidence) -> list[Finding]:
    """Return findings for pairs of collectives that two ranks issued in opposite orders, and that went well."""
    groups = group_tables(evidence)
    chosen = sorted(groups, key=lambda group: (-len(group.ranks), group.name))[:MAX_GROUPS]
    found = []
    for a, b in combinations(chosen, 2):
        shared = sorted(set(groups[a]) & set(groups[b]))
        if len(shared) > 1 and (pair := _first_inversion(groups[a], groups[b], shared)) is not None:
            found.append(_risk(evidence, (a, b), (groups[a], groups[b]), *pair))
    return found


def _first_inversion(
    a: dict[int, Array], b: dict[int, Array], shared: list[int]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the two ranks, and the positions in both groups, of the first pair in opposite orders."""
    reference: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    first_rank = -1
    for rank in shared:
        if len({*np.unique(a[rank]["thread"]).tolist(), *np.unique(b[rank]["thread"]).tolist()}) > 1:
            continue  # several threads: their order is nobody's program
        before = np.searchsorted(b[rank]["issued_ns"], a[rank]["issued_ns"])
        following = np.r_[b[rank]["seq"], b[rank]["seq"][-1] + 1][before]
        known = (before > 0) | (b[rank]["seq"][0] == 0)
        seqs, nexts = a[rank]["seq"][known], following[known]
        if reference is None:
            reference, first_rank = (seqs, nexts), rank
            continue
        _, mine, theirs = np.intersect1d(reference[0], seqs, return_indices=True)
        differs = np.flatnonzero(reference[1][mine] != nexts[theirs])
        for at in differs[:1].tolist():
            low = int(min(reference[1][mine][at], nexts[theirs][at]))
            if all(low in b[r]["seq"] for r in (first_rank, rank)):
                return (first_rank, rank), (int(reference[0][mine][at]), low)
    return None


def _risk(
    evidence: Evidence,
    keys: tuple[GroupId, GroupId],
    tables: tuple[dict[int, Array], dict[int, Array]],
    ranks: tuple[int, int],
    positions: tuple[int, int],
) -> Finding:
    sites, facts = {}, []
    firsts = []
    for rank in ranks:
        both = zip(tables, positions, strict=True)
        pair = [at_position(evidence, {rank: table[rank]}, seq)[rank] for table, seq in both]
        pair.sort(key=lambda operation: operation.issued_ns)
        facts.append(f"rank {rank}: " + ", then ".join(_words(evidence, operation) for operation in pair))
        firsts.append(pair[0])
        if pair[0].site is not None:
            sites[rank] = pair[0].site
    names = " and ".join(group_words(evidence.group(key)) for key in keys)
    return Finding(
        kind="group-order-risk",
        severity="warning",
        summary=f"{capitalised(ranks)} enter {names} in opposite orders; it went well this time, and can hang.",
        culprit_ranks=ranks,
        confidence=0.85,
        group=evidence.group(keys[0]),
        op=firsts[0].op,
        seq=positions[0],
        step=firsts[0].step,
        culprit_call_sites=sites,
        evidence=tuple(facts),
        advice=("Issue the operations of both groups in the same order on every rank that is a member of both.",),
    )
