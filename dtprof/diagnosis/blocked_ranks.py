"""The ranks that a fault blocks: in which operation, and at which line."""

import re
from collections.abc import Collection, Iterable

from dtprof.diagnosis.findings import at_line, group_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import Wait
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS

REFUSAL = re.compile(r"ProcessGroup\w*::\w+: ")
"""How the messages of backends begin that refuse arguments."""


def raised_by(rank: RankState) -> Operation | None:
    """Return the operation that the exception came out of; None where it did not come out of one."""
    error = rank.own_exception
    last = rank.operations[-1] if rank.operations else None
    if error is None or last is None or not last.failed or last.done_ns == UNKNOWN_NS:
        return None
    return last if 0 <= error.t_ns - last.done_ns < 1_000_000_000 else None


def is_refused(rank: RankState) -> bool:
    """Say whether the exception is that of a backend that refused the arguments of a call."""
    return rank.own_exception is not None and REFUSAL.search(rank.own_exception.message) is not None


def failed_in_communication(rank: RankState) -> bool:
    """Say whether the exception came out of an operation that failed after waiting: it is a victim's."""
    error, operation = rank.own_exception, raised_by(rank)
    if error is None or operation is None or is_refused(rank):
        return False
    return operation.done_ns - operation.issued_ns > 1_000_000 and "RuntimeError" in error.type


def victims(job: JobState, culprits: set[int]) -> tuple[int, ...]:
    """Return the other ranks that were blocked, or failed because of a lost peer."""
    return tuple(
        rank.rank
        for rank in job.ranks.values()
        if rank.rank not in culprits
        and (rank.first_blocking is not None or rank.transport_exception is not None or failed_in_communication(rank))
    )


def find_followers(job: JobState, ranks: Collection[int]) -> set[int]:
    """Return the ranks that wait for any of these, or for one that does, however long the chain.

    A receive from any source follows only where all its possible senders do.
    """
    found = set(ranks)
    open_ranks = set(job.waits) - found
    # Each round follows every chain by one wait.
    while follow := {rank for rank in open_ranks if any(_follows(wait, found) for wait in job.waits[rank])}:
        found |= follow
        open_ranks -= follow
    return found - set(ranks)


def _follows(wait: Wait, ranks: Collection[int]) -> bool:
    if wait.awaited:
        hits = (rank in ranks for rank in wait.awaited)
        return all(hits) if wait.any_of_them else any(hits)
    # All have issued it, or nobody knows: it cannot complete while something else blocks a member.
    operation = wait.operation
    return operation.peer_rank in ranks if operation.p2p else any(member in ranks for member in operation.group.ranks)


def first_blocking_of(job: JobState, ranks: Iterable[int]) -> dict[int, Operation]:
    """Return the operation that blocked each of these ranks."""
    return {rank: operation for rank in ranks if (operation := job.ranks[rank].first_blocking) is not None}


def common_operation(waiting: dict[int, Operation]) -> Operation | None:
    """Return the operation that blocked most ranks."""
    if not waiting:
        return None
    places = [(operation.group, operation.seq, operation.p2p) for operation in waiting.values()]
    chosen = max(places, key=places.count)
    return next(f for f in waiting.values() if (f.group, f.seq, f.p2p) == chosen)


def fewest_steps(ranks: Iterable[RankState]) -> int | None:
    """Return the fewest steps that any of these ranks has completed; None where no steps are known."""
    return min((rank.steps for rank in ranks if rank.steps is not None), default=None)


def call_sites(waiting: dict[int, Operation]) -> dict[int, Site]:
    """Return the lines of the operations."""
    return {rank: operation.site for rank, operation in waiting.items() if operation.site is not None}


def places_of(ranks: Iterable[RankState]) -> dict[int, Site]:
    """Return the line that each rank is at, or was at its end; ranks of which no line is known are omitted."""
    return {rank.rank: site for rank in ranks if (site := rank.place) is not None}


def places_held_by(ranks: Iterable[RankState]) -> dict[int, Site]:
    """Return the line that each rank is at: its last record is no place, but of one whose program has ended."""
    held = ((rank.rank, rank.place if rank.has_left else rank.place_held) for rank in ranks)
    return {rank: site for rank, site in held if site is not None}


def last_sites_of(ranks: Iterable[RankState]) -> dict[int, Site]:
    """Return the line of the newest record of each rank; ranks without one are omitted."""
    return {rank.rank: site for rank in ranks if (site := rank.last_site) is not None}


def seen_at(rank: RankState) -> str:
    """Return where a rank is, or was at its end; `last seen` where only its last record shows it."""
    held = rank.place_held or rank.left_at
    return at_line(held) if held is not None or rank.place is None else f", last seen{at_line(rank.place)}"


def operation_words(job: JobState, operation: Operation, *, beside: Operation | None = None) -> str:
    """Return `all_reduce #17 of the default group at FILE:LINE (FUNCTION)`.

    Parameters:
        beside: another operation of the sentence. If it is of the same line by another caller, the caller is named.
    """
    words = f"{operation.op} #{operation.seq} of {group_words(job.group(operation.group))}{at_line(operation.site)}"
    site, other = operation.site, beside.site if beside is not None else None
    if site is None or site != other:
        return words
    callers = zip(site.callers, other.callers, strict=False)
    return next((f"{words}, called{at_line(own)}" for own, theirs in callers if own != theirs), words)
