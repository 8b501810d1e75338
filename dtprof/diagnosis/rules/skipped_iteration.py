"""Ranks of a hung job that skipped the operations of an iteration together with its optimizer step."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.diagnosis.rules.step_mismatch import earliest, shifts_by_group


def find_skipped_iteration(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks of a hung job that skipped the operations of a round together with its step.

    Their step counts then agree with those of the others, but they ran one extra forward pass. That alone proves
    little: it counts only if such a rank has exited, or issued an operation that the others have not reached.
    """
    for finding in earliest(shifts_by_group(case.job, clock="forwards")):
        is_past = all(_is_past_the_others(case.job, case.job.ranks[rank], finding) for rank in finding.culprit_ranks)
        if is_past and finding.kind == "rank-skipped-collective":
            yield finding


def explain_exit_by_skipped_iteration(case: Case, left: Finding) -> list[Finding]:
    """Return the finding for a skipped round that explains why ranks exited early: they were a round ahead."""
    return [skip for skip in case.findings(find_skipped_iteration) if skip.culprit_ranks == left.culprit_ranks]


def _is_past_the_others(job: JobState, culprit: RankState, finding: Finding) -> bool:
    """Say whether a rank has exited, or waits in a call that the others have not issued."""
    now = culprit.first_blocking
    if culprit.finished or now is None:
        return culprit.finished
    others = (rank for rank in job.ranks.values() if rank.rank not in finding.culprit_ranks)
    return all(operation.label != now.label for other in others for operation in other.operations)


RULES: Declared = (
    Rule(kinds=("rank-skipped-collective",), stages=(Stage.DIVERGENCE,), find=find_skipped_iteration),
    Refinement(
        kinds=("rank-skipped-collective",),
        causes=("rank-exited",),
        stages=(Stage.LATE,),
        refine=explain_exit_by_skipped_iteration,
    ),
)
