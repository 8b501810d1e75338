"""A rank went on without a collective that its peers wait in."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, part_sites
from dtprof.diagnosis.divergence.other_iterations import (
    describe_fewer_iterations,
    extra_iteration_finding,
    find_extra_iteration,
    find_other_iteration,
)
from dtprof.diagnosis.divergence.sequence_alignment import ReferenceProgram, place_of
from dtprof.diagnosis.divergence.skip_findings import ONE_ORDER, OR_SWAPPED, skip_finding
from dtprof.diagnosis.divergence.skipped_calls import Skip, find_skipped_call
from dtprof.diagnosis.divergence.source_paths import are_branches_in_loop, cannot_have_looped_back, is_later_in_round
from dtprof.diagnosis.findings import Finding, at_line
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import OpenCollective, operation_at
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.rules.ranks_apart import find_apart
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import usual_operation

BEFORE_CALL = "no loop is around both calls: from this loop the source has yet to come to the one"


def find_skip(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that went on without a collective that the others wait in.

    In a loop each of two calls follows the other, and either rank may have skipped its own: then the one that is as
    many steps from the other's place as the program is there.
    """
    if case.findings(find_apart):
        return  # ranks were at other places long before, and completed what does not belong together
    questionable: Finding | None = None
    for collective, rank in ((c, rank) for c in case.open_collectives for rank in _choose_references(c)):
        compared = _compare_with(case.job, collective, case.job.ranks[rank])
        if compared is None:
            continue
        finding, is_certain = compared
        if is_certain:
            yield finding
            return
        questionable = questionable or finding
    if questionable is not None:
        yield questionable


def _compare_with(job: JobState, collective: OpenCollective, reference: RankState) -> tuple[Finding, bool] | None:
    """Return the finding for what members skipped of the program of one that waits, and whether it is certain."""
    others = [rank for rank in collective.group.ranks if rank in job.ranks and rank != reference.rank]
    skips = _find_skips(job, collective, reference, others)
    if not skips:
        return None
    skipped = min((skip.operation for skip in skips.values()), key=lambda operation: operation.issued_ns)
    culprits = tuple(sorted(rank for rank, skip in skips.items() if skip.operation.label == skipped.label))
    # Where more than half went on alike, the reference made a call too many: no skip.
    if len(culprits) > (len(others) + 1) // 2:
        return None
    finding = skip_finding(job, skipped, culprits, grade=0.95 if 2 * len(culprits) <= len(others) else 0.8)
    fewer = [describe_fewer_iterations(job.ranks[rank], skipped) for rank in culprits]
    fewer = fewer if all(fewer) else []
    finding = replace(finding, evidence=(*fewer, *finding.evidence))
    if all(_may_have_swapped(job, reference, skipped, job.ranks[rank]) for rank in culprits):
        now = job.ranks[culprits[0]].first_blocking
        if now is not None and now.op != skipped.op and are_branches_in_loop(job, now.site, skipped.site):
            return None  # another order of the items of the loop
        finding = replace(
            finding,
            grade=0.7 if len(others) > 1 else 0.6,
            evidence=(*finding.evidence, OR_SWAPPED),
            advice=(*finding.advice, *_advise_one_order(job, skipped, job.ranks[culprits[0]].first_blocking)),
        )
    finding = find_other_iteration(job, finding, skipped) or finding
    expected = RankCall(reference, skipped)
    if all(cannot_have_looped_back(job, expected, job.ranks[rank]) for rank in culprits):
        return extra_iteration_finding(job, finding, expected, f"{BEFORE_CALL}{at_line(skipped.site)}"), True
    if fewer or all(skips[rank].fits_steps for rank in culprits):
        return finding, True
    if (extra := find_extra_iteration(job, finding, expected)) is not None:
        return extra, True
    return (finding, False) if skipped.step is not None else None  # without steps, too little speaks for it


def _find_skips(
    job: JobState, collective: OpenCollective, reference: RankState, others: Sequence[int]
) -> dict[int, Skip]:
    """Return what each of the other members skipped of the program of a reference, for those that skipped a call."""
    program = ReferenceProgram(operations=reference.operations)
    label = collective.waiting[reference.rank].label
    companions = _ranks_in_same_call(collective, reference.rank)
    num_usual = len(companions) + _count_completed(job, collective, label)
    skips = {
        rank: find_skipped_call(
            job,
            reference,
            program,
            job.ranks[rank],
            is_usual=2 * num_usual > len(others) + 1,
            is_half=2 * len(companions) == len(others) + 1,
        )
        for rank in others
        if rank not in companions or collective.waiting[rank].label == label
    }
    return {
        rank: skip
        for rank, skip in skips.items()
        if skip is not None
        and not skip.operation.p2p  # a message of the reference is no call that the other could have made
        and rank in skip.operation.group.ranks  # a call of another subgroup shows only that the two differ
        and not _waits_for_rank_off_pattern(job, job.ranks[rank], collective)
    }


def _choose_references(collective: OpenCollective) -> list[int]:
    """Return a rank of the largest set of waiting ranks that wait at the same place, or of each that is as large."""
    places = {rank: place_of(o) for rank, o in collective.waiting.items()}
    counted = Counter(places.values())
    usual = [place for place, count in counted.items() if count == max(counted.values())]
    return [next(rank for rank, waits_at in places.items() if waits_at == place) for place in usual]


def _ranks_in_same_call(collective: OpenCollective, reference: int) -> set[int]:
    """Return the ranks that wait in the call of one of them, itself included.

    Ranks may have a line each for one call, as a barrier before some work on some and after it on others: where they
    wait in different operations, these tell.
    """
    waiting = collective.waiting
    call = waiting[reference]
    are_different = len({operation.op for operation in waiting.values()}) > 1
    return {rank for rank, o in waiting.items() if o.label == call.label or (are_different and o.op == call.op)}


def _count_completed(job: JobState, collective: OpenCollective, label: object) -> int:
    """Return how many members have made a call, and gone on, as some do from a broadcast."""
    made = (
        operation_at(job.ranks[rank], collective.group, collective.seq)
        for rank in collective.group.ranks
        if rank in job.ranks and rank not in collective.waiting
    )
    return sum(operation is not None and operation.done and operation.label == label for operation in made)


def _waits_for_rank_off_pattern(job: JobState, rank: RankState, awaited: OpenCollective) -> bool:
    """Say whether a rank waits, as in its rounds before, for one that left its own rounds for a collective.

    What others wait in besides tells nothing of the two: they need not be members of the group of that call.
    """
    now = rank.first_blocking
    if now is None or now.p2p or now.group == awaited.group or usual_operation(rank.operations, now) is not None:
        return False
    left = (
        usual_operation(job.ranks[member].operations, operation)
        for member, operation in awaited.waiting.items()
        if member in now.group.ranks
        and job.ranks[member].counts.get((now.group, False), 0) <= now.seq
        and not _is_new_in_round(job, RankCall(rank, now), RankCall(job.ranks[member], operation))
    )
    return any(usual is not None and usual.label == now.label for usual in left)


def _is_new_in_round(job: JobState, first: RankCall, later: RankCall) -> bool:
    """Say whether a rank is in a call that it never made before, and that the source has later in the loop."""
    rank, call = later
    is_new = all(o.label != call.label or o == call for o in rank.operations)
    return is_new and is_later_in_round(job, first, later)


def _may_have_swapped(job: JobState, reference: RankState, skipped: Operation, rank: RankState) -> bool:
    """Say whether a rank that waits in the call after the skipped one may have made the two in the other order.

    It issued nothing after what precedes both but the call that it waits in. Where the source can be read, and has
    the two at lines that are no branches of one `if`, the program reaches these in one order alone: another order has
    lines of its own.
    """
    now = rank.first_blocking
    newest = rank.operations[-2:]
    at = next((i for i in range(len(reference.operations) - 1, -1, -1) if reference.operations[i] == skipped), -1)
    if now is None or not newest or newest[-1] != now or at < 0:
        return False
    before = reference.operations[at - 1].label if at else None
    if (newest[0].label if len(newest) > 1 else None) != before:
        return False
    if skipped.site is None or now.site is None:
        return True
    ours, theirs = part_sites(job, skipped.site, now.site)
    here, there = map(job.place_in_source, (ours, theirs))
    if here is None or there is None:
        return True
    if not ours.shares_function(theirs):
        return False
    # Of a function that is called for each, as a hook is, one call makes the one or the other branch of an `if`.
    return ours.line == theirs.line or here.is_other_branch(there)


def _advise_one_order(job: JobState, skipped: Operation, now: Operation | None) -> tuple[str, ...]:
    """Return the advice where a loop makes both calls, at one line or in branches of one `if`."""
    here, there = (job.place_in_source(o.site) if o is not None else None for o in (skipped, now))
    is_one_line = now is not None and now.site == skipped.site
    is_one_if = here is not None and there is not None and here.is_other_branch(there)
    return (ONE_ORDER,) if is_one_line or is_one_if else ()


RULES: Declared = (Rule(kinds=("rank-skipped-collective",), stages=(Stage.DIVERGENCE,), find=find_skip),)
