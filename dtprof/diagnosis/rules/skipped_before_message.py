"""A rank skipped a collective of an earlier step than the message that it waits for."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import first_blocking_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_findings import skip_finding
from dtprof.diagnosis.divergence.skipped_calls import skipped_in_step
from dtprof.diagnosis.findings import Finding, explain
from dtprof.diagnosis.rule import Declared, Refinement, Stage


def explain_message(case: Case, unmatched: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that wait for a message of a later step than the collective they are waited for in."""
    job = case.job
    for collective in case.open_collectives:
        awaited = next(iter(collective.waiting.values()))
        ahead = tuple(
            rank
            for rank, now in first_blocking_of(job, collective.absent).items()
            if now.p2p and skipped_in_step(job.ranks[rank], awaited, reached=now.step)
        )
        if ahead:
            yield explain(skip_finding(job, awaited, ahead, grade=0.85), unmatched)
            return


RULES: Declared = (
    Refinement(
        kinds=("rank-skipped-collective",), causes=("p2p-unmatched",), stages=(Stage.WAIT,), refine=explain_message
    ),
)
