"""A monitored barrier of torch names the ranks that did not come, in a log."""

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.log_findings.log_rule import log_rule
from dtprof.diagnosis.log_findings.logged_absences import absence_finding, operations_of
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob
from dtprof.formatting import list_ranks


def find_missed_barrier(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks that a monitored barrier waited for in vain."""
    reached = {note.rank for note in job.notes("barrier-reached") if note.rank is not None}
    notes = job.notes("barrier-missed", "barrier-waits")
    missed = {rank for note in notes for rank in note.ranks} - reached
    if not missed:
        return _find_late_root(job, reached) if reached and not notes else None
    culprits = tuple(sorted(missed))
    exited = job.left_in_order(missed) == missed
    waiting = tuple(sorted(job.waited_for() - missed))
    elsewhere = {rank: job.victims[rank] for rank in culprits if rank in job.victims and job.victims[rank].call}
    facts = [f"torch's monitored barrier names {list_ranks(culprits)}"]
    facts += [f"rank {rank} waited in {trace.call} instead" for rank, trace in list(elsewhere.items())[:2]]
    return absence_finding(
        job,
        culprits=culprits,
        waiting=waiting,
        ops=operations_of(job.victims),
        exited=exited,
        grade=0.8,
        evidence=tuple(facts),
    )


def _find_late_root(job: LoggedJob, reached: set[int]) -> Finding | None:
    """Return the finding where ranks waited in vain for rank 0, which asks all others, and it says nothing."""
    if not job.notes("gloo-timeout") or 0 in job.waited_for() | reached:
        return None
    return absence_finding(
        job,
        culprits=(0,),
        waiting=tuple(sorted(reached)),
        ops={"barrier"},
        exited=False,
        grade=0.45,
        evidence=(f"{list_ranks(sorted(reached))} reached torch's monitored barrier, and rank 0 did not answer",),
    )


RULES: Declared = (log_rule(find_missed_barrier, ("rank-skipped-collective", "rank-exited")),)
