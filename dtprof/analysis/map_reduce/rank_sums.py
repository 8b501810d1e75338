"""The second pass over ranks: sums over the measured steps of each, given the collective instances of all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.communication.bucket_reductions import BucketSums, sum_buckets
from dtprof.analysis.communication.collective_table import RowKey, add_rows, sum_rows
from dtprof.analysis.communication.communication_sites import SiteKey, add_sites, sum_sites
from dtprof.analysis.communication.dropped_operations import sum_dropped
from dtprof.analysis.communication.exchange_balance import find_exchanges
from dtprof.analysis.communication.operation_timing import ESTIMATED, NOT_KNOWN, Timing
from dtprof.analysis.communication.serialised_collectives import SerialKey, SerialSums, find_rows
from dtprof.analysis.communication.traffic import Tallies
from dtprof.analysis.critical_path.longest_path import RankPath, collect_paths
from dtprof.analysis.map_reduce.blocked_steps import find_blocked_steps
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, SteppedRank, part_steps
from dtprof.analysis.memory.memory_growth import find_growth
from dtprof.analysis.results import MemoryGrowth
from dtprof.analysis.steps.part_bands import StepParts, add_parts, sum_parts
from dtprof.analysis.steps.phase_intervals import find_user_phases
from dtprof.analysis.steps.step_boundaries import MeasuredSteps
from dtprof.analysis.steps.step_partition import partition_phases, round_means, sum_steps
from dtprof.analysis.stragglers.rank_waits import RankWaits
from dtprof.analysis.timeline.step_timeline import RankBars, collect_bars
from dtprof.intervals import Column, Intervals, share_out
from dtprof.job.api_names import find_apis
from dtprof.job.clock_errors import ONE_CLOCK, ClockErrors
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array, RankTables, is_own


@dataclass(frozen=True, kw_only=True)
class RankReduction:
    """The second pass over one rank: sums over the measured steps."""

    rank: int
    num_steps: int
    steps_ns: int  # duration of all of them
    parts_ns: dict[str, int] | None  # None where no steps are measured, or completion is not observed
    newest_parts_ns: dict[str, int] | None  # of the last step alone
    all_phases_ns: dict[str, int]
    all_user_phases_ns: dict[str, int]
    num_events: int
    waits: RankWaits | None  # None where no steps are measured, or completion is not observed
    bars: RankBars | None
    unmatched: int  # operations that cannot be matched with other ranks'
    unobserved: int  # operations in the measured steps whose completion is not observed
    estimated: int  # operations whose arrival is an estimate
    not_known: int  # operations of several members whose arrival is not known
    mixed: int  # operations that were matched with an operation of another name
    path: RankPath | None = None  # for the critical path
    uncertain: int = 0  # operations whose wait is smaller than the error of the clocks
    impossible: int = 0  # operations that completed before the last rank had issued them
    most_impossible_ns: int = 0  # by so much at most
    clock_errors_ns: int = 0  # of the sums of exposed wait and exposed transfer, by the errors of the clocks
    serialised: dict[SerialKey, SerialSums] = field(default_factory=dict)
    buckets: dict[str, BucketSums] = field(default_factory=dict)  # by the name of the group
    exchanges: dict[GroupId, Array] = field(default_factory=dict)  # of exchange_balance.EXCHANGE, the newest
    memory_growth: MemoryGrowth | None = None

    @property
    def step_ns(self) -> int | None:
        """The mean duration of a step; None where no steps are measured, as all that follows."""
        return self.steps_ns // self.num_steps if self.num_steps else None

    @property
    def partition_ns(self) -> dict[str, int] | None:
        """The mean time a step of each part."""
        return round_means(self.parts_ns, self.num_steps) if self.parts_ns is not None else None

    @property
    def partition_error_ns(self) -> int | None:
        """The error that clocks add to the mean time a step of a part, rounded up; None where there are no parts."""
        return -(-self.clock_errors_ns // self.num_steps) if self.parts_ns is not None and self.num_steps else None

    @property
    def phases_ns(self) -> dict[str, int] | None:
        """The mean time a step of each phase."""
        return round_means(self.all_phases_ns, self.num_steps) if self.num_steps else None

    @property
    def user_phases_ns(self) -> dict[str, int] | None:
        """The mean time a step of each phase that the program named, to the ns below."""
        if not self.num_steps:
            return None
        return {name: total // self.num_steps for name, total in self.all_user_phases_ns.items()}

    @property
    def events_per_step(self) -> float | None:
        """Records of a step, on average."""
        return self.num_events / self.num_steps if self.num_steps else None


@dataclass(kw_only=True)
class Reductions:
    """The second pass over some ranks, and sums over them."""

    ranks: list[RankReduction] = field(default_factory=list)
    rows: dict[RowKey, Array] = field(default_factory=dict)
    dropped: dict[RowKey, Array] = field(default_factory=dict)  # of operations of which only sums are left
    sites: dict[SiteKey, Column] = field(default_factory=dict)  # by call site; empty without measured steps
    step_parts: StepParts | None = None  # None: no step of these ranks could be split
    lateness: Tallies = field(default_factory=dict)  # of the whole run, as far as it was asked for

    def join(self, others: "Reductions") -> None:
        """Take in other ranks."""
        self.ranks.extend(others.ranks)
        add_rows(self.rows, others.rows)
        add_rows(self.dropped, others.dropped)
        add_sites(self.sites, others.sites)
        self.step_parts = add_parts(self.step_parts, others.step_parts)


@dataclass(frozen=True, kw_only=True)
class ReductionLimits:
    """What is kept of each rank beside its sums, at most."""

    max_bars: int = 0  # of a step of the timeline; 0: it is not asked for
    max_hops: int = 0  # operations of the critical path; 0: it is not asked for
    steps_per_bin: int = 1  # of what is kept bin by bin


def reduce_ranks(
    batch: PlacedBatch,
    *,
    measured: MeasuredSteps,
    instances: OperationInstances,
    limits: ReductionLimits,
    errors: ClockErrors = ONE_CLOCK,
) -> tuple[Reductions, Timing]:
    """Sum up the measured steps of ranks; all records of a rank where no steps are measured. Return with it the timing.

    Parameters:
        errors: of the clocks of the ranks against each other.
    """
    blocked = find_blocked_steps(
        batch, measured=measured, instances=instances, width=limits.steps_per_bin, errors=errors
    )
    timing, step, chosen, seen = blocked.timing, blocked.step, blocked.chosen, blocked.seen
    apis = [find_apis(rank.placed.tables, rank.placed.operations) for rank in batch.ranks]
    nothing = [None] * len(batch.ranks)
    parts: dict[str, Column] = {}
    totals: Sequence[dict[str, int] | None] = nothing
    paths: Sequence[RankPath | None] = nothing
    # Where completions were not observed, waits are unknown, and a step cannot be split into parts.
    if any(seen):
        parts = part_steps(batch, blocked.stretches)
        totals = sum_steps(parts, batch.window_bounds)
        paths = (
            collect_paths(
                batch, timing, blocked.either, max_rows=limits.max_hops, num_steps=measured.last - measured.first + 1
            )
            if limits.max_hops
            else nothing
        )
    phases = sum_steps(partition_phases(batch.windows, batch.phases), batch.window_bounds)
    bars = collect_bars(batch, timing, limit=limits.max_bars) if limits.max_bars else nothing
    serialised = find_rows(batch, apis, chosen=chosen, timing=timing) if measured.known else [{} for _ in batch.ranks]
    buckets = (
        sum_buckets(batch, apis, step=step, chosen=chosen, timing=timing)
        if measured.known
        else [{} for _ in batch.ranks]
    )
    exchanges = find_exchanges(batch, step=step, chosen=chosen)
    most_impossible = np.zeros(len(batch.ranks), np.int64)
    if timing.impossible.any():
        np.maximum.at(most_impossible, batch.place, timing.impossible)
    counts = [
        batch.count(some)
        for some in (
            blocked.unobserved,
            chosen & (timing.source == ESTIMATED),
            chosen & (timing.source == NOT_KNOWN),
            timing.mixed & batch.is_own,
            chosen & timing.uncertain,
            chosen & (timing.impossible > 0),
        )
    ]
    clock_errors = np.bincount(batch.place[chosen], timing.clock_error[chosen], len(batch.ranks))
    ranks = []
    for i, one in enumerate(batch.ranks):
        tables, windows, num_steps = one.placed.tables, one.windows, len(one.windows)
        num_unobserved, estimated, not_known, mixed, uncertain, impossible = (own[i] for own in counts)
        ranks.append(
            RankReduction(
                rank=tables.rank,
                num_steps=num_steps,
                steps_ns=int((windows[:, 1] - windows[:, 0]).sum()),
                parts_ns=totals[i] if seen[i] else None,
                newest_parts_ns={part: int(ns[batch.window_bounds[i + 1] - 1]) for part, ns in parts.items()}
                if seen[i]
                else None,
                all_phases_ns=phases[i],
                all_user_phases_ns=_user_phases(one) if num_steps else {},
                num_events=_count_events(tables, windows) if num_steps else 0,
                waits=blocked.waits[i],
                path=paths[i] if seen[i] else None,
                bars=bars[i],
                unmatched=_count_unmatched(one),
                unobserved=num_unobserved,
                estimated=estimated,
                not_known=not_known,
                mixed=mixed,
                uncertain=uncertain,
                impossible=impossible,
                most_impossible_ns=int(most_impossible[i]),
                clock_errors_ns=int(clock_errors[i]),
                serialised=serialised[i],
                buckets=buckets[i],
                exchanges=exchanges[i],
                memory_growth=find_growth(tables, measured.first, measured.last),
            )
        )
    dropped: dict[RowKey, Array] = {}
    for one in batch.ranks:
        add_rows(dropped, sum_dropped(one.placed.tables))
    reductions = Reductions(
        ranks=ranks,
        rows=sum_rows(batch, apis, chosen=chosen, instances=instances, timing=timing),
        dropped=dropped,
        step_parts=sum_parts(parts, batch.numbers, np.array(seen, np.bool_)[batch.place_of_window]) if parts else None,
        sites=sum_sites(batch, apis, chosen=chosen, timing=timing) if measured.known else {},
    )
    return reductions, timing


def _count_unmatched(one: SteppedRank) -> int:
    """Return how many operations of a rank cannot be matched; of a range of steps its own."""
    placed = one.placed
    if placed.tables.own_steps is None:
        return placed.matched.unmatched
    unmatched = is_own(placed.tables, placed.operations)
    unmatched[placed.matched.every_row] = False
    return int(np.count_nonzero(unmatched))


def _user_phases(one: SteppedRank) -> dict[str, int]:
    """Return the time in each phase that the program named."""
    placed, windows = one.placed, one.windows
    return {
        name: int(share_out([intervals], windows)[:, 0].sum())
        for name, intervals in find_user_phases(placed.tables, placed.spans, placed.steps).items()
    }


def _count_events(tables: RankTables, windows: Intervals) -> int:
    count = 0
    for times in (tables.operations["issued_ns"], tables.spans["begin_ns"], tables.samples["t_ns"]):
        at = np.searchsorted(np.sort(times), windows)
        count += int((at[:, 1] - at[:, 0]).sum())
    return count
