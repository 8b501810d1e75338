"""Join a window of torch.profiler with the records of its rank: which traced operation is which recorded one.

A call of the trace belongs to the record of the same operation that was issued within it: both were made on one clock,
by one thread. Where the clocks are further apart, as on a machine that took the core from the rank between their two
readings, calls left between two that matched belong to the records left between these, in order, if they are as many.
A kernel belongs to the record within whose call it was launched; one
that several messages share, launched when their batch ended, to the last message before that. Each record has one
operation of the trace at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dtprof.columns import is_any, median
from dtprof.formatting import list_ranks
from dtprof.intervals import Column, Mask
from dtprof.records.profiler_windows import Share, WindowTrace
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, Snapshot, Window

SLACK_NS = 100_000
"""How far the clocks of profiler and records may be apart."""
LATE_NS = 20_000_000
"""How far they may be apart where a busy machine took the core from the rank in between; order decides then."""
BATCH_NS = 50_000_000
"""Within this long before the launch of a kernel the messages were issued that it sends."""
BATCHED = ("sendrecv", "send", "recv", "coalesced", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class JoinedOperation:
    """One operation of the records as a window saw it, all calls of the window together; medians."""

    op: str
    count: int
    matched: int
    recorded_ns: int | None  # from call to completion as recorded
    traced_ns: int | None  # of the same operations in the trace: of their kernel, or from call to completion
    issued_apart_ns: int | None  # how far the two see the call apart


@dataclass(frozen=True, kw_only=True)
class JoinedWindow:
    """A window and its joined facts."""

    rank: int
    window: Window
    traced: int  # operations in the trace
    matched: int  # of these, found in the records
    recorded: int  # operations recorded while the window was open
    operations: tuple[JoinedOperation, ...]
    shares: tuple[Share, ...]
    events: int
    has_device: bool
    clock_ns: int | None
    problems: tuple[str, ...]

    @property
    def share(self) -> float | None:
        """The part of the operations in the trace that was found in the records."""
        return self.matched / self.traced if self.traced else None


@dataclass(frozen=True, kw_only=True)
class RankWindows:
    """The windows and snapshots of one rank."""

    rank: int
    folder: str  # of the rank
    windows: tuple[JoinedWindow, ...]
    snapshots: tuple[Snapshot, ...]
    steps: int  # ended

    def path_of(self, file: str) -> str:
        """Return where a file lies; empty where there is none."""
        return f"{self.folder}/{file}" if file else ""


def match_records(trace: WindowTrace, tables: RankTables) -> Column:
    """Return for each traced operation the index of its record; -1 where none was found."""
    records, traced = tables.operations, trace.operations
    record_of = np.full(len(traced), -1, np.int64)
    taken = np.zeros(len(records), np.bool_)
    if not len(traced) or not len(records):
        return record_of
    low = int(traced["issued_ns"].min()) - BATCH_NS
    high = int(traced["issued_ns"].max()) + SLACK_NS
    near = np.flatnonzero((records["issued_ns"] >= low) & (records["issued_ns"] <= high))
    on_device = traced["on_device"]
    for number, name in enumerate(trace.ops):
        own = np.flatnonzero((traced["op"] == number) & ~on_device)
        same = near[is_any(records["op"][near], [i for i, known in enumerate(tables.ops) if known == name])]
        _match_calls(traced, own, records, same, record_of, taken)
    _match_kernels(trace, np.flatnonzero(on_device), tables, near, record_of, taken)
    return record_of


def _match_calls(traced: Array, own: Column, records: Array, same: Column, record_of: Column, taken: Mask) -> None:
    """Match calls with the records of the same operation issued within them, each with the nearest that is left."""
    issued = records["issued_ns"][same]
    for index in own.tolist():
        begin, end = int(traced["issued_ns"][index]), int(traced["returned_ns"][index])
        first = int(np.searchsorted(issued, begin - SLACK_NS, "left"))
        last = int(np.searchsorted(issued, max(begin, end) + SLACK_NS, "right"))
        free = [at for at in range(first, last) if not taken[same[at]]]
        if free:
            nearest = same[min(free, key=lambda at: abs(int(issued[at]) - begin))]
            record_of[index], taken[nearest] = nearest, True
    _match_left_calls(traced, own, records, same, record_of)
    taken[record_of[own[record_of[own] >= 0]]] = True


def _match_left_calls(traced: Array, own: Column, records: Array, same: Column, record_of: Column) -> None:
    """Match the calls that are left with the records that are left between the same two matches, if as many."""
    own = own[np.argsort(traced["issued_ns"][own], kind="stable")]
    matched = np.flatnonzero(record_of[own] >= 0)
    for before, after in pairwise([-1, *matched.tolist(), len(own)]):
        calls = own[before + 1 : after]
        if not len(calls):
            continue
        first = 0 if before < 0 else int(np.searchsorted(same, record_of[own[before]], "right"))
        last = len(same) if after == len(own) else int(np.searchsorted(same, record_of[own[after]], "left"))
        left = same[first:last]
        near = (records["issued_ns"][left] >= int(traced["issued_ns"][calls[0]]) - LATE_NS) & (
            records["issued_ns"][left] <= int(traced["returned_ns"][calls].max()) + LATE_NS
        )
        if int(near.sum()) == len(calls):
            record_of[calls] = left[near]


def _match_kernels(
    trace: WindowTrace, own: Column, tables: RankTables, near: Column, record_of: Column, taken: Mask
) -> None:
    """Match kernels with the record within whose call they were launched."""
    records, traced = tables.operations, trace.operations
    issued = records["issued_ns"][near]
    returned = np.where(records["returned_ns"][near] < 0, np.iinfo(np.int64).max, records["returned_ns"][near])
    for index in own.tolist():
        launched, name = int(traced["issued_ns"][index]), trace.ops[int(traced["op"][index])]
        last = int(np.searchsorted(issued, launched + SLACK_NS, "right"))
        first = int(np.searchsorted(issued, launched - BATCH_NS, "left"))
        free = [at for at in range(first, last) if not taken[near[at]]]
        inside = [at for at in free if issued[at] <= launched <= returned[at]]
        named = [at for at in inside if tables.ops[int(records["op"][near[at]])] == name]
        batched = [at for at in free if tables.ops[int(records["op"][near[at]])] in BATCHED] if name in BATCHED else []
        choice = named or inside or batched
        if choice:
            record_of[index], taken[near[choice[-1]]] = near[choice[-1]], True


def join_window(trace: WindowTrace, tables: RankTables) -> JoinedWindow:
    """Return the operations that both window and records have, with the facts of each."""
    record_of = match_records(trace, tables)
    issued, window = tables.operations["issued_ns"], trace.window
    within = (issued >= window.begin_ns) & (issued <= window.end_ns)
    return JoinedWindow(
        rank=tables.rank,
        window=window,
        traced=len(record_of),
        matched=int((record_of >= 0).sum()),
        recorded=int(within.sum()),
        operations=tuple(_join_operation(trace, tables, record_of, number) for number in range(len(trace.ops))),
        shares=trace.shares,
        events=trace.events,
        has_device=trace.has_device,
        clock_ns=trace.clock_ns,
        problems=trace.problems,
    )


def _join_operation(trace: WindowTrace, tables: RankTables, record_of: Column, number: int) -> JoinedOperation:
    own = np.flatnonzero(trace.operations["op"] == number)
    matched = own[record_of[own] >= 0]
    records = tables.operations[record_of[matched]]
    recorded = recorded_duration_ns(records)
    traced = trace.duration_ns()[matched]
    both = (recorded >= 0) & (traced >= 0)
    apart = np.abs(records["issued_ns"] - trace.operations["issued_ns"][matched])
    return JoinedOperation(
        op=trace.ops[number],
        count=len(own),
        matched=len(matched),
        recorded_ns=_median_ns(recorded[both]),
        traced_ns=_median_ns(traced[both] if both.any() else traced[traced >= 0]),
        issued_apart_ns=_median_ns(apart),
    )


def recorded_duration_ns(records: Array) -> Column:
    """Return how long operations took: on their device where that was measured, else from call to completion."""
    done = np.where(records["done_ns"] >= records["issued_ns"], records["done_ns"] - records["issued_ns"], UNKNOWN_NS)
    taken: Column = np.where(records["device_ns"] >= 0, records["device_ns"], done)
    return taken


def _median_ns(values: Column) -> int | None:
    return int(median(values)) if len(values) else None


def without_trace(window: Window, rank: int, problem: str = "") -> JoinedWindow:
    """Return the caveats of a window whose trace is missing or unreadable."""
    return JoinedWindow(
        rank=rank,
        window=window,
        traced=0,
        matched=0,
        recorded=0,
        operations=(),
        shares=(),
        events=0,
        has_device=False,
        clock_ns=None,
        problems=(problem,) if problem else (),
    )


def explain_missing(
    ranks: Sequence[RankWindows], *, planned: tuple[int, int] | None, chosen: Sequence[tuple[int, int]], world_size: int
) -> list[str]:
    """Return the planned windows that were not taken, and why, one sentence each."""
    if planned is None:
        return []
    first, last = planned
    reasons = [
        f"rank {rank} takes no window: the job has ranks 0 to {world_size - 1}"
        for rank in sorted({high for _, high in chosen if high >= world_size > 0})
    ]
    none = [
        rank
        for rank in ranks
        if all(joined.window.request for joined in rank.windows)
        and (not chosen or any(low <= rank.rank <= high for low, high in chosen))
    ]
    if none:
        fewest = min(rank.steps for rank in none)
        names = list_ranks([rank.rank for rank in none])
        reasons.append(
            f"{names} took no window over steps {first} to {last}: {fewest} steps had ended"
            if fewest < first
            else f"{names} took no window over steps {first} to {last}: what runs there does not end steps"
        )
    short = [
        rank for rank in ranks for joined in rank.windows if joined.window.state == "written" and joined.window.reason
    ]
    reasons += [f"rank {rank.rank}: the window {rank.windows[0].window.reason}" for rank in short[:5]]
    return reasons
