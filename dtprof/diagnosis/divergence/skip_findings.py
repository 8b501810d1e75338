"""The finding for ranks that skipped a collective, and the branches of the source that may have skipped it."""

from collections.abc import Mapping

from dtprof.diagnosis.blocked_ranks import call_sites, operation_words, places_of
from dtprof.diagnosis.divergence.call_divergence import MAX_STACKS, RankCall, frames_of
from dtprof.diagnosis.divergence.skip_branches import (
    Branch,
    find_branches_past,
    find_handler,
    operation_before,
)
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, skip_evidence, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import operation_at
from dtprof.formatting import plural
from dtprof.job.issued_operations import Operation
from dtprof.records.sites import Site

MAX_BRANCHES = 2
"""Branches by which a rank may have skipped a call: of more, none is worth naming."""
OR_SWAPPED = "the records also fit these two calls in swapped order: the rank issued nothing after the one it waits in"
ONE_ORDER = (
    "If a loop makes both calls, go through it in one order on all ranks: sort the keys of a dictionary or a set."
)


def skip_finding(job: JobState, skipped: Operation, culprits: tuple[int, ...], *, grade: float) -> Finding:
    """Return the finding for ranks that skipped a collective, with where they are and who waits for them."""
    others = [rank for rank in job.ranks.values() if rank.rank not in culprits]
    at_position = {
        rank.rank: operation
        for rank in others
        if (operation := operation_at(rank, skipped.group, skipped.seq)) is not None
    }
    waiting = {rank: operation for rank, operation in at_position.items() if operation.open}
    waits_in = "it"
    if not waiting:  # it met another operation, and both completed: the group hangs later
        newer = {
            rank.rank: [o for o in rank.open_operations if o.group == skipped.group and not o.p2p] for rank in others
        }
        waiting = {rank: operations[0] for rank, operations in newer.items() if operations}
        waits_in = "a later one"
    waiting_ranks = tuple(sorted(waiting))
    places = places_of(job.ranks[rank] for rank in culprits)
    branches = branches_past_by_rank(job, culprits, waiting, skipped)
    evidence = (
        *(_progress_words(job, job.ranks[rank], places.get(rank)) for rank in culprits),
        f"the ranks agree on every operation before {skipped.op} #{skipped.seq}{at_line(skipped.site)}",
        *(skip_evidence(rank, b.site, branch=b.words) for rank, of_rank in branches.items() for b in of_rank),
    )
    for rank, of_rank in branches.items():
        named = without_counted(of_rank)
        places |= {rank: named[0].site} if len(named) == 1 else {}
    first = job.ranks[culprits[0]].first_blocking
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits)} never entered {operation_words(job, skipped, beside=first)}; "
        f"{wait_words(waiting_ranks)} in {waits_in}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting_ranks,
        grade=grade,
        group=job.group(skipped.group),
        op=skipped.op,
        seq=skipped.seq,
        step=skipped.step,
        call_sites=call_sites(waiting or at_position),
        culprit_call_sites=places,
        evidence=evidence,
        advice=(
            f"Make the call{at_line(skipped.site)} on every member of the group: look for a branch on the rank, "
            "the data or an early continue around it.",
        ),
    )


def _progress_words(job: JobState, rank: RankState, place: Site | None) -> str:
    """Say how many steps a rank has completed, and what it does now."""
    now = rank.first_blocking
    doing = f"waits in {now.op} #{now.seq} of {group_words(job.group(now.group))}" if now else "runs on"
    ended = f"has completed {plural(rank.steps, 'step')} and " if rank.steps is not None else ""
    return f"rank {rank.rank} {ended}{doing}{at_line(place)}"


def branches_past_by_rank(
    job: JobState, culprits: tuple[int, ...], waiting: Mapping[int, Operation], skipped: Operation
) -> dict[int, list[Branch]]:
    """Return, by rank, the branches by which the culprits may have skipped a call: nothing where many may.

    The others wait in what was skipped, or have gone on to a later call.
    """
    stacks = {rank: frames_of(job.ranks[rank], o) for rank, o in [*waiting.items()][:MAX_STACKS]}
    if not stacks:
        return {}
    named = {}
    for rank in culprits[:MAX_STACKS]:
        by = job.ranks[rank]
        sites = {operation.site for operation in by.operations}
        # Where each rank has a line of its own for the call, one that waits at a line of the culprit tells most.
        reference = job.ranks[max(stacks, key=lambda r: (waiting[r].site in sites, len(stacks[r])))]
        first = operation_at(reference, skipped.group, skipped.seq) or waiting[reference.rank]
        after = operation_before(reference, first)
        branches = find_branches_past(job, RankCall(reference, waiting[reference.rank]), by, after=after)
        if len(branches) > MAX_BRANCHES:
            branches = without_counted(branches)
        if 0 < len(branches) <= MAX_BRANCHES and find_handler(job, by) is None:
            named[rank] = branches
    return named


def without_counted(branches: list[Branch]) -> list[Branch]:
    """Return the branches but those on a counter of the loop, which is alike on a rank that keeps pace.

    Where there are no others, it does not keep pace.
    """
    return [branch for branch in branches if not branch.on_counter] or branches
