"""The trace of a window that dtprof took: its operations on the clock of the records, and the kernels by time."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_records import ImportedOperation
from dtprof.interchange.importers.kineto_communication import Groups, device_operations, host_operations
from dtprof.interchange.importers.kineto_events import (
    COLLECTIVE,
    COMMUNICATION,
    KERNEL,
    NODE,
    OPERATOR,
    KinetoEvent,
    KinetoTrace,
    correlation_of,
    read_events,
)
from dtprof.intervals import cover, union
from dtprof.records.profiler_windows import TRACED, Share, WindowTrace
from dtprof.records.tables import UNKNOWN_NS, Array, Window

MOST_SHARES = 1_000
ON_HOST = (OPERATOR, NODE, COMMUNICATION)
ON_DEVICE = (KERNEL, COLLECTIVE)


class _Piece(NamedTuple):
    """One call of an operator, us."""

    begin: float
    end: float
    name: str


class _Sums:
    """Time of operators and kernels, by name."""

    def __init__(self) -> None:
        self.calls: dict[object, list[_Piece]] = defaultdict(list)  # by thread
        self.kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self.process: object = None

    def take(self, by_class: list[list[KinetoEvent]]) -> None:
        """Take in the events of a piece of the file."""
        for number in ON_HOST:
            for event in by_class[number]:
                self.calls[event.tid].append(_Piece(event.ts, event.ts + max(event.dur, 0.0), event.name))
        for number in ON_DEVICE:
            for event in by_class[number]:
                row = self.kernels[event.name]
                row[0] += 1
                row[1] += max(event.dur, 0.0)

    def shares(self) -> tuple[Share, ...]:
        """Return the sums, the most time first."""
        rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for calls in self.calls.values():
            _add_self_times(calls, rows)
        all_shares = [
            Share(name=name, on_device=False, count=int(n), total_ns=round(total * 1000), self_ns=round(self_us * 1000))
            for name, (n, total, self_us) in rows.items()
        ]
        all_shares += [
            Share(name=name, on_device=True, count=int(n), total_ns=round(total * 1000), self_ns=round(total * 1000))
            for name, (n, total) in self.kernels.items()
        ]
        return tuple(sorted(all_shares, key=lambda share: -share.self_ns)[:MOST_SHARES])


def _add_self_times(calls: Iterable[_Piece], rows: dict[str, list[float]]) -> None:
    """Add count, total and self time of the calls of one thread, which lie one inside another or apart."""
    inside: list[tuple[float, str]] = []  # end and name of the calls that are open
    for begin, end, name in sorted(calls, key=lambda call: (call.begin, -call.end)):
        while inside and inside[-1][0] <= begin:
            inside.pop()
        row = rows[name]
        row[0] += 1
        row[1] += end - begin
        row[2] += end - begin
        if inside:
            rows[inside[-1][1]][2] -= min(end, inside[-1][0]) - begin
        inside.append((end, name))


def read_window(path: Path, window: Window) -> WindowTrace:
    """Read the trace of a window.

    Raises:
        NotATraceError: it is none that can be read.
    """
    sums = _Sums()
    trace = read_events(path, sums.take)
    if not trace.count:
        raise NotATraceError(f"{path} holds no event; expected the trace of a window. Take it again.")
    groups = Groups(rank=0, world_size=1, configured={})
    if trace.uses_device:
        issued_operations = list(zip(device_operations(trace, groups), _launches(trace), strict=True))
    else:
        issued_operations = [(operation, operation.begin) for operation in host_operations(trace, groups)]
    ops = sorted({operation.op for operation, _ in issued_operations})
    offset = window.begin_ns - window.realtime_ns
    begin, end, _ = trace.kernels.columns(trace.base_ns + offset)
    sent = [(call.begin + trace.base_ns + offset, call.end + trace.base_ns + offset) for call in trace.collectives]
    return WindowTrace(
        window=window,
        ops=tuple(ops),
        operations=_rows(issued_operations, ops, trace, offset),
        shares=sums.shares(),
        events=trace.count,
        has_device=trace.uses_device,
        clock_ns=_clock_error(trace, window, offset),
        problems=tuple(trace.problems),
        communication=union(np.array(sent, np.int64).reshape(-1, 2)),
        computation=cover(begin, end),
    )


def _launches(trace: KinetoTrace) -> list[int]:
    """Return when the host launched each kernel that communicates, in ns of the file; its begin where not known."""
    begin, _, correlation = trace.launches.columns(0)
    at = dict(zip(correlation.tolist(), begin.tolist(), strict=True))
    return [int(at.get(correlation_of(call.arguments), call.begin)) for call in trace.collectives]


def _rows(
    issued_operations: list[tuple[ImportedOperation, int]], ops: list[str], trace: KinetoTrace, offset: int
) -> Array:
    base = trace.base_ns + offset
    rows = np.zeros(len(issued_operations), TRACED)
    rows["on_device"] = trace.uses_device
    rows["returned_ns"] = rows["begin_ns"] = UNKNOWN_NS
    for row, (operation, issued) in zip(rows, issued_operations, strict=True):
        row["op"] = ops.index(operation.op)
        row["issued_ns"] = issued + base
        row["end_ns"] = operation.end + base if operation.end >= operation.begin else UNKNOWN_NS
        if trace.uses_device:
            row["begin_ns"] = operation.begin + base
        else:
            row["returned_ns"] = operation.begin + operation.returned_after + base
    ordered: Array = rows[np.argsort(rows["issued_ns"], kind="stable")]
    return ordered


def _clock_error(trace: KinetoTrace, window: Window, offset: int) -> int | None:
    """Return how far the first operator lies before the begin of the window, or the last beyond its end: 0 is well."""
    begin, end, _ = trace.operators.columns(trace.base_ns + offset)
    if not len(begin) or window.end_ns < 0:
        return None
    return max(0, window.begin_ns - int(begin.min()), int(end.max()) - window.ready_ns)
