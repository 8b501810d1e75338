"""Ranks in another iteration of a loop than their peers: it looks like a skipped collective, and may be none."""

from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, operation_words
from dtprof.diagnosis.divergence.call_divergence import RankCall
from dtprof.diagnosis.divergence.sequence_alignment import is_same_call
from dtprof.diagnosis.divergence.skip_branches import OTHER_ITERATION_ADVICE
from dtprof.diagnosis.divergence.skip_findings import branches_past_by_rank
from dtprof.diagnosis.divergence.source_paths import is_alone_in_loop
from dtprof.diagnosis.findings import ONLY_BRANCH, Finding, at_line, capitalised, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import MIN_ALIKE, iterations_by_round


def find_other_iteration(job: JobState, skip: Finding, skipped: Operation) -> Finding | None:
    """Return the finding for ranks that skipped a call by a condition on a loop counter: they are in other iterations.

    As after a resume from another step. Had they left the round early, the source would show where.
    """
    waiting = first_blocking_of(job, skip.waiting_ranks)
    branches = branches_past_by_rank(job, skip.culprit_ranks, waiting, skipped)
    if {*branches} < {*skip.culprit_ranks} or not all(
        branch.on_counter for of_rank in branches.values() for branch in of_rank
    ):
        return None
    sites = {rank: of_rank[-1].site for rank, of_rank in branches.items()}
    line = at_line(sites[skip.culprit_ranks[0]])
    words = "is" if len(skip.culprit_ranks) == 1 else "are"
    return replace(
        skip,
        kind="step-mismatch",
        summary=f"{capitalised(skip.culprit_ranks)} {words} in another iteration than the others: the "
        f"condition{line} on a loop counter skips {skipped.op} #{skipped.seq} of {group_words(skip.group)}"
        f"{at_line(skipped.site)}; {wait_words(skip.waiting_ranks)} in it. Calls paired before are of different "
        "iterations.",
        grade=0.8 if len(skip.waiting_ranks) > len(skip.culprit_ranks) else 0.6,
        culprit_call_sites=sites,
        evidence=(
            *(fact for fact in skip.evidence[: len(skip.culprit_ranks)]),
            f"{ONLY_BRANCH}, and operations before it agree in form only",
        ),
        advice=(OTHER_ITERATION_ADVICE,),
    )


def find_extra_iteration(job: JobState, skip: Finding, expected: RankCall) -> Finding | None:
    """Return the finding for ranks in an extra iteration of an inner loop that the others have left.

    They are not as many steps further as a later round would be, and have run more iterations than in any round before.
    """
    now = first_blocking_of(job, skip.culprit_ranks)
    turns = [iterations_by_round(job.ranks[rank].operations, o, expected.operation) or [0] for rank, o in now.items()]
    if any(newest <= max(before, default=0) for *before, newest in turns):
        return None
    is_inside = [
        _repeats_call(job.ranks[rank], o) or is_alone_in_loop(job, expected, RankCall(job.ranks[rank], o))
        for rank, o in now.items()
    ]
    if len(now) < len(skip.culprit_ranks) or not all(is_inside):
        return None
    return extra_iteration_finding(
        job,
        skip,
        expected,
        "no more steps lie between the two calls than without another iteration of the loop around both",
    )


def _repeats_call(rank: RankState, current: Operation) -> bool:
    """Say whether a rank is in a call that it made more than once in a row before, in one step, as a loop makes it."""
    newest = rank.operations[-3:]
    alike = len(newest) == 3 and all(is_same_call(operation, current) for operation in newest)
    return alike and newest[-1] == current and current.step is not None and len({o.step for o in newest}) == 1


def extra_iteration_finding(job: JobState, skip: Finding, expected: RankCall, evidence: str) -> Finding:
    """Return the finding for ranks in an extra iteration of a loop, rather than past what they seem to skip."""
    now = first_blocking_of(job, skip.culprit_ranks)
    first, awaited = now[min(now)], expected.operation
    wait = "waits" if len(skip.culprit_ranks) == 1 else "wait"
    return replace(
        skip,
        kind="step-mismatch",
        summary=f"{capitalised(skip.culprit_ranks)} ran one extra loop iteration and {wait} in "
        f"{operation_words(job, first, beside=awaited)}; {wait_words(skip.waiting_ranks)} after it in "
        f"{operation_words(job, awaited, beside=first)}.",
        culprit_call_sites=call_sites(now),
        grade=min(skip.grade, 0.8),
        evidence=(evidence,),
        advice=("Look for what sets the iterations of this loop, and differs on this rank.",),
    )


def describe_fewer_iterations(rank: RankState, turn: Operation) -> str:
    """Say that a rank ran fewer iterations of a loop than in each of its rounds before, and went on to its next call.

    Empty where it did not, or has made more of the next call than ever.
    """
    now = rank.first_blocking
    if now is None or now.label == turn.label:
        return ""
    *before, made = iterations_by_round(rank.operations, turn, now) or [0]
    *others, again = iterations_by_round(rank.operations, now, turn) or [0]
    if len(before) < MIN_ALIKE or not 0 < made < min(before) or again > min(others, default=0):
        return ""
    newest = "once" if made == 1 else f"{made} times"
    usual = f"{min(before)} times{' or more' if len({*before}) > 1 else ''}"
    return f"rank {rank.rank} made this call {newest} in its newest round, and {usual} in each before"
