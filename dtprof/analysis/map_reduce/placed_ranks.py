"""Batches of ranks for the second pass: their operations, blocked time and measured steps.

Column operations run once per batch, because with few records per rank the calls cost more than the work; a rank with
many operations is a batch of its own. Rows of one rank follow those of the rank before, with their own times. Intervals
are shifted onto one time axis on which ranks do not overlap, so that one sweep gives the same result as one per rank.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.blocked_time import Blocked, find_blocked
from dtprof.analysis.communication.operation_timing import Timing, time_operations
from dtprof.analysis.pipeline.bubbles import find_actions
from dtprof.analysis.steps.phase_intervals import BUSY, find_phases
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.analysis.steps.step_partition import partition_steps
from dtprof.intervals import NONE, Column, Intervals, Mask, subtract, union
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import MatchedOperations, OperationInstances, match_operations
from dtprof.job.rank_batches import MAX_AXIS_NS, RankBatch, batch_in_turn, lay_out
from dtprof.records.tables import Array, RankTables, is_own, join

MAX_ROWS = 1 << 14
"""Operations of a batch at most: columns of this length stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class PlacedRank:
    """One rank with its operations; `blocked` has a row for each of `operations`."""

    tables: RankTables
    steps: RankSteps
    operations: Array  # those whose times can be
    spans: Array
    phases: dict[str, Intervals]
    matched: MatchedOperations
    blocked: Blocked


@dataclass(frozen=True, kw_only=True)
class RankTiming(PlacedRank):
    """One rank with the wait and transfer of its operations; `timing` has a row for each of `operations`."""

    timing: Timing


@dataclass(frozen=True, kw_only=True)
class SteppedRank:
    """One rank and its measured steps."""

    placed: PlacedRank
    numbers: Column
    windows: Intervals
    pipeline_windows: Intervals
    actions: Intervals  # of pipeline stages; none without such windows

    @functools.cached_property
    def extent(self) -> tuple[int, int]:
        """The first and the last time of any of its intervals."""
        placed = self.placed
        every = (placed.blocked.call, placed.blocked.wait, self.windows, self.pipeline_windows, self.actions)
        some = [intervals for intervals in (*every, *placed.phases.values()) if len(intervals)]
        if not some:
            return 0, 0
        return min(int(one[:, 0].min()) for one in some), max(int(one[:, 1].max()) for one in some)


@dataclass(frozen=True, kw_only=True)
class PlacedBatch:
    """Several ranks; the rows of `blocked` are those of `operations`."""

    ranks: Sequence[SteppedRank]
    shifts: Column  # of each rank: where its time 0 lies on the axis
    begins: Column  # of each rank: where its stretch of the axis begins
    operations: Array
    place: Column  # of each operation: the position of its rank
    bounds: list[int]  # where the operations of each rank begin, and the end of the last
    matched: MatchedOperations
    place_of_channel: Column  # the position of the rank of each channel of `matched`
    instance_rows: Array  # the instance of each row of `matched`
    blocked: Blocked
    phases: dict[str, Intervals]  # on the axis
    numbers: Column  # of the measured steps
    windows: Intervals  # of them, on the axis
    pipeline_windows: Intervals  # on the axis
    window_bounds: list[int]  # where the measured steps of each rank begin, and the end of the last

    @functools.cached_property
    def rank_of_operation(self) -> Column:
        """The rank of each operation."""
        return np.repeat([rank.placed.tables.rank for rank in self.ranks], np.diff(self.bounds))

    @functools.cached_property
    def device_error_of_operation(self) -> Column:
        """By how much the time of each operation may be apart from that of another device; 0 without a device."""
        errors = [2 * (rank.placed.tables.device_error_ns or 0) for rank in self.ranks]
        return np.repeat(errors, np.diff(self.bounds))

    @functools.cached_property
    def shift_of_operation(self) -> Column:
        """The shift of the times of each operation onto the axis."""
        return np.repeat(self.shifts, np.diff(self.bounds))

    @functools.cached_property
    def is_own(self) -> Mask:
        """Say which operations are of the range of steps that was read; all, where all are read."""
        return np.concatenate([is_own(rank.placed.tables, rank.placed.operations) for rank in self.ranks])

    def place_times(self, times: Column) -> Column:
        """Return where times lie on the axis, given one of each operation."""
        return times + self.shift_of_operation

    @property
    def place_of_window(self) -> Column:
        """The position of the rank of each measured step."""
        return np.repeat(np.arange(len(self.ranks)), np.diff(self.window_bounds))

    def on_axis(self, intervals: Sequence[Intervals]) -> Intervals:
        """Return where the intervals of each rank lie on the axis."""
        return _shift(self.shifts, intervals)

    def timed(self, timing: Timing) -> Iterator[RankTiming]:
        """Yield each rank with the times of its operations, given those of all ranks."""
        for rank, (begin, end) in zip(self.ranks, itertools.pairwise(self.bounds), strict=True):
            yield RankTiming(**vars(rank.placed), timing=timing.of(begin, end))

    def count(self, chosen: Mask) -> list[int]:
        """Return how many of the operations of each rank are chosen."""
        if not chosen.any():  # as a rule
            return [0] * len(self.ranks)
        return [int(np.count_nonzero(chosen[begin:end])) for begin, end in itertools.pairwise(self.bounds)]

    def stretches(self, times: Column) -> Iterator[slice]:
        """Yield for each rank which of these sorted times on the axis are its own."""
        at = np.searchsorted(times, self.begins[1:])
        return itertools.starmap(slice, itertools.pairwise([0, *at.tolist(), len(times)]))


def place_ranks(
    batch: RankBatch, steps: Mapping[int, RankSteps], instances: OperationInstances
) -> Iterator[PlacedRank]:
    """Place the operations of some ranks, given the steps of each, by rank, and the instances of all ranks."""
    for i, (tables, matched) in enumerate(zip(batch.tables, match_operations(batch), strict=True)):
        operations, spans, own = batch.operations.of(i), batch.spans.of(i), steps[tables.rank]
        phases = find_phases(tables, spans, own)
        yield PlacedRank(
            tables=tables,
            steps=own,
            operations=operations,
            spans=spans,
            phases=phases,
            matched=matched.matched_in(instances),
            blocked=find_blocked(tables, operations, phases, own),
        )


def place_used(
    batch: RankBatch,
    steps: Mapping[int, RankSteps],
    measured: MeasuredSteps,
    instances: OperationInstances,
    windows: Mapping[int, Intervals],
) -> Iterator[SteppedRank]:
    """Place ranks and their measured steps for `reduce_ranks`.

    Parameters:
        steps: by rank. windows: of the pipeline, by rank.
    """
    for placed in place_ranks(batch, steps, instances):
        rank = placed.tables.rank
        numbers, own = measured.of(steps[rank])
        yield SteppedRank(
            placed=placed,
            numbers=numbers,
            windows=own,
            pipeline_windows=windows[rank],
            actions=find_actions(placed.tables, placed.spans, placed.operations) if len(windows[rank]) else NONE,
        )


def read_placed(
    ranks: Iterable[RankTables],
    *,
    steps: Mapping[int, RankSteps],
    measured: MeasuredSteps,
    instances: OperationInstances,
    pipeline_windows: Mapping[int, Intervals],
) -> Iterator["PlacedBatch"]:
    """Read and place ranks, in order, in batches of as many ranks as MAX_OPERATIONS allows.

    Parameters:
        ranks: on the clock of the reference; each is read only when its batch is due.
        steps: by rank. pipeline_windows: by rank.
    """
    placed = (
        rank
        for batch in batch_in_turn(ranks)
        for rank in place_used(batch, steps, measured, instances, pipeline_windows)
    )
    return batches_in_turn(placed, instances)


def time_batch(batch: "PlacedBatch", instances: OperationInstances, errors: ClockErrors) -> Timing:
    """Return wait and transfer of the operations of ranks, given the collective instances and the errors of clocks."""
    return time_operations(
        batch.operations,
        batch.matched,
        batch.instance_rows,
        batch.blocked,
        op_names=instances.ops.values,
        rank=batch.rank_of_operation,
        errors=errors,
        device_error_ns=batch.device_error_of_operation,
    )


def part_steps(batch: "PlacedBatch", stretches: tuple[Intervals, Intervals]) -> dict[str, Column]:
    """Return how long each part of each measured step took, of one rank after the other.

    Parameters:
        stretches: times blocked by operations before and after the arrival of the last rank, on the axis.
    """
    bubbles = subtract(union(batch.pipeline_windows), union(batch.on_axis([rank.actions for rank in batch.ranks])))
    return partition_steps(batch.windows, batch.phases, *stretches, bubbles)


def join_placed(ranks: Sequence[SteppedRank], instances: OperationInstances) -> PlacedBatch:
    """Join ranks into one batch."""
    placed = [rank.placed for rank in ranks]
    extents = [rank.extent for rank in ranks] if len(ranks) > 1 else [(0, 0)]
    shifts = lay_out(extents)
    assert shifts is not None  # so few are put together
    lengths = [len(one.operations) for one in placed]
    bounds = [0, *itertools.accumulate(lengths)]
    matched = _join_matched([one.matched for one in placed], bounds)
    return PlacedBatch(
        ranks=ranks,
        shifts=shifts,
        begins=shifts + np.array([first for first, _ in extents], np.int64),
        operations=join([one.operations for one in placed]),
        place=np.repeat(np.arange(len(ranks)), lengths),
        bounds=bounds,
        matched=matched,
        place_of_channel=np.repeat(np.arange(len(ranks)), [len(one.matched.channels) for one in placed]),
        instance_rows=matched.find_instances(instances),
        blocked=_join_blocked([one.blocked for one in placed]),
        phases={phase: _shift(shifts, [one.phases[phase] for one in placed]) for phase in placed[0].phases},
        numbers=np.concatenate([rank.numbers for rank in ranks]),
        windows=_shift(shifts, [rank.windows for rank in ranks]),
        pipeline_windows=_shift(shifts, [rank.pipeline_windows for rank in ranks]),
        window_bounds=[0, *itertools.accumulate(len(rank.windows) for rank in ranks)],
    )


def batches_in_turn(ranks: Iterable[SteppedRank], instances: OperationInstances) -> Iterator[PlacedBatch]:
    """Yield all ranks in batches, in order."""
    waiting: list[SteppedRank] = []
    num_rows = length_ns = 0
    for rank in ranks:
        rows, length = len(rank.placed.operations), _length_ns(rank)
        if waiting and (num_rows + rows > MAX_ROWS or length_ns + length > MAX_AXIS_NS):
            yield join_placed(waiting, instances)
            waiting, num_rows, length_ns = [], 0, 0
        waiting.append(rank)
        num_rows, length_ns = num_rows + rows, length_ns + length
    if waiting:
        yield join_placed(waiting, instances)


def _length_ns(rank: SteppedRank) -> int:
    """Return the length of the time axis that a rank needs; more than the axis has for a rank to be batched alone."""
    if any(len(rank.placed.phases[busy]) for busy in BUSY):
        return MAX_AXIS_NS + 1  # blocked time and parts of a device's timeline are computed per rank
    first, last = rank.extent
    return last - first + 1  # one apart: intervals of two ranks never touch


def _shift(shifts: Column, intervals: Sequence[Intervals]) -> Intervals:
    if len(intervals) == 1:
        return intervals[0]
    return np.concatenate(intervals) + np.repeat(shifts, [len(interval) for interval in intervals])[:, np.newaxis]


def _join_matched(parts: Sequence[MatchedOperations], bounds: Sequence[int]) -> MatchedOperations:
    if len(parts) == 1:
        return parts[0]
    return MatchedOperations(
        channels=[channel for part in parts for channel in part.channels],
        rows=[rows + begin for one, begin in zip(parts, bounds, strict=False) for rows in one.rows],
        seqs=[seqs for part in parts for seqs in part.seqs],
        unmatched=sum(part.unmatched for part in parts),
    )


def _join_blocked(parts: Sequence[Blocked]) -> Blocked:
    if len(parts) == 1:
        return parts[0]  # only a rank that is batched alone has covered times
    return Blocked(
        call=np.concatenate([part.call for part in parts]),
        wait=np.concatenate([part.wait for part in parts]),
        known=np.concatenate([part.known for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        of_steps=np.concatenate([part.of_steps for part in parts]),
    )
