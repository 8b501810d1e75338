"""Find, while a job runs, the rank that the others wait for again and again.

It comes last to the collectives of a group whose members all run on this host. In a pipeline, where ranks meet in
messages alone, it waits least for them. `straggler_ranks` finds those of a finished job.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dtprof.intervals import Column
from dtprof.job.groups import GroupId, identify_groups
from dtprof.job.streamed_matching import SEQ, MatchedCollectives, StreamedMatching
from dtprof.records import codes
from dtprof.records.tables import Array, RankTables, select

FEWEST, FEWEST_LATE, KEPT = 8, 4, 64
"""Operations by which lateness is judged; those of them to which a rank comes late; and those kept."""
MIN_SHARE, MIN_LAG_NS, MIN_COST = 0.6, 3_000_000, 0.15
"""Of the operations with a lag, the shortest that counts, those to which the same rank comes last; its lags, or what
another rank waits longer for messages, as a share of the time."""
NEWEST = 128
"""Operations of a group that are looked at in a poll."""
MAX_HELD = 4 * NEWEST
MOST_GROUPS = 16
ISSUED = SEQ + 1


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A rank that others wait for again and again, and one of these."""

    late: int
    on_time: int
    same_traffic: bool = True  # as much is sent and received by both
    period_ns: int | None = None  # from one late arrival to the next; None: not known


class LateArrivals:
    """The newest operations of each group to which all members have come, and the time spent in messages."""

    def __init__(self) -> None:
        """Start with none."""
        self.pids: dict[int, int] = {}
        self._messages: dict[int, _Messages] = {}
        self._attempt = 0  # the newest of any rank: operations of two attempts do not meet
        self._matching = StreamedMatching(max_held=MAX_HELD)
        self._arrivals: dict[GroupId, tuple[list[int], Column]] = {}  # ranks, and when each issued each operation

    def take(self, grown: Iterable[RankTables]) -> None:
        """Add the operations that have settled."""
        groups: set[GroupId] = set()
        for tables in grown:
            if tables.attempt > self._attempt:
                self._attempt, self._matching = tables.attempt, StreamedMatching(max_held=MAX_HELD)
                self._messages.clear()
            if tables.attempt == self._attempt:
                self.pids[tables.rank] = tables.pid
                self._messages.setdefault(tables.rank, _Messages()).add(tables.operations)
                groups |= self._add(tables)
        for matched in self._matching.take({group: set(group.ranks) for group in groups}):
            self._keep(matched)

    def _add(self, tables: RankTables) -> set[GroupId]:
        collectives = select(tables.operations, tables.operations["kind"] == codes.COLLECTIVE)
        several = {number: group for number, group in identify_groups(tables.groups).items() if len(group.ranks) > 1}
        for number, group in list(several.items())[:MOST_GROUPS]:
            rows = collectives[collectives["group"] == number][-NEWEST:]
            if len(rows):
                self._matching.add(tables.rank, group, np.stack((rows["seq"], rows["issued_ns"])).astype(np.int64))
        return set(several.values())

    def _keep(self, matched: MatchedCollectives) -> None:
        issued = matched.of_each(ISSUED)
        if matched.group in self._arrivals:
            issued = np.concatenate((self._arrivals[matched.group][1], issued), axis=1)
        self._arrivals[matched.group] = matched.ranks, issued[:, -KEPT:]

    def find_late(self) -> LateRank | None:
        """Return the rank that is late again and again in some group, the one that costs most, else the busiest one."""
        found = [late for ranks, issued in self._arrivals.values() if (late := _judge(ranks, issued)) is not None]
        return max(found, key=lambda pair: pair[0])[1] if found else self._find_busiest()

    def _find_busiest(self) -> LateRank | None:
        """Return the rank that waits much less in messages than another one."""
        shares = {rank: own.waited_share for rank, own in self._messages.items() if own.count >= FEWEST}
        if not shares:
            return None
        late, on_time = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        if shares[on_time] - shares[late] < MIN_COST:
            return None
        return LateRank(late=late, on_time=on_time, same_traffic=False)

    def forget(self) -> None:
        """Judge by later records only."""
        self._arrivals.clear()
        self._messages.clear()


@dataclass
class _Messages:
    """How long a rank was kept waiting by sends and receives, of the time that its operations span."""

    count: int = 0
    _waited_ns: int = 0
    _span_ns: int = 0

    def add(self, operations: Array) -> None:
        """Add the operations that have settled since."""
        if not len(operations):
            return
        issued = operations["issued_ns"]
        self._span_ns += int(issued.max() - issued.min())
        messages = select(operations, operations["kind"] == codes.POINT_TO_POINT)
        returned = np.maximum(messages["returned_ns"] - messages["issued_ns"], 0)  # 0 where the return is not known
        self.count += len(messages)
        self._waited_ns += int(returned.sum()) + int(messages["wait_ns"].sum())

    @property
    def waited_share(self) -> float:
        """Return the share of the time that the rank waited in messages."""
        return self._waited_ns / max(1, self._span_ns)


def _judge(ranks: list[int], issued: Column) -> tuple[float, LateRank] | None:
    """Return the cost of the latest rank as a share of the time, and the rank."""
    num_members, count = issued.shape
    if count < FEWEST:
        return None
    last = issued.argmax(axis=0)
    lags = issued.max(axis=0) - np.sort(issued, axis=0)[(num_members - 1) // 2]
    # Of several operations of a step, as one a parameter, a rank is late to the first: the others follow at once.
    has_lag = lags >= MIN_LAG_NS
    latest = int(np.bincount(last, lags, num_members).argmax())
    is_late = has_lag & (last == latest)
    span_ns = int(issued.max() - issued.min())
    cost = int(lags[is_late].sum()) / max(1, span_ns)
    if is_late.sum() < max(FEWEST_LATE, MIN_SHARE * has_lag.sum()) or cost < MIN_COST:
        return None
    waits = (issued[latest] - issued).sum(axis=1)
    period_ns = span_ns // int(is_late.sum())
    return cost, LateRank(late=ranks[latest], on_time=ranks[int(waits.argmax())], period_ns=period_ns)
