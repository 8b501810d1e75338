"""Point-to-point messages: their other ends, and who else expects one."""

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, Operation
from dtprof.diagnosis.wait_graph import Wait, find_waits


def message_words(operation: Operation) -> str:
    """Return `send to rank 3 with tag 7`."""
    peer = operation.peer_rank
    other = "any rank" if peer < 0 else f"rank {peer}"
    tag = f" with tag {operation.tag}" if operation.tag else ""
    return f"{operation.op} {'to' if operation.op == 'send' else 'from'} {other}{tag}"


def message_finding(
    kind: str,
    summary: str,
    *,
    job: JobState,
    operations: dict[int, Operation],
    culprits: tuple[int, ...],
    confidence: float,
    facts: tuple[str, ...],
    advice: str,
) -> Finding:
    """Return the finding for operations whose other ends do not meet them."""
    chosen = operations[min(operations)]
    held_up = tuple(r for r in sorted(find_waits(job)) if r not in culprits)
    waiting = {rank: job.ranks[rank].blocking[0] for rank in held_up}
    own = call_sites(operations)
    places = {r: place for r in culprits if (place := own.get(r) or job.ranks[r].place) is not None}
    return Finding(
        kind=kind,
        summary=summary,
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=confidence,
        group=job.group(chosen.group),
        op=chosen.op,
        seq=chosen.seq,
        step=chosen.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=places,
        evidence=facts,
        advice=(advice,),
    )


def partner_of(job: JobState, rank: int, operation: Operation) -> Operation | None:
    """Return the other end of a message."""
    peer = job.ranks.get(operation.peer_rank)
    if peer is None or operation.nth < 0 or not (peer.complete and job.ranks[rank].complete):
        return None
    if any(c.peer < 0 for owner in (peer, job.ranks[rank]) for c in owner.channels):
        return None  # a receive from any source takes what comes: order does not tell
    return next(
        (
            o
            for o in reversed(peer.operations)
            if o.p2p
            and o.op != operation.op
            and (o.group, o.tag, o.nth, o.peer_rank) == (operation.group, operation.tag, operation.nth, rank)
        ),
        None,
    )


def went_astray(job: JobState, wait: Wait) -> bool:
    """Say whether a rank turned to this peer for the first time, while another expects its usual message."""
    mine = wait.operation
    usual = [c for c in job.ranks[wait.rank].channels if c.sends == (mine.op == "send")]
    first = mine.nth == 0 and len({channel.peer for channel in usual}) > 1
    return first and any(other.nth > 0 for other in find_expecting(job, wait.rank, mine).values())


def find_expecting(job: JobState, rank: int, operation: Operation) -> dict[int, Operation]:
    """Return other ranks whose messages to or from this one meet nothing either: one may be named wrongly."""
    found = {}
    for other in job.ranks.values():
        for o in other.open_operations:
            if o.p2p and o.op != operation.op and o.peer_rank == rank and other.rank != operation.peer_rank:
                found[other.rank] = o
    return found
