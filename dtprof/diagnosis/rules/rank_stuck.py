"""Others wait for a rank that no operation holds up: it works, is stuck, frozen, or in a long phase.

A frozen process carries on with no operation that it has issued, either.
"""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.absent_ranks import FROZEN, absent_finding, kind_of_absence
from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, group_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.p2p_messages import message_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import Wait

JUST_NOW_NS = 1_000_000_000
"""Within which the newest record of a rank at work lies, and at least so long after the others began to wait."""


def find_absent(case: Case) -> Iterator[Finding]:
    """Give findings for ranks that others wait for and that nothing holds up, one for each kind: errors come first."""
    job, waits = case.job, case.job.waits
    for wait in sorted((w for own in waits.values() for w in own), key=lambda w: w.operation.issued_ns):
        awaited = (job.ranks[r] for r in wait.awaited if r in job.ranks and r not in waits)
        idle = [rank for rank in awaited if rank.sees_program and not rank.finished]
        if idle and not wait.any_of_them:
            kinds: dict[str, list[RankState]] = {}
            going_on = _find_going_on(job, idle, wait.operation.issued_ns)
            for rank in idle:
                kinds.setdefault(kind_of_absence(rank, goes_on=rank.rank in going_on), []).append(rank)
            for kind in sorted(kinds, key="long-operation".__eq__):
                yield _absent_in_operation(job, wait.operation, waits, kinds[kind], going_on)
            return


def find_frozen(case: Case) -> Iterator[Finding]:
    """Give the finding for frozen ranks in an operation that others wait in, too."""
    job, waits = case.job, case.job.waits
    frozen = {r for r in waits if (stack := job.ranks[r].stack) is not None and stack.state in FROZEN}
    for rank in sorted(frozen):
        operation = waits[rank][0].operation
        members = {operation.peer_rank} if operation.p2p else set(operation.group.ranks)
        if members & waits.keys() - frozen:
            yield _absent_in_operation(job, operation, waits, [job.ranks[r] for r in sorted(frozen)], {})
            return


def _absent_in_operation(
    job: JobState,
    op: Operation,
    waits: dict[int, tuple[Wait, ...]],
    absent: list[RankState],
    going_on: dict[int, float],
) -> Finding:
    group = job.group(op.group)
    waiting = tuple(sorted(waits.keys() - {rank.rank for rank in absent}))
    here = tuple(rank for rank in waiting if any(_is_alike(w, op, absent) for w in waits[rank]))
    place = f"{op.op} #{op.seq} of {group_words(group)}"
    if op.p2p:
        place = message_words(op) if len(here) == 1 else "messages"
    return replace(
        absent_finding(absent, here, place, going_on=going_on),
        waiting_ranks=waiting,
        group=group,
        op=op.op,
        seq=op.seq,
        step=op.step,
        call_sites=call_sites({rank: waits[rank][0].operation for rank in waiting}),
    )


def _find_going_on(job: JobState, ranks: list[RankState], since_ns: int) -> dict[int, float]:
    """Return for how many seconds of a wait ranks without a stack went on recording, where they did so to the end.

    As a rank that evaluates, sample by sample, until the others lose their patience.
    """
    ends = [rank.moments[-1] for rank in job.ranks.values() if rank.moments]
    ends += [error.t_ns for rank in job.ranks.values() for error in rank.exceptions[-1:]]
    until_ns = max(ends, default=0)
    return {
        rank.rank: (rank.moments[-1] - since_ns) / 1e9
        for rank in ranks
        if rank.stack is None
        and rank.moments
        and until_ns - rank.moments[-1] <= JUST_NOW_NS <= rank.moments[-1] - since_ns
    }


def _is_alike(wait: Wait, op: Operation, absent: list[RankState]) -> bool:
    """Say whether a wait is in a collective, or for a message of an absent rank: each rank numbers its own messages."""
    waited = wait.operation
    if op.p2p:
        return waited.p2p and any(rank.rank in wait.awaited for rank in absent)
    return (waited.group, waited.seq, waited.p2p) == (op.group, op.seq, False)


RULES: Declared = (
    Rule(
        kinds=("rank-stuck", "rank-frozen", "rank-exited", "long-operation", "rank-never-joined"),
        stages=(Stage.WAIT,),
        find=find_absent,
        finds_all=True,
    ),
    Rule(kinds=("rank-frozen",), stages=(Stage.STALL,), find=find_frozen),
)
