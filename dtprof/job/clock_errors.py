"""By how much the clocks of two ranks may be apart once they are aligned."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dtprof.columns import distinct
from dtprof.intervals import Column


@dataclass(frozen=True, kw_only=True)
class ClockErrors:
    """By how much the clocks of two ranks may be apart."""

    clock: Column  # of each rank from 0 on, -1 not known
    error_ns: Column  # of each clock

    def between(self, ranks: Column, others: Column) -> Column:
        """Return the error between each of these ranks and the other one beside it; 0 on one clock."""
        if len(self.error_ns) < 2 or not len(self.clock):
            return np.zeros(len(others), np.int64)
        mine, theirs = self._clock_of(ranks), self._clock_of(others)
        error = self.error_ns[theirs] + self.error_ns[mine]
        return np.where((theirs >= 0) & (theirs != mine) & (mine >= 0), error, 0)

    def within(self, ranks: Iterable[int]) -> int:
        """Return the largest error between any two of these ranks; 0 where they share one clock."""
        if len(self.error_ns) < 2 or not len(self.clock):
            return 0
        clocks = distinct(self._clock_of(np.fromiter(ranks, np.int64)))
        known = clocks[clocks >= 0]
        return int(np.sort(self.error_ns[known])[-2:].sum()) if len(known) > 1 else 0

    def _clock_of(self, ranks: Column) -> Column:
        known = (ranks >= 0) & (ranks < len(self.clock))
        return np.where(known, self.clock[np.where(known, ranks, 0)], -1)


ONE_CLOCK = ClockErrors(clock=np.zeros(0, np.int64), error_ns=np.zeros(0, np.int64))
"""Of a run on one host."""
