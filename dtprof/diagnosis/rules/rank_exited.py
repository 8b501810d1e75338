"""A rank left its program with status 0 while others wait for it."""

from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rank_failures import STOPPED, exit_finding
from dtprof.diagnosis.wait_graph import absent_members
from dtprof.records.tables import UNKNOWN_NS

KINDS = ("rank-exited",)
TO_THE_END_NS = 1_000_000_000
"""Between the end of a program's connections and that of its interpreter."""


def find_exited(job: JobState) -> Finding | None:
    """Return the finding for ranks that left with status 0 while others wait for them."""
    operations = [
        operation for r in job.ranks.values() if not r.finished and (operation := r.first_blocking) is not None
    ]
    peers = {operation.peer_rank for operation in operations if operation.p2p}
    places = {(operation.group, operation.seq) for operation in operations if not operation.p2p}
    awaited = peers.union(*(absent_members(job, group, seq) for group, seq in places))
    awaited = {rank for rank in awaited if rank in job.ranks and job.ranks[rank].finished}
    if not awaited:
        return None
    culprits = tuple(sorted(awaited))
    sites = {rank: site for rank in culprits if (site := job.ranks[rank].last_site) is not None}
    steps = {rank: job.ranks[rank].steps for rank in culprits}
    name = capitalised(culprits)
    return exit_finding(
        "rank-exited",
        f"{name} left the program with status 0",
        culprits,
        sites,
        job,
        confidence=0.95,
        evidence=tuple(
            f"rank {rank}: ended in order after {steps[rank]} steps; its last record is{at_line(sites.get(rank))}"
            for rank in culprits
        ),
        advice=(
            "Every rank must make the same collectives: look for an early return, break or exit, "
            "or for fewer batches on that rank.",
        ),
    )


def find_left_alone(job: JobState) -> Finding | None:
    """Return the finding for ranks that ended in order before others lost their connection to a peer.

    For records that do not show in which operation those others were: the last thing to look for.
    """
    lost = [error.t_ns for rank in job.ranks.values() if (error := rank.transport_exception) is not None]
    gone = tuple(
        sorted(
            rank.rank
            for rank in job.ranks.values()
            if lost and rank.finished and rank.ended_ns != UNKNOWN_NS and rank.ended_ns <= min(lost) + TO_THE_END_NS
        )
    )
    if not gone or job.manifest.exit_status in STOPPED:
        return None
    sites = {rank: site for rank in gone if (site := job.ranks[rank].last_site) is not None}
    return exit_finding(
        "rank-exited",
        f"{capitalised(gone)} left the program with status 0, and others lost a peer then",
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
