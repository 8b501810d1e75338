"""Who waits for whom: the operations that hold ranks up, and the ranks that have not come to them.

A collective waits for all members that have not issued it (and); a receive from any source for any of its peers (or).
"""

from dataclasses import dataclass

from dtprof.diagnosis.cyclic_waits import find_closed_sets
from dtprof.diagnosis.job_state import ChannelEnd, JobState, Operation
from dtprof.job.groups import GroupId


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One rank held up in one operation."""

    rank: int
    operation: Operation
    awaited: tuple[int, ...]  # ranks that have not come; empty: all have
    any_of_them: bool = False  # one would do


def find_waits(job: JobState) -> dict[int, tuple[Wait, ...]]:
    """Return what holds each rank up; ranks that nothing holds up are left out."""
    absent: dict[tuple[GroupId, int], tuple[int, ...]] = {}  # a thousand ranks wait in the same collective
    waits = {}
    for rank in job.ranks.values():
        if rank.blocking and not rank.finished:
            for place in {(o.group, o.seq) for o in rank.blocking if not o.p2p} - absent.keys():
                absent[place] = absent_members(job, *place)
            waits[rank.rank] = tuple(
                _message(job, rank.rank, operation)
                if operation.p2p
                else Wait(rank=rank.rank, operation=operation, awaited=absent[operation.group, operation.seq])
                for operation in rank.blocking
            )
    return waits


def absent_members(job: JobState, group: GroupId, seq: int) -> tuple[int, ...]:
    """Return the members of a group that have not issued a collective, and those lost; of other ranks nobody knows."""
    key = group, False
    known = ((member, job.ranks.get(member)) for member in group.ranks)
    lost = set(job.lost)
    return tuple(m for m, rank in known if (rank.counts.get(key, 0) <= seq if rank is not None else m in lost))


def _message(job: JobState, rank: int, operation: Operation) -> Wait:
    peer = operation.peer_rank
    sends = operation.op == "send"
    if peer in job.lost:
        return Wait(rank=rank, operation=operation, awaited=(peer,))
    if operation.op not in ("send", "recv"):  # several issued as one: with whom is not known
        return Wait(rank=rank, operation=operation, awaited=())
    if peer >= 0:
        came = is_met(job, rank, operation)
        return Wait(rank=rank, operation=operation, awaited=() if came is not False else (peer,))
    others = tuple(r for r in operation.group.ranks if r != rank and r in job.ranks)
    sent = sum(job.ranks[r].channels.get(ChannelEnd(operation.group, rank, operation.tag, True), 0) for r in others)
    mine = job.ranks[rank].channels
    taken = sum(mine.get(ChannelEnd(operation.group, r, operation.tag, False), 0) for r in others)
    known = not sends and all(job.ranks[r].complete for r in (*others, rank))
    return Wait(
        rank=rank,
        operation=operation,
        awaited=() if not known or sent > taken + operation.nth else others,
        any_of_them=True,
    )


def is_met(job: JobState, rank: int, operation: Operation) -> bool | None:
    """Say whether the peer of a message has issued the other end; None where that cannot be known."""
    peer = operation.peer_rank
    if peer not in job.ranks or operation.nth < 0:
        return None
    if not (job.ranks[peer].complete and job.ranks[rank].complete):
        return None
    receives = operation.op == "send"
    theirs = job.ranks[peer].channels
    count = theirs.get(ChannelEnd(operation.group, rank, operation.tag, not receives), 0)
    if receives:
        count += theirs.get(ChannelEnd(operation.group, -1, operation.tag, False), 0)  # any source may take it
    return count > operation.nth


def find_cycle(waits: dict[int, tuple[Wait, ...]]) -> tuple[int, ...]:
    """Return the ranks of a cycle of waits that nobody outside can resolve; empty where there is none."""
    stuck = set(waits)
    while free := {rank for rank in stuck if not any(_is_held(wait, stuck) for wait in waits[rank])}:
        stuck -= free
    edges = {rank: {r for wait in waits[rank] for r in wait.awaited if r in stuck} for rank in sorted(stuck)}
    return min(find_closed_sets(edges), default=())


def _is_held(wait: Wait, stuck: set[int]) -> bool:
    """Say whether a wait cannot end while these ranks are stuck."""
    held = [rank in stuck for rank in wait.awaited]
    return bool(held) and (all(held) if wait.any_of_them else any(held))
