"""A rank left a loop before the collective that always came there, and waits in what comes after the loop."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import first_blocking_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import MAX_STACKS, RankCall
from dtprof.diagnosis.divergence.skip_findings import skip_finding
from dtprof.diagnosis.divergence.source_paths import is_later_in_round
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.group_collectives import checksum
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import usual_operation
from dtprof.records import codes


def find_left_loop(case: Case) -> Iterator[Finding]:
    """Give findings for ranks that left a round before the collective that always came there, and wait elsewhere.

    Several ranks wait together in a collective that was never made before, on another group: what comes after the
    loop. Their peers keep to the pattern of the loop. A call that the source has later in the loop is of its round.
    """
    job = case.job
    new = _find_new_calls(job)
    for collective in sorted(case.open_collectives, key=lambda collective: collective.group.ranks) if new else ():
        member, expected = next(iter(collective.waiting.items()))
        inside = RankCall(job.ranks[member], expected)
        elsewhere = first_blocking_of(job, collective.absent)
        left = tuple(
            rank
            for rank, now in elsewhere.items()
            if now.group != collective.group
            and now.label in new
            and (usual := usual_operation(job.ranks[rank].operations, now)) is not None
            and usual.label == expected.label
            and not is_later_in_round(job, inside, RankCall(job.ranks[rank], now))
        )
        waiting = [*collective.waiting.items()][:MAX_STACKS]
        if left and all(usual_operation(job.ranks[rank].operations, o) is None for rank, o in waiting):
            yield skip_finding(job, expected, left, grade=0.75)


def _find_new_calls(job: JobState) -> set[object]:
    """Return the labels of collectives in which several ranks wait, and the like of which they have not completed."""
    calls: dict[object, list[RankCall]] = {}
    for rank in job.ranks.values():
        if (now := rank.first_blocking) is not None and not now.p2p:
            calls.setdefault(now.label, []).append(RankCall(rank, now))
    return {
        label
        for label, alike in calls.items()
        if len(alike) > 1 and not any(_has_completed_op(rank, operation) for rank, operation in alike)
    }


def _has_completed_op(rank: RankState, operation: Operation) -> bool:
    """Say whether a rank has completed an operation of the same kind in the group."""
    table = rank.collectives.groups.get(operation.group)
    return table is not None and bool(((table["op"] == checksum(operation.op)) & (table["state"] == codes.DONE)).any())


RULES: Declared = (
    Rule(kinds=("rank-skipped-collective",), stages=(Stage.DIVERGENCE,), find=find_left_loop, finds_all=True),
)
