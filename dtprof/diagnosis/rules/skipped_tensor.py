"""A rank skipped one tensor of a loop over tensors: its call met one of another size."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_findings import ONE_ORDER, OR_SWAPPED, skip_finding
from dtprof.diagnosis.findings import Finding, explain
from dtprof.diagnosis.open_collectives import operation_at
from dtprof.diagnosis.rule import Declared, Refinement, Stage


def explain_size(case: Case, mismatch: Finding) -> Iterator[Finding]:
    """Give the finding for a rank whose size is not that of the others, but that of their next call at this line.

    The root of an operation has a size of its own.
    """
    job = case.job
    if len(mismatch.culprit_ranks) != 1 or (odd := job.ranks.get(mismatch.culprit_ranks[0])) is None:
        return
    position = (mismatch.op, mismatch.seq, False)
    call = next((o for o in reversed(odd.operations) if (o.op, o.seq, o.p2p) == position), None)
    if call is None:
        return
    for rank in job.ranks.values():
        expected, following = (operation_at(rank, call.group, call.seq + ahead) for ahead in (0, 1))
        if rank.rank in (odd.rank, call.peer_rank) or expected is None or following is None:
            continue
        is_one_line = expected.label == following.label == call.label
        if is_one_line and following.numel == call.numel != expected.numel:
            finding = skip_finding(job, expected, (odd.rank,), grade=0.7)
            size = f"{call.numel:,} elements, as the next call at this line has on rank {rank.rank}"
            fact = f"rank {odd.rank} has {size}; the others have {expected.numel:,} here"
            evidence, advice = (fact, *finding.evidence[1:], OR_SWAPPED), (*finding.advice, ONE_ORDER)
            yield explain(replace(finding, evidence=evidence, advice=advice), mismatch)
            return


RULES: Declared = (
    Refinement(
        kinds=("rank-skipped-collective",),
        causes=("size-mismatch",),
        stages=(Stage.BROKEN_MESSAGE,),
        refine=explain_size,
    ),
)
