"""Findings for ranks that did not come to a collective, as logs show it: by silence, a count, a table of failures.

Rules read the evidence; who waits, who is absent and what to do next is said here, in the same words for each of them.
"""

from collections.abc import Collection, Mapping

from dtprof.diagnosis.findings import Finding, capitalised, group_words, wait_words
from dtprof.diagnosis.log_findings.log_rule import log_finding
from dtprof.diagnosis.sources.logs.log_facts import Trace
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, operation
from dtprof.formatting import list_ranks
from dtprof.records.tables import Group

STACKS = "Take the stack of that rank next time while the job hangs (py-spy dump), or start it with dtprof run."
COLLECT = (
    "Give the logs of all ranks. Next time set TORCH_FR_BUFFER_SIZE=20000 (before torch 2.9 "
    "TORCH_NCCL_TRACE_BUFFER_SIZE), TORCH_NCCL_DUMP_ON_TIMEOUT=1 and diagnose the dumps, or start with dtprof run."
)
DID_LAST = "Look at what these ranks did last: saving, evaluation, a shorter input, an early return."
BRANCH = "Look for a branch, an early return or a shorter loop on these ranks."


def operations_of(fronts: Mapping[int, Trace]) -> set[str]:
    """Return the operations that ranks failed in, as far as their calls tell."""
    return {op for trace in fronts.values() if (op := operation(trace.call))}


def the_only(ops: set[str]) -> str | None:
    """Return the operation, where it is one."""
    return next(iter(ops)) if len(ops) == 1 else None


def words_of(ops: set[str]) -> str:
    """Return the operations in words."""
    return " or ".join(sorted(ops)) if ops else "an operation"


def unnamed_absence_finding(
    job: LoggedJob,
    *,
    waiting: Collection[int],
    place: str,
    reason: str,
    advice: tuple[str, ...],
    op: str | None,
    group: Group | None = None,
    seq: int | None = None,
    evidence: tuple[str, ...] = (),
) -> Finding:
    """Return the finding that says who waits where, and names no culprit.

    Parameters:
        place: the operation, as its finding calls it.
        reason: the question that the log leaves open.
    """
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{wait_words(sorted(waiting)).capitalize()} in {place}; for whom is not in the log.",
        waiting=waiting,
        grade=0.2,
        group=group,
        op=op,
        seq=seq,
        evidence=evidence,
        advice=advice,
        leaves_open=(reason,),
    )


def absence_finding(
    job: LoggedJob,
    *,
    culprits: Collection[int],
    waiting: Collection[int],
    ops: set[str],
    exited: bool,
    grade: float,
    evidence: tuple[str, ...],
) -> Finding:
    """Return the finding for ranks that the others waited for in vain.

    Parameters:
        ops: operations that the others wait in.
        exited: the culprits had ended by themselves, with status 0.
    """
    how = "had ended with status 0" if exited else "never came"
    waits = wait_words(sorted(waiting)) if waiting else "the others wait"
    if exited:
        evidence = (
            f"torchelastic's table lists every rank that failed or was stopped, not {list_ranks(sorted(culprits))}",
            *evidence,
        )
    return log_finding(
        job,
        "rank-exited" if exited else "rank-skipped-collective",
        f"{capitalised(sorted(culprits))} {how}; {waits} in {words_of(ops)}.",
        culprits=culprits,
        waiting=waiting,
        grade=grade,
        op=the_only(ops),
        evidence=evidence,
        advice=(BRANCH, STACKS),
    )


def fewer_calls_finding(
    job: LoggedJob,
    group: Group | None,
    seq: int,
    *,
    enqueued: Mapping[int, int],
    waiting: Collection[int],
    grade: float,
    name: str = "",
) -> Finding:
    """Return the finding for ranks that had enqueued too few operations.

    Parameters:
        group: the group of the operation.
        seq: its sequence number.
        enqueued: the last that each of these ranks had started, in the order of the ranks.
        waiting: the ranks that are in the operation.
        name: of the operation, as the log has it; empty where the log does not have it.
    """
    op = operation(name)
    culprits = tuple(enqueued)
    place = f"{op or name} #{seq}".lstrip() + f" of {group_words(group)}"
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{capitalised(culprits)} had not entered {place}; {wait_words(sorted(waiting))} in it.",
        culprits=culprits,
        waiting=waiting,
        grade=grade,
        group=group,
        op=op,
        seq=seq,
        evidence=tuple(f"rank {rank}: last enqueued #{done}" for rank, done in list(enqueued.items())[:4]),
        advice=(DID_LAST, COLLECT),
        leaves_open=(
            "whether they did not call it or were stuck inside the call: the count is raised after it returns",
        ),
    )
