"""Shared parts of findings on point-to-point messages."""

from dtprof.diagnosis.blocked_ranks import call_sites, find_followers
from dtprof.diagnosis.findings import Evidence, Finding
from dtprof.diagnosis.job_state import JobState
from dtprof.job.issued_operations import Operation


def message_words(operation: Operation, *, with_any_tag: bool = False) -> str:
    """Return `send to rank 3 with tag 7`; tag 0, the default of torch, only on demand."""
    peer = operation.peer_rank
    other = "any rank" if peer < 0 else f"rank {peer}"
    tag = f" with tag {operation.tag}" if operation.tag or with_any_tag else ""
    return f"{operation.op} {'to' if operation.op == 'send' else 'from'} {other}{tag}"


def message_finding(
    kind: str,
    summary: str,
    *,
    job: JobState,
    operations: dict[int, Operation],
    culprits: tuple[int, ...],
    grade: float,
    evidence_class: Evidence | None = None,
    facts: tuple[str, ...],
    advice: str,
) -> Finding:
    """Return the finding for operations whose other ends do not meet them."""
    chosen = operations[min(operations)]
    inside = {*culprits, *operations}
    blocked = tuple(r for r in sorted(inside | find_followers(job, inside)) if r in job.waits and r not in culprits)
    waiting = {rank: job.ranks[rank].blocking[0] for rank in blocked}
    sites = call_sites(operations)
    places = {r: place for r in culprits if (place := sites.get(r) or job.ranks[r].place) is not None}
    return Finding(
        kind=kind,
        summary=summary,
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        grade=grade,
        evidence_class=evidence_class,
        group=job.group(chosen.group),
        op=chosen.op,
        seq=chosen.seq,
        step=chosen.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=places,
        evidence=facts,
        advice=(advice,),
    )
