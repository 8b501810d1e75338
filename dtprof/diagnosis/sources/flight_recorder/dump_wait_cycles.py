"""Ranks that wait for one another: groups entered in opposite order, sends and receives in a ring, or a skip."""

from itertools import combinations

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.sources.flight_recorder.dump_tables import NO_LABEL, Pending
from dtprof.diagnosis.sources.flight_recorder.dump_wait_graph import Front, Meeting, Waits
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job, sites


def cycle_finding(job: Job, waits: Waits, ranks: tuple[int, ...]) -> Finding:
    """Return the finding for a closed set of ranks that wait for each other."""
    held = [item for rank in ranks for item in waits.edges[rank].values()]
    fronts = [front for front in waits.fronts if any(item is front for item in held)]
    meetings = [item for item in held if isinstance(item, Meeting)]
    if not fronts:
        return _ring(job, ranks, meetings)
    return _crossed(job, ranks, fronts, meetings) if meetings else _opposed(job, ranks, fronts)


def _ring(job: Job, ranks: tuple[int, ...], meetings: list[Meeting]) -> Finding:
    ops = {meeting.first.op for meeting in meetings}
    what = "receive" if ops == {"recv"} else "send" if ops == {"send"} else "send and receive"
    pending = {meeting.waiter: meeting.first for meeting in meetings}
    one = meetings[0].first
    listed = tuple(
        f"rank {m.waiter}: {m.first.op} {'to' if m.first.op == 'send' else 'from'} rank {m.absent}"
        f"{at_line(m.first.site)}"
        for m in meetings[:4]
    )
    return Finding(
        kind="p2p-deadlock-cycle",
        summary=f"{capitalised(ranks)} wait for each other in a ring: each is in a {what} that the other side has not "
        "come to.",
        culprit_ranks=ranks,
        waiting_ranks=ranks,
        confidence=0.85,
        group=job.group(meetings[0].key),
        op=one.op,
        seq=one.seq,
        call_sites=sites(pending),
        culprit_call_sites=sites(pending),
        evidence=listed,
        advice=("Let every second rank receive first, or issue both together (batch_isend_irecv).",),
    )


def _crossed(job: Job, ranks: tuple[int, ...], fronts: list[Front], meetings: list[Meeting]) -> Finding:
    """Return the finding for a transfer whose other side is in a collective that waits for this one."""
    front, meeting = fronts[0], meetings[0]
    apart = {m.waiter for m in meetings}
    together = {rank for rank in ranks if any(rank in f.waiting for f in fronts)} - apart
    culprits = tuple(sorted(apart if len(apart) < len(together) else together if len(together) < len(apart) else ranks))
    here = meeting.first
    pending: dict[int, Pending] = {**front.waiting, meeting.waiter: here}
    return Finding(
        kind="p2p-unmatched",
        summary=f"Rank {meeting.waiter} is in {here.op} {'to' if here.op == 'send' else 'from'} rank {meeting.absent}"
        f"{at_line(here.site)}, while {wait_words(sorted(front.waiting))} in {front.first.op} #{front.seq} of "
        f"{group_words(job.group(front.key))}{at_line(front.first.site)}: they wait for each other.",
        culprit_ranks=culprits,
        waiting_ranks=ranks,
        confidence=0.6,
        group=job.group(meeting.key),
        op=here.op,
        seq=here.seq,
        call_sites=sites(pending),
        culprit_call_sites=sites({rank: pending[rank] for rank in culprits if rank in pending}),
        evidence=("either the transfer was left out on one side, or it is one too many on the other",),
        advice=("Compare the two lines: every send needs its receive before both sides go on.",),
    )


def _opposed(job: Job, ranks: tuple[int, ...], fronts: list[Front]) -> Finding:
    """Return the finding for collectives of different groups that members came to in different order."""
    pairs = ((a, b) for a, b in combinations(fronts, 2) if _side(a, b, ranks) and _side(b, a, ranks))
    a, b = next(pairs, (None, None))
    if a is None or b is None:
        return _long_cycle(job, ranks, fronts)
    ours, theirs = _side(a, b, ranks), _side(b, a, ranks)
    our_way, their_way = (
        {_came_unusually(job, rank, front) for rank in side} for side, front in ((ours, a), (theirs, b))
    )
    if our_way == {False} and their_way == {True}:
        return _skipped(job, a, b, theirs)
    if our_way == {True} and their_way == {False}:
        return _skipped(job, b, a, ours)
    culprits = tuple(sorted(ours if len(ours) < len(theirs) else theirs if len(theirs) < len(ours) else ours + theirs))
    return Finding(
        kind="group-order-inversion",
        summary=f"{capitalised(ours)} entered {a.first.op} #{a.seq} of {group_words(job.group(a.key))} first, "
        f"{rank_list(theirs)} {b.first.op} #{b.seq} of {group_words(job.group(b.key))}: they wait for each other.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted({*a.waiting, *b.waiting})),
        confidence=0.85,
        group=job.group(a.key),
        op=a.first.op,
        seq=a.seq,
        call_sites=sites({**a.waiting, **b.waiting}),
        culprit_call_sites=sites({r: {**a.waiting, **b.waiting}[r] for r in culprits}),
        evidence=(
            f"{rank_list(list(a.waiting))} in group {a.key.name}{at_line(a.first.site)}",
            f"{rank_list(list(b.waiting))} in group {b.key.name}{at_line(b.first.site)}",
        ),
        advice=("Enter the groups in the same order on every rank.",),
    )


def _side(here: Front, there: Front, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that wait in one collective and have not come to the other."""
    return tuple(rank for rank in here.waiting if rank in there.absent and rank in ranks)


def _came_unusually(job: Job, rank: int, front: Front) -> bool:
    """Say whether a rank came to an operation from another place in its program than whenever it came before."""
    sequence = [number for number in job.dumps[rank].sequence if number != NO_LABEL]
    track = job.track(rank, front.key)
    number = track.at(front.seq) if track is not None else NO_LABEL
    if number not in sequence:
        return False
    places = [job.labels[n].place for n in sequence]
    last = len(sequence) - 1 - sequence[::-1].index(number)
    before = {places[i - 1] for i in range(1, last) if places[i] == places[last]}
    return bool(before) and last > 0 and places[last - 1] not in before


def _skipped(job: Job, left_out: Front, instead: Front, culprits: tuple[int, ...]) -> Finding:
    group = job.group(left_out.key)
    waiting = tuple(sorted(set(left_out.waiting) - set(culprits)))
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits)} never entered {left_out.first.op} #{left_out.seq} of {group_words(group)}"
        f"{at_line(left_out.first.site)} and went on to {instead.first.op} #{instead.seq} of "
        f"{group_words(job.group(instead.key))}{at_line(instead.waiting[culprits[0]].site)}; {wait_words(waiting)}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.9,
        group=group,
        op=left_out.first.op,
        seq=left_out.seq,
        call_sites=sites({rank: left_out.waiting[rank] for rank in waiting}),
        culprit_call_sites=sites({rank: instead.waiting[rank] for rank in culprits}),
        evidence=("in earlier rounds these ranks came to the second operation only after the first",),
        advice=(f"Make the call{at_line(left_out.first.site)} on every member of the group.",),
    )


def _long_cycle(job: Job, ranks: tuple[int, ...], fronts: list[Front]) -> Finding:
    one = fronts[0]
    return Finding(
        kind="group-order-inversion",
        summary=f"{capitalised(ranks)} wait for each other in {len(fronts)} groups: each is in an operation that the "
        "next has not come to.",
        culprit_ranks=ranks,
        waiting_ranks=ranks,
        confidence=0.75,
        group=job.group(one.key),
        op=one.first.op,
        seq=one.seq,
        call_sites=sites({rank: pending for front in fronts for rank, pending in front.waiting.items()}),
        evidence=tuple(
            f"{rank_list(list(front.waiting))} in {front.first.op} #{front.seq} of {group_words(job.group(front.key))}"
            for front in fronts[:4]
        ),
        advice=("Enter the groups in the same order on every rank.",),
    )
