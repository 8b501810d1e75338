"""The critical path over ranks: the work that must get faster for the step to get faster.

It is walked backwards from the rank that ended the step last. Work of the rank, back to the end of the last operation
that blocked it; the transfer of that operation, back to the arrival of the last rank (of the first operation, where
several queued behind one another); from there on the rank that arrived last. What a rank waited is never on the path.
So the pieces follow one another without a gap, and sum to the step from last end to last end.

Per rank only operations that blocked it and the owners of its time are kept, of at most MAX_STEPS steps. Cost: the walk
takes O(pieces * log rows); rows are bounded by MAX_ROWS over all ranks.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtprof.analysis.communication.operation_timing import EXACT, Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, SteppedRank
from dtprof.analysis.results import CriticalPathResult, PathOperation, PathRank
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import begins_of
from dtprof.intervals import Column, Intervals, Mask, accumulate_maximum, near, paint, union
from dtprof.job.device_timeline import is_placed
from dtprof.job.valid_records import stride_of
from dtprof.records import codes
from dtprof.records.tables import UNKNOWN_NS, Array

MAX_STEPS = 32
MAX_ROWS = 1 << 22
MIN_BLOCKED_NS = 1_000
MAX_RANKS, MAX_OPERATIONS = 8, 8
BLOCKED = "communication"
"""Work on the path in whose time the rank was blocked for a moment, or by an operation nothing is known of."""
OWNERS = (BLOCKED, *ORDER, "other")
_HOP = np.dtype([("end", "i8"), ("start", "i8"), ("rank", "i8"), ("op", "i4"), ("group", "i4")])


@dataclass(frozen=True, kw_only=True)
class RankPath:
    """The operations and phases of one rank for the walk along the critical path."""

    rank: int
    steps: Column
    windows: Intervals
    hops: Array  # operations that blocked it, by the end of that: where their transfer began, who had come last
    cuts: Column  # of time, by owner
    owner: Column  # position in OWNERS
    ops: tuple[str, ...]
    groups: tuple[str, ...]


def collect_paths(
    batch: PlacedBatch, timing: Timing, stretches: Intervals, *, max_rows: int, num_steps: int
) -> list[RankPath]:
    """Return the input of the walk for each rank, of steps evenly spaced over the run.

    Parameters:
        stretches: blocked by operations, on the axis.
        num_steps: of the run, whether or not they are in this batch.
    """
    operations, blocked = batch.operations, batch.blocked
    sampled = [rank.numbers % stride_of(num_steps, MAX_STEPS) == 0 for rank in batch.ranks]
    windows = batch.windows[np.concatenate(sampled)]
    start, last = _find_transfers(batch, timing)
    in_wait = blocked.wait[:, 1] > blocked.wait[:, 0]
    begin, end = (np.where(in_wait, blocked.wait[:, side], blocked.call[:, side]) for side in (0, 1))
    # Who waits for what was done before is not held up by it.
    length = np.minimum(end, operations["done_ns"]) - begin
    # A message on the host is only seen to be done in the wait for it. What it took before is not known, and the rank
    # worked then: its own work leads to the wait.
    is_message = (operations["kind"] == codes.POINT_TO_POINT) & ((operations["flags"] & codes.DEVICE) == 0)
    is_seen_late = is_message & (last >= 0) & (start < begin)
    start, last = np.where(is_seen_late, begin, start), np.where(is_seen_late, batch.rank_of_operation, last)
    end_on_axis = batch.place_times(end)
    chosen = blocked.counts & (length >= MIN_BLOCKED_NS) & (last >= 0) & (_step_at(end_on_axis, windows) >= 0)
    rows = _longest(np.flatnonzero(chosen), length, batch, max_rows)
    rows = rows[np.argsort(end_on_axis[rows], kind="stable")]
    hops = np.zeros(len(rows), _HOP)
    hops["end"], hops["start"], hops["rank"] = end[rows], np.minimum(start[rows], end[rows]), last[rows]
    hops["op"], hops["group"] = operations["op"][rows], operations["group"][rows]
    # An operation may have started in the step before: its time is asked for in no other step than this one.
    window = union(windows)
    layers = (stretches, *(batch.phases[phase] for phase in ORDER))
    cuts, owner = paint([near(layer, window) for layer in layers], window)
    hops_of = itertools.pairwise(np.searchsorted(batch.place[rows], np.arange(len(batch.ranks) + 1)).tolist())
    return [
        _path_of(rank, kept=chosen, hops=hops[first:end], cuts=cuts[own] - shift, owner=owner[own])
        for rank, chosen, (first, end), own, shift in zip(
            batch.ranks, sampled, hops_of, batch.stretches(cuts), batch.shifts, strict=True
        )
    ]


def join_paths(parts: Sequence[RankPath]) -> RankPath:
    """Return the input of the walk for one rank, given that of several ranges of steps in order."""
    if len(parts) == 1:
        return parts[0]

    def column(name: str) -> Any:
        return np.concatenate([getattr(own, name) for own in parts])

    return replace(
        parts[-1],
        steps=column("steps"),
        windows=column("windows"),
        hops=column("hops"),
        cuts=column("cuts"),
        owner=column("owner"),
    )


def _longest(rows: Column, length: Column, batch: PlacedBatch, max_rows: int) -> Column:
    """Return of the operations of each rank the longest."""
    if len(rows) <= max_rows:
        return rows
    hops = []
    for begin, end in itertools.pairwise(np.searchsorted(rows, batch.bounds).tolist()):
        own = rows[begin:end]
        hops.append(own if len(own) <= max_rows else own[np.argsort(-length[own], kind="stable")[:max_rows]])
    return np.concatenate(hops)


def _path_of(rank: SteppedRank, *, kept: Mask, hops: Array, cuts: Column, owner: Column) -> RankPath:
    tables = rank.placed.tables
    hops["op"] = np.minimum(hops["op"], len(tables.ops))
    return RankPath(
        rank=tables.rank,
        steps=rank.numbers[kept],
        windows=rank.windows[kept],
        hops=hops,
        cuts=cuts,
        owner=owner,
        ops=(*tables.ops, "?"),
        groups=tuple(
            tables.groups[i].name if i in tables.groups else "?" for i in range(max(tables.groups, default=-1) + 1)
        ),
    )


def _step_at(times: Column, windows: Intervals) -> Column:
    at = np.searchsorted(windows[:, 0], times, "right") - 1
    inside = at >= 0
    inside[inside] = times[inside] <= windows[at[inside], 1]
    return np.where(inside, at, -1)


def _find_transfers(batch: PlacedBatch, timing: Timing) -> tuple[Column, Column]:
    """Return when the row of transfers began at whose end each operation was done, and who had come last to the first.

    Operations of one group queue: one whose members are all there while another is under way begins when that is done.
    Where devices came to it within the error of their times, each is as much the last as the others: the rank itself.
    """
    operations, matched, rank = batch.operations, batch.matched, batch.rank_of_operation
    start = timing.arrival.copy()
    together = timing.uncertain & is_placed(operations)
    last = np.where(timing.source == EXACT, timing.culprit, np.where(together, rank, -1))
    queues = matched.of_each(not channel.is_p2p and channel.num_members > 1 for channel in matched.channels) > 0
    every = matched.every_row
    chosen = queues & (last[every] >= 0) & (operations["done_ns"][every] != UNKNOWN_NS)  # messages do not queue
    rows, group = every[chosen], matched.of_each(range(len(matched.rows)))[chosen]
    if len(rows) < 2:
        return start, last
    order = np.lexsort((operations["issued_ns"][rows], group))
    rows, group = rows[order], group[order]
    begins = begins_of(group)
    done = accumulate_maximum(operations["done_ns"][rows], begins)
    # On a device an operation starts where the one before it in the queue ends, but for the rounding of both times.
    rounding = np.where(is_placed(operations), batch.device_error_of_operation, 0)[rows]
    queued = ~begins & (timing.arrival[rows] < np.concatenate((done[:1], done[:-1])) + rounding)
    first = np.maximum.accumulate(np.where(queued, 0, np.arange(len(rows))))
    start[rows], last[rows] = timing.arrival[rows][first], last[rows][first]
    return start, last


def find_critical_path(ranks: Sequence[RankPath]) -> CriticalPathResult | None:
    """Return the critical path of the steps that all ranks keep; None where there are none."""
    if not ranks:
        return None
    steps = ranks[0].steps
    for path in ranks[1:]:
        steps = steps if np.array_equal(steps, path.steps) else np.intersect1d(steps, path.steps)
    if not len(steps):
        return None
    by_rank = {path.rank: path for path in ranks}
    work = {path.rank: np.zeros(len(OWNERS), np.int64) for path in ranks}
    transfers: dict[tuple[str, str], int] = defaultdict(int)
    total = 0
    windows = np.array(
        [path.windows if len(path.steps) == len(steps) else path.windows[np.isin(path.steps, steps)] for path in ranks]
    )
    for number in range(len(steps)):
        begin, end = windows[:, number, 0].max(), windows[:, number, 1].max()
        last = ranks[int(windows[:, number, 1].argmax())]
        total += int(end - begin)
        _walk(by_rank, last.rank, (int(begin), int(end)), work, transfers)
    count = len(steps)
    by_phase = np.sum(list(work.values()), axis=0)
    on_rank = sorted(((int(spent.sum()), rank) for rank, spent in work.items()), key=lambda item: (-item[0], item[1]))
    moved = sorted(transfers.items(), key=lambda item: (-item[1], item[0]))
    return CriticalPathResult(
        steps=count,
        step_ns=total // count,
        phases_ns={name: int(ns) // count for name, ns in zip(OWNERS, by_phase, strict=True)},
        transfer_ns=sum(transfers.values()) // count,
        operations=tuple(
            PathOperation(op=op, group=group, transfer_ns=ns // count) for (op, group), ns in moved[:MAX_OPERATIONS]
        ),
        ranks=tuple(PathRank(rank=rank, work_ns=ns // count) for ns, rank in on_rank[:MAX_RANKS] if ns),
    )


def _walk(
    by_rank: Mapping[int, RankPath],
    rank: int,
    window: tuple[int, int],
    work: Mapping[int, Column],
    transfers: dict[tuple[str, str], int],
) -> None:
    """Add the pieces of the path of one step."""
    begin, now = window
    moved = True
    while now > begin:
        own = by_rank[rank]
        at = int(np.searchsorted(own.hops["end"], now, "right" if moved else "left")) - 1
        if at < 0 or own.hops["end"][at] <= begin:
            work[rank][:] += _spend(own, begin, now)
            return
        hop = own.hops[at]
        work[rank][:] += _spend(own, int(hop["end"]), now)
        start = max(begin, int(hop["start"]))
        group = own.groups[hop["group"]] if hop["group"] < len(own.groups) else "?"
        transfers[own.ops[hop["op"]], group] += int(hop["end"]) - start
        moved = start < now
        now = start
        if int(hop["rank"]) in by_rank:
            rank = int(hop["rank"])


def _spend(own: RankPath, begin: int, end: int) -> Column:
    """Return the work of a rank between two times, by OWNERS."""
    first, last = np.searchsorted(own.cuts, (begin, end), "right")
    times = np.r_[begin, own.cuts[first:last], end]
    owners = own.owner[max(first - 1, 0) : last] if first else np.r_[-1, own.owner[:last]]
    lengths = np.diff(times)
    owners = np.where(owners < 0, len(OWNERS) - 1, owners)  # outside the window of this rank: between steps
    return np.bincount(owners, lengths, len(OWNERS)).astype(np.int64)
