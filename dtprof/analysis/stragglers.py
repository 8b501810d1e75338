"""Which ranks the others wait for, again and again, and what that costs.

The last rank to arrive at a collective owns the waits of the others; who was done with a broadcast before the last one
came waited for its root. Counted is the time in which the others' threads stood still before that arrival: waits of
several operations in flight together are one wait.
Only collectives whose members all left a record on one clock count, and no point-to-point messages: a pipeline's stages
wait for one another by design.

A rank is listed when all of these hold:
- its lag is at least MIN_COST of a step: what it cost each waiting rank, on average over the steps, less the mean of
  what the other ranks cost (ranks that take turns are no slower than one another);
- it was last in at least min(0.6, 2 / members) of the collectives in which somebody waited notably
  (MIN_WAIT of a step, 50 us at least);
- it was so in at least 3 steps, or in all where fewer are used: one bad step is an event.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.collectives import EXACT, Timing
from dtprof.analysis.intervals import Column, Mask
from dtprof.analysis.meetings import Family, Matched, Meetings
from dtprof.analysis.results import StragglerResult

MIN_COST = 0.05
MIN_WAIT = 0.01
MIN_WAIT_NS = 50_000
MIN_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """What one rank lost in the used steps, by family and position in it."""

    seqs: dict[Family, Column]
    step: dict[Family, Column]
    for_last: dict[Family, Column]  # until the last rank arrived
    for_root: dict[Family, Column]  # until the root arrived


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The same summed over ranks, one row a meeting; -1 in `step` for what lies outside the used steps."""

    step: dict[Family, Column] = field(default_factory=dict)
    for_last: dict[Family, Column] = field(default_factory=dict)
    for_root: dict[Family, Column] = field(default_factory=dict)

    def add(self, rank: RankWaits, meetings: Meetings) -> None:
        """Take in the waits of one more rank."""
        for family, seqs in rank.seqs.items():
            table = meetings.tables[family]
            at = np.searchsorted(table["seq"], seqs)
            if family not in self.step:
                self.step[family] = np.full(len(table), -1, np.int64)
                self.for_last[family] = np.zeros(len(table), np.int64)
            self.step[family][at] = np.maximum(self.step[family][at], rank.step[family])
            self.for_last[family][at] += rank.for_last[family]
            if family in rank.for_root:
                self.for_root.setdefault(family, np.zeros(len(table), np.int64))[at] += rank.for_root[family]


def collect_waits(matched: Matched, timing: Timing, step: Column) -> RankWaits:
    """Return what one rank waited for others, and in which step it issued each operation."""
    waits = RankWaits(seqs={}, step={}, for_last={}, for_root={})
    for family, rows in matched.rows.items():
        if family.is_p2p or family.members < 2:
            continue
        counts = (timing.source[rows] == EXACT) & (step[rows] >= 0)
        if not counts.any():
            continue
        waits.seqs[family], rows = matched.seqs[family][counts], rows[counts]
        waits.step[family] = step[rows]
        waited, for_root = timing.exposed_wait[rows], timing.for_root[rows]
        waits.for_last[family] = np.where(for_root, 0, waited)
        if for_root.any():
            waits.for_root[family] = np.where(for_root, waited, 0)
    return waits


@dataclass
class _Record:
    """What is held against one rank."""

    blame_ns: int = 0  # sum of the waits of all others
    delay_ns: float = 0.0  # their mean over the waiting ranks, summed
    last: int = 0
    notable: int = 0
    steps: set[int] = field(default_factory=set)
    members: int = 2


def find_stragglers(meetings: Meetings, waits: Waits, *, num_steps: int, step_ns: int) -> tuple[StragglerResult, ...]:
    """Return the ranks that the others waited for notably, the costliest first."""
    records: dict[int, _Record] = defaultdict(_Record)
    threshold = max(MIN_WAIT_NS, int(MIN_WAIT * step_ns))
    for family, step in waits.step.items():
        used = step >= 0
        for waited, culprit, arrival in (
            (waits.for_last.get(family), "last_rank", "last_start"),
            (waits.for_root.get(family), "root_rank", "root_start"),
        ):
            if waited is not None:
                met = meetings.tables[family][used]
                late_ns = met[arrival] - met["first_start"]
                notable = (late_ns >= threshold) & (waited[used] > 0)
                _judge(records, family, met[culprit], waited[used], step[used], notable)
    results = []
    cost_of_all = sum(record.delay_ns for record in records.values())
    for rank, record in records.items():
        cost_of_others = (cost_of_all - record.delay_ns) / max(1, len(records) - 1)
        lag = int(record.delay_ns - cost_of_others) // num_steps
        share = record.last / record.notable if record.notable else 0.0
        recurs = len(record.steps) >= min(MIN_STEPS, num_steps)
        if lag >= MIN_COST * step_ns and share >= min(0.6, 2 / record.members) and recurs:
            results.append(
                StragglerResult(
                    rank=rank,
                    last_share=share,
                    slowdown=step_ns / (step_ns - lag) if lag < step_ns else None,
                    blame_ns_per_step=record.blame_ns // num_steps,
                )
            )
    return tuple(sorted(results, key=lambda result: (-(result.blame_ns_per_step or 0), result.rank)))


def _judge(
    records: dict[int, _Record], family: Family, culprit: Column, waited: Column, step: Column, notable: Mask
) -> None:
    """Put the waits of one family on the account of those who caused them."""
    for rank in family.ranks or np.unique(culprit).tolist():
        records[rank].notable += int(notable.sum())
    for rank in np.unique(culprit[waited > 0]).tolist():
        own = culprit == rank
        record = records[rank]
        record.blame_ns += int(waited[own].sum())
        record.delay_ns += int(waited[own].sum()) / (family.members - 1)
        record.last += int((own & notable).sum())
        record.steps.update(step[own & notable].tolist())
        record.members = max(record.members, family.members)
