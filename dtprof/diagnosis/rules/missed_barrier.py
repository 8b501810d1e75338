"""A monitored barrier of torch names the ranks that did not come, in a log."""

from dtprof.diagnosis.findings import Finding, capitalised, wait_words
from dtprof.diagnosis.log_rule import log_finding, log_rule
from dtprof.diagnosis.logged_job import LoggedJob
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.rules.lost_peer import STACKS, operations_of, the_only, words_of
from dtprof.formatting import list_ranks


def find_missed_barrier(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks that a monitored barrier waited for in vain."""
    reached = {note.rank for note in job.notes("barrier-reached")} - {None}
    missed = {rank for note in job.notes("barrier-missed", "barrier-waits") for rank in note.ranks} - reached
    if not missed:
        return None
    culprits = tuple(sorted(missed))
    gone = job.left_in_order(missed) == missed
    waiting = tuple(sorted(job.waited_for() - missed))
    elsewhere = {rank: job.victims[rank] for rank in culprits if rank in job.victims and job.victims[rank].call}
    facts = [f"torch's monitored barrier names {list_ranks(culprits)}"]
    facts += [f"rank {rank} waited in {trace.call} instead" for rank, trace in list(elsewhere.items())[:2]]
    if gone:
        facts.append(f"torchelastic's table of failures has no entry for {list_ranks(culprits)}: status 0")
    ops = operations_of(job.victims)
    return log_finding(
        job,
        "rank-exited" if gone else "rank-skipped-collective",
        f"{capitalised(culprits)} {'had left the program' if gone else 'did not come'}; "
        f"{wait_words(waiting) if waiting else 'the others wait'} in {words_of(ops)}.",
        culprits=culprits,
        waiting=waiting,
        confidence=0.8,
        op=the_only(ops),
        evidence=tuple(facts),
        advice=("Look for a branch, an early return or a shorter loop on these ranks.", STACKS),
    )


RULES: Declared = (log_rule(find_missed_barrier, ("rank-skipped-collective", "rank-exited")),)
