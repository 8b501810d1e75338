"""Who waits where and for whom, from the tracebacks of ranks whose operations failed: gloo, monitored barriers."""

from collections.abc import Hashable, Mapping

from dtprof.diagnosis.findings import Finding, capitalised, rank_list, wait_words
from dtprof.diagnosis.sources.logs.log_facts import Trace
from dtprof.diagnosis.sources.logs.logged_job import Job, operation
from dtprof.diagnosis.sources.logs.logged_messages import find_messages
from dtprof.diagnosis.sources.logs.logged_mismatches import odd_ones

ONE_SIDED = {"broadcast", "reduce", "gather", "scatter"}
STACKS = "Take the stack of that rank next time while the job hangs (py-spy dump), or start it with dtprof run."


def find_missed_barrier(job: Job) -> Finding | None:
    """Return the finding for ranks that a monitored barrier waited for in vain."""
    reached = {note.rank for note in job.notes("barrier-reached")} - {None}
    missed = {rank for note in job.notes("barrier-missed", "barrier-waits") for rank in note.ranks} - reached
    if not missed:
        return None
    culprits = tuple(sorted(missed))
    gone = job.left_in_order(missed) == missed
    waiting = tuple(sorted(job.waited_for() - missed))
    elsewhere = {rank: job.victims[rank] for rank in culprits if rank in job.victims and job.victims[rank].call}
    facts = [f"torch's monitored barrier names {rank_list(culprits)}"]
    facts += [f"rank {rank} waited in {trace.call} instead" for rank, trace in list(elsewhere.items())[:2]]
    if gone:
        facts.append(f"torchelastic's table of failures has no entry for {rank_list(culprits)}: status 0")
    ops = _operations(job.victims)
    return Finding(
        kind="rank-exited" if gone else "rank-skipped-collective",
        summary=f"{capitalised(culprits)} {'had left the program' if gone else 'did not come'}; "
        f"{wait_words(waiting) if waiting else 'the others wait'} in {_op_words(ops)}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.8,
        op=_only(ops),
        call_sites=job.sites(list(waiting)),
        culprit_call_sites=job.sites(list(culprits)),
        evidence=tuple(facts),
        advice=("Look for a branch, an early return or a shorter loop on these ranks.", STACKS),
    )


def _operations(fronts: Mapping[int, Trace]) -> set[str]:
    """Return the operations that ranks failed in, as far as their calls tell."""
    return {op for trace in fronts.values() if (op := operation(trace.call))}


def _only(ops: set[str]) -> str | None:
    return next(iter(ops)) if len(ops) == 1 else None


def _op_words(ops: set[str]) -> str:
    return " or ".join(sorted(ops)) if ops else "an operation"


def find_waits(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding that the lines of failed operations give, and what they leave open."""
    fronts = {rank: trace for rank, trace in job.victims.items() if not trace.bare}
    if not fronts:
        return None, ()
    absent = job.known - set(fronts) - set(job.own)
    exited = job.left_in_order(absent)
    late = any("imed out" in trace.message or "imeout" in trace.message for trace in fronts.values())
    running = {rank for rank in absent - exited if late}
    if len(exited or running) > len(fronts):
        reason = (
            f"only {rank_list(sorted(fronts))} of {len(job.known)} ranks reported a failed operation: "
            "the others may not have come, or it may be one operation too many"
        )
        return (_nobody(job, fronts) if late else None), (reason,)
    if messages := find_messages(job, fronts, exited | running):
        return messages, ()
    ops = {rank: operation(trace.call) or trace.call for rank, trace in fronts.items()}
    if exited or running:
        return _absent(job, fronts, exited, running), ()
    if absent:
        return None, (
            f"a peer of {rank_list(sorted(fronts))} went away, and the log does not tell which: "
            f"{rank_list(sorted(absent))} left no exception",
        )
    if not late:
        reason = f"{rank_list(sorted(fronts))} lost a peer, and the log does not tell whose end came first"
        return (_unnamed_left(job, fronts) if set(job.exits) == set(fronts) else None), (reason,)
    if len(set(ops.values())) > 1 and all(ops.values()):
        return _parted(job, fronts, ops), ()
    places: dict[int, Hashable] = {rank: trace.site for rank, trace in fronts.items()}
    if len(set(places.values())) > 1:
        return _other_lines(job, fronts, places), ()
    return _all_alike(job, fronts, late)


def _nobody(job: Job, fronts: dict[int, Trace]) -> Finding:
    """Return the finding that says who waited where, and accuses nobody."""
    waiting = tuple(sorted(fronts))
    ops = _operations(fronts)
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{wait_words(waiting).capitalize()} in {_op_words(ops)} in vain; for whom is not in the log.",
        culprit_ranks=(),
        waiting_ranks=waiting,
        confidence=0.2,
        op=_only(ops),
        call_sites=job.sites(list(waiting)),
        advice=("Look at what the other ranks did at that time, and at the groups of their operations.", STACKS),
    )


def _unnamed_left(job: Job, fronts: dict[int, Trace]) -> Finding | None:
    """Return the finding for jobs whose listed ranks all lost a peer: it is none of them."""
    if not job.has_table:
        return None
    waiting = tuple(sorted(fronts))
    ops = _operations(fronts)
    return Finding(
        kind="rank-exited",
        summary=f"A rank that the log does not name left; {rank_list(waiting)} lost it in {_op_words(ops)}.",
        culprit_ranks=(),
        waiting_ranks=waiting,
        confidence=0.4,
        op=_only(ops),
        call_sites=job.sites(list(waiting)),
        evidence=("every rank in torchrun's table failed because a peer was gone, none by itself",),
        advice=(f"Look at ranks above {max(waiting)} that ended with status 0, and at other hosts.",),
    )


def _absent(job: Job, fronts: dict[int, Trace], exited: set[int], running: set[int]) -> Finding:
    culprits = tuple(sorted(exited or running))
    waiting = tuple(sorted(fronts))
    ops = _operations(fronts)
    if exited:
        how, kind = "had ended with status 0", "rank-exited"
        facts = [f"torchelastic's table lists every rank that failed or was stopped, not {rank_list(culprits)}"]
    else:
        how, kind = "never came", "rank-skipped-collective"
        facts = [f"{rank_list(culprits)} raised nothing: the operations of the others timed out"]
        if stopped := [rank for rank in culprits if rank in job.exits and job.exits[rank].status == -15]:
            facts.append(f"{rank_list(stopped)} still ran when the launcher stopped the job")
    return Finding(
        kind=kind,
        summary=f"{capitalised(culprits)} {how}; {wait_words(waiting)} in {_op_words(ops)}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.65 if len(culprits) < len(waiting) or job.has_table else 0.4,
        op=_only(ops),
        call_sites=job.sites(list(waiting)),
        evidence=tuple(facts),
        advice=("Look for a branch, an early return or a shorter loop on these ranks.", STACKS),
    )


def _parted(job: Job, fronts: dict[int, Trace], ops: dict[int, str]) -> Finding:
    culprits = odd_ones(dict(ops))
    split = len(culprits) == len(ops)
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    one_line = len({trace.site for trace in fronts.values()}) == 1
    named = all(operation(trace.call) for trace in fronts.values())
    facts = [f"rank {rank}: {ops[rank]}" for rank in sorted(fronts)[:3]]
    if split:
        facts.append("as many ranks stand on either side: who of them is wrong is not told")
    one_sided = bool(ONE_SIDED & set(ops.values()))
    if one_sided:
        facts.append("in these operations some ranks end before others: who is in another one may only be ahead")
    if one_line:
        facts.append("all are at one line: the odd one may only be behind, for a reason that the log does not show")
    words = ", ".join(sorted({ops[rank] for rank in culprits}))
    against = f" while {rank_list(waiting)} were in {ops[waiting[0]]}" if waiting else ""
    return Finding(
        kind="collective-order-mismatch" if named and not one_line else "rank-skipped-collective",
        summary=f"{capitalised(culprits)} {'was' if len(culprits) == 1 else 'were'} in {words}{against}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.35 if one_line else 0.4 if one_sided else 0.5 if split else 0.6,
        op=operation(fronts[waiting[0] if waiting else culprits[0]].call),
        call_sites=job.sites(list(waiting)),
        culprit_call_sites=job.sites(list(culprits)),
        evidence=tuple(facts),
        advice=("Compare how these ranks came to the lines named: a branch, a loop one round shorter, one call more.",),
    )


def _other_lines(job: Job, fronts: dict[int, Trace], places: dict[int, Hashable]) -> Finding:
    culprits = odd_ones(places)
    split = len(culprits) == len(places)
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    ops = _operations(fronts)
    facts = ["the ranks failed in the same operation at different lines"]
    if split:
        facts.append("they may wait for each other in different groups: the log does not tell the groups")
    return Finding(
        kind="rank-skipped-collective",
        summary=f"Ranks stand at different lines in {_op_words(ops)}"
        + ("." if split else f": {rank_list(culprits)} apart from {rank_list(waiting)}."),
        culprit_ranks=() if split else culprits,
        waiting_ranks=tuple(sorted(fronts)) if split else waiting,
        confidence=0.3 if split else 0.45,
        op=_only(ops),
        call_sites=job.sites(sorted(fronts) if split else list(waiting)),
        culprit_call_sites={} if split else job.sites(list(culprits)),
        evidence=tuple(facts),
        advice=("Start the job with dtprof run: its records tell the group of each operation.",),
    )


def _all_alike(job: Job, fronts: dict[int, Trace], late: bool) -> tuple[Finding | None, tuple[str, ...]]:
    waiting = tuple(sorted(fronts))
    op = next((name for trace in fronts.values() if (name := operation(trace.call))), None)
    what = f"{rank_list(waiting)} failed in {op or 'the same operation'} at the same line"
    if not late or len(waiting) < 2:
        return None, (f"{what}: who went away or did not come is not in the log",)
    finding = Finding(
        kind="backend-stall",
        summary=f"{capitalised(waiting)} timed out in {op or 'the same operation'} at the same line.",
        culprit_ranks=(),
        waiting_ranks=waiting,
        confidence=0.3,
        op=op,
        call_sites=job.sites(list(waiting)),
        advice=("Check that no rank's log is left out, then the network between the hosts.",),
    )
    return finding, ("whether other ranks belong to the job, and what they did, is not in the log",)
