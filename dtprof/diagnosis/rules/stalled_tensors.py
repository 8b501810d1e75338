"""Horovod's stall inspector names the tensors that some ranks have not submitted, in a log."""

import re

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.log_findings.log_rule import log_finding, log_rule
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.log_facts import TENSOR
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, operation

NAME = re.compile(rf"{TENSOR}[^\s,\]]{{0,200}}")
WHAT_IS_SUBMITTED = "Compare what these ranks submit: look for a branch on the rank or the data, or a shorter input."


def find_stalled_tensors(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks that the others wait for, by the newest report."""
    notes = job.notes("stalled-tensor")
    if not notes or job.own_traces:
        return None
    missing = {rank: tuple(NAME.findall(note.text)) for note in notes for rank in note.ranks}
    culprits = tuple(sorted(missing))
    name = missing[culprits[0]][0]
    facts = tuple(f"rank {rank} has not submitted {', '.join(missing[rank][:4])}" for rank in culprits[:4])
    if len(set(missing.values())) == 1:
        return log_finding(
            job,
            "rank-skipped-collective",
            f"{capitalised(culprits)} did not come to {name}, as Horovod reports.",
            culprits=culprits,
            waiting=(),
            op=operation(name),
            grade=0.6,
            evidence=facts,
            advice=(WHAT_IS_SUBMITTED,),
            leaves_open=("whether these ranks will come yet: Horovod warns, and waits on",),
        )
    return log_finding(
        job,
        "collective-order-mismatch",
        f"{capitalised(culprits)} each wait for operations that another of them has not submitted, as Horovod reports.",
        culprits=culprits,
        waiting=(),
        op=operation(name),
        grade=0.45,
        evidence=facts,
        advice=(WHAT_IS_SUBMITTED,),
    )


RULES: Declared = (log_rule(find_stalled_tensors, ("rank-skipped-collective", "collective-order-mismatch")),)
