"""Others wait for ranks that no operation blocks, or that are lost, and no source shows their activity."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites, last_sites_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, wait_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import Wait

TAKE_STACKS = (
    "Take the stacks of these ranks while the job hangs (py-spy dump, or record it with dtprof run): nothing here "
    "shows what they do instead - a lock, input, a file, other code."
)
Waits = dict[int, tuple[Wait, ...]]


def find_never_came(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks of which only operations are known, and that never came to one.

    Ranks with a source and no open operation are more probable culprits than ranks without a source. If most ranks
    have no source there is no culprit.
    """
    job, waits = case.job, case.job.waits
    awaited = {rank for own in waits.values() for wait in own if not wait.any_of_them for rank in wait.awaited}
    there = {r: job.ranks[r] for r in awaited if r in job.ranks and r not in waits}
    idle = {r for r, rank in there.items() if not (rank.sees_program or rank.transport_exception)}
    if idle:
        yield _finding(job, waits, idle)
        return
    lost = awaited & set(job.lost)
    if lost and 2 * len(lost) <= len(job.ranks) + len(job.missing) and not _waits_for_unknown(job, waits):
        yield _finding(job, waits, lost)


def _waits_for_unknown(job: JobState, waits: Waits) -> bool:
    """Say whether ranks wait in operations with members of which nothing can be known."""
    unknown = set(job.missing) - set(job.lost)
    operations = {w.operation.group: w.operation for own in waits.values() for w in own if not w.operation.p2p}
    peers = {w.operation.peer_rank for own in waits.values() for w in own if w.operation.p2p}
    return bool(unknown & peers) or any(unknown.intersection(group.ranks) for group in operations)


def _finding(job: JobState, waits: Waits, absent: set[int]) -> Finding:
    wait = _most_telling(waits, absent)
    culprits = tuple(sorted(absent))
    op = wait.operation
    if op.p2p:
        return _unmatched(job, waits, wait, culprits)
    here = {
        rank: w.operation
        for rank, own in waits.items()
        for w in own
        if not w.operation.p2p and (w.operation.group, w.operation.seq) == (op.group, op.seq)
    }
    idle = [rank for rank in wait.awaited if rank in job.ranks]
    if absent <= set(idle) and 2 * len(idle) > sum(rank in job.ranks for rank in op.group.ranks) > 2:
        return _alone(job, here, idle)
    return _never_entered(job, waits, here, culprits)


def _most_telling(waits: Waits, absent: set[int]) -> Wait:
    """Return the wait that involves most absent ranks: collectives before messages, then the oldest."""
    return min(
        (wait for own in waits.values() for wait in own if not wait.any_of_them and absent & set(wait.awaited)),
        key=lambda wait: (wait.operation.p2p, -len(absent & set(wait.awaited)), wait.operation.issued_ns),
    )


def _never_entered(job: JobState, waits: Waits, here: dict[int, Operation], culprits: tuple[int, ...]) -> Finding:
    op = min(here.values(), key=lambda operation: operation.issued_ns)
    group = job.group(op.group)
    direct = tuple(sorted(here))
    lost = [rank for rank in culprits if rank not in job.ranks]
    sure = 0.9 if not job.missing else 0.75
    if lost:
        sure = 0.7 if len(lost) == 1 or 4 * len(lost) <= len(job.ranks) + len(job.missing) else 0.4
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits)} never entered {op.op} #{op.seq} of {group_words(group)}{at_line(op.site)}; "
        f"{wait_words(direct)} in it.",
        culprit_ranks=culprits,
        waiting_ranks=direct,
        grade=sure,
        group=group,
        op=op.op,
        seq=op.seq,
        call_sites=call_sites(here),
        culprit_call_sites=last_sites_of(job.ranks[rank] for rank in culprits if rank in job.ranks),
        evidence=tuple(_facts(job, waits, here, culprits)),
        advice=("Find out how these ranks ended: exit statuses, kernel log (OOM killer), the host.",)
        if lost
        else (TAKE_STACKS,),
    )


def _facts(job: JobState, waits: Waits, here: dict[int, Operation], culprits: tuple[int, ...]) -> list[str]:
    facts = [_rank_words(job, rank, next(iter(here.values()))) for rank in culprits[:4]]
    others = sorted(set(waits) - set(here) - set(culprits))
    if others:
        facts.append(f"{wait_words(others)} for these ranks in turn, in other groups")
    inside = [rank for rank, operation in here.items() if operation.inside_call]
    if inside:
        facts.append(
            f"{list_ranks(inside)} had not come out of the call itself: the group's communicator is being made"
        )
    return facts


def _rank_words(job: JobState, rank: int, op: Operation) -> str:
    if rank not in job.ranks:
        return f"rank {rank} left no {job.evidence_name}: it was killed, has ended, or is stuck too hard to write one"
    issued = job.ranks[rank].counts.get((op.group, False), 0)
    reached = f"#{issued - 1} of this group" if issued else f"nothing of this group that its {job.evidence_name} tells"
    return (
        f"rank {rank} waits for nothing: all it issued has completed, up to {reached}"
        f"{at_line(job.ranks[rank].last_site)}"
    )


def _alone(job: JobState, here: dict[int, Operation], idle: list[int]) -> Finding:
    """Return the finding for a collective that only a minority of its group came to."""
    op = min(here.values(), key=lambda operation: operation.issued_ns)
    waiting = tuple(sorted(here))
    group = job.group(op.group)
    return Finding(
        kind="collective-order-mismatch",
        summary=f"{capitalised(waiting)} issued {op.op} #{op.seq} of {group_words(group)}{at_line(op.site)} alone: "
        f"{list_ranks(idle)} never came to it and wait for nothing.",
        culprit_ranks=waiting,
        waiting_ranks=waiting,
        grade=0.6,
        group=group,
        op=op.op,
        seq=op.seq,
        call_sites=call_sites(here),
        culprit_call_sites=call_sites(here),
        evidence=(
            f"{len(idle)} of {len(op.group.ranks)} members did not come: more probably the call is one too many here "
            "than one too few there",
        ),
        advice=("Look for a branch around this call that only these ranks take; else take stacks of the others.",),
    )


def _unmatched(job: JobState, waits: Waits, wait: Wait, culprits: tuple[int, ...]) -> Finding:
    group = job.group(wait.operation.group)
    here = wait.operation
    wanted = "recv" if here.op == "send" else "send"
    waiting = tuple(sorted(r for r, own in waits.items() if any(set(w.awaited) & set(culprits) for w in own)))
    facts = [f"rank {rank} left no {job.evidence_name}" for rank in culprits if rank not in job.ranks][:4]
    facts += [f"rank {r} waits for nothing: all it issued has completed" for r in culprits if r in job.ranks][:4]
    others = sorted(set(waits) - set(waiting))
    if others:
        facts.append(f"{wait_words(others)} in turn")
    return Finding(
        kind="p2p-unmatched",
        summary=f"Rank {wait.rank} is in {here.op} #{here.seq} {'to' if here.op == 'send' else 'from'} rank "
        f"{here.peer_rank} ({group_words(group)}){at_line(here.site)}, which never came to its {wanted}"
        + (f"; {list_ranks(culprits)} hold the job up." if len(culprits) > 1 else "."),
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        grade=0.8 if all(rank in job.ranks for rank in culprits) else 0.6,
        group=group,
        op=here.op,
        seq=here.seq,
        call_sites=call_sites({wait.rank: here}),
        culprit_call_sites=last_sites_of(job.ranks[rank] for rank in culprits if rank in job.ranks),
        evidence=tuple(facts),
        advice=(TAKE_STACKS,),
    )


RULES: Declared = (
    Rule(
        kinds=("rank-skipped-collective", "collective-order-mismatch", "p2p-unmatched"),
        stages=(Stage.WAIT,),
        find=find_never_came,
    ),
)
