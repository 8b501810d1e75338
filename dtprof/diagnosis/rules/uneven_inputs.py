"""A rank ran out of batches while the others go on."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, places_of, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall
from dtprof.diagnosis.divergence.skip_branches import find_loop_left
from dtprof.diagnosis.findings import Evidence, Finding, capitalised, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rank_failures import find_first_failed
from dtprof.diagnosis.rule import Declared, Refinement, Stage
from dtprof.job.issued_operations import Operation
from dtprof.records.sites import Site

CONSEQUENCES = (
    "rank-exited",
    "rank-skipped-collective",
    "collective-order-mismatch",
    "size-mismatch",
    "dtype-mismatch",
    "root-mismatch",
    "step-mismatch",
    "group-order-inversion",
    "wrong-group",
    "p2p-unmatched",
    "backend-stall",
    "rank-stuck",
)
"""Consequence of a rank without batches for the others, by the operation these wait in."""
JOIN_RAISED = "exhausted all inputs."
"""How torch.distributed.algorithms.Join ends what it raises on a rank that has no inputs left."""


def explain_by_inputs(case: Case, cause: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that ran out of batches where that explains another cause."""
    job, counted = case.job, case.job.is_complete
    none_left = all(rank in job.ranks and job.ranks[rank].newest_is_exhaustion for rank in cause.culprit_ranks)
    if cause.kind != "rank-skipped-collective" and not none_left and find_first_failed(job) is not None:
        return  # a backend aborted in what did not fit, and those who did not fit had batches left
    least = min(rank.exhausted for rank in job.ranks.values())
    out = {
        rank.rank: rank
        for rank in job.ranks.values()
        if rank.newest_is_exhaustion and (rank.exhausted > least or not counted)
    }
    out = out or _ended_behind_their_devices(case)
    went_on = {} if out else _went_on_with_fewer(case, cause)
    out = out or went_on
    going_on = [rank for rank in job.ranks.values() if rank.rank not in out]
    # Where most have none left, the epoch is over: then the others took too many.
    if not out or 2 * len(out) > len(job.ranks) or any(rank.batches < 1 for rank in going_on):
        return
    most = max(rank.batches for rank in going_on)
    culprits = tuple(sorted(rank for rank, state in out.items() if state.batches < most or went_on or not counted))
    if not culprits:
        return
    blocked = tuple(sorted(set(victims(job, set(culprits))) | set(cause.waiting_ranks) - set(culprits)))
    operations = first_blocking_of(job, blocked)
    places = places_of(job.ranks[rank] for rank in culprits)
    places |= _loops_left(job, culprits, going_on[0], cause)
    first = out[culprits[0]]
    after = f" after {first.batches}" if counted and not went_on else ""
    yield replace(
        cause,
        kind="uneven-inputs",
        summary=f"{capitalised(culprits)} ran out of batches{after}, and left the loop; "
        f"{wait_words(blocked)} for {'it' if len(culprits) == 1 else 'them'} in the next step.",
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        grade=0.9 if counted else 0.75,
        evidence_class=Evidence.DIRECT if counted else None,
        call_sites=call_sites(operations) or cause.call_sites,
        culprit_call_sites=places or cause.culprit_call_sites,
        evidence=(_show_batches(first, most, counted=counted), *cause.evidence[:2]),
        advice=(
            "Give every rank as many batches (DistributedSampler, drop_last), or train inside "
            "torch.distributed.algorithms.Join.",
        ),
    )


def explain_join(case: Case, crash: Finding) -> Iterator[Finding]:
    """Give the finding for ranks whose Join raises as they have no inputs left (throw_on_early_termination)."""
    raised = [rank.own_exception for r in crash.culprit_ranks if (rank := case.job.ranks.get(r)) is not None]
    if not raised or not all(error is not None and JOIN_RAISED in error.message for error in raised):
        return
    first, batches = case.job.ranks[crash.culprit_ranks[0]], [rank.batches for rank in case.job.ranks.values()]
    counted = (_show_batches(first, max(batches), counted=True),) if first.batches < max(batches) else ()
    yield replace(
        crash,
        kind="uneven-inputs",
        summary=f"{capitalised(crash.culprit_ranks)} ran out of inputs before the others, and Join raised on every "
        "rank, as throw_on_early_termination asks.",
        evidence=(*counted, *crash.evidence[:1]),
        advice=(
            "Give every rank as many batches (DistributedSampler, drop_last); without throw_on_early_termination, "
            "Join lets the others train on.",
        ),
    )


def _show_batches(first: RankState, most: int, *, counted: bool) -> str:
    of_rank = f"the data loader of rank {first.rank} was exhausted"
    if not counted:
        return f"{of_rank} when last asked; events were dropped, so the number of batches of each rank is unknown"
    if first.batches >= most:
        return f"{of_rank} before what it did in place of that call; it has asked another one since"
    return f"data loaders gave {first.batches} batches to rank {first.rank}, and up to {most} to the others so far"


def _ended_behind_their_devices(case: Case) -> dict[int, RankState]:
    """Return ranks with fewer batches and operations than others where hosts issued all they had to.

    The hosts of devices run ahead: those of the other ranks are through with their data as well when the devices hang.
    """
    ranks = case.job.ranks.values()
    on_device = any(operation.on_device for rank in ranks for operation in rank.open_operations)
    if not on_device or not case.job.is_complete or not all(rank.newest_is_exhaustion for rank in ranks):
        return {}
    issued = {rank.rank: sum(rank.counts.values()) for rank in ranks}
    most = max(rank.batches for rank in ranks)
    behind = {rank.rank: rank for rank in ranks if rank.batches < most}
    full = [issued[rank.rank] for rank in ranks if rank.rank not in behind]
    return behind if all(issued[rank] < min(full) for rank in behind) else {}


def _went_on_with_fewer(case: Case, skip: Finding) -> dict[int, RankState]:
    """Return the ranks that left a loop for want of batches before others, and took batches of another loader since.

    Their loader was exhausted between the call before the skipped one and what they did instead, those of the others
    were not. Or the backend let the skip pass, all have come out of the loop since, and these took fewer batches.
    """
    job, ranks = case.job, case.job.ranks
    out = {rank: ranks[rank] for rank in skip.culprit_ranks if rank in ranks}
    others = [state for rank, state in ranks.items() if rank not in out]
    if skip.kind != "rank-skipped-collective" or not job.is_complete:
        return {}
    exhausted, batches = {rank.exhausted for rank in ranks.values()}, {rank.batches for rank in others}
    are_alike = len(exhausted) == 1 and min(exhausted) > 0 and len(batches) == 1
    has_fewer = are_alike and all(rank.batches < min(batches) for rank in out.values())
    has_none_left = all(_found_exhausted(rank, skip) for rank in out.values())
    if not has_fewer and (not has_none_left or any(_found_exhausted(rank, skip) for rank in others)):
        return {}
    skipped = next(filter(None, (_call_at(rank, skip) for rank in others)), None)
    return out if all(_is_outside_loop_of(job, skipped, _call_at(rank, skip)) for rank in out.values()) else {}


def _found_exhausted(rank: RankState, skip: Finding) -> bool:
    """Say whether a rank found a loader exhausted between its call before the position of a skip and that at it."""
    at, before = _call_at(rank, skip), _call_at(rank, skip, back=1)
    if at is None or before is None:
        return False
    return any(before.issued_ns < exhausted_ns < at.issued_ns for exhausted_ns in rank.exhaustions)


def _loops_left(job: JobState, culprits: tuple[int, ...], other: RankState, cause: Finding) -> dict[int, Site]:
    """Return the lines of the loops that ranks left: around what they skipped, else around where another waits."""
    sites = dict[int, Site]()
    for culprit in (job.ranks[rank] for rank in culprits):
        calls = ((_call_at(other, cause), _call_at(culprit, cause)), (other.first_blocking, culprit.first_blocking))
        loops = (
            find_loop_left(job, RankCall(other, a), RankCall(culprit, b))
            for a, b in calls
            if a is not None and b is not None
        )
        if (loop := next(filter(None, loops), None)) is not None:
            sites[culprit.rank] = loop
    return sites


def _call_at(rank: RankState, skip: Finding, *, back: int = 0) -> Operation | None:
    """Return what a rank issued at the position of a skipped call, or so many before it."""
    position = ((skip.seq or 0) - back, skip.group.name if skip.group is not None else "")
    return next((o for o in reversed(rank.operations) if not o.p2p and (o.seq, o.group.name) == position), None)


def _is_outside_loop_of(job: JobState, skipped: Operation | None, instead: Operation | None) -> bool:
    """Say whether the source has a loop around a skipped call that what a rank did instead is not in."""
    if skipped is None or instead is None or skipped.site is None or instead.site is None:
        return False
    place = job.place_in_source(skipped.site)
    is_elsewhere = not instead.site.shares_function(skipped.site)
    loops = place.loops[:1] if place is not None else ()
    return any(is_elsewhere or not first <= instead.site.line <= last for first, last in loops)


RULES: Declared = (
    Refinement(kinds=("uneven-inputs",), causes=("rank-crashed",), stages=(Stage.DEATH,), refine=explain_join),
    Refinement(
        kinds=("uneven-inputs",),
        causes=CONSEQUENCES,
        stages=(Stage.DIVERGENCE, Stage.WAIT, Stage.STALL, Stage.LATE),
        refine=explain_by_inputs,
    ),
)
