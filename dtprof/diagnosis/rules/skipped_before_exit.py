"""A rank ended without a collective of an earlier step or round, and its peers wait for it in that collective."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_branches import find_branches_past_iteration
from dtprof.diagnosis.divergence.skip_findings import MAX_BRANCHES, skip_finding
from dtprof.diagnosis.divergence.skipped_calls import skipped_in_step
from dtprof.diagnosis.findings import Finding, at_line, capitalised, explain, group_words, skip_evidence, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Refinement, Stage
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import find_departures

KINDS = ("rank-skipped-collective",)


def explain_exit_by_skip(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that completed a step, and their program, without a call that each step has.

    Their peers wait for them in that call, in a step that they have completed since.
    """
    job = case.job
    waiting = first_blocking_of(job, (rank for rank in left.waiting_ranks if rank in job.ranks))
    awaited = next((o for o in waiting.values() if (o.op, o.seq) == (left.op, left.seq)), None)
    culprits = [job.ranks[rank] for rank in left.culprit_ranks if rank in job.ranks]
    if awaited is None:
        return
    if culprits and all(r.finished and skipped_in_step(r, awaited, reached=r.steps_ended) for r in culprits):
        yield explain(skip_finding(job, awaited, left.culprit_ranks, grade=0.8), left)
    elif not awaited.p2p:
        finding = _explain_by_rounds(job, left, waiting, awaited) or _explain_by_pattern(job, left, culprits, awaited)
        if finding is not None:
            yield finding


def explain_caught_exit(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that ended without a call of some round, where the others caught what it raised."""
    if left.seq is None:
        return
    open_operations = (
        (rank, operation)
        for rank in left.call_sites
        if rank in case.job.ranks
        for operation in case.job.ranks[rank].open_operations
        if (operation.op, operation.seq) == (left.op, left.seq)
    )
    failed: dict[int, Operation] = {}
    for rank, operation in open_operations:
        failed.setdefault(rank, operation)
    if failed and (finding := _explain_by_rounds(case.job, left, failed, failed[min(failed)])) is not None:
        yield finding


def _explain_by_rounds(
    job: JobState, left: Finding, waiting: Mapping[int, Operation], awaited: Operation
) -> Finding | None:
    """Return the finding for ranks that ended after all rounds, where no line may have led them out of a loop."""
    gone = [job.ranks[rank] for rank in left.culprit_ranks if rank in job.ranks and job.ranks[rank].left_at is None]
    branches = {rank.rank: find_branches_past_iteration(job, rank, waiting) for rank in gone}
    if not gone or len(branches) < len(left.culprit_ranks) or not all(branches.values()):
        return None
    last = f"#{awaited.seq} of {group_words(job.group(awaited.group))}"
    if left.waiting_ranks:
        words = f"{wait_words(left.waiting_ranks)} in the last one, {last}"
    else:
        words = f"{list_ranks(tuple(waiting))} issued the last one, {last}, which failed, and went on"
    finding = replace(
        skip_finding(job, awaited, left.culprit_ranks, grade=0.8),
        summary=f"{capitalised(left.culprit_ranks)} skipped one iteration of {awaited.op}{at_line(awaited.site)} "
        f"and exited; {words}.",
        waiting_ranks=left.waiting_ranks,
        call_sites=left.call_sites,
        culprit_call_sites=left.culprit_call_sites
        | {rank: lines[0] for rank, lines in branches.items() if len(lines) == 1},
        evidence=(
            "the source counts the rounds of the loop, or data loaders gave as many batches, and no line leads "
            "out of it",
            *(skip_evidence(rank, site) for rank, lines in branches.items() for site in lines[:MAX_BRANCHES]),
        ),
    )
    return explain(finding, left)


def _explain_by_pattern(job: JobState, left: Finding, culprits: list[RankState], awaited: Operation) -> Finding | None:
    """Return the finding for a rank that left a call out of one round, as its pattern of the other rounds shows."""
    if len(culprits) != 1 or (departure := _find_departure(job, culprits[0], awaited)) is None:
        return None
    skipped, instead = departure
    (rank,) = left.culprit_ranks
    finding = skip_finding(job, skipped, left.culprit_ranks, grade=0.8)
    finding = replace(
        finding,
        summary=f"Rank {rank} skipped {skipped.op} #{skipped.seq} of {group_words(finding.group)}"
        f"{at_line(skipped.site)}, which it issues in every round: later ones took the place of those before, "
        f"and {wait_words(left.waiting_ranks)} for one more.",
        waiting_ranks=left.waiting_ranks,
        call_sites=left.call_sites,
        culprit_call_sites=call_sites({rank: instead}),
        evidence=(f"rank {rank} made {operation_words(job, instead)} where {skipped.op} came in its rounds before",),
    )
    return explain(finding, left)


def _find_departure(job: JobState, gone: RankState, awaited: Operation) -> tuple[Operation, Operation] | None:
    """Return the one collective that a rank which ended left out of its rounds, and what it did instead.

    It made fewer calls in the group than others, and what it did instead oftener by then than who shares that line.
    """
    operations = gone.operations
    departures = [
        (at, usual)
        for at, usual in find_departures(operations)
        if (usual.group, usual.op, usual.p2p) == (awaited.group, awaited.op, False)
    ]
    if len(departures) != 1 or gone.counts.get((awaited.group, False), 0) > awaited.seq:
        return None
    ((at, usual),) = departures
    instead = operations[at]
    seq = next((o.seq for o in operations[at:] if o.group == awaited.group and not o.p2p), None)
    if seq is None or (instead.group == awaited.group and not instead.p2p):
        return None
    count = sum(o.site == instead.site for o in operations[: at + 1])
    position = (awaited.group, seq, False)
    for rank in job.ranks.values():
        call = next((i for i, o in enumerate(rank.operations) if (o.group, o.seq, o.p2p) == position), None)
        is_comparable = rank.rank != gone.rank and call is not None
        if is_comparable and sum(o.site == instead.site for o in rank.operations[:call]) >= count:
            return None
    return replace(usual, seq=seq), instead


RULES: Declared = (
    Refinement(kinds=KINDS, causes=("rank-exited",), stages=(Stage.WAIT, Stage.LATE), refine=explain_exit_by_skip),
    Refinement(kinds=KINDS, causes=("rank-exited",), stages=(Stage.RISK,), refine=explain_caught_exit),
)
