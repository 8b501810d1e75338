"""A rank left its program with status 0 while others wait for it."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.rank_failures import STOPPED, exit_finding
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.records.tables import UNKNOWN_NS

TO_THE_END_NS = 1_000_000_000
"""Between the end of a program's connections and that of its interpreter."""


def find_exited(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that left with status 0 while others wait for them."""
    job, culprits = case.job, case.awaited_leavers
    if not culprits or _were_never_to_send(case):
        return
    sites = {rank: site for rank in culprits if (site := job.ranks[rank].last_site) is not None}
    steps = {rank: job.ranks[rank].steps for rank in culprits}
    yield exit_finding(
        "rank-exited",
        f"{capitalised(culprits)} exited with status 0",
        culprits,
        sites,
        job,
        confidence=0.95,
        evidence=tuple(
            f"rank {rank}: exited without an error after {steps[rank]} steps; "
            f"its last record is{at_line(sites.get(rank))}"
            for rank in culprits
        ),
        advice=(
            "Every rank must make the same collectives: look for an early return, break or exit, "
            "or for fewer batches on that rank.",
        ),
    )


def _were_never_to_send(case: Case) -> bool:
    """Say whether ranks wait for those that left only in messages such as had never gone between them before.

    Then the program never was to send them, which is p2p-unmatched; after others, the rank left too early.
    """
    gone = set(case.awaited_leavers)
    blocked = [wait for waits in case.job.waits.values() for wait in waits if gone.intersection(wait.awaited)]
    # A receive from any source names no message in particular.
    return any(not wait.any_of_them for wait in blocked) and all(
        wait.operation.p2p and wait.operation.nth == 0 for wait in blocked
    )


def find_left_alone(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that ended in order before others lost their connection to a peer.

    For records that do not show in which operation those others were: the last thing to look for.
    """
    job = case.job
    errors = (rank.transport_exception for rank in job.ranks.values())
    lost = [error.t_ns for error in errors if error is not None and error.t_ns != UNKNOWN_NS]
    gone = tuple(
        sorted(
            rank.rank
            for rank in job.ranks.values()
            if lost and rank.finished and rank.ended_ns != UNKNOWN_NS and rank.ended_ns <= min(lost) + TO_THE_END_NS
        )
    )
    if not gone or job.manifest.exit_status in STOPPED:
        return
    sites = {rank: site for rank in gone if (site := job.ranks[rank].last_site) is not None}
    yield exit_finding(
        "rank-exited",
        f"{capitalised(gone)} exited with status 0, and others lost a peer then",
        gone,
        sites,
        job,
        confidence=0.7,
        evidence=tuple(
            f"rank {rank.rank} lost its peer{at_line(error.frame)}: {error.type}"
            for rank in job.ranks.values()
            if (error := rank.transport_exception) is not None
        ),
        advice=("Every rank must make the same collectives: look for an early return, break or exit on that rank.",),
    )


RULES: Declared = (
    Rule(kinds=("rank-exited",), stages=(Stage.WAIT,), find=find_exited),
    Rule(kinds=("rank-exited",), stages=(Stage.LATE,), find=find_left_alone),
)
