"""The figures of the ranks of one node, summed up as their records settle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtprof.analysis.communication.blocked_time import find_blocked
from dtprof.analysis.steps.phase_intervals import BUSY
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.columns import distinct
from dtprof.interchange.metric_families import label_text
from dtprof.interning import Interned
from dtprof.intervals import NONE, Column, Intervals, Mask, pair, union
from dtprof.job.axes import DEFAULT_GROUP, purpose_of
from dtprof.job.groups import GroupId, identify_groups
from dtprof.job.streamed_matching import MatchedCollectives, StreamedMatching
from dtprof.monitor.device_operations import OpenDeviceOperations
from dtprof.monitor.prometheus.collective_arrivals import measure_waits
from dtprof.monitor.prometheus.metric_catalogue import MAX_NAMES, OTHER
from dtprof.monitor.prometheus.step_counts import StepCounter
from dtprof.monitor.prometheus.token_counts import Consumed, sum_consumed
from dtprof.records import codes, events
from dtprof.records.events import FROM_ROOT, TO_ROOT
from dtprof.records.run_follower import Growth
from dtprof.records.tables import UNKNOWN_NS, Array, Group, RankTables, join, select

KNOWN_OF = {"duration_ns": "timed", "blocked_ns": "seen", "wait_ns": "judged"}
"""Times by group and operation, and of how many operations each is known: where that is 0, the time is not 0."""
SUMS = ("count", "nbytes", "failed", *KNOWN_OF, *KNOWN_OF.values(), "open")
"""Sums by group and operation; `open` is the level at the newest poll."""
KEPT_BACKWARD = 64
"""Backward passes that are remembered: an operation settles after its own has ended."""
Numbers = npt.NDArray[np.int8]


def number_label(labels: Interned[str], name: str) -> int:
    """Return the number of the label of a name: the first MAX_NAMES as they are, all others as one."""
    text = label_text(name)
    return labels.number(text if len(labels) < MAX_NAMES or text in labels else OTHER)


def group_label(group: Group | None) -> str:
    """Return the purpose of a group, which is the same on every node: its axis, else its description."""
    if group is None:
        return "unknown"
    if not group.axis and DEFAULT_GROUP in (group.description, group.name):
        return "default"
    return purpose_of(group) or group.name


def _no_numbers() -> Numbers:
    return np.full(1 << 16, -1, np.int8)


@dataclass
class RankTally:
    """One rank in its newest attempt."""

    tables: RankTables
    steps: StepCounter = field(default_factory=StepCounter)
    consumed: Consumed = field(default_factory=Consumed)
    backward: Intervals = field(default_factory=lambda: NONE)
    groups: dict[int, GroupId] = field(default_factory=dict)
    op_numbers: Numbers = field(default_factory=_no_numbers)  # by id, in `NodeTally.ops`; -1 not yet seen
    group_numbers: Numbers = field(default_factory=_no_numbers)
    num_events: int = 0
    lost: int = 0
    blocked_ns: int | None = None  # None: of no operation is known how long it blocked
    wait_ns: int | None = None  # None: no collective has ended on all its members here
    waited_for_ns: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    on_device: OpenDeviceOperations = field(default_factory=OpenDeviceOperations)
    oldest_open_ns: int | None = None
    last_ns: int = 0


class NodeTally:
    """All ranks of the node; an ended attempt still counts in sums over ranks."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.ranks: dict[int, RankTally] = {}
        self.groups: Interned[str] = Interned()
        self.ops: Interned[str] = Interned()
        self.phases: Interned[str] = Interned()
        self.phase_ns = np.zeros(MAX_NAMES + 1, np.int64)
        self.sums = {name: np.zeros((MAX_NAMES + 1, MAX_NAMES + 1), np.int64) for name in SUMS}
        self.earlier: list[RankTally] = []
        self._rooted = np.zeros(MAX_NAMES + 1, np.bool_)
        self._matching = StreamedMatching()
        self._attempt = 0  # the newest of any rank: operations of two attempts do not meet

    @property
    def every(self) -> list[RankTally]:
        """All attempts of all ranks."""
        return [*self.earlier, *self.ranks.values()]

    def consumed(self) -> Column:
        """Return the tokens and samples that count on this node, of all attempts."""
        attempts: dict[int, dict[int, Consumed]] = {}
        for own in self.every:
            attempts.setdefault(own.tables.attempt, {})[own.tables.rank] = own.consumed
        return sum(map(sum_consumed, attempts.values()), np.zeros(len(events.CONSUMED), np.int64))

    def take(self, growths: Mapping[int, Growth]) -> None:
        """Add the new records of the ranks since the last poll."""
        self.sums["open"][:] = 0
        newest = max((growth.tables.attempt for growth in growths.values()), default=0)
        if newest > self._attempt:
            self._attempt, self._matching = newest, StreamedMatching()
        for rank, growth in growths.items():
            self._take_rank(rank, growth)
        members: dict[GroupId, set[int]] = {}
        for rank, tally in self.ranks.items():
            for group in tally.groups.values() if tally.tables.attempt == self._attempt else ():
                if group.size > 1:
                    members.setdefault(group, set()).add(rank)
        for matched in self._matching.take(members):
            self._take_waits(matched)

    def _take_rank(self, rank: int, growth: Growth) -> None:
        tables = growth.tables
        known = self.ranks.get(rank)
        if known is None or known.tables.attempt != tables.attempt:
            self.earlier += [known] if known is not None else []
            known = self.ranks[rank] = RankTally(tables=tables)
        if not known.groups or tables.groups != known.tables.groups:
            known.groups = identify_groups(tables.groups)
            known.consumed.know(tables.groups.values())
            known.group_numbers[:] = -1
        known.tables, known.lost = tables, growth.lost
        known.num_events += len(tables.operations) + len(tables.spans) + len(tables.samples)
        ends = self._take_spans(known, tables) if len(tables.spans) else []
        if ends or len(tables.samples):
            known.consumed.add(tables, ends)
        if len(tables.samples):
            _take_samples(known, tables)
        if len(tables.operations):
            self._take_operations(rank, known, tables)
        self._take_open(known, growth)
        for rows, column in ((tables.operations, "issued_ns"), (tables.spans, "end_ns"), (tables.samples, "t_ns")):
            known.last_ns = max(known.last_ns, int(rows[column].max(initial=0)))
        known.last_ns = max(known.last_ns, growth.newest_ns)

    def _take_spans(self, own: RankTally, tables: RankTables) -> list[int]:
        """Take in phases; return when steps ended."""
        spans = select(tables.spans, tables.spans["end_ns"] != UNKNOWN_NS)
        ends = own.steps.add(spans, tables.ops)
        length = np.maximum(spans["end_ns"] - spans["begin_ns"], 0)
        for op, took in enumerate(np.bincount(spans["op"], length).tolist()):
            name = tables.ops[op] if op < len(tables.ops) else ""
            if took and name:
                self.phase_ns[number_label(self.phases, name.removeprefix(events.USER_PHASE))] += int(took)
        backward = tables.ops.index(events.BACKWARD) if events.BACKWARD in tables.ops else -1
        rows = spans[spans["op"] == backward]
        if len(rows):
            own.backward = union(np.concatenate((own.backward, pair(rows["begin_ns"], rows["end_ns"]))))
            own.backward = own.backward[-KEPT_BACKWARD:]
        return ends

    def _take_operations(self, rank: int, own: RankTally, tables: RankTables) -> None:
        rows = tables.operations
        key = self._keys(rows, own)
        done = (rows["done_ns"] != UNKNOWN_NS) & ((rows["flags"] & codes.COMPLETION_SEEN) != 0)
        on_device = rows["device_ns"] >= 0
        duration = np.where(done, rows["done_ns"] - rows["issued_ns"], 0)
        duration = np.where(on_device, rows["device_ns"], duration)
        blocked, seen = _blocked_ns(own, tables)
        if seen.any():
            own.blocked_ns = (own.blocked_ns or 0) + int(blocked.sum())
        self._add("count", key, np.ones(len(rows), np.int64))
        self._add("nbytes", key, rows["nbytes"])
        self._add("failed", key, (rows["state"] == codes.FAILED).astype(np.int64))
        self._add("duration_ns", key, np.maximum(duration, 0))
        self._add("timed", key, (done | on_device).astype(np.int64))
        self._add("blocked_ns", key, blocked)
        self._add("seen", key, seen.astype(np.int64))
        self._take_arrivals(rank, own, rows, key % (MAX_NAMES + 1), done)

    def _take_arrivals(self, rank: int, own: RankTally, rows: Array, ops: Column, done: Mask) -> None:
        if own.tables.attempt != self._attempt:
            return
        chosen = done & (rows["kind"] == codes.COLLECTIVE)
        held = np.stack((rows["seq"], rows["issued_ns"], rows["done_ns"], ops))[:, chosen]
        groups = rows["group"][chosen]
        for number in set(groups.tolist()):
            group = own.groups.get(number)
            if group is not None and group.size > 1:
                self._matching.add(rank, group, held[:, groups == number])

    def _take_open(self, own: RankTally, growth: Growth) -> None:
        rows = growth.open_operations
        # Inside its call it is open, and whether its completion will be seen is not known yet.
        sees_end = (rows["state"] == codes.ISSUED) | ((rows["flags"] & codes.COMPLETION_SEEN) != 0)
        waiting = join([rows[(rows["done_ns"] == UNKNOWN_NS) & sees_end], own.on_device.take(growth)])
        own.oldest_open_ns = int(waiting["issued_ns"].min()) if len(waiting) else None
        if len(waiting):
            self._add("open", self._keys(waiting, own), np.ones(len(waiting), np.int64))

    def _take_waits(self, matched: MatchedCollectives) -> None:
        waits, ranks = measure_waits(matched, self._rooted), matched.ranks
        holder = self.ranks[ranks[0]]
        number = next(number for number, known in holder.groups.items() if known == matched.group)
        label = number_label(self.groups, group_label(holder.tables.groups.get(number)))
        key = label * (MAX_NAMES + 1) + waits.ops
        self._add("wait_ns", key, waits.waited_ns.sum(axis=0))
        self._add("judged", key, np.ones(len(waits.ops), np.int64))
        caused = np.bincount(waits.last, waits.waited_ns.sum(axis=0), len(ranks))
        for row, rank in enumerate(ranks):
            own = self.ranks[rank]
            own.wait_ns = (own.wait_ns or 0) + int(waits.waited_ns[row].sum())
            own.waited_for_ns = (own.waited_for_ns or 0) + int(caused[row])

    def _keys(self, rows: Array, own: RankTally) -> Column:
        """Return for each operation its group and name as one number."""
        ops, groups = rows["op"], rows["group"]
        if (own.op_numbers[ops] < 0).any():
            for op in set(ops.tolist()):
                name = own.tables.ops[op] if op < len(own.tables.ops) else "unknown"
                own.op_numbers[op] = number_label(self.ops, name)
                self._rooted[own.op_numbers[op]] = name in FROM_ROOT or name in TO_ROOT
        if (own.group_numbers[groups] < 0).any():
            for group in set(groups.tolist()):
                own.group_numbers[group] = number_label(self.groups, group_label(own.tables.groups.get(group)))
        keys: Column = own.group_numbers[groups].astype(np.int64) * (MAX_NAMES + 1) + own.op_numbers[ops]
        return keys

    def _add(self, name: str, key: Column, values: Column) -> None:
        flat = np.bincount(key, values, (MAX_NAMES + 1) ** 2)
        self.sums[name] += flat.astype(np.int64).reshape(MAX_NAMES + 1, MAX_NAMES + 1)


def _take_samples(own: RankTally, tables: RankTables) -> None:
    for op, value in zip(tables.samples["op"].tolist(), tables.samples["value"].tolist(), strict=True):
        if op < len(tables.ops):
            own.memory[tables.ops[op]] = value


def _blocked_ns(own: RankTally, tables: RankTables) -> tuple[Column, Mask]:
    """Return how long each operation kept the program from going on, and of which that is known."""
    phases = dict.fromkeys((*BUSY, events.FORWARD), NONE) | {events.BACKWARD: own.backward}
    threads = own.steps.threads or set(distinct(tables.operations["thread"]).tolist())
    steps = RankSteps(
        rank=tables.rank, count=0, numbers=np.zeros(0, np.int64), windows=NONE, threads=tuple(sorted(threads))
    )
    blocked = find_blocked(tables, tables.operations, phases, steps)
    both = blocked.call[:, 1] - blocked.call[:, 0] + blocked.wait[:, 1] - blocked.wait[:, 0]
    return np.where(blocked.known & blocked.counts, np.maximum(both, 0), 0), blocked.exposure_known
