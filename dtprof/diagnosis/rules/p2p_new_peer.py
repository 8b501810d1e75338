"""A rank turns to a peer that it never had at this line, and holds up the collective that the others wait in."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, explain
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Refinement, Stage
from dtprof.job.issued_operations import Operation


def explain_by_new_peer(case: Case, skip: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that wait for a peer of a message which is new to them, before the skipped call.

    Of the next iteration they are not: the line has had other peers in each of those before.
    """
    job = case.job
    messages = {rank: _find_new(job, rank, skip) for rank in skip.culprit_ranks}
    operations = {rank: message for rank, message in messages.items() if message is not None}
    if not operations or len(operations) < len(messages):
        return
    first = operations[min(operations)]
    finding = message_finding(
        "p2p-unmatched",
        f"{capitalised(skip.culprit_ranks)} {'waits' if len(operations) == 1 else 'wait'} in {message_words(first)}"
        f"{at_line(first.site)}, a peer that the line never had before; the peer makes no other end, and waits in "
        f"{skip.op} #{skip.seq}.",
        job=job,
        operations=operations,
        culprits=skip.culprit_ranks,
        grade=0.8,
        facts=tuple(f"rank {rank}: {message_words(o)}{at_line(o.site)}" for rank, o in sorted(operations.items())),
        advice="Compare what this rank computes its peers from, such as its place in a grid, with the other ranks.",
    )
    yield explain(finding, skip)


def _find_new(job: JobState, rank: int, skip: Finding) -> Operation | None:
    """Return the message that a rank waits for, where its line had other peers alone and the peer waits in the skip."""
    state = job.ranks.get(rank)
    now = state.first_blocking if state is not None else None
    if state is None or now is None or not now.p2p or now.peer_rank not in skip.waiting_ranks or state.first_row:
        return None
    before = {o.peer_rank for o in state.operations if o.p2p and o.site == now.site and o.issued_ns < now.issued_ns}
    return now if before and now.peer_rank not in before else None


RULES: Declared = (
    Refinement(
        kinds=("p2p-unmatched",),
        causes=("rank-skipped-collective",),
        stages=(Stage.DIVERGENCE,),
        refine=explain_by_new_peer,
    ),
)
