"""A rank skipped the collectives of a group because the thread that made them ended by an exception."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_findings import skip_finding
from dtprof.diagnosis.findings import Finding, at_line, explain
from dtprof.diagnosis.rule import Declared, Refinement, Stage


def explain_dead_thread(case: Case, cycle: Finding) -> Iterator[Finding]:
    """Give the finding for a rank whose thread ended by an exception, and had made all of its calls of a group."""
    job = case.job
    for collective in case.open_collectives:
        for rank in (job.ranks[absent] for absent in collective.absent if absent in job.ranks):
            now = rank.first_blocking
            threads = {o.thread for o in rank.operations if o.group == collective.group and not o.p2p}
            if not rank.thread_exceptions or now is None or not threads or now.thread in threads:
                continue
            error, awaited = rank.thread_exceptions[-1], next(iter(collective.waiting.values()))
            finding = skip_finding(job, awaited, (rank.rank,), grade=0.9)
            words = f"its thread {error.thread or 'of no name'}, which had made its calls of this group, ended by"
            yield explain(
                replace(
                    finding,
                    culprit_call_sites={rank.rank: error.frame} if error.frame else finding.culprit_call_sites,
                    evidence=(f"{words} {error.type}{at_line(error.frame)}", *finding.evidence[:1]),
                ),
                cycle,
            )
            return


RULES: Declared = (
    Refinement(
        kinds=("rank-skipped-collective",),
        causes=("group-order-inversion",),
        stages=(Stage.WAIT,),
        refine=explain_dead_thread,
    ),
)
