"""Tokens and samples that the job consumes, counted as steps end, by the rules of `analysis.steps.throughput`.

Ranks that work on the same tokens may be on several nodes: the node of the lowest of them counts, so that nodes add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.steps.throughput import samples_of
from dtprof.intervals import Column
from dtprof.job.axes import SAME_SAMPLES, SAME_TOKENS, find_replicas
from dtprof.records import events
from dtprof.records.tables import Group, RankTables


def _nothing() -> Column:
    return np.zeros(len(events.CONSUMED), np.int64)


@dataclass
class Consumed:
    """Consumption of one rank: tokens and samples, in the order of events.CONSUMED."""

    totals: Column = field(default_factory=_nothing)
    shared: frozenset[Group] = frozenset()  # groups whose ranks may consume the same
    _a_step: Column = field(default_factory=_nothing)  # as last sampled

    def know(self, groups: Iterable[Group]) -> None:
        """Take in the groups that the rank knows."""
        self.shared = frozenset(group for group in groups if group.axis in SAME_SAMPLES)

    def add(self, tables: RankTables, ends: Sequence[int]) -> None:
        """Add samples, and steps that ended at these times: each consumed the last sampled amount."""
        for place, name in enumerate(events.CONSUMED):
            rows = samples_of(tables, name)
            held = np.concatenate((self._a_step[place : place + 1], rows["value"]))
            self.totals[place] += held[np.searchsorted(rows["t_ns"], ends, "right")].sum()
            self._a_step[place] = held[-1]


def sum_consumed(consumed: Mapping[int, Consumed]) -> Column:
    """Return the tokens and samples that count on this node, of its ranks in one attempt."""
    total, shared = _nothing(), frozenset[Group]().union(*(own.shared for own in consumed.values()))
    for place, axes in enumerate((SAME_TOKENS, SAME_SAMPLES)):
        everyone = {rank for group in shared if group.axis in axes for rank in group.ranks} | consumed.keys()
        for replica in find_replicas(everyone, shared, axes):
            if replica[0] in consumed:
                total[place] += max(int(consumed[rank].totals[place]) for rank in replica if rank in consumed)
    return total
