"""The wait-for graph: operations that block ranks, and the ranks that have not reached them.

A collective waits for all members that have not issued it (and); a receive from any source for any of its peers (or).
A message meets the one of as many before it in its channel, where nothing was dropped on either end. On devices, what a
rank has issued has not come before its device has started it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from dtprof.job.cyclic_waits import find_closed_sets
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import ChannelEnd, Operation, RankOperations, Ranks


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One rank blocked by one operation."""

    rank: int
    operation: Operation
    awaited: tuple[int, ...]  # ranks that have not come; empty: all have
    any_of_them: bool = False  # one would do


def find_waits(ranks: Ranks, waiting: Iterable[int], *, lost: Collection[int]) -> dict[int, tuple[Wait, ...]]:
    """Return the operation that blocks each rank; ranks that are not blocked are omitted.

    Parameters:
        waiting: the ranks whose open operations hold them up: a program that has ended waits for nothing.
        lost: ranks without a record, though those that live and can answer leave one.
    """
    absent: dict[tuple[GroupId, int], tuple[int, ...]] = {}  # a thousand ranks wait in the same collective
    waits = {}
    for rank in waiting:
        if blocking := ranks[rank].blocking:
            for place in {(o.group, o.seq) for o in blocking if not o.p2p} - absent.keys():
                absent[place] = _awaited_members(ranks, *place, lost=lost)
            waits[rank] = tuple(
                _message(ranks, rank, operation, lost)
                if operation.p2p
                else Wait(
                    rank=rank, operation=operation, awaited=_without(rank, absent[operation.group, operation.seq])
                )
                for operation in blocking
            )
    return waits


def _awaited_members(ranks: Ranks, group: GroupId, seq: int, *, lost: Collection[int]) -> tuple[int, ...]:
    """Return the members that have not reached a collective with their devices, and the lost ones."""
    return _members_without(ranks, group, lambda rank: rank.has_come_to(group, seq), lost)


def _without(rank: int, members: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(member for member in members if member != rank) if rank in members else members


def absent_members(ranks: Ranks, group: GroupId, seq: int, *, lost: Collection[int]) -> tuple[int, ...]:
    """Return the members of a group that have not issued a collective, and those lost; of other ranks nobody knows."""
    return _members_without(ranks, group, lambda rank: rank.counts.get((group, False), 0) > seq, lost)


def _members_without(
    ranks: Ranks, group: GroupId, has_come: Callable[[RankOperations], bool], lost: Collection[int]
) -> tuple[int, ...]:
    """Return the members that have not come, and the lost ones; members without a record are unknown."""
    lost, known = set(lost), ((member, ranks.get(member)) for member in group.ranks)
    return tuple(m for m, rank in known if (not has_come(rank) if rank is not None else m in lost))


def _message(ranks: Ranks, rank: int, operation: Operation, lost: Collection[int]) -> Wait:
    peer = operation.peer_rank
    if peer in lost:
        return Wait(rank=rank, operation=operation, awaited=(peer,))
    if operation.op not in ("send", "recv"):  # several issued as one: with whom is not known
        return Wait(rank=rank, operation=operation, awaited=())
    if peer >= 0:
        came = has_come(ranks, rank, operation)
        return Wait(rank=rank, operation=operation, awaited=() if came is not False else (peer,))
    others = tuple(r for r in operation.group.ranks if r != rank and r in ranks)
    sent = sum(ranks[r].channels.get(ChannelEnd(operation.group, rank, operation.tag, True), 0) for r in others)
    mine = ranks[rank].channels
    taken = sum(mine.get(ChannelEnd(operation.group, r, operation.tag, False), 0) for r in others)
    known = operation.op == "recv" and all(ranks[r].complete for r in (*others, rank))
    return Wait(
        rank=rank,
        operation=operation,
        awaited=() if not known or sent > taken + operation.nth else others,
        any_of_them=True,
    )


def has_come(ranks: Ranks, rank: int, operation: Operation) -> bool | None:
    """Say whether the peer of a message issued the other end and its device reached it; None: not known."""
    came = is_met(ranks, rank, operation)
    if not came:
        return came
    end = operation.channel_end.other(rank)
    peer = ranks[operation.peer_rank]
    return peer.channels.get(end, 0) <= operation.nth or peer.has_come_to_message(end, operation.nth)


def is_met(ranks: Ranks, rank: int, operation: Operation) -> bool | None:
    """Say whether the peer of a message has issued the other end; None where that cannot be known."""
    peer = operation.peer_rank
    if not _are_counted(ranks, rank, operation):
        return None
    theirs = ranks[peer].channels
    end = operation.channel_end.other(rank)
    count = theirs.get(end, 0)
    if not end.sends:
        count += theirs.get(replace(end, peer=-1), 0)  # any source may take it
    return count > operation.nth


def _are_counted(ranks: Ranks, rank: int, operation: Operation) -> bool:
    """Say whether both ends of the channel of a message are known from its first one on."""
    peer = ranks.get(operation.peer_rank)
    return peer is not None and operation.nth >= 0 and peer.complete and ranks[rank].complete


def partner_of(ranks: Ranks, rank: int, operation: Operation) -> Operation | None:
    """Return the other end of a message, where it is among the newest operations of its peer."""
    if not _are_counted(ranks, rank, operation):
        return None
    peer = ranks[operation.peer_rank]
    if any(channel.peer < 0 for owner in (peer, ranks[rank]) for channel in owner.channels):
        return None  # a receive from any source takes what comes: order does not tell
    key = (operation.group, operation.tag, operation.nth, rank)
    ends = (o for o in reversed(peer.operations) if o.p2p and o.op != operation.op)
    return next((o for o in ends if (o.group, o.tag, o.nth, o.peer_rank) == key), None)


def find_expecting(ranks: Ranks, rank: int, operation: Operation) -> dict[int, Operation]:
    """Return other ranks whose messages to or from this one meet nothing either: one may be named wrongly."""
    return {
        other.rank: o
        for other in ranks.values()
        for o in other.open_operations
        if o.p2p and o.op != operation.op and o.peer_rank == rank and other.rank != operation.peer_rank
    }


def went_astray(ranks: Ranks, wait: Wait) -> bool:
    """Say whether a rank turned to this peer for the first time, while another expects its usual message.

    Or its first one: then a message of the same size and tag.
    """
    mine = wait.operation
    usual = [c for c in ranks[wait.rank].channels if c.sends == (mine.op == "send")]
    others = find_expecting(ranks, wait.rank, mine).values() if mine.nth == 0 else ()
    if len({channel.peer for channel in usual}) > 1:
        return any(other.nth > 0 for other in others)
    return any((other.nth, other.numel, other.tag) == (0, mine.numel, mine.tag) for other in others)


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
