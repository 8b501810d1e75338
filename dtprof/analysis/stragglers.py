"""Which ranks the others wait for, again and again, and what that costs.

The last rank to arrive at a collective owns the waits of the others (from a root: the root). Counted is the time in
which the others' threads stood still before it arrived: waits of several operations in flight together are one wait.
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

from dtprof.analysis.collectives import EXACT, FROM_ROOT, Timing
from dtprof.analysis.intervals import Column
from dtprof.analysis.meetings import Family, Matched, Meetings
from dtprof.analysis.results import StragglerResult
from dtprof.tables import Array

MIN_COST = 0.05
MIN_WAIT = 0.01
MIN_WAIT_NS = 50_000
MIN_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """What one rank lost in each family, by position in it; -1 in `step` for what lies outside the used steps."""

    seqs: dict[Family, Column]
    waited: dict[Family, Column]
    step: dict[Family, Column]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The same over all ranks, one row a meeting."""

    waited: dict[Family, Column] = field(default_factory=dict)
    step: dict[Family, Column] = field(default_factory=dict)

    def add(self, rank: RankWaits, meetings: Meetings) -> None:
        """Take in the waits of one more rank."""
        for family, waited in rank.waited.items():
            table = meetings.tables[family]
            if family not in self.waited:
                self.waited[family] = np.zeros(len(table), np.int64)
                self.step[family] = np.full(len(table), -1, np.int64)
            at = np.searchsorted(table["seq"], rank.seqs[family])
            self.waited[family][at] += waited
            self.step[family][at] = np.maximum(self.step[family][at], rank.step[family])


def collect_waits(matched: Matched, timing: Timing, step: Column) -> RankWaits:
    """Return what one rank waited for others, and in which step it issued each operation."""
    seqs, waited, steps = {}, {}, {}
    for family, rows in matched.rows.items():
        if family.is_p2p or family.members < 2:
            continue
        counts = (timing.source[rows] == EXACT) & (step[rows] >= 0)
        if counts.any():
            seqs[family] = matched.seqs[family][counts]
            waited[family] = timing.exposed_wait[rows][counts]
            steps[family] = step[rows][counts]
    return RankWaits(seqs=seqs, waited=waited, step=steps)


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
    for family, waited in waits.waited.items():
        table, step = meetings.tables[family], waits.step[family]
        used = step >= 0
        _judge(records, family, meetings, table[used], waited[used], step[used], threshold)
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
    records: dict[int, _Record],
    family: Family,
    meetings: Meetings,
    table: Array,
    waited: Column,
    step: Column,
    threshold: int,
) -> None:
    """Put the waits of one family on the account of those who were last."""
    from_root = np.isin(table["op"], [i for i, op in enumerate(meetings.ops.names) if op in FROM_ROOT])
    from_root &= table["root_start"] >= 0
    culprit = np.where(from_root, table["root_rank"], table["last_rank"])
    arrival = np.where(from_root, table["root_start"], table["last_start"])
    notable = (arrival - table["first_start"] >= threshold) & (waited > 0)
    members = family.ranks or tuple(int(rank) for rank in np.unique(culprit))
    for rank in members:
        records[rank].notable += int(notable.sum())
    for rank in np.unique(culprit[waited > 0]).tolist():
        own = culprit == rank
        record = records[rank]
        record.blame_ns += int(waited[own].sum())
        record.delay_ns += int(waited[own].sum()) / (family.members - 1)
        record.last += int((own & notable).sum())
        record.steps.update(step[own & notable].tolist())
        record.members = max(record.members, family.members)
