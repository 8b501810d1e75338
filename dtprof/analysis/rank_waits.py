"""What one rank worked and for whom it waited, by bin of steps: what stragglers are found from."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.blocking import Blocked
from dtprof.analysis.intervals import Column, Intervals, share_out, union
from dtprof.analysis.operation_timing import EXACT, Timing
from dtprof.analysis.phases import ORDER

WORK = (*ORDER, "other")


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """Work and waits of one rank in the used steps, by bin of steps."""

    rank: int
    steps: Column  # of the used steps in the bin, how many this rank has
    work: Column  # ns neither waiting nor blocked by a transfer
    blocked: Column  # the rest of these steps
    unclear: Column  # of it waits for nobody knows whom
    phases: Column  # the same over all bins by WORK
    bins: Column  # one row a bin and culprit
    culprits: Column
    waited: Column

    def by_culprit(self) -> dict[int, int]:
        """Return how long it waited for each rank, a step."""
        ranks, place = np.unique(self.culprits, return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, place.reshape(-1), self.waited)
        num_steps = max(1, int(self.steps.sum()))
        return dict(zip(ranks.tolist(), (sums // num_steps).tolist(), strict=True))


def collect_waits(
    rank: int,
    *,
    timing: Timing,
    blocked: Blocked,
    stretches: tuple[Intervals, Intervals],
    phases: Mapping[str, Intervals],
    steps: tuple[Column, Intervals],
    step: Column,
    width: int,
) -> RankWaits:
    """Return what one rank worked and for whom it waited.

    Parameters:
        stretches: blocked by waits and by transfers, as `split_blocked` returns them.
        steps: how many steps after the first used one each window lies, and the windows.
        step: the same of each operation, -1 outside the used steps.
        width: steps a bin.
    """
    numbers, windows = steps
    shares = share_out([union(np.concatenate(stretches)), *(phases[phase] for phase in ORDER)], windows)
    num_bins = int(numbers.max(initial=-1)) // width + 1
    in_bin = numbers // width
    work, blocked_ns = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    np.add.at(work, in_bin, shares[:, 1:].sum(axis=1))
    np.add.at(blocked_ns, in_bin, shares[:, 0])
    waited = timing.exposed_wait
    waits = (step >= 0) & blocked.counts & (waited > 0)
    clear = (timing.source == EXACT) & (timing.culprit >= 0)
    unclear = np.bincount(step[waits & ~clear] // width, waited[waits & ~clear], num_bins).astype(np.int64)
    counts = waits & clear & (timing.culprit != rank)
    key = (step[counts] // width) << 32 | timing.culprit[counts]
    keys, place = np.unique(key, return_inverse=True)
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, place, waited[counts])
    return RankWaits(
        rank=rank,
        steps=np.bincount(in_bin, minlength=num_bins),
        work=work,
        blocked=blocked_ns,
        unclear=unclear,
        phases=shares[:, 1:].sum(axis=0),
        bins=keys >> 32,
        culprits=keys & 0xFFFFFFFF,
        waited=sums,
    )
