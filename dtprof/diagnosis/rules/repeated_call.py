"""A rank is behind or ahead of the others: it made calls of its round once more, or is in another round of the loop.

The others then wait in a collective that this rank seems to have left out.
"""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, deviating_sites
from dtprof.diagnosis.divergence.skip_branches import (
    OTHER_ITERATION_ADVICE,
    find_branches_past,
    find_counter_branch,
    is_ahead_by_counter,
    without_single_iterations,
)
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import operation_at
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import SIZES_AGREE
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import Repetition, find_repetition, usual_operation
from dtprof.lint.program_order import BranchKind

MAX_ASKED = 64
"""Ranks at other places than most whose own pattern is looked at."""


def find_repeated(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that made calls of a round again, which leaves their own pattern.

    Others wait where that rank went on in its earlier rounds, or were there at the position of the repeated call, and
    keep to their patterns. Where most made the calls again, the few left them out.
    """
    job = case.job
    waiting = _waiting_in_collectives(job)
    for repeated in _find_repetitions(job, waiting):
        usual = next(iter(repeated.values())).usual
        met = {rank: _met_by(job.ranks[rank], o, next(iter(repeated.values()))) for rank, o in waiting.items()}
        others = {rank: waiting[rank] for rank, o in met.items() if rank not in repeated and o.label == usual.label}
        kept = [usual_operation(job.ranks[rank].operations, o) is None for rank, o in [*others.items()][:2]]
        if (
            kept
            and all(kept)
            and len(repeated) <= len(others)
            and not _may_have_skipped(job, repeated, met, min(others))
        ):
            yield _finding(job, repeated, others)
            return


def find_ahead(case: Case) -> Iterator[Finding]:
    """Give the finding for the few ranks that a condition on a counter leads to another call than the others."""
    job = case.job
    waiting = _waiting_in_collectives(job)
    counted = Counter(o.label for o in waiting.values())
    if len(counted) != 2:
        return
    (usual, most), (other, few) = counted.most_common(2)
    ahead = {rank: o for rank, o in waiting.items() if o.label == other}
    others = {rank: o for rank, o in waiting.items() if o.label == usual}
    reference = RankCall(job.ranks[min(others)], others[min(others)])
    odd = [RankCall(job.ranks[rank], o) for rank, o in ahead.items()]
    is_ahead = all(is_ahead_by_counter(job, mine, reference) for mine in odd)
    past = {mine[0].rank: site for mine in odd if not is_ahead and (site := find_counter_branch(job, mine, reference))}
    if few < most and (is_ahead or len(past) == few):
        culprits, awaited, now = tuple(sorted(ahead)), others[min(others)], ahead[min(ahead)]
        yield Finding(
            kind="step-mismatch",
            summary=f"{capitalised(culprits)} {'is' if len(culprits) == 1 else 'are'} in another iteration than the "
            f"others: a condition on a loop counter {'leads' if is_ahead else 'skips their call and leads'} to "
            f"{operation_words(job, now, beside=awaited)}; "
            f"{wait_words(tuple(sorted(others)))} in {operation_words(job, awaited, beside=now)}.",
            culprit_ranks=culprits,
            waiting_ranks=tuple(sorted(others)),
            grade=0.8,
            group=job.group(now.group),
            op=now.op,
            seq=now.seq,
            step=now.step,
            call_sites=call_sites(others),
            culprit_call_sites=past or call_sites(ahead),
            evidence=("no other branch or exit skips the call in which the others wait",),
            advice=(OTHER_ITERATION_ADVICE,),
        )


def _met_by(rank: RankState, now: Operation, again: Repetition) -> Operation:
    """Return what another rank made where a call was repeated, if that is what usually follows; else where it waits."""
    made = operation_at(rank, again.first.group, again.first.seq)
    return made if made is not None and made.label == again.usual.label else now


def _waiting_in_collectives(job: JobState) -> dict[int, Operation]:
    return {rank: o for rank, o in first_blocking_of(job, job.ranks).items() if not o.p2p}


def _find_repetitions(job: JobState, waiting: dict[int, Operation]) -> list[dict[int, Repetition]]:
    """Return the ranks that made calls again, those that made the same together, the most ranks first.

    Asked are ranks at another place than most; so are those at one line whose sizes differ, of which one may be behind.
    """
    places = {rank: (o.group, o.seq, o.label, o.op in SIZES_AGREE and o.numel) for rank, o in waiting.items()}
    counted = Counter(places.values())
    most = max(counted.values(), default=0)
    is_one = sum(count == most for count in counted.values()) == 1
    usual = next((place for place, count in counted.items() if count == most and is_one), None)
    asked = [rank for rank, place in places.items() if place != usual][:MAX_ASKED]
    found: dict[object, dict[int, Repetition]] = {}
    for rank in asked:
        if (again := find_repetition(job.ranks[rank].operations)) is not None:
            found.setdefault((again.first.label, again.first.step, again.count), {})[rank] = again
    return sorted(found.values(), key=len, reverse=True)


def _may_have_skipped(
    job: JobState, repeated: dict[int, Repetition], met: dict[int, Operation], reference: int
) -> bool:
    """Say whether a branch of the source skips the call that others made, or wait in: then a skip is as likely.

    As a branch around the backward pass and the optimizer's step, or a `continue` before them.
    """
    by, made = job.ranks[min(repeated)], RankCall(job.ranks[reference], met[reference])
    branches = without_single_iterations(
        job, made, by, find_branches_past(job, made, by, after=repeated[by.rank].first)
    )
    return any(branch.kind != BranchKind.RETRY and not branch.on_counter for branch in branches)


def _finding(job: JobState, repeated: dict[int, Repetition], others: dict[int, Operation]) -> Finding:
    culprits = tuple(sorted(repeated))
    first, count = repeated[culprits[0]].first, repeated[culprits[0]].count
    awaited, usual = others[min(others)], repeated[culprits[0]].usual
    what = f"{first.op}{at_line(first.site)}"
    again = f"{what} again" if count == 1 else f"{plural(count, 'call')} again, from {what} on,"
    return Finding(
        kind="step-mismatch",
        summary=f"{capitalised(culprits)} made {again} in step {first.step}, at #{first.seq} of "
        f"{group_words(job.group(first.group))}; {list_ranks(tuple(sorted(others)))} had gone on to "
        f"{operation_words(job, awaited, beside=first)}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(others)),
        grade=_sure(is_read=job.place_in_source(usual.site) is not None, is_few=len(culprits) < len(others)),
        group=job.group(first.group),
        op=first.op,
        seq=first.seq,
        step=first.step,
        call_sites=call_sites(others),
        culprit_call_sites=deviating_sites(job, {rank: one.first for rank, one in repeated.items()}, min(others)),
        evidence=(
            f"in each earlier round {list_ranks(culprits)} went on from there to {usual.op}{at_line(usual.site)}, "
            "as the others did now",
            "no optimizer step lies between the calls and those made again",
        ),
        advice=("Look for a retry, an extra forward pass or an extra loop iteration on that rank.",),
    )


def _sure(*, is_read: bool, is_few: bool) -> float:
    """Grade the evidence: without the source, two calls in the other order may have left the same records."""
    return (0.9 if is_few else 0.8) if is_read else 0.7


RULES: Declared = (
    Rule(kinds=("step-mismatch",), stages=(Stage.DIVERGENCE,), find=find_repeated),
    Rule(kinds=("step-mismatch",), stages=(Stage.DIVERGENCE,), find=find_ahead),
)
