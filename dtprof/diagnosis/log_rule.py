"""Rules that read facts only logs have."""

from collections.abc import Callable, Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.logged_job import LoggedJob
from dtprof.diagnosis.rule import Rule, Stage

Suspicion = Finding | str | None
"""The result of a rule on a log: a finding, or the reason why there is none."""


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
