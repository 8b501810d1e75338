"""Waits between ranks from the tracebacks of failed operations: gloo, monitored barriers."""

import re
from collections import Counter
from collections.abc import Hashable

from dtprof.diagnosis.broadcast_tree import find_deviations
from dtprof.diagnosis.findings import Finding, capitalised, wait_words
from dtprof.diagnosis.log_findings.log_rule import Suspicion, log_finding, log_rule
from dtprof.diagnosis.log_findings.logged_absences import (
    STACKS,
    absence_finding,
    operations_of,
    the_only,
    unnamed_absence_finding,
    words_of,
)
from dtprof.diagnosis.log_findings.logged_messages import find_messages, plain_broadcast
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.log_facts import BACKWARD, Trace
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, odd_ones, operation
from dtprof.formatting import list_ranks
from dtprof.records.events import FROM_ROOT, TO_ROOT

WAY = re.compile(r"Timed out waiting \d{1,12}ms for (send|recv) operation")


def find_waits(job: LoggedJob) -> Suspicion:
    """Return the finding from the lines of failed operations, and its caveats."""
    fronts = {rank: trace for rank, trace in job.victims.items() if not trace.bare}
    if not fronts:
        return None
    absent = job.known - set(fronts) - set(job.own)
    exited = job.left_in_order(absent)
    late = any("imed out" in trace.message or "imeout" in trace.message for trace in fronts.values())
    running = {rank for rank in absent - exited if late}
    if len(exited or running) > len(fronts):
        reason = (
            f"only {list_ranks(sorted(fronts))} of {len(job.known)} ranks reported a failed operation: "
            "the others may not have come, or it may be one operation too many"
        )
        return _no_culprit(job, fronts, reason) if late else reason
    # Connections that were closed in the middle of a message tell of an end, not of what was never sent.
    if (late or exited) and (messages := find_messages(job, fronts, exited | running)):
        return messages
    # Gradients and the program's own all_reduce are distinguished: they cannot be one call.
    ops = {rank: _reported_op(trace) or trace.call for rank, trace in fronts.items()}
    if exited or running:
        return _absent(job, fronts, exited, running)
    if absent:
        return (
            f"a peer of {list_ranks(sorted(fronts))} went away, and the log does not say which: "
            f"{list_ranks(sorted(absent))} left no exception"
        )
    if not late:
        reason = f"{list_ranks(sorted(fronts))} lost a peer, and the log does not say whose end came first"
        listed = set(job.exits) == set(fronts)
        return (_unnamed_left(job, fronts, reason) if listed else None) or reason
    if len(set(ops.values())) > 1 and all(ops.values()):
        return _disagreeing(job, fronts, ops)
    places: dict[int, Hashable] = {rank: trace.site for rank, trace in fronts.items()}
    if len(set(places.values())) > 1:
        return _other_lines(job, fronts, places)
    return _all_alike(job, fronts, late)


def _reported_op(trace: Trace) -> str | None:
    """Return the operation that a call names by itself."""
    return None if trace.call == BACKWARD else operation(trace.call)


def _no_culprit(job: LoggedJob, fronts: dict[int, Trace], reason: str) -> Finding:
    ops = operations_of(fronts)
    return unnamed_absence_finding(
        job,
        waiting=fronts,
        place=f"{words_of(ops)} in vain",
        reason=reason,
        op=the_only(ops),
        advice=("Look at what the other ranks did at that time, and at the groups of their operations.", STACKS),
    )


def _unnamed_left(job: LoggedJob, fronts: dict[int, Trace], reason: str) -> Finding | None:
    """Return the finding for jobs whose listed ranks all lost a peer: it is none of them."""
    if not job.has_table:
        return None
    ops = operations_of(fronts)
    return log_finding(
        job,
        "rank-exited",
        f"A rank that the log does not name left; {list_ranks(sorted(fronts))} lost it in {words_of(ops)}.",
        waiting=fronts,
        grade=0.4,
        op=the_only(ops),
        evidence=("every rank in torchrun's table failed because a peer was gone, none by itself",),
        advice=(f"Look at ranks above {max(fronts)} that ended with status 0, and at other hosts.",),
        leaves_open=(reason,),
    )


def _absent(job: LoggedJob, fronts: dict[int, Trace], exited: set[int], running: set[int]) -> Finding:
    culprits = sorted(exited or running)
    facts = []
    if not exited:
        facts.append(f"{list_ranks(culprits)} raised nothing: the operations of the others timed out")
        if stopped := [rank for rank in culprits if rank in job.exits and job.exits[rank].status == -15]:
            facts.append(f"{list_ranks(stopped)} still ran when the launcher stopped the job")
    return absence_finding(
        job,
        culprits=culprits,
        waiting=fronts,
        ops=operations_of(fronts),
        exited=bool(exited),
        grade=0.65 if len(culprits) < len(fronts) or job.has_table else 0.4,
        evidence=tuple(facts),
    )


def _disagreeing(job: LoggedJob, fronts: dict[int, Trace], ops: dict[int, str]) -> Finding:
    if (found := _in_broadcast(job, fronts, ops)) is not None:
        return found
    culprits = odd_ones(dict(ops))
    split = len(culprits) == len(ops)
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    one_line = len({trace.site for trace in fronts.values()}) == 1
    named = all(_reported_op(trace) for trace in fronts.values())
    facts = [f"rank {rank}: {ops[rank]}" for rank in sorted(fronts)[:3]]
    if split:
        facts.append("the ranks split into equal halves: which half is wrong is unknown")
    one_sided = bool({*FROM_ROOT, *TO_ROOT} & set(ops.values()))
    if one_sided:
        facts.append("in these operations some ranks end before others: who is in another one may only be ahead")
    if one_line:
        facts.append("all are at one line: the odd one may only be behind, for a reason that the log does not show")
    words = ", ".join(sorted({ops[rank] for rank in culprits}))
    against = f" while {list_ranks(waiting)} were in {ops[waiting[0]]}" if waiting else ""
    return log_finding(
        job,
        "collective-order-mismatch" if named and not one_line else "rank-skipped-collective",
        f"{capitalised(culprits)} {'was' if len(culprits) == 1 else 'were'} in {words}{against}.",
        culprits=culprits,
        waiting=waiting,
        grade=0.35 if one_line else 0.4 if one_sided else 0.5 if split else 0.6,
        op=(_first_on_line(fronts) if one_line else None)
        or next((name for rank in (*waiting, *culprits) if (name := operation(fronts[rank].call))), None),
        evidence=tuple(facts),
        advice=("Compare how these ranks came to the lines named: a branch, a loop one round shorter, one call more.",),
    )


def _first_on_line(fronts: dict[int, Trace]) -> str | None:
    """Return the operation that stands first on the line of all: it did not end on every rank."""
    by_call = {trace.call: trace for trace in fronts.values()}
    places = {call: trace.source.find(f"{call}(") for call, trace in by_call.items()}
    return operation(min(places, key=places.__getitem__)) if -1 not in places.values() else None


HOW = {
    "skipped": "did not make the broadcast",
    "root": "named another root",
    "more": "made one broadcast more",
}


def _in_broadcast(job: LoggedJob, fronts: dict[int, Trace], ops: dict[int, str]) -> Finding | None:
    """Return the finding for a broadcast that some wait in and others passed, where gloo's way through it tells."""
    inside = {rank: trace for rank, trace in fronts.items() if ops[rank] == "broadcast"}
    passed = sorted(set(fronts) - set(inside))
    if (
        len(fronts) < 3
        or not (job.has_table and set(fronts) == job.known)
        or len({t.site for t in inside.values()}) != 1
    ):
        return None
    waits = {rank: match[1] for rank, trace in inside.items() if (match := WAY.search(trace.message))}
    is_plain, root = plain_broadcast(next(iter(inside.values())).source)
    places: dict[int, Hashable] = {rank: fronts[rank].site for rank in passed}
    together = max(Counter(places.values()).values(), default=0)
    # In a loop of broadcasts waiters may stand in different rounds: then no two have passed and wait at one place.
    if not is_plain or len(waits) < len(inside) or together < 2:
        return None
    causes = find_deviations(waits, len(fronts), range(len(fronts)) if root is None else [root])
    if together < len(passed):  # of those that passed one went another way: no need to suspect one that waits
        odd = odd_ones(places)
        causes = {cause for cause in causes if cause.rank in odd} or {cause for cause in causes if cause.how != "more"}
    if not causes:
        return None
    guesses = [f"rank {cause.rank} {HOW[cause.how]}" for cause in sorted(causes)]
    culprits = sorted({cause.rank for cause in causes})
    waiting = [rank for rank in sorted(fronts) if rank not in culprits]
    facts = [f"rank {rank}: broadcast, waited in {call}" for rank, call in sorted(waits.items())[:3]]
    facts.append(f"{list_ranks(passed)} had passed it, or never made it")
    facts.append("on gloo's way through a broadcast, this is what one rank that goes another way leaves")
    return log_finding(
        job,
        "root-mismatch" if all(cause.how == "root" for cause in causes) else "rank-skipped-collective",
        f"{' or '.join(guesses[:3]).capitalize()}; {wait_words(sorted(inside))} in it.",
        culprits=culprits,
        waiting=waiting,
        grade=0.6 if len(causes) == 1 else 0.4,
        op="broadcast",
        evidence=tuple(facts),
        advice=("Compare how these ranks came to the lines named, and the source rank they pass.", STACKS),
    )


def _other_lines(job: LoggedJob, fronts: dict[int, Trace], places: dict[int, Hashable]) -> Finding:
    odd = odd_ones(places)
    culprits = odd if len(odd) < len(places) else ()
    waiting = [rank for rank in sorted(fronts) if rank not in culprits]
    ops = operations_of(fronts)
    facts = ["the ranks failed in the same operation at different lines"]
    if not culprits:
        facts.append("they may wait for each other in different groups: the log does not say the groups")
    return log_finding(
        job,
        "rank-skipped-collective",
        f"Ranks stand at different lines in {words_of(ops)}"
        + (f": {list_ranks(culprits)} apart from {list_ranks(waiting)}." if culprits else "."),
        culprits=culprits,
        waiting=waiting,
        grade=0.45 if culprits else 0.3,
        op=the_only(ops),
        evidence=tuple(facts),
        advice=("Start the job with dtprof run: its records tell the group of each operation.",),
    )


def _all_alike(job: LoggedJob, fronts: dict[int, Trace], late: bool) -> Suspicion:
    waiting = sorted(fronts)
    op = next((name for trace in fronts.values() if (name := operation(trace.call))), None)
    what = f"in {op or 'the same operation'} at the same line"
    if not late or len(waiting) < 2:
        return f"{list_ranks(waiting)} failed {what}: who went away or did not come is not in the log"
    return log_finding(
        job,
        "backend-stall",
        f"{capitalised(waiting)} timed out {what}.",
        waiting=waiting,
        grade=0.3,
        op=op,
        advice=("Check that no rank's log is left out, then the network between the hosts.",),
        leaves_open=("whether other ranks belong to the job, and what they did, is not in the log",),
    )


RULES: Declared = (
    log_rule(
        find_waits,
        (
            *("rank-skipped-collective", "rank-exited", "collective-order-mismatch", "backend-stall"),
            *("root-mismatch", "p2p-deadlock-cycle", "p2p-tag-mismatch", "p2p-unmatched"),
        ),
    ),
)
