"""Ranks that never came to what others wait in, and wait for nothing themselves."""

from dataclasses import replace

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.sources.flight_recorder import dump_divergence
from dtprof.diagnosis.sources.flight_recorder.dump_wait_graph import Front, Meeting, Waits
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job, sites
from dtprof.records.tables import Site

_LOOK = (
    "Take the stacks of these ranks while the job hangs (py-spy dump, or record it with dtprof run): a dump does not "
    "show what they do instead - a lock, input, a file, other code."
)


def absent_finding(job: Job, waits: Waits, culprits: tuple[int, ...]) -> Finding:
    """Return the finding for ranks that others wait for and that wait for nobody."""
    first = _telling(waits, culprits)
    if isinstance(first, Meeting):
        return _unmatched(job, waits, first, culprits)
    members = sum(rank in job.dumps for rank in first.key.ranks)
    idle = [rank for rank in first.absent if rank in job.dumps]
    if set(culprits) <= set(idle) and 2 * len(idle) > members > 2:
        return _alone(job, first)
    return _never_entered(job, waits, first, culprits)


def _telling(waits: Waits, culprits: tuple[int, ...]) -> Front | Meeting:
    """Return the operation that shows most of the culprits: collectives before transfers, then the earliest."""
    shown: dict[int, tuple[Front | Meeting, set[int]]] = {}
    for edges in waits.edges.values():
        for rank, item in edges.items():
            if rank in culprits:
                shown.setdefault(id(item), (item, set()))[1].add(rank)
    return min(
        shown.values(),
        key=lambda one: (isinstance(one[0], Meeting), -len(one[1]), one[0].first.created_ns),
    )[0]


def last_lines(job: Job, ranks: tuple[int, ...]) -> dict[int, Site]:
    """Return the lines of the newest operations of ranks."""
    return {r: site for r in ranks if r in job.dumps and (site := job.dumps[r].last_site) is not None}


def _never_entered(job: Job, waits: Waits, front: Front, culprits: tuple[int, ...]) -> Finding:
    group = job.group(front.key)
    direct = tuple(sorted(front.waiting))
    op = front.first
    name = capitalised(culprits)
    lost = [rank for rank in culprits if rank not in job.dumps]
    places = last_lines(job, culprits)
    sure = 0.9 if not job.missing else 0.75
    if lost:
        sure = 0.7 if len(lost) == 1 or 4 * len(lost) <= len(job.world) else 0.4
    finding = Finding(
        kind="rank-skipped-collective",
        summary=f"{name} never entered {op.op} #{front.seq} of {group_words(group)}{at_line(op.site)}; "
        f"{wait_words(direct)} in it.",
        culprit_ranks=culprits,
        waiting_ranks=direct,
        confidence=sure,
        group=group,
        op=op.op,
        seq=front.seq,
        call_sites=sites(front.waiting),
        culprit_call_sites=places,
        evidence=tuple(_facts(job, waits, front, culprits)),
        advice=("Find out how these ranks ended: exit statuses, kernel log (OOM killer), the host.",)
        if lost
        else (_LOOK,),
    )
    for rank in culprits:
        origin = dump_divergence.find_origin(job, front.key, rank, direct)
        if origin is not None:
            better = dump_divergence.finding_of(job, origin, waiting=direct, held_up=True)
            return replace(better, culprit_ranks=culprits, evidence=(*better.evidence, finding.summary))
    return finding


def _facts(job: Job, waits: Waits, front: Front, culprits: tuple[int, ...]) -> list[str]:
    facts = []
    for rank in culprits[:4]:
        if rank not in job.dumps:
            facts.append(f"rank {rank} left no dump: it was killed, has ended, or is stuck too hard to write one")
            continue
        newest = job.issued(rank, front.key)
        reached = f"#{newest} of this group" if newest is not None else "nothing of this group that its dump tells"
        facts.append(
            f"rank {rank} waits for nothing: all it issued has ended, up to {reached}"
            f"{at_line(job.dumps[rank].last_site)}"
        )
    others = sorted(set(waits.edges) - set(front.waiting) - set(culprits))
    if others:
        facts.append(f"{wait_words(others)} for these ranks in turn, in other groups")
    inside = [rank for rank, pending in front.waiting.items() if job.inside_call(rank, pending)]
    if inside:
        facts.append(f"{rank_list(inside)} had not come out of the call itself: the group's communicator is being made")
    return facts


def _alone(job: Job, front: Front) -> Finding:
    """Return the finding for a collective that only a minority of its group came to."""
    waiting = tuple(sorted(front.waiting))
    absent = [rank for rank in front.absent if rank in job.dumps]
    group = job.group(front.key)
    op = front.first
    return Finding(
        kind="collective-order-mismatch",
        summary=f"{capitalised(waiting)} made {op.op} #{front.seq} of {group_words(group)}{at_line(op.site)} alone: "
        f"{rank_list(absent)} never came to it and wait for nothing.",
        culprit_ranks=waiting,
        waiting_ranks=waiting,
        confidence=0.6,
        group=group,
        op=op.op,
        seq=front.seq,
        call_sites=sites(front.waiting),
        culprit_call_sites=sites(front.waiting),
        evidence=(
            f"{len(absent)} of {len(front.key.ranks)} members did not come: more probably the call is one too "
            "many here than one too few there",
        ),
        advice=("Look for a branch around this call that only these ranks take; else take stacks of the others.",),
    )


def _unmatched(job: Job, waits: Waits, meeting: Meeting, culprits: tuple[int, ...]) -> Finding:
    group = job.group(meeting.key)
    here = meeting.first
    wanted = "recv" if here.op == "send" else "send"
    waiting = tuple(sorted(rank for rank, edges in waits.edges.items() if any(on in culprits for on in edges)))
    facts = [f"rank {rank} left no dump" for rank in culprits if rank not in job.dumps][:4]
    facts += [f"rank {rank} waits for nothing: all it issued has ended" for rank in culprits if rank in job.dumps][:4]
    others = sorted(set(waits.edges) - set(waiting))
    if others:
        facts.append(f"{wait_words(others)} in turn")
    return Finding(
        kind="p2p-unmatched",
        summary=f"Rank {meeting.waiter} is in {here.op} #{here.seq} {'to' if here.op == 'send' else 'from'} rank "
        f"{meeting.absent} ({group_words(group)}){at_line(here.site)}, which never came to its {wanted}"
        + (f"; {rank_list(culprits)} hold the job up." if len(culprits) > 1 else "."),
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.8 if all(rank in job.dumps for rank in culprits) else 0.6,
        group=group,
        op=here.op,
        seq=here.seq,
        call_sites={meeting.waiter: here.site} if here.site else {},
        culprit_call_sites=last_lines(job, culprits),
        evidence=tuple(facts),
        advice=(_LOOK,),
    )
