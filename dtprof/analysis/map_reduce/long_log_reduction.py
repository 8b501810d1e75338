"""The second pass over ranks with long logs: by ranges of steps, of all ranks at once, summed as ranges are done.

Operations are matched within a range and the steps around it: what ranks do together they do in the same step, or in
one next to it. Messages are matched step by step. An operation that blocks its rank for longer than that counts in the
steps that it reaches into as one whose other members are not known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from dtprof.analysis.communication.collective_table import add_rows
from dtprof.analysis.communication.communication_sites import add_sites
from dtprof.analysis.communication.traffic import Tallies, add_lateness, tally_rows
from dtprof.analysis.map_reduce.long_log_survey import cut_steps
from dtprof.analysis.map_reduce.rank_sums import RankReduction, ReductionLimits
from dtprof.analysis.map_reduce.reduction_tasks import (
    CollectDetails,
    DetailedReductions,
    Found,
    ReductionTask,
    reduce_part,
)
from dtprof.analysis.map_reduce.step_range_joins import join_reductions
from dtprof.analysis.map_reduce.survey import StepRanges, Surveys
from dtprof.analysis.memory.memory_growth import find_growth
from dtprof.analysis.steps.part_bands import add_parts
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.analysis.timeline.step_timeline import MAX_STEPS
from dtprof.intervals import Column, Intervals
from dtprof.job.api_names import find_apis
from dtprof.job.clock_alignment import Clocks, state_errors
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import OperationInstances, describe_operations, match_operations
from dtprof.job.device_timeline import place_on_device
from dtprof.job.groups import Channel
from dtprof.job.rank_batches import batch_in_turn
from dtprof.job.rank_executor import Executor, map_tasks
from dtprof.records.rank_log.step_index import STEPS_AFTER, STEPS_BEFORE, StepRange
from dtprof.records.reader import Run
from dtprof.records.tables import RankTables, is_own, select

MOST_ROWS = 1 << 18
"""Records of all ranks together that are read at once, and of a single step however many it has."""
MIN_ROWS_EACH = 1 << 13
"""Records of each rank that are read at once, however many ranks there are: each segment is read that often less."""

JOINED_AT_ONCE = 16
"""Ranges whose sums are joined together: one by one, what is known of all steps would be copied for each."""


@dataclass(frozen=True, kw_only=True)
class RangeTask(Generic[Found]):
    """A range of steps of some ranks to sum up; the fields are those of ReductionTask where they are not explained."""

    records: Run
    ranges: Mapping[int, StepRange]  # by rank
    device_error_ns: Mapping[int, int | None]  # by rank, over the whole log
    clocks: Clocks
    steps: Mapping[int, RankSteps]  # of these ranks: those in the range and around it
    measured: MeasuredSteps
    pipeline_windows: Mapping[int, Intervals]
    errors: ClockErrors
    limits: ReductionLimits
    collect: CollectDetails[Found] | None


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """Ranks that are read."""

    tables: Mapping[int, RankTables]

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Return the records of a rank."""
        assert attempt is None
        return self.tables[rank]

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return the records of ranks, in this order."""
        return map(self.tables.__getitem__, ranks)


def reduce_by_ranges(
    executor: Executor,
    *,
    surveys: Surveys,
    ranges: StepRanges,
    measured: MeasuredSteps,
    steps: Mapping[int, RankSteps],
    windows: Mapping[int, Intervals],
    limits: ReductionLimits,
    collect: CollectDetails[Found] | None,
) -> DetailedReductions[Found]:
    """Sum up the measured steps of ranks; with details, which are of one range, these steps alone.

    Parameters:
        steps: of the ranks. windows: of their pipelines.
    """
    task = RangeTask(
        records=ranges.run,
        ranges={},
        device_error_ns={rank: index.device_error_ns for rank, index in ranges.indexes.items()},
        clocks=surveys.clocks,
        steps={},
        measured=measured,
        pipeline_windows={},
        errors=state_errors(surveys.clocks, surveys.boots),
        limits=limits,
        collect=collect,
    )
    cut = [(measured.first, measured.last)] if collect is not None else list(_cut(ranges, measured))
    tasks = (
        _task_of(task, ranges, first, last, steps=steps, windows=windows, is_whole=collect is None, cut=cut)
        for first, last in cut
    )
    reduced: DetailedReductions[Found] = DetailedReductions()
    of_rank: dict[int, list[tuple[int, RankReduction]]] = {}
    for (first, _), found in zip(cut, map_tasks(executor, reduce_range, tasks), strict=True):
        for own in found.ranks:
            parts = of_rank.setdefault(own.rank, [])
            parts.append((_bins_before(first, measured, limits.steps_per_bin), own))
            if len(parts) >= JOINED_AT_ONCE:
                parts[:] = [(0, join_reductions(parts))]
        add_rows(reduced.rows, found.rows)
        add_sites(reduced.sites, found.sites)
        reduced.dropped = found.dropped  # that of the log as a whole
        reduced.step_parts = add_parts(reduced.step_parts, found.step_parts)
        add_lateness(reduced.lateness, found.lateness)
        reduced.details.extend(found.details)
    reduced.ranks = [
        replace(join_reductions(parts), memory_growth=find_growth(ranges.memory[rank], measured.first, measured.last))
        for rank, parts in of_rank.items()
    ]
    return reduced


def _bins_before(first: int, measured: MeasuredSteps, steps_per_bin: int) -> int:
    """Return how many bins of steps lie before those of a range that begins with this step."""
    return max(0, first - measured.first) // steps_per_bin


def _cut(ranges: StepRanges, measured: MeasuredSteps) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each range, by number; together they hold all records."""
    indexes = ranges.indexes.values()
    first = min(index.offset for index in indexes)
    counts = np.zeros(max(index.offset + len(index.counts) for index in indexes) - first, np.int64)
    for index in indexes:
        counts[index.offset - first :][: len(index.counts)] += index.counts
    most = max(MOST_ROWS, MIN_ROWS_EACH * len(ranges.indexes))
    cuts = [(begin + first, end + first) for begin, end in cut_steps(counts, most)]
    # The steps of the timeline are in one range.
    drawn = range(measured.last - MAX_STEPS + 2, measured.last + 1) if measured.known else range(0)
    begin = cuts[0][0]
    for (_, end), following in zip(cuts, [*(one for one, _ in cuts[1:]), None], strict=True):
        if following is None or following not in drawn:
            yield begin, end
            begin = end + 1


def newest_range(ranges: StepRanges, measured: MeasuredSteps) -> tuple[int, int]:
    """Return the first and the last of the newest measured steps that are read at once."""
    if not measured.known:
        return measured.first, measured.last
    first = next(begin for begin, end in _cut(ranges, measured) if end >= measured.last)
    return max(first, measured.first), measured.last


def _task_of(
    task: RangeTask[Found],
    ranges: StepRanges,
    first: int,
    last: int,
    *,
    steps: Mapping[int, RankSteps],
    windows: Mapping[int, Intervals],
    is_whole: bool,
    cut: Sequence[tuple[int, int]],
) -> RangeTask[Found]:
    """Return the task of one range; the first and the last have all records before and after, too."""
    around = {rank: _slice(own, first - STEPS_BEFORE, last + STEPS_AFTER) for rank, own in steps.items()}
    is_drawn = first <= task.measured.last <= last
    of_rank = {}
    for rank, index in ranges.indexes.items():
        begin = 0 if is_whole and first == cut[0][0] else first - index.offset
        end = last - index.offset
        if is_whole and last == cut[-1][1]:
            end = max(end, len(index.counts) - 1)
        of_rank[rank] = index.of(begin, end).without_facts()
    return replace(
        task,
        records=task.records.part(of_rank),
        ranges=of_rank,
        steps=around,
        measured=replace(task.measured, within=(first, last)),
        pipeline_windows={rank: _touching(own, around[rank].windows) for rank, own in windows.items()},
        limits=task.limits if is_drawn else replace(task.limits, max_bars=0),
    )


def _slice(own: RankSteps, first: int, last: int) -> RankSteps:
    numbers, windows = own.between(first, last)
    return replace(own, numbers=numbers, windows=windows)


def _touching(intervals: Intervals, steps: Intervals) -> Intervals:
    """Return those of some intervals that touch any of these steps, which follow one another."""
    if not len(steps) or not len(intervals):
        return intervals[:0]
    touching: Intervals = intervals[(intervals[:, 1] > steps[0, 0]) & (intervals[:, 0] < steps[-1, 1])]
    return touching


def reduce_range(task: RangeTask[Found]) -> DetailedReductions[Found]:
    """Read a range of steps of all ranks, match their operations and sum them up."""
    tables = {
        rank: task.clocks.align(place_on_device(task.records.load_steps(rank, steps), task.device_error_ns[rank]))
        for rank, steps in task.ranges.items()
    }
    instances = OperationInstances()
    own: list[tuple[int, Channel, Column]] = []
    for batch in batch_in_turn(tables.values()):
        matched = match_operations(batch)
        apis = [find_apis(one, batch.operations.of(i)) for i, one in enumerate(batch.tables)]
        for i, described in enumerate(describe_operations(batch, apis, matched)):
            instances.add(described)
            mask = is_own(batch.tables[i], batch.operations.of(i))
            for channel, rows, seqs in zip(matched[i].channels, matched[i].rows, matched[i].seqs, strict=True):
                if not channel.is_p2p and channel.num_members > 1:
                    own.append((batch.tables[i].rank, channel, seqs[mask[rows]]))
    reduced = reduce_part(
        ReductionTask(
            records=_Loaded(tables=tables),
            clocks=Clocks(),
            steps=task.steps,
            measured=task.measured,
            pipeline_windows=task.pipeline_windows,
            instances=instances,
            errors=task.errors,
            limits=task.limits,
            collect=task.collect,
        )
    )
    reduced.lateness = _tally(instances, own)
    assert task.measured.within is not None
    before = _bins_before(task.measured.within[0], task.measured, task.limits.steps_per_bin)
    reduced.ranks = [
        replace(found, waits=found.waits.since(before)) if found.waits is not None else found for found in reduced.ranks
    ]
    return reduced


def _tally(instances: OperationInstances, own: Sequence[tuple[int, Channel, Column]]) -> Tallies:
    """Count who arrived last at the operations of a range: of each its lowest member says in which range it is."""
    found: dict[Channel, list[Column]] = {}
    for rank, channel, seqs in own:
        table = instances.tables[channel]
        at = np.searchsorted(table["seq"], seqs)
        found.setdefault(channel, []).append(at[table["first_rank"][at] == rank])
    tallies: Tallies = {}
    for channel, parts in found.items():
        tally = tally_rows(channel, select(instances.tables[channel], np.concatenate(parts)))
        if tally is not None:
            tallies[channel] = tally
    return tallies
