"""Compare the records of ranks while they run: mismatched operations at one sequence number of a group.

What is new is compared in columns, position by position, for all groups at once; only where it differs, the rules of
finished runs decide, on the records of each rank around the first position of each group that does. Polls may be far
apart, and ranks may come to a position in any order: whatever came between two polls is compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.common_callers import with_common_callers
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import assemble_job
from dtprof.diagnosis.rules.argument_mismatch import mismatches_by_group
from dtprof.diagnosis.rules.step_mismatch import shifts_by_group
from dtprof.diagnosis.sources.recorded_ranks import NO_PAST, are_named, rank_state, spans_named
from dtprof.job.agreement import disagree
from dtprof.job.group_collectives import COMPARED, Numbers, compare_columns, mix
from dtprof.job.groups import GroupId, identify_groups
from dtprof.job.world_size import resolve_world_size
from dtprof.records import codes, events
from dtprof.records.manifest import Manifest
from dtprof.records.tables import Array, RankTables, join, select

BEFORE, AFTER = 1024, 512
"""Positions of a group on which is decided, around the first that differs."""
MAX_KEPT, MIN_KEPT = 131_072, 2048
"""Operations that are kept to decide on: of all ranks together, and of each."""
MAX_OPEN = 262_144
"""Sequence numbers that wait for members to reach them; beyond, the oldest are not compared."""
SETTLING = 16
"""Positions after the first whose line or step differs, before it is decided whether ranks are out of step."""
MAX_WAYS = 1024
"""In which lines and steps of a group's ranks may differ; beyond, they have no order to find a fault in."""
MAX_DOUBLINGS = 12
"""Of the positions between decisions that find nothing."""
POSITION = np.dtype([*COMPARED.descr, ("key", "u8"), ("rank", "i4")])
"""A collective of a rank; the key is the number of its group and its position in it."""
SEQ_BITS = np.uint64(40)
_OPEN = np.dtype([*POSITION.descr, ("come", "i4"), ("poll", "i4"), ("differs", "?"), ("complete", "?")])
_LATEST = np.iinfo(np.int64).max


@dataclass
class _Rank:
    """One rank: its newest records, and the number of each of its groups."""

    tables: RankTables
    numbers: npt.NDArray[np.int64]  # by key of the tables; -1: nothing to compare
    steppers: npt.NDArray[np.integer]


@dataclass
class _Group:
    """The state of the comparison of one group."""

    key: GroupId
    newest: int = -1  # position that can be decided on: all members of this host have come to it
    differs_at: int = _LATEST  # the first position with other arguments
    looks_from: int = 0  # the first position whose arguments count
    fruitless: int = 0  # decisions on arguments that go together after all
    ways: dict[int, int] = field(default_factory=dict)  # how lines and steps differ, and first where; -1: by right
    ways_due: int = 0  # the position at which the next decision on them is due
    ways_fruitless: int = 0
    closed: bool = False

    def first_due(self, *, is_last: bool) -> int | None:
        """Return the first position that can be decided on."""
        first = self.differs_at
        if is_last or self.newest >= self.ways_due:
            settled = self.newest if is_last else self.newest - SETTLING
            first = min([first, *(seq for seq in self.ways.values() if 0 <= seq <= settled)])
        return first if first != _LATEST else None

    def decided(self) -> None:
        """Take what was decided on as right: what is new counts, each time after more positions."""
        settled = {way for way, seq in self.ways.items() if 0 <= seq <= self.newest - SETTLING}
        if settled:
            self.ways |= dict.fromkeys(settled, -1)
            self.ways_due = self.newest + (SETTLING << self.ways_fruitless)
            self.ways_fruitless = min(self.ways_fruitless + 1, MAX_DOUBLINGS)
        if self.differs_at != _LATEST:
            self.looks_from = self.newest + (1 << self.fruitless)
            self.fruitless = min(self.fruitless + 1, MAX_DOUBLINGS)
            self.differs_at = _LATEST


class LiveComparison:
    """Compares the ranks of one host; reports each group once."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._begin(-1)

    def take(self, grown: Iterable[RankTables], *, is_last: bool = False) -> list[Finding]:
        """Add the operations that have settled since the last call, by rank; return newly detected mismatches."""
        grown = list(grown)
        attempt = max((tables.attempt for tables in grown), default=-1)
        if attempt > self._attempt:
            self._begin(attempt)
        self._polls += 1
        new = [(self._add(tables), tables.operations) for tables in grown if tables.attempt == self._attempt]
        for rank, rows in new:
            self._compare(self._positions(rank, rows))
        self._complete(is_last=is_last)
        mismatches = self._decide(is_last=is_last)
        self._trim()
        return mismatches

    def _begin(self, attempt: int) -> None:
        """Forget an attempt when its ranks are restarted: positions count from 0 again."""
        self._attempt, self._polls = attempt, 0
        self._ranks: dict[int, _Rank] = {}
        self._groups: list[_Group] = []
        self._numbers: dict[GroupId, int] = {}
        self._here: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # members of each group on this host
        self._seen = 0
        self._open: Array = np.zeros(0, _OPEN)
        self._out_of_step: set[tuple[int, ...]] = set()

    def _add(self, tables: RankTables) -> _Rank:
        known = self._ranks.get(tables.rank)
        before = [known.tables] if known is not None else []
        operations = join([part.operations for part in (*before, tables)])
        spans = join([part.spans for part in (*before, tables)])
        steppers = np.unique(spans_named(tables, spans, events.STEP, events.OPTIMIZER)["thread"])
        marks = spans_named(tables, spans, events.STEP)
        _, at = np.unique(marks["thread"], return_index=True)
        spans = join([marks[at], spans_named(tables, spans, events.FORWARD, events.OPTIMIZER)])
        numbers = known.numbers if known is not None else np.zeros(0, np.int64)
        if known is None or known.tables.groups is not tables.groups:
            numbers = self._number(tables)
        past = known.tables.past if known is not None else tables.past
        merged = replace(tables, operations=operations, spans=spans, samples=tables.samples[:0], past=past)
        self._ranks[tables.rank] = rank = _Rank(tables=merged, numbers=numbers, steppers=steppers)
        return rank

    def _number(self, tables: RankTables) -> npt.NDArray[np.int64]:
        """Return a number for each group of a rank that is the same for all ranks."""
        keys = identify_groups(tables.groups)
        numbers = np.full(max(keys, default=0) + 1, -1, np.int64)
        for group_id, key in keys.items():
            if len(key.ranks) < 2:
                continue
            if key not in self._numbers:
                self._numbers[key] = len(self._groups)
                self._groups.append(_Group(key=key))
            numbers[group_id] = self._numbers[key]
        return numbers

    def _positions(self, rank: _Rank, rows: Array) -> Array:
        """Return the compared columns of a rank's new operations."""
        rows = select(rows, rows["op"] < len(rank.tables.ops))
        rows = select(rows, rows["kind"] != codes.POINT_TO_POINT)
        groups = _numbered(rank, rows)
        # A call that was refused takes no position in the backend: those after it cannot be counted from here.
        for number in distinct(groups[(rows["state"] == codes.FAILED) & (groups >= 0)]).tolist():
            self._groups[number].closed = True
        compared = np.array([not group.closed for group in self._groups] + [False])[groups]
        table = compare_columns(select(rows, compared), rank.tables, POSITION, steppers=rank.steppers)
        table["key"] = (groups[compared].astype(np.uint64) << SEQ_BITS) | table["seq"].astype(np.uint64)
        table["step"][~table["in_step"]] = 0  # other threads keep no pace with steps
        table["rank"] = rank.tables.rank
        return select(table, np.argsort(table["key"], kind="stable"))

    def _compare(self, rows: Array) -> None:
        """Compare the positions of a rank with those of the first rank that came to them."""
        at = np.searchsorted(self._open["key"], rows["key"])
        met = np.zeros(len(rows), bool)
        inside = at < len(self._open)
        met[inside] = self._open["key"][at[inside]] == rows["key"][inside]
        at, mine = at[met], rows[met]
        first = self._open[at]
        self._open["differs"][at] |= disagree(first, mine)
        self._open["balance"][at] += mine["balance"]
        self._open["come"][at] += 1
        self._note_ways(_ways_of(first, mine), mine)
        if met.all():
            return
        fresh = np.zeros(int((~met).sum()), _OPEN)
        for name in POSITION.names or ():
            fresh[name] = rows[name][~met]
        fresh["come"], fresh["poll"] = 1, self._polls
        self._open = join([self._open, fresh])
        self._open = select(self._open, np.argsort(self._open["key"], kind="stable"))

    def _note_ways(self, ways: Numbers, rows: Array) -> None:
        ways, at = np.unique(ways, return_index=True)
        for way, number, seq in zip(
            ways.tolist(), _groups_of(rows[at]).tolist(), rows["seq"][at].tolist(), strict=True
        ):
            group = self._groups[number]
            if way and len(group.ways) < MAX_WAYS:
                group.ways.setdefault(way, seq)

    def _complete(self, *, is_last: bool) -> None:
        """Take the sequence numbers that all local members have reached; keep them for one poll: a read may lag."""
        if len(self._here) != len(self._groups) or self._seen != len(self._ranks):  # groups may have many members
            self._seen = len(self._ranks)
            here = [sum(rank in self._ranks for rank in group.key.ranks) for group in self._groups]
            self._here = np.array(here, np.int64)
        whole = np.array([len(group.key.ranks) for group in self._groups], np.int64)
        groups = _groups_of(self._open)
        come = self._open["come"]
        complete = (come >= self._here[groups]) & (come > 1)
        differs = self._open["differs"] | ((come == whole[groups]) & (self._open["balance"] != 0))
        # Where members are elsewhere, or not seen yet, a poll more: one of this host may be among them.
        decidable = (come == whole[groups]) | (complete & self._open["complete"]) | (is_last & (come > 1))
        seqs = self._open["seq"]
        newest = np.full(len(self._groups), -1, np.int64)
        np.maximum.at(newest, groups[decidable], seqs[decidable])
        for number in np.flatnonzero(newest >= 0).tolist():
            self._groups[number].newest = max(self._groups[number].newest, int(newest[number]))
        for at in np.flatnonzero(differs & decidable).tolist():
            group = self._groups[int(groups[at])]
            if int(seqs[at]) >= group.looks_from:
                group.differs_at = min(group.differs_at, int(seqs[at]))
        closed = np.array([group.closed for group in self._groups], bool)
        undecided = ~(complete & self._open["complete"]) & ~closed[groups]
        self._open["complete"] = complete
        self._open = select(self._open, undecided)
        if len(self._open) > MAX_OPEN:
            newest_first = np.argsort(-self._open["poll"], kind="stable")
            self._open = select(self._open, np.sort(newest_first[:MAX_OPEN]))

    def _decide(self, *, is_last: bool) -> list[Finding]:
        """Apply the rules of finished runs to the records around the first positions that are due."""
        due = {
            number: first
            for number, group in enumerate(self._groups)
            if not group.closed and (first := group.first_due(is_last=is_last)) is not None
        }
        if not due:
            return []
        begin = np.full(len(self._groups) + 1, _LATEST)  # the last stands for no group
        for number, first in due.items():
            begin[number] = max(0, first - BEFORE)
        near = [tables for rank in self._ranks.values() if len((tables := _around(rank, begin)).operations)]
        job = with_common_callers(
            assemble_job(
                [rank_state(tables, exit=None, stack=None, alive=True) for tables in near],
                world_size=resolve_world_size((tables.world_size for tables in near), (tables.rank for tables in near)),
                manifest=Manifest(),
                stalled=False,
                stopped_on_hang_ns=None,
            )
        )
        for number in due:
            self._groups[number].decided()
        findings = shifts_by_group(job) | mismatches_by_group(Case(job))
        in_order = sorted(findings.items(), key=lambda item: item[1].step or 0)
        return [finding for group, finding in in_order if self._is_new(finding, group)]

    def _is_new(self, finding: Finding, group: GroupId) -> bool:
        """Say whether this is newly detected, and close its group."""
        self._groups[self._numbers[group]].closed = True
        if finding.kind != "step-mismatch":
            return True
        # A rank that is out of step is so in all its groups.
        was_in_step = finding.culprit_ranks not in self._out_of_step
        self._out_of_step.add(finding.culprit_ranks)
        return was_in_step

    def _trim(self) -> None:
        """Let go of the oldest records."""
        limit = max(MIN_KEPT, MAX_KEPT // max(1, len(self._ranks)))
        for rank in self._ranks.values():
            rows = rank.tables.operations
            if len(rows) > limit:  # a copy: a view would keep the whole
                rank.tables = replace(rank.tables, operations=rows[-limit:].copy())
            rank.tables = _without_early_spans(rank.tables, most=limit)


def _without_early_spans(tables: RankTables, *, most: int) -> RankTables:
    """Return the tables with forward passes and optimizer steps before the operations counted, and all but the newest.

    One of either is left, which tells the thread.
    """
    oldest_ns = int(tables.operations["issued_ns"][0]) if len(tables.operations) else 0
    past, early = tables.past or NO_PAST, []
    for name, counter in ((events.FORWARD, "forwards"), (events.OPTIMIZER, "updates")):
        at = np.flatnonzero(are_named(tables, tables.spans, name))
        num = max(int(np.count_nonzero(tables.spans["begin_ns"][at] < oldest_ns)), len(at) - most)
        early.append(at[: max(0, min(num, len(at) - 1))])
        past = replace(past, **{counter: getattr(past, counter) + len(early[-1])})
    if not any(map(len, early)):
        return tables
    return replace(tables, spans=np.delete(tables.spans, np.concatenate(early)), past=past)


def _groups_of(rows: Array) -> npt.NDArray[np.int64]:
    """Return the number of the group of each position."""
    return (rows["key"] >> SEQ_BITS).astype(np.int64)


def _ways_of(a: Array, b: Array) -> Numbers:
    """Return one number for how lines and steps of the same positions of two ranks differ; 0 where they do not.

    A program may differ in lines by rank, and in steps by a constant: it differs in few ways, then, again and again.
    """
    ahead = b["step"] - a["step"]
    number = mix(_groups_of(a), a["rank"], b["rank"], a["line"], b["line"], ahead) | np.uint64(1)
    return np.where((a["line"] != b["line"]) | (ahead != 0), number, np.uint64(0))


def _numbered(rank: _Rank, rows: Array) -> npt.NDArray[np.int64]:
    """Return the number of the group of each row; -1 where there is none."""
    last = len(rank.numbers) - 1
    return np.where(rows["group"] <= last, rank.numbers[np.minimum(rows["group"], last)], -1)


def _around(rank: _Rank, begin: npt.NDArray[np.int64]) -> RankTables:
    """Return the rank with the collectives of some groups only, from a position of each on."""
    rows = rank.tables.operations
    first = begin[_numbered(rank, rows)]
    near = (rows["seq"] >= first) & (rows["seq"] - first < BEFORE + AFTER) & (rows["kind"] != codes.POINT_TO_POINT)
    return replace(rank.tables, operations=select(rows, near))
