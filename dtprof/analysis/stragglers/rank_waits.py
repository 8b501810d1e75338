"""Work of one rank and its waits by peer, by bin of steps: the input of the straggler analysis."""

from dataclasses import dataclass, replace

import numpy as np

from dtprof.analysis.communication.operation_timing import EXACT, Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.intervals import Column, Intervals, share_out

WORK = (*ORDER, "other")


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """Work and waits of one rank in the measured steps, by bin of steps."""

    rank: int
    steps: Column  # of the measured steps in the bin, how many this rank has
    work: Column  # ns neither waiting nor blocked by a transfer
    blocked: Column  # the rest of these steps
    unclear: Column  # of it waits for nobody knows whom
    phases: Column  # the same over all bins by WORK
    bins: Column  # one row a bin and culprit
    culprits: Column
    waited: Column

    def since(self, first: int) -> "RankWaits":
        """Return the same with bins that count from this one, before which there is nothing."""
        columns = {name: getattr(self, name)[first:] for name in ("steps", "work", "blocked", "unclear")}
        return replace(self, bins=self.bins - first, **columns)

    def by_culprit(self) -> dict[int, int]:
        """Return how long it waited for each rank, a step."""
        ranks, place = np.unique(self.culprits, return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, place.reshape(-1), self.waited)
        num_steps = max(1, int(self.steps.sum()))
        return dict(zip(ranks.tolist(), (sums // num_steps).tolist(), strict=True))


def collect_waits(
    batch: PlacedBatch, *, timing: Timing, stretches: Intervals, first: int, step: Column, width: int
) -> list[RankWaits]:
    """Return the work of each rank and its waits by peer.

    Parameters:
        stretches: blocked by waits or transfers, on the axis.
        first: the first measured step.
        step: how many steps after that each operation lies, -1 outside the measured steps.
        width: steps a bin.
    """
    shares = share_out([stretches, *(batch.phases[phase] for phase in ORDER)], batch.windows)
    numbers, place = batch.numbers - first, batch.place_of_window
    num_bins = int(numbers.max(initial=-1)) // width + 1
    num_cells = num_bins * len(batch.ranks)  # those of one rank follow those of another
    cell = place * num_bins + numbers // width
    work, blocked = np.zeros(num_cells, np.int64), np.zeros(num_cells, np.int64)
    np.add.at(work, cell, shares[:, 1:].sum(axis=1))
    np.add.at(blocked, cell, shares[:, 0])
    phases = np.zeros((len(batch.ranks), len(WORK)), np.int64)
    np.add.at(phases, place, shares[:, 1:])
    steps = np.bincount(cell, minlength=num_cells)
    waited, culprit = timing.exposed_wait, timing.culprit
    waits = (step >= 0) & batch.blocked.counts & (waited > 0)
    clear = (timing.source == EXACT) & (culprit >= 0)
    not_clear = waits & ~clear
    cell_of = (batch.place[not_clear] * num_bins) + step[not_clear] // width
    unclear = np.bincount(cell_of, waited[not_clear], num_cells).astype(np.int64)
    counts = waits & clear & (culprit != batch.rank_of_operation)
    cell_of = (batch.place[counts] * num_bins) + step[counts] // width
    keys, at = np.unique(cell_of << 32 | culprit[counts], return_inverse=True)
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, at, waited[counts])
    cells, culprits = keys >> 32, keys & 0xFFFFFFFF
    ends = np.searchsorted(cells, np.arange(1, len(batch.ranks) + 1) * num_bins).tolist()
    rank_waits = []
    for i, (rank, begin, end) in enumerate(zip(batch.ranks, [0, *ends], ends, strict=False)):
        own_bins = (int(rank.numbers.max(initial=first - 1)) - first) // width + 1
        rank_bins = slice(i * num_bins, i * num_bins + own_bins)
        rank_waits.append(
            RankWaits(
                rank=rank.placed.tables.rank,
                steps=steps[rank_bins],
                work=work[rank_bins],
                blocked=blocked[rank_bins],
                unclear=unclear[rank_bins],
                phases=phases[i],
                bins=cells[begin:end] - i * num_bins,
                culprits=culprits[begin:end],
                waited=sums[begin:end],
            )
        )
    return rank_waits
