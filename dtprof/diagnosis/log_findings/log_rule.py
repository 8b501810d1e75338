"""Rules that read facts only logs have, and the findings they form from the lines at which ranks failed."""

from collections.abc import Callable, Collection, Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.rule import Rule, Stage
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob
from dtprof.records.tables import Group

Suspicion = Finding | str | None
"""The result of a rule on a log: a finding, or the reason why there is none."""


def log_finding(
    job: LoggedJob,
    kind: str,
    summary: str,
    *,
    waiting: Collection[int],
    grade: float,
    advice: tuple[str, ...],
    culprits: Collection[int] = (),
    op: str | None = None,
    group: Group | None = None,
    seq: int | None = None,
    evidence: tuple[str, ...] = (),
    leaves_open: tuple[str, ...] = (),
) -> Finding:
    """Return the finding with the lines at which its ranks failed, where the log has them.

    Parameters:
        waiting: the ranks that failed because of the others.
        culprits: the ranks at fault; none where the log does not tell.
        op: the operation they failed in; None where it is not one, or not known.
    """
    return Finding(
        kind=kind,
        summary=summary,
        culprit_ranks=tuple(sorted(culprits)),
        waiting_ranks=tuple(sorted(waiting)),
        grade=grade,
        group=group,
        op=op,
        seq=seq,
        call_sites=job.sites(set(waiting)),
        culprit_call_sites=job.sites(set(culprits)),
        evidence=evidence,
        advice=advice,
        leaves_open=leaves_open,
    )


def log_rule(find: Callable[[LoggedJob], Suspicion], kinds: tuple[str, ...], stage: Stage = Stage.SUSPICION) -> Rule:
    """Return the rule that asks `find`, where the job has a log."""

    def ask(case: Case) -> Iterator[Suspicion]:
        if case.job.log is not None:
            yield find(case.job.log)

    def find_in_log(case: Case) -> Iterator[Finding]:
        return (found for found in ask(case) if isinstance(found, Finding))

    def leave_open(case: Case) -> Iterator[str]:
        return (found for found in ask(case) if isinstance(found, str))

    return Rule(kinds=kinds, stages=(stage,), find=find_in_log, leave_open=leave_open)
