"""Everyone came, and yet it does not end: a rank's device, the inside of a call, the network, sizes that do not fit."""

from collections import Counter
from itertools import chain, combinations

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.sources.flight_recorder.dump_tables import Pending
from dtprof.diagnosis.sources.flight_recorder.dump_wait_graph import Front, Meeting, Waits
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job, sites

MAX_COMPARED = 50
"""Fronts compared with each other for the order in which ranks issued them."""


def size_finding(job: Job, waits: Waits) -> Finding | None:
    """Return the finding for a send and a receive that met and do not fit."""
    for meeting in waits.meetings:
        send, recv = meeting.send, meeting.recv
        if send is None or recv is None:
            continue
        sizes_differ = -1 not in (send.numel_in, recv.numel_in) and send.numel_in != recv.numel_in
        types_differ = bool(send.dtype and recv.dtype) and send.dtype != recv.dtype
        if sizes_differ or types_differ:
            pair = {meeting.source: send, meeting.target: recv}
            return Finding(
                kind="p2p-size-mismatch",
                summary=f"Rank {meeting.source} sends {send.numel_in} {send.dtype}{at_line(send.site)}; rank "
                f"{meeting.target} receives {recv.numel_in} {recv.dtype}{at_line(recv.site)}.",
                culprit_ranks=tuple(sorted(pair)),
                confidence=0.85,
                group=job.group(meeting.key),
                op="send",
                seq=send.seq,
                culprit_call_sites=sites(pair),
                evidence=("both are the oldest between these ranks that have not ended; which is wrong is a guess",),
                advice=("Make both sides agree on shape and element type.",),
            )
    return None


def stall_finding(job: Job, waits: Waits, ranks: list[int]) -> Finding | None:
    """Return the finding where all that these ranks are in has been reached by everyone."""
    fronts = [front for front in waits.fronts if not front.absent]
    if (inverted := _inverted(job, fronts)) is not None:
        return inverted
    theirs = [front for front in fronts if set(ranks) & set(front.waiting)]
    pairs = [m for m in waits.meetings if m.met and {m.source, m.target} & set(ranks)]
    lopsided = (finding for front in theirs if (finding := _one_sided(job, front)) is not None)
    behind = (_behind(job, meeting) for meeting in pairs if meeting.send is None or meeting.recv is None)
    plain = (_stalled(job, front) for front in theirs)
    return next(chain(lopsided, behind, plain, (_pair_stalled(job, meeting) for meeting in pairs)), None)


def _one_sided(job: Job, front: Front) -> Finding | None:
    """Return the finding where the operation has ended, begun or been left on some members only."""
    members = [rank for rank in front.key.ranks if rank in job.dumps]
    done = [rank for rank in members if rank not in front.waiting]
    inside = [rank for rank, pending in front.waiting.items() if job.inside_call(rank, pending)]
    started = [rank for rank, pending in front.waiting.items() if pending.started]
    unstarted = [rank for rank in front.waiting if rank not in started]
    half = len(members) / 2
    if inside and len(inside) <= half:
        return _stuck(job, front, inside, "is inside the call and does not come out of it", 0.75)
    if done and len(front.waiting) <= half:
        return _stuck(job, front, list(front.waiting), "does not finish on its own device", 0.7)
    if started and unstarted and len(unstarted) <= half:
        return _stuck(job, front, unstarted, "issued it, and its device never began", 0.75)
    return None


def _stuck(job: Job, front: Front, culprits: list[int], words: str, confidence: float) -> Finding:
    group = job.group(front.key)
    ours = tuple(sorted(culprits))
    waiting = tuple(sorted(set(front.waiting) - set(ours)))
    one: Pending = front.waiting[ours[0]]
    return Finding(
        kind="rank-stuck",
        summary=f"{capitalised(ours)}: {one.op} #{front.seq} of {group_words(group)}{at_line(one.site)} {words}; the "
        "other members have gone through it or are in it.",
        culprit_ranks=ours,
        waiting_ranks=waiting,
        confidence=confidence,
        group=group,
        op=one.op,
        seq=front.seq,
        call_sites=sites({rank: front.waiting[rank] for rank in waiting}),
        culprit_call_sites=sites({rank: front.waiting[rank] for rank in ours}),
        evidence=(f"{rank_list(front.key.ranks)} all issued it; operations and arguments agree",),
        advice=(
            "Look at the devices of these ranks (Xid errors, a kernel that never ends) and at their native stacks.",
        ),
    )


def _stalled(job: Job, front: Front) -> Finding:
    group = job.group(front.key)
    one = front.first
    return Finding(
        kind="backend-stall",
        summary=f"All {len(front.key.ranks)} members of {group_words(group)} have issued {one.op} #{front.seq}"
        f"{at_line(one.site)} and it does not end; {wait_words(sorted(front.waiting))}.",
        culprit_ranks=(),
        waiting_ranks=tuple(sorted(front.waiting)),
        confidence=0.6,
        group=group,
        op=one.op,
        seq=front.seq,
        call_sites=sites(front.waiting),
        evidence=("operation and arguments agree on every member, and none of them waits for anything older",),
        advice=("Look at the network between the members' hosts and at the back end's own log.",),
    )


def _pair_stalled(job: Job, meeting: Meeting) -> Finding:
    pair = tuple(sorted((meeting.source, meeting.target)))
    here = meeting.first
    return Finding(
        kind="backend-stall",
        summary=f"The transfer from rank {meeting.source} to rank {meeting.target} "
        f"({group_words(job.group(meeting.key))}){at_line(here.site)} does not end, though both sides issued it.",
        culprit_ranks=(),
        waiting_ranks=pair,
        confidence=0.6,
        group=job.group(meeting.key),
        op=here.op,
        seq=here.seq,
        call_sites={meeting.waiter: here.site} if here.site else {},
        evidence=("sizes agree, and neither rank waits for anything older",),
        advice=("Look at the link between the two hosts and at the back end's own log.",),
    )


def _behind(job: Job, meeting: Meeting) -> Finding:
    """Return the finding for a transfer that has ended on the other side only."""
    here, other = meeting.first, meeting.target if meeting.send is not None else meeting.source
    return Finding(
        kind="rank-stuck",
        summary=f"Rank {meeting.waiter} does not finish its {here.op} #{here.seq}{at_line(here.site)} "
        f"({group_words(job.group(meeting.key))}) on its own device; the other side, rank {other}, has ended.",
        culprit_ranks=(meeting.waiter,),
        confidence=0.6,
        group=job.group(meeting.key),
        op=here.op,
        seq=here.seq,
        culprit_call_sites={meeting.waiter: here.site} if here.site else {},
        evidence=(f"rank {other} issued as many transfers with it, and its part of this one has ended",),
        advice=("Look at the device of this rank (Xid errors, a kernel that never ends) and at its native stack.",),
    )


def _inverted(job: Job, fronts: list[Front]) -> Finding | None:
    """Return the finding for two groups whose operations all members issued, but not in the same order."""
    for a, b in combinations(fronts[:MAX_COMPARED], 2):
        if a.key == b.key:
            continue
        both = sorted(set(a.waiting) & set(b.waiting))
        order = {rank: a.waiting[rank].order < b.waiting[rank].order for rank in both}
        if len(set(order.values())) < 2:
            continue
        counted = Counter(order.values())
        rare = min(counted.values())
        tie = len(set(counted.values())) == 1
        culprits = tuple(rank for rank in both if tie or counted[order[rank]] == rare)
        return Finding(
            kind="group-order-inversion",
            summary=f"{a.first.op} #{a.seq} of {group_words(job.group(a.key))} and {b.first.op} #{b.seq} of "
            f"{group_words(job.group(b.key))} were issued in opposite order: {rank_list(culprits)} against the rest."
            if not tie
            else f"{rank_list(culprits).capitalize()} issued {a.first.op} #{a.seq} of {group_words(job.group(a.key))} "
            f"and {b.first.op} #{b.seq} of {group_words(job.group(b.key))} in opposite order.",
            culprit_ranks=culprits,
            waiting_ranks=tuple(sorted({*a.waiting, *b.waiting} - {*culprits})),
            confidence=0.85,
            group=job.group(a.key),
            op=a.first.op,
            seq=a.seq,
            call_sites=sites(a.waiting),
            culprit_call_sites=sites({rank: b.waiting[rank] for rank in culprits}),
            evidence=tuple(
                f"rank {rank}: group {(a if order[rank] else b).key.name} before {(b if order[rank] else a).key.name}"
                for rank in both[:4]
            ),
            advice=("Issue operations of different groups in the same order on every rank.",),
        )
    return None
