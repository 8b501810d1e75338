"""A monitored barrier of torch names the ranks that did not come, in a log."""

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.log_rule import log_rule
from dtprof.diagnosis.logged_absences import absence_finding, operations_of
from dtprof.diagnosis.logged_job import LoggedJob
from dtprof.diagnosis.rule import Declared
from dtprof.formatting import list_ranks


def find_missed_barrier(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks that a monitored barrier waited for in vain."""
    reached = {note.rank for note in job.notes("barrier-reached")} - {None}
    missed = {rank for note in job.notes("barrier-missed", "barrier-waits") for rank in note.ranks} - reached
    if not missed:
        return None
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
        confidence=0.8,
        evidence=tuple(facts),
    )


RULES: Declared = (log_rule(find_missed_barrier, ("rank-skipped-collective", "rank-exited")),)
