"""The rules for logs, in order, and the outcome."""

from dataclasses import replace

from dtprof.diagnosis.findings import Finding, Verdict, rank_list
from dtprof.diagnosis.sources.logs import (
    logged_crashes,
    logged_mismatches,
    logged_waits,
    nccl_order,
    network_failures,
    watchdog_counts,
    watchdog_timeouts,
)
from dtprof.diagnosis.sources.logs.log_facts import MAX_RANK, Facts
from dtprof.diagnosis.sources.logs.logged_job import Job, view
from dtprof.job.world_size import resolve_world_size

CRASHES = ("rank-crashed", "rank-killed")
TIMED_OUT = (
    *("gloo-timeout", "barrier-missed", "barrier-waits", "store-key", "store-barrier", "store-clients", "stuck"),
    "dump-signal",
)
NAME_THE_RANKS = "Lines carry no rank: next time use torchrun --tee 3 or --log-dir DIR, or srun --label."


def decide_from_logs(facts: Facts, *, earlier: list[Facts], problems: tuple[str, ...]) -> Verdict:
    """Return the verdict on the newest attempt; earlier attempts are compared with it."""
    job = view(facts)
    finding, reasons = find_cause(job)
    if finding is not None and earlier:
        finding = _with_history(finding, earlier)
    elif earlier and (before := _newest_cause(earlier)) is not None:
        reasons = (*reasons, f"an earlier attempt failed, this one shows nothing wrong: {before.summary}")
    if finding is None:
        reasons = (*reasons, *_why_unknown(job, told=bool(reasons)))
    elif not finding.culprit_ranks and not reasons:
        reasons = ("which rank began it is not in the log",)
    seen = (set(job.facts.ranks_named) or set(job.victims) | set(job.own)) | nccl_order.ranks_in(job)
    missing = _missing(job, seen)
    if facts.left_out:
        problems = (*problems, f"{facts.left_out} more lines of these kinds were not kept")
    if job.notes("folded"):
        problems = (*problems, "Ray folded lines of several ranks into one: set RAY_DEDUP_LOGS=0 next time")
    return Verdict(
        outcome=_outcome(job, finding),
        source=("log",),
        ranks_seen=tuple(sorted(seen)),
        ranks_missing=missing,
        findings=(finding,) if finding is not None else (),
        cannot_tell=(*reasons, *problems),
    )


def find_cause(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the cause, and what is left open: mismatches and ends first, then who waits for whom, then transports."""
    parted, open_parted = logged_mismatches.find_fingerprints(job)
    crash = logged_crashes.find_crash(job)
    if parted is not None and not _came_first(job, crash):
        return parted, open_parted
    certain = (
        logged_mismatches.find_other_models(job)
        or crash
        or logged_mismatches.find_size_conflict(job)
        or logged_mismatches.find_nccl_mismatch(job)
        or logged_crashes.find_killed(job)
        or logged_waits.find_missed_barrier(job)
        or nccl_order.find_parting(job)
    )
    if certain is not None:
        return certain, ()
    reasons: tuple[str, ...] = open_parted
    for rule in (
        watchdog_timeouts.find_timeouts,
        watchdog_counts.find_behind,
        network_failures.find_never_joined,
        logged_waits.find_waits,
        network_failures.find_stuck,
    ):
        if rule is logged_waits.find_waits and (transport := network_failures.find_transport(job)) is not None:
            return transport, reasons
        finding, told = rule(job)
        reasons = (*reasons, *told)
        if finding is not None:
            return finding, told
    return logged_crashes.find_failed_exit(job) or network_failures.find_setup(job), reasons


def _came_first(job: Job, crash: Finding | None) -> bool:
    """Say whether an exception stands before the first report of a mismatch."""
    if crash is None:
        return False
    traces = [*job.own.values(), *job.own_unknown]
    return (
        min((trace.order for trace in traces), default=job.facts.fingerprints[0].order)
        < job.facts.fingerprints[0].order
    )


def _newest_cause(earlier: list[Facts]) -> Finding | None:
    return next((finding for facts in reversed(earlier) if (finding := find_cause(view(facts))[0]) is not None), None)


def _with_history(finding: Finding, earlier: list[Facts]) -> Finding:
    """Add what repeats: the same position in every attempt is a fault of the program."""
    before = [found for facts in earlier[-20:] if (found := find_cause(view(facts))[0]) is not None]
    same = [
        f
        for f in before
        if (f.kind, f.op, f.seq, f.culprit_ranks) == (finding.kind, finding.op, finding.seq, finding.culprit_ranks)
    ]
    if same and len(same) == len(before):
        text = f"{len(same)} earlier attempt(s) ended in the same way: the program does it, not the hardware"
    elif before:
        text = f"earlier attempts ended otherwise, the newest of them: {before[-1].summary}"
    else:
        return finding
    return replace(finding, evidence=(*finding.evidence, text))


def _outcome(job: Job, finding: Finding | None) -> str:
    timed_out = bool(job.facts.timeouts or job.notes(*TIMED_OUT))
    if finding is None:
        return "hang" if timed_out else "unknown"
    if finding.kind in CRASHES:
        return "crash"
    if finding.kind in ("rank-never-joined", "rank-stuck"):
        return "hang"
    # NCCL's own log of calls tells of no end.
    stands = bool(job.facts.communicators) and not (job.exits or job.facts.traces)
    return "hang" if (timed_out or stands) and not job.facts.fingerprints else "crash"


def _missing(job: Job, seen: set[int]) -> tuple[int, ...]:
    size = resolve_world_size([job.facts.world_size], job.known)
    return tuple(rank for rank in range(min(size, MAX_RANK)) if rank not in seen)


def _why_unknown(job: Job, *, told: bool) -> tuple[str, ...]:
    reasons: list[str] = []
    stopped = job.notes("stopped")
    if stopped:
        reasons.append(f"the job was stopped from outside, and nothing wrong was seen before: {stopped[0].text[:160]}")
    lost = job.victims_unknown or job.notes("peer-lost", "gloo-timeout")
    if lost and not job.victims:
        reasons.append(f"operations failed because a peer was gone or late, and no line names a rank. {NAME_THE_RANKS}")
    if job.notes("barrier-reached", "barrier-waits") and not job.victims:
        reasons.append("monitored barriers point at each other: a connection failed or was late")
    if hints := job.hints:
        reasons.append(f"the log says {hints[0].type}: {hints[0].message[:120]}, without a traceback or a rank")
    failed = [end for end in job.exits.values() if end.status != 0]
    if failed and not reasons and not told:
        reasons.append(f"{rank_list([end.rank for end in failed])} failed, and no line tells why")
    if job.notes("failed", "system-error", "native-crash") and not reasons and not told:
        reasons.append("the job failed, and no line tells why: keep the output of every rank")
    if not reasons and not told:
        reasons.append(
            "nothing in the log tells of a failure; whether a job that still runs hangs silently, it cannot show"
        )
    return tuple(reasons)
