"""All members issued an operation, and some devices do not start or complete it as the others do."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.device_evidence import (
    begin_words,
    is_held_by_compute,
    place_words,
    with_connecting,
    with_device_health,
)
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.open_collectives import OpenCollective
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.wait_graph import is_met

ADVICE = "Look at the devices of these ranks (Xid errors, a kernel that never ends) and at their native stacks."
HELD_BACK = "issued it, and its device never began"
HELD_BY_COMPUTE = (
    "issued it, and its device never began: the stream is blocked by work before it that is no operation of a group, "
    "such as a kernel that does not end"
)


def find_device_stalls(case: Case) -> Iterator[Finding]:
    """Give findings for the members, no more than half, whose state in an operation differs from the others'."""
    job = case.job
    for collective in case.open_collectives:
        on_device = all(operation.on_device for operation in collective.waiting.values())
        if on_device and not collective.absent and (finding := _find_one_sided(job, collective)) is not None:
            yield finding
    yield from _messages_behind(job)


def _find_one_sided(job: JobState, collective: OpenCollective) -> Finding | None:
    members = [rank for rank in collective.group.ranks if rank in job.ranks]
    waiting = collective.waiting
    inside = [rank for rank, operation in waiting.items() if operation.inside_call]
    started = [rank for rank, operation in waiting.items() if operation.started]
    unstarted = [rank for rank, operation in waiting.items() if operation.started is False]
    half = len(members) / 2
    if inside and len(inside) <= half:
        return _finding(job, collective, inside, "is inside the call and does not come out of it", 0.75)
    if len(waiting) < len(members) and len(waiting) <= half:
        return _finding(job, collective, list(waiting), "does not complete on its own device", 0.7)
    if started and unstarted and len(unstarted) <= half:
        held = all(is_held_by_compute(job.ranks[rank]) for rank in unstarted)
        return _finding(job, collective, unstarted, HELD_BY_COMPUTE if held else HELD_BACK, 0.8 if held else 0.75)
    return None


def _finding(job: JobState, collective: OpenCollective, ranks: list[int], words: str, grade: float) -> Finding:
    group = job.group(collective.group)
    culprits = tuple(sorted(ranks))
    waiting = {rank: o for rank, o in sorted(collective.waiting.items()) if rank not in culprits}
    op = collective.waiting[culprits[0]]
    finding = Finding(
        kind="rank-stuck",
        summary=f"{capitalised(culprits)}: {op.op} #{op.seq} of {group_words(group)}{at_line(op.site)} {words}; the "
        "other members have completed it or are in it.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(waiting),
        grade=grade,
        group=group,
        op=op.op,
        seq=op.seq,
        step=op.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=call_sites({rank: collective.waiting[rank] for rank in culprits}),
        evidence=(
            f"{list_ranks(collective.group.ranks)} all issued it; operations and arguments agree",
            *begin_words({**collective.elsewhere, **collective.waiting}),
            *place_words(job, culprits),
        ),
        advice=(ADVICE,),
    )
    return with_device_health(job, with_connecting(finding, op), culprits)


def _messages_behind(job: JobState) -> Iterator[Finding]:
    """Yield a finding for each message that has completed at its other end only."""
    for rank in job.ranks.values():
        for here in rank.open_operations:
            if not (here.p2p and here.on_device and is_met(job.ranks, rank.rank, here)):
                continue
            peer = job.ranks[here.peer_rank]
            place = (here.group, here.tag, here.nth, rank.rank)
            if any(
                o.p2p and o.op != here.op and (o.group, o.tag, o.nth, o.peer_rank) == place
                for o in peer.open_operations
            ):
                continue
            finding = Finding(
                kind="rank-stuck",
                summary=f"Rank {rank.rank} does not complete its {here.op} #{here.seq}{at_line(here.site)} "
                f"({group_words(job.group(here.group))}) on its own device; the other side, rank {peer.rank}, has.",
                culprit_ranks=(rank.rank,),
                grade=0.6,
                group=job.group(here.group),
                op=here.op,
                seq=here.seq,
                step=here.step,
                culprit_call_sites=call_sites({rank.rank: here}),
                evidence=(f"rank {peer.rank} issued as many messages with it, and its end of this one has completed",),
                advice=(ADVICE,),
            )
            yield with_connecting(finding, here)


RULES: Declared = (Rule(kinds=("rank-stuck",), stages=(Stage.STALL,), find=find_device_stalls),)
