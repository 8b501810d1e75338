"""Progress of one rank's operations on its device from two sources: issued, started and completed from either.

Records of a device that nobody followed know what was issued only; dumps of the Flight Recorder know what was
completed, and, with timing, what was started. Operations are paired by their position in the group, which records count
from 0 and dumps from 1, where operations and lines of the newest positions agree; messages by their number in their
channel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dtprof.diagnosis.findings import group_words
from dtprof.diagnosis.job_state import RankState
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import ChannelEnd, LazyOperations, Operation, RankCollectives
from dtprof.records import codes
from dtprof.records.tables import Array

COMPARED = 64
"""Newest positions of a group that must agree before positions of two sources are taken for the same."""
Place = tuple[GroupId | ChannelEnd, int]
"""A collective by group and position, or a message by channel and number, as the first source counts."""


def merge_progress(rank: RankState, other: RankState, *, shift: int) -> RankState:
    """Return a rank whose operations know how far its device came with them by either source.

    Parameters:
        shift: what to add to a position of the rank to have that of the other source.
    """
    progress = _OtherProgress.of(rank, other, shift)
    if not progress.open and not progress.completed:
        return rank
    adopted = LazyOperations(
        lambda row: progress.adopt(rank.operations[row - rank.first_row]),
        first=rank.first_row,
        end=rank.first_row + len(rank.operations),
    )
    known = {_place(operation): operation for operation in rank.open_operations}
    places = [_place(operation) for operation in rank.open_operations]
    for place in progress.open.keys() - known.keys():
        at = _index_of(rank, place)
        if at is not None:
            known[place] = rank.operations[at]
            places.append(place)
    still_open = [operation for place in places if (operation := progress.adopt(known[place])).open]
    return replace(
        rank,
        operations=adopted,
        open_operations=tuple(sorted(still_open, key=lambda operation: operation.issued_ns)),
        collectives=RankCollectives(groups=_completed(rank, progress), operation=_adopting(rank, progress)),
    )


def find_uncounted(rank: RankState, other: RankState, *, shift: int) -> tuple[str, ...]:
    """Say in which groups operations of two sources cannot be paired, where one of them knows of open ones there."""
    return tuple(
        f"rank {rank.rank}: records and dump do not count the operations of {group_words(rank.groups.get(group))} "
        "alike; how far its device came there is taken from one of them"
        for group in {operation.group for operation in other.open_operations if not operation.p2p}
        if group in rank.collectives.groups and not _are_paired(rank, other, group, shift)
    )


@dataclass(frozen=True, kw_only=True)
class _OtherProgress:
    """Progress that the other source knows, by rows of the first."""

    open: Mapping[Place, Operation]
    completed: frozenset[Place]

    @classmethod
    def of(cls, rank: RankState, other: RankState, shift: int) -> "_OtherProgress":
        groups = rank.collectives.groups.keys() & other.collectives.groups.keys()
        paired = {group for group in groups if _are_paired(rank, other, group, shift)}
        pending: dict[Place, Operation] = {}
        for operation in other.open_operations:
            channel, number = _place(operation)
            if operation.p2p and number >= 0:
                pending[channel, number] = operation
            elif channel in paired:
                pending[channel, number - shift] = operation
        completed: set[Place] = set()
        for group in paired:
            table = other.collectives.groups[group]
            completed.update((group, int(seq) - shift) for seq in table["seq"][table["state"] == codes.DONE])
        for channel, count in other.channels.items() if rank.complete and other.complete else ():
            completed.update((channel, nth) for nth in range(count) if (channel, nth) not in pending)
        return cls(open=pending, completed=frozenset(completed))

    def adopt(self, operation: Operation) -> Operation:
        """Return an operation of the first source with the progress that the other knows."""
        place = _place(operation)
        if operation.done and operation.observed:
            return operation
        if place in self.completed:
            return replace(operation, observed=True, done=not operation.failed, on_device=True)
        device = self.open.get(place)
        if device is None:
            return operation
        started = operation.started if operation.started is not None and not device.started else device.started
        return replace(operation, observed=True, started=started, on_device=device.on_device)


def _place(operation: Operation) -> Place:
    if not operation.p2p:
        return operation.group, operation.seq
    return operation.channel_end, operation.nth


def _are_paired(rank: RankState, other: RankState, group: GroupId, shift: int) -> bool:
    """Say whether the newest positions of a group that both sources know hold the same operations of the same lines."""
    own, theirs = rank.collectives.groups[group], other.collectives.groups[group]
    mine = own[np.isin(own["seq"] + shift, theirs["seq"])][-COMPARED:]
    same = theirs[np.isin(theirs["seq"], mine["seq"] + shift)]
    if not len(mine) or len(same) != len(mine):
        return False
    known = (mine["line"] != 0) & (same["line"] != 0)
    alike = (mine["op"] == same["op"]) & (~known | (mine["line"] == same["line"]))
    return bool(alike.all())


def _index_of(rank: RankState, place: Place) -> int | None:
    """Return where an operation is among the newest of a rank."""
    channel, number = place
    if isinstance(channel, GroupId):
        table = rank.collectives.groups[channel]
        at = [int(row) - rank.first_row for row in table["row"][table["seq"] == number].tolist()]
    else:
        messages = rank.messages.get(channel)
        at = messages["at"][messages["nth"] == number].tolist() if messages is not None else []
    return at[0] if at and 0 <= at[0] < len(rank.operations) else None


def _completed(rank: RankState, progress: _OtherProgress) -> dict[GroupId, Array]:
    groups = {}
    for group, table in rank.collectives.groups.items():
        done = [(group, seq) in progress.completed for seq in table["seq"].tolist()]
        groups[group] = table
        if any(done):
            groups[group] = table.copy()
            groups[group]["state"][np.array(done) & (table["state"] != codes.FAILED)] = codes.DONE
    return groups


def _adopting(rank: RankState, progress: _OtherProgress) -> Callable[[int], Operation]:
    return lambda row: progress.adopt(rank.collectives.operation(row))
