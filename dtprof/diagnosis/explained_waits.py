"""Waits that a cause explains: the ranks it names, and all that wait for these, however long the chain."""

from dtprof.diagnosis.blocked_ranks import find_followers
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rank_failures import has_crashed
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.stalls import SLOW_AFTER_NS, hang_after_of
from dtprof.job.wait_graph import Wait
from dtprof.records.events import POINT_TO_POINT
from dtprof.records.tables import UNKNOWN_NS

BY_THEIR_END = ("rank-crashed", "rank-killed")


def find_explained(job: JobState, cause: Finding) -> set[int]:
    """Return the ranks whose state follows from a cause: culprits, waiting ranks, and those that wait for any of them.

    A receive from any source follows only where all its possible senders do.
    """
    waits = job.waits
    explained = set(cause.culprit_ranks)
    # Findings list all blocked ranks, also those of other causes: only waits in the operation of this one count.
    explained.update(r for r in cause.waiting_ranks if r not in waits or any(_is_of(w, cause) for w in waits[r]))
    return explained | find_followers(job, explained)


def _is_of(wait: Wait, cause: Finding) -> bool:
    """Say whether a wait is in the collective of a cause, or for a message of it: each rank numbers its own."""
    waited, group = wait.operation.group, cause.group
    if group is None:
        return True
    if wait.operation.p2p or cause.op in POINT_TO_POINT:
        return not set(cause.culprit_ranks).isdisjoint(wait.awaited)
    same = (waited.name, waited.ranks, waited.instance) == (group.name, group.ranks, group.instance)
    return same and wait.operation.seq == cause.seq


def find_unexplained_waits(job: JobState) -> dict[int, Operation]:
    """Return the operation that each rank waits in without a cause: since long before the job came down, if it did."""
    waits = job.waits
    return {
        rank: own[0].operation
        for rank, own in (waits.items() if job.stalled else ())
        if _waits_long(job, job.ranks[rank], own[0].operation)
    }


def _waits_long(job: JobState, rank: RankState, operation: Operation) -> bool:
    """Say whether a wait is more than one that the end of the job interrupted.

    Where dtprof stopped the job for its hang, nothing had happened for the threshold, which may be short.
    """
    stopped_ns, quiet_ns = job.stopped_on_hang_ns, hang_after_of(job.manifest.settings) * 1e9
    if stopped_ns is not None and 0 < quiet_ns / 2 < stopped_ns - operation.issued_ns:
        return True
    ends = [error.t_ns for error in rank.exceptions[-1:]] + ([rank.exit.t_ns] if rank.exit is not None else [])
    ends = [t_ns for t_ns in ends if t_ns != UNKNOWN_NS]
    return not ends or min(ends) - operation.issued_ns >= SLOW_AFTER_NS


def find_conflicting_waits(job: JobState) -> set[int]:
    """Return the ranks that wait in one place of a group, in different operations: no end of the job makes them so."""
    places: dict[tuple[GroupId, int], dict[int, str]] = {}
    for rank, waits in job.waits.items():
        for wait in waits:
            if not wait.operation.p2p:
                places.setdefault((wait.operation.group, wait.operation.seq), {})[rank] = wait.operation.op
    return {rank for ops in places.values() if len(set(ops.values())) > 1 for rank in ops}


def find_independent_crashes(job: JobState, first: Finding, whole: JobState) -> set[int]:
    """Return the ranks that raised before the process of a rank that failed first was gone: no peer was lost then."""
    ends = (whole.ranks[rank].exit for rank in first.culprit_ranks if rank in whole.ranks)
    gone = [end.t_ns for end in ends if end is not None and end.t_ns != UNKNOWN_NS]
    if not gone or first.kind not in BY_THEIR_END:
        return set()
    return {
        rank.rank
        for rank in job.ranks.values()
        if has_crashed(rank) and rank.own_exception is not None and UNKNOWN_NS < rank.own_exception.t_ns < min(gone)
    }
