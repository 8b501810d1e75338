"""Issued operations of each rank of a job: counts by group and channel, and collectives in columns.

Records and dumps fill this; what became of the process of a rank is no part of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from dtprof.job.groups import GroupId
from dtprof.records.codes import NONE
from dtprof.records.schema import MOST_CALLERS
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS, Array, join, select


@dataclass(frozen=True)
class ChannelEnd:
    """One end of a channel: point-to-point messages of one group, peer, tag and direction, which arrive in order."""

    group: GroupId
    peer: int  # global rank; -1: any source
    tag: int
    sends: bool

    def other(self, rank: int) -> "ChannelEnd":
        """Return the end that the peer has of this one, which is of `rank`."""
        return ChannelEnd(self.group, rank, self.tag, not self.sends)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one rank; the defaults are facts that a source does not know."""

    group: GroupId
    op: str
    seq: int
    p2p: bool
    peer: int = -1
    tag: int = 0
    numel: int = -1
    dtype: int = NONE
    reduce_op: int = NONE
    site: Site | None = None
    common_callers: int = MOST_CALLERS  # of its site, that ranks have in common
    step: int | None = None
    inside_call: bool = False
    failed: bool = False
    done: bool
    issued_ns: int
    done_ns: int = UNKNOWN_NS
    observed: bool  # completion can be known
    started: bool | None = None  # its device began it; None: not known
    on_device: bool = False  # it ends on a device of its own on every member, after its call has returned
    waited: bool = False  # a wait for it began
    nbytes: int = 0
    thread: int = 0
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of uneven operations: what goes in, what comes out
    nth: int = -1  # point to point: messages of this channel issued before; -1 where that is not known

    @property
    def blocks(self) -> bool:
        """Say whether the program is known to wait for it."""
        return self.open and (self.inside_call or self.waited or self.failed)

    @property
    def peer_rank(self) -> int:
        """The global rank of the peer or root; -1 for none, or any source."""
        return self.group.ranks[self.peer] if 0 <= self.peer < len(self.group.ranks) else -1

    @property
    def channel_end(self) -> ChannelEnd:
        """The channel of a message, as the rank that issued it has it."""
        return ChannelEnd(self.group, self.peer_rank, self.tag, self.op == "send")

    @property
    def open(self) -> bool:
        """Say whether it has failed or is known not to have completed."""
        return self.failed or (self.observed and not self.done) or self.inside_call

    @property
    def label(self) -> tuple[GroupId, str, tuple[tuple[str, int], ...] | None]:
        """The place in the program and the callers that led there: equal for the same operation of two ranks.

        Without callers for messages, which their peers tell apart.
        """
        return (
            self.group,
            self.op,
            self.site.call_path[: 1 if self.p2p else 1 + self.common_callers] if self.site else None,
        )

    @property
    def place(self) -> tuple[GroupId, str, Site | None]:
        """The place in the program, by whatever callers."""
        return self.group, self.op, self.site


class LazyOperations(Sequence[Operation]):
    """Operations of a rank, built from its rows on demand: rules ask for few of them."""

    def __init__(self, make: Callable[[int], Operation], *, first: int, end: int) -> None:
        """Stand for the rows from `first` up to `end`."""
        self._make = make
        self._first = first
        self._made: list[Operation | None] = [None] * (end - first)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Operation]:
        for at, operation in enumerate(self._made):
            yield operation or self[at]

    @overload
    def __getitem__(self, at: int) -> Operation: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Operation, ...]: ...

    def __getitem__(self, at: int | slice) -> Operation | tuple[Operation, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        operation = self._made[at]
        if operation is None:
            operation = self._made[at] = self._make(self._first + range(len(self))[at])
        return operation


MESSAGE = np.dtype(
    [
        ("nth", "i8"),  # messages of the channel issued before
        ("at", "i8"),  # in RankState.operations
        ("nbytes", "i8"),
        ("site", "u4"),  # equal for messages of one line
        ("plain", "?"),  # a send or a receive, not several as one
        ("done", "?"),  # as Operation.done
        ("settled", "?"),  # done, failed, inside its call, waited for or asked about
    ]
)


def _no_operation(row: int) -> Operation:
    raise IndexError(f"no operation of row {row}: of this rank no collectives are known")


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of a rank in columns (group_collectives.COLLECTIVE), to compare whole runs."""

    groups: dict[GroupId, Array] = field(default_factory=dict)  # by position
    operation: Callable[[int], Operation] = _no_operation  # of a row


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The newest calls of a rank in columns, in the order of issue."""

    collectives: Array  # group_collectives.COLLECTIVE
    group: npt.NDArray[np.int64]  # of each, in `groups`
    groups: tuple[GroupId, ...]
    messages: npt.NDArray[np.int64]  # where each is in RankOperations.operations, ascending
    peers: frozenset[int]  # of the messages


@dataclass(frozen=True, kw_only=True)
class RankOperations:
    """The operations of one rank, as far as its source knows them."""

    rank: int
    operations: Sequence[Operation] = ()  # the newest, in the order of issue
    open_operations: tuple[Operation, ...] = ()  # those of them that had not ended well
    first_row: int = 0  # of the first of `operations` among all of the rank
    counts: dict[tuple[GroupId, bool], int] = field(default_factory=dict)  # operations issued, by group and p2p
    channels: dict[ChannelEnd, int] = field(default_factory=dict)  # messages issued
    messages: dict[ChannelEnd, Array] = field(default_factory=dict)  # those among `operations` in columns (MESSAGE)
    complete: bool = True  # nothing was dropped: messages can be counted
    collectives: RankCollectives = field(default_factory=RankCollectives)

    @cached_property
    def blocking(self) -> tuple[Operation, ...]:
        """Operations that block its program: those it waits for, or all open ones if no wait was recorded.

        The host of a device has issued more than the device has come to: what holds it up is what the device is in.
        """
        waited = tuple(o for o in self.open_operations if o.blocks) or self.open_operations
        for begun in (
            tuple(o for o in chosen if not self._is_held_back(o)) for chosen in (waited, self.open_operations)
        ):
            if begun:
                return begun
        return waited

    def has_come_to(self, group: GroupId, seq: int) -> bool:
        """Say whether a rank has issued a collective, and its device, where known, has reached it."""
        return seq < self._first_held_back.get(group, self.counts.get((group, False), 0))

    def has_come_to_message(self, channel: ChannelEnd, nth: int) -> bool:
        """Say the same of a message."""
        return nth < self._first_held_back.get(channel, self.channels.get(channel, 0))

    @cached_property
    def _first_held_back(self) -> dict[GroupId | ChannelEnd, int]:
        """The first operation of each group, and message of each channel, that its device has not reached."""
        first: dict[GroupId | ChannelEnd, int] = {}
        for o in self.open_operations:
            if o.started is None or o.inside_call:
                continue
            if not o.p2p:  # a group works off its collectives one by one: on a stream of its own, which no mark shows
                first.setdefault(o.group, o.seq + o.started)
            elif not o.started and o.nth >= 0:
                first.setdefault(o.channel_end, o.nth)
        return first

    def _is_held_back(self, operation: Operation) -> bool:
        """Say whether the device has not reached an open operation."""
        if operation.started is None or operation.inside_call:
            return False
        return not (operation.started if operation.p2p else self.has_come_to(operation.group, operation.seq))

    @property
    def first_blocking(self) -> Operation | None:
        """The oldest operation that holds the rank up, or did at its end."""
        return self.blocking[0] if self.blocking else None

    @cached_property
    def newest_collectives(self) -> dict[GroupId, Array]:
        """The collectives among `operations` in columns, by group."""
        groups = self.collectives.groups.items()
        newest = ((group, table, table["row"] >= self.first_row) for group, table in groups)
        return {group: table if chosen.all() else table[chosen] for group, table, chosen in newest}

    @cached_property
    def newest_calls(self) -> Calls | None:
        """All of `operations` in columns; None where not each of them is a row there."""
        tables = self.newest_collectives
        messages = [table["at"] for table in self.messages.values()]
        if not tables or sum(map(len, (*tables.values(), *messages))) != len(self.operations):
            return None
        collectives, group = join([*tables.values()]), np.repeat(np.arange(len(tables)), [*map(len, tables.values())])
        order = np.argsort(collectives["row"])
        return Calls(
            collectives=select(collectives, order),
            group=group[order],
            groups=tuple(tables),
            messages=np.sort(np.concatenate(messages)) if messages else np.zeros(0, np.int64),
            peers=frozenset(channel.peer for channel in self.messages),
        )


Ranks = Mapping[int, RankOperations]
"""The ranks of a job that left a record."""
