"""Who waits for whom: a graph from operations that have not ended to the ranks that have not come to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from dtprof.diagnosis.cyclic_waits import find_closed_sets
from dtprof.diagnosis.sources.flight_recorder.dump_tables import Pending
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job
from dtprof.job.groups import GroupId


@dataclass(frozen=True, kw_only=True)
class Front:
    """A collective that has not ended on some ranks."""

    key: GroupId
    seq: int
    waiting: dict[int, Pending]
    absent: tuple[int, ...]  # members that never issued it, or of which nothing is known

    @property
    def first(self) -> Pending:
        """The operation of the rank that came first."""
        return min(self.waiting.values(), key=lambda pending: pending.created_ns)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One pending send and one pending receive between two ranks; None where a side has none that is pending."""

    key: GroupId
    source: int
    target: int
    send: Pending | None
    recv: Pending | None
    met: bool  # the side that is not there has ended its part

    @property
    def first(self) -> Pending:
        """The operation of the side that is there."""
        here = self.send or self.recv
        assert here is not None
        return here

    @property
    def waiter(self) -> int:
        """The rank that is there."""
        return self.source if self.send is not None else self.target

    @property
    def absent(self) -> int | None:
        """The rank that is not, None where both have come."""
        if self.met:
            return None
        return self.target if self.send is not None else self.source


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The graph: from a rank to those it waits for, with the oldest operation it does so in."""

    fronts: tuple[Front, ...]
    meetings: tuple[Meeting, ...]
    edges: dict[int, dict[int, Front | Meeting]]

    @property
    def sinks(self) -> tuple[int, ...]:
        """Ranks that others wait for and that wait for nobody."""
        waited_for = {on for edges in self.edges.values() for on in edges}
        return tuple(sorted(rank for rank in waited_for if not self.edges.get(rank)))

    def cycle(self) -> tuple[int, ...]:
        """Return the ranks of a smallest set that wait for one another and for nobody else, empty for none."""
        return min((found for found in find_closed_sets(self.edges) if len(found) > 1), key=len, default=())


def find_waits(job: Job) -> Waits:
    """Build the graph."""
    fronts = sorted(_fronts(job), key=lambda front: front.first.created_ns)
    meetings = sorted(_meetings(job), key=lambda meeting: meeting.first.created_ns)
    edges: dict[int, dict[int, Front | Meeting]] = {}
    for front in fronts:
        for rank in front.waiting:
            for other in front.absent:
                edges.setdefault(rank, {}).setdefault(other, front)
    for meeting in meetings:
        if meeting.absent is not None and meeting.absent != meeting.waiter:
            edges.setdefault(meeting.waiter, {}).setdefault(meeting.absent, meeting)
    return Waits(fronts=tuple(fronts), meetings=tuple(meetings), edges=edges)


def _fronts(job: Job) -> Iterator[Front]:
    places: dict[tuple[GroupId, int], dict[int, Pending]] = {}
    for rank in job.dumps:
        for pending in job.of(rank):
            if not pending.p2p:
                places.setdefault((job.key(rank, pending.group), pending.seq), {}).setdefault(rank, pending)
    issued: dict[GroupId, dict[int, int | None]] = {}
    for (key, seq), waiting in places.items():
        if key not in issued:
            issued[key] = {member: job.issued(member, key) for member in key.ranks}
        absent = tuple(
            member
            for member, newest in issued[key].items()
            if member not in waiting and (newest is None or newest < seq)
        )
        yield Front(key=key, seq=seq, waiting=waiting, absent=absent)


def _meetings(job: Job) -> Iterator[Meeting]:
    sends: dict[tuple[GroupId, int, int], list[Pending]] = {}
    recvs: dict[tuple[GroupId, int, int], list[Pending]] = {}
    for rank in job.dumps:
        for pending in job.of(rank):
            if pending.peers is not None:
                key = job.key(rank, pending.group)
                source, target = (_global(key, peer) for peer in pending.peers)
                side = sends if pending.op == "send" else recvs
                side.setdefault((key, source, target), []).append(pending)
    for place in dict.fromkeys([*sends, *recvs]):
        key, source, target = place
        pairs = list(zip_longest(sends.get(place, ()), recvs.get(place, ())))
        short = _never_answered(job, place)
        for i, (send, recv) in enumerate(pairs):
            both = send is not None and recv is not None
            met = both or (short is not None and i < len(pairs) - short)
            yield Meeting(key=key, source=source, target=target, send=send, recv=recv, met=met)


def _never_answered(job: Job, place: tuple[GroupId, int, int]) -> int | None:
    """Return by how many the sends and receives of a pair differ, None where a ring has lost its beginning."""
    key, source, target = place
    sender, receiver = job.dumps.get(source), job.dumps.get(target)
    if sender is None or receiver is None or not (sender.whole and receiver.whole):
        return None
    peers = (key.ranks.index(source), key.ranks.index(target)) if source in key.ranks and target in key.ranks else None
    if peers is None:
        return None
    sent, received = (
        sender.p2p_counts.get((key.name, "send", peers), 0),
        receiver.p2p_counts.get((key.name, "recv", peers), 0),
    )
    return abs(sent - received)


def _global(key: GroupId, peer: int) -> int:
    return key.ranks[peer] if peer < len(key.ranks) else peer
