"""Ranks wait for one another in collectives of groups that they entered in opposite orders."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from dtprof.diagnosis.blocked_ranks import call_sites, operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.open_collectives import OpenCollective
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.rules.wrong_group import find_call_of_absent, find_wrong_call
from dtprof.diagnosis.sibling_groups import order_of_issue
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import usual_operation

MAX_COMPARED = 50
"""Open collectives compared with each other for the order in which ranks issued them."""


def find_group_cycle(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that wait for one another in collectives of several groups."""
    job, waits, cycle = case.job, case.job.waits, case.cycle
    operations = {rank: waits[rank][0].operation for rank in cycle}
    if len({operation.group for operation in operations.values()}) < 2 or any(
        operation.p2p for operation in operations.values()
    ):
        return
    everyone = {rank: own[0].operation for rank, own in waits.items() if not own[0].operation.p2p}
    wrong = find_wrong_call(job, operations, everyone) or find_call_of_absent(job, operations, everyone)
    if wrong is not None:
        yield wrong
        return
    few = _find_fewest(job, operations, everyone)
    odd = tuple(r for r, o in sorted(operations.items()) if usual_operation(job.ranks[r].operations, o) is not None)
    # Who leaves the order of its own rounds deviates; where none does, or all, the fewest do.
    culprits = odd if 0 < len(odd) < len(cycle) else few if few and 2 * len(few) < len(everyone) else cycle
    waiting = {rank: operation for rank, operation in everyone.items() if rank not in culprits}
    first = operations[culprits[0]]
    facts = [f"rank {r} waits in {operation_words(job, operation)}" for r, operation in sorted(operations.items())[:8]]
    if culprits == cycle:
        facts.append("which of them is in the wrong order is not known")
    names = " and ".join(sorted({group_words(job.group(operation.group)) for operation in operations.values()}))
    yield Finding(
        kind="group-order-inversion",
        summary=f"{capitalised(cycle)} wait for one another in a cycle: {names} are entered in opposite order; "
        f"{list_ranks(culprits)} {'is' if len(culprits) == 1 else 'are'} in {operation_words(job, first)}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(waiting)),
        grade=0.9 if culprits != cycle else 0.8,
        evidence_class=Evidence.DIRECT if culprits != cycle else None,
        group=job.group(first.group),
        op=first.op,
        seq=first.seq,
        step=first.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=call_sites({rank: operations[rank] for rank in culprits}),
        evidence=tuple(facts),
        advice=("Enter groups in the same order on every rank that is a member of both.",),
    )


def _find_fewest(job: JobState, cycle: dict[int, Operation], everyone: dict[int, Operation]) -> tuple[int, ...]:
    """Return the ranks of a cycle of two groups with the order of the fewest, siblings of the groups included.

    Else those that wait in the group in which the fewest wait.
    """
    first = {operation.group: operation for operation in cycle.values()}
    if len(first) == 2:
        a, b = first.values()
        orders = order_of_issue(job, a, b) | {rank: own.group == a.group for rank, own in cycle.items()}
        counted = Counter(orders.values())
        if counted[True] != counted[False]:
            fewest = counted[True] < counted[False]
            return tuple(rank for rank in sorted(cycle) if orders.get(rank) is fewest)
    waiting = Counter(operation.group for operation in everyone.values())
    least = min(waiting[operation.group] for operation in cycle.values())
    return tuple(rank for rank, operation in sorted(cycle.items()) if waiting[operation.group] == least)


def find_issue_inversions(case: Case) -> Iterator[Finding]:
    """Give findings for collectives of two groups that all members issued, in different orders.

    Devices take operations in the order of issue, so that none of the two begins on all members.
    """
    job = case.job
    chosen = [c for c in case.open_collectives if not c.absent and all(o.on_device for o in c.waiting.values())]
    order = {
        rank.rank: {(o.group, o.seq): i for i, o in enumerate(rank.open_operations) if not o.p2p}
        for rank in job.ranks.values()
    }
    for a, b in combinations(chosen[:MAX_COMPARED], 2):
        both = sorted(set(a.waiting) & set(b.waiting)) if a.group != b.group else []
        is_first = {rank: order[rank][a.group, a.seq] < order[rank][b.group, b.seq] for rank in both}
        if len(set(is_first.values())) > 1:
            yield _inversion_finding(job, a, b, is_first)


def _inversion_finding(job: JobState, a: OpenCollective, b: OpenCollective, is_first: dict[int, bool]) -> Finding:
    """Return the finding; `is_first` says by rank whether it issued `a` before `b`."""
    counted = Counter(is_first.values())
    tie = counted[True] == counted[False]
    culprits = tuple(rank for rank, first in is_first.items() if tie or counted[first] == min(counted.values()))
    one, other = (next(iter(collective.waiting.values())) for collective in (a, b))
    waiting: dict[int, Operation] = {
        rank: operation for rank, operation in {**b.waiting, **a.waiting}.items() if rank not in culprits
    }
    return Finding(
        kind="group-order-inversion",
        summary=f"{capitalised(culprits)} issued {operation_words(job, one)} and {operation_words(job, other)} in "
        f"{'opposite orders' if tie else 'another order than the other members'}: neither can begin on all devices.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(waiting)),
        grade=0.85,
        group=job.group(a.group),
        op=one.op,
        seq=one.seq,
        step=one.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=call_sites({rank: b.waiting[rank] for rank in culprits}),
        evidence=tuple(
            f"rank {rank} issued that of {group_words(job.group((a if first else b).group))} first"
            for rank, first in list(is_first.items())[:4]
        ),
        advice=("Issue operations of different groups in the same order on every rank.",),
    )


RULES: Declared = (
    # A cycle may be a call on the wrong handle, which makes it a cycle of two groups.
    Rule(kinds=("group-order-inversion", "wrong-group"), stages=(Stage.WAIT,), find=find_group_cycle),
    Rule(kinds=("group-order-inversion",), stages=(Stage.STALL,), find=find_issue_inversions),
)
