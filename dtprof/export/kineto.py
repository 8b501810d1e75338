"""Traces as torch.profiler writes them, one a rank, so that what reads those reads a run.

HolisticTraceAnalysis reads any such trace. torch-tb-profiler 0.4.3 has its own rules, and loses views where one is
broken (docs/how-to/use-tensorboard.md): steps are called ProfilerStep#N; communication counts only under five names
and within a step; every rank must have as many of these operations, in the same order. So messages and operations that
have no such name are there twice: as they are called, which only the trace view shows, and under the nearest of the
five names on a thread of their own; and a rank with fewer operations in a step than another gets empty ones that lie
within the last it has.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof import events
from dtprof.analysis.detail import RankDetail, RunDetail, map_ranks
from dtprof.analysis.execution import THIS_PROCESS, Executor
from dtprof.analysis.intervals import Column, Intervals, intersect
from dtprof.analysis.results import PARTS, PHASES
from dtprof.export.tracks import assign_lanes, name_group, name_rank
from dtprof.export.windows import Window, choose_window
from dtprof.tables import UNKNOWN_NS, Group

MAX_EVENTS = 100_000
"""Of all ranks; their readers take about 10 us an event and keep all of them in memory."""
COMPRESSION = 1
COUNTED = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
NEAREST = {
    "send": "broadcast",
    "recv": "broadcast",
    "scatter": "broadcast",
    "gather": "reduce",
    "all_to_all": "all_gather",
}
"""What an operation is counted as that torch-tb-profiler does not know; any other as all_reduce."""
WORK = ("forward", "recompute", "backward", "evaluation")
DATA_LOADER = "enumerate(DataLoader)#dtprof.__next__"
MAIN, FIRST_LANE, FIRST_COUNTED_LANE, FILLED = 1, 100, 1000, 2000
CPU, GPU = 0, 1
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of one rank that count: those that are done, within one step."""

    step: Column  # number
    begin: Column
    end: Column
    name: list[str]  # as they are called
    lane: Column
    arguments: list[dict[str, Any]]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank of a trace that is being built."""

    rank: int
    origin_ns: int
    origin_realtime_ns: int
    head: list[Event] = field(default_factory=list)
    operations: Operations


def write_kineto(
    run: RunDetail, folder: Path, *, steps: tuple[int, int] | None = None, executor: Executor = THIS_PROCESS
) -> list[str]:
    """Write the folder; return what the reader should know: what was left out."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    write_traces(run, list(map_ranks(run, partial(collect_trace, window, run.first_ns), executor)), folder)
    return window.describe()


def write_traces(run: RunDetail, traces: Sequence[RankTrace], folder: Path) -> None:
    """Write a trace of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    backends = {group.backend for fact in run.surveys.facts for group in fact.groups.values()}
    prefix = "nccl" if any("nccl" in (backend or "") for backend in backends) else "gloo"
    counts = _count_by_step(traces)
    shortest = _shortest(traces, counts)
    world_size = max([fact.world_size for fact in run.surveys.facts] + [trace.rank + 1 for trace in traces], default=0)
    for trace in traces:
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": prefix, "rank": trace.rank, "world_size": world_size},
            "deviceProperties": [],
            "baseTimeNanoseconds": trace.origin_realtime_ns,
            "traceName": f"rank {trace.rank}",
            "traceEvents": _number([*trace.head, *_counted(trace, counts, shortest, prefix)]),
        }
        with gzip.open(folder / f"rank{trace.rank:05}.pt.trace.json.gz", "wb", compresslevel=COMPRESSION) as file:
            file.write(json.dumps(document).encode())  # HolisticTraceAnalysis looks for `"rank": `, blank included


def collect_trace(window: Window, origin: int, rank: RankDetail) -> RankTrace:
    """Return what a trace holds of one rank, times from `origin` on."""
    since, until = window.bounds(rank)
    end = np.iinfo(np.int64).max if until is None else until
    numbers, windows = rank.steps.numbers, rank.steps.windows
    shown = (windows[:, 0] >= since) & (windows[:, 1] <= end)
    operations = _operations(rank, numbers[shown], windows[shown])
    tid_names = {MAIN: "steps and work"}
    tid_names |= {FIRST_LANE + lane: "communication" for lane in np.unique(operations.lane).tolist()}
    renamed = np.array([name not in COUNTED for name in operations.name], np.bool_)
    lanes = np.unique(operations.lane[renamed]).tolist()
    tid_names |= {FIRST_COUNTED_LANE + lane: "messages, as the Distributed view counts them" for lane in lanes}
    pid = rank.tables.rank
    head: list[Event] = [_metadata("process_name", pid, 0, name=name_rank(rank.tables))]
    head += [_metadata("thread_name", pid, tid, name=name) for tid, name in tid_names.items()]
    for number, (begin, stop) in zip(numbers[shown].tolist(), windows[shown].tolist(), strict=True):
        head.append(_slice("user_annotation", f"ProfilerStep#{number}", pid, MAIN, begin - origin, stop - begin))
    for name, times in _work(rank):
        inside = times[(times[:, 0] >= since) & (times[:, 1] <= end)]
        head += [_slice("cpu_op", name, pid, MAIN, begin - origin, stop - begin) for begin, stop in inside.tolist()]
    head += _memory(rank, since, end, origin)
    return RankTrace(
        rank=pid,
        origin_ns=origin,
        origin_realtime_ns=origin + rank.tables.monotonic_to_realtime_ns,
        head=head,
        operations=operations,
    )


def _work(rank: RankDetail) -> list[tuple[str, Intervals]]:
    """Return what the program does when communication does not keep it from going on."""
    phase_times, phase = rank.phase_stretches
    by_phase = {name: phase_times[phase == PHASES.index(name)] for name in PHASES}
    part_times, part = rank.part_stretches
    if rank.parts is None:
        found = {name: by_phase[name] for name in (*WORK, events.OPTIMIZER, events.CHECKPOINT)}
        return [*found.items(), (DATA_LOADER, by_phase[events.DATA])]
    by_part = {name: part_times[part == PARTS.index(name)] for name in PARTS}
    found = {name: intersect(by_part["compute"], by_phase[name]) for name in WORK}
    found |= {name: by_part[name] for name in (events.OPTIMIZER, events.CHECKPOINT)}
    return [*found.items(), (DATA_LOADER, by_part[events.DATA])]


def _operations(rank: RankDetail, numbers: Column, windows: Intervals) -> Operations:
    rows, duration = rank.operations, rank.timing.duration
    done = rows["done_ns"].astype(np.int64)
    begin = done - duration  # on a device an operation begins when the device comes to it
    at = np.searchsorted(windows[:, 0], begin, "right") - 1
    inside = (duration != UNKNOWN_NS) & (at >= 0)
    inside[inside] = done[inside] <= windows[at[inside], 1]
    chosen = np.flatnonzero(inside)
    chosen = chosen[np.lexsort((-duration[chosen], begin[chosen]))]
    names = [(*rank.tables.ops, "?")[op] for op in np.minimum(rows["op"][chosen], len(rank.tables.ops)).tolist()]
    groups = {number: _describe_group(rank.tables.groups.get(number)) for number in np.unique(rows["group"]).tolist()}
    columns = (
        names,
        *(rows[name][chosen].tolist() for name in ("group", "seq", "nbytes")),
        rank.timing.wait[chosen].tolist(),
    )
    return Operations(
        step=numbers[at[chosen]] if len(numbers) else np.zeros(0, np.int64),
        begin=begin[chosen],
        end=done[chosen],
        name=names,
        lane=assign_lanes(begin[chosen], done[chosen]) if len(chosen) else np.zeros(0, np.int64),
        arguments=[
            {
                "Input Dims": [[nbytes]],
                "Input type": ["unsigned char"],
                "Collective name": name,
                **groups[group],
                "Seq": seq,
                "wait_ns": wait if wait != UNKNOWN_NS else None,
            }
            for name, group, seq, nbytes, wait in zip(*columns, strict=True)
        ],
    )


def _describe_group(group: Group | None) -> dict[str, Any]:
    return {
        "Process Group Name": group.name if group is not None else "",
        "Process Group Description": name_group(group),
        "Group size": len(group.ranks) or group.size if group is not None else 0,
    }


def _count_by_step(traces: Sequence[RankTrace]) -> dict[int, int]:
    """Return how many operations the rank with most of them has in each step."""
    counts: dict[int, int] = {}
    for trace in traces:
        for step, count in zip(*np.unique(trace.operations.step, return_counts=True), strict=True):
            counts[int(step)] = max(counts.get(int(step), 0), int(count))
    return counts


def _shortest(traces: Sequence[RankTrace], counts: dict[int, int]) -> dict[int, Column]:
    """Return for each place of each step how long the shortest operation there is on any rank."""
    shortest = {step: np.full(count, np.iinfo(np.int64).max) for step, count in counts.items()}
    for trace in traces:
        own = trace.operations
        for step in counts:
            lengths = (own.end - own.begin)[own.step == step]
            shortest[step][: len(lengths)] = np.minimum(shortest[step][: len(lengths)], lengths)
    return shortest


def _counted(trace: RankTrace, counts: dict[int, int], shortest: dict[int, Column], prefix: str) -> list[Event]:
    """Return the operations of a rank, and as many more of no effect as it has fewer than others."""
    own, pid, origin = trace.operations, trace.rank, trace.origin_ns
    found: list[Event] = []
    times = _all_microseconds(own.begin - origin)
    lengths = _all_microseconds(own.end - origin) - times
    plain: Event = {"ph": "X", "cat": "user_annotation", "name": "", "pid": pid, "tid": 0}
    columns = (own.name, times.tolist(), lengths.tolist(), own.lane.tolist(), own.arguments)
    for name, ts, dur, lane, arguments in zip(*columns, strict=True):
        counted, tid = name, FIRST_LANE + lane
        if name not in COUNTED:
            found.append({**plain, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": arguments.copy()})
            counted, tid = NEAREST.get(name, "all_reduce"), FIRST_COUNTED_LANE + lane
        counted = f"{prefix}:{counted}"
        found.append({**plain, "name": counted, "tid": tid, "ts": ts, "dur": dur, "args": arguments.copy()})
    named = False
    for step, count in counts.items():
        rows = np.flatnonzero(own.step == step)
        if not named and 0 < len(rows) < count:
            found.append(_metadata("thread_name", pid, FILLED, name="empty operations that fill a place"))
            named = True
        for place in range(len(rows), count if len(rows) else 0):
            last = rows[-1]
            length = min(int(shortest[step][place]), int(shortest[step][len(rows) - 1]))
            begin = int(own.end[last]) - length - origin
            name = own.name[last] if own.name[last] in COUNTED else NEAREST.get(own.name[last], "all_reduce")
            nothing = {"Input Dims": [[0]], "Input type": ["unsigned char"], "Collective name": "none: fills a place"}
            found.append(_slice("user_annotation", f"{prefix}:{name}", pid, FILLED, begin, length, **nothing))
    return found


def _memory(rank: RankDetail, since: int, end: int, origin: int) -> list[Event]:
    """Return memory over time as allocations and releases of what it grew and shrank by."""
    samples, ops = rank.tables.samples, rank.tables.ops

    def series(name: str) -> tuple[Column, Column]:
        own = samples[np.isin(samples["op"], [i for i, op in enumerate(ops) if op == name])]
        inside = (own["t_ns"] >= since) & (own["t_ns"] <= end)
        return own["t_ns"][inside].astype(np.int64), own["value"][inside].astype(np.int64)

    found: list[Event] = []
    device = max(0, rank.tables.local_rank)
    host = max((events.HEAP_BYTES, events.RSS_BYTES, events.PEAK_RSS_BYTES), key=lambda name: len(series(name)[0]))
    kinds = ((host, events.RSS_BYTES, CPU), (events.CUDA_ALLOCATED_BYTES, events.CUDA_RESERVED_BYTES, GPU))
    for held_by, reserved_by, kind in kinds:
        times, held = series(held_by)
        reserved_at, reserved = series(reserved_by)
        at = np.clip(np.searchsorted(reserved_at, times, "right") - 1, 0, None)
        for i, (t_ns, value) in enumerate(zip(times.tolist(), held.tolist(), strict=True)):
            arguments = {
                "Addr": i + 1,
                "Device Id": device if kind == GPU else -1,
                "Device Type": kind,
                "Bytes": value - int(held[i - 1]) if i else value,
                "Total Allocated": value,
                "Total Reserved": int(reserved[at[i]]) if len(reserved) else value,
            }
            event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": rank.tables.rank}
            found.append(event | {"tid": MAIN, "ts": _microseconds(t_ns - origin), "args": arguments})
    return found


def _slice(category: str, name: str, pid: int, tid: int, begin: int, length: int, **arguments: object) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(begin),
        "dur": _microseconds(begin + length) - _microseconds(begin),
        "args": arguments,
    }


def _microseconds(ns: int) -> float:
    """Return a time within half a ns in units that floats add exactly: else neighbours would overlap by 1e-10."""
    return round(ns * 1.024) / 1024


def _all_microseconds(ns: Column) -> npt.NDArray[np.float64]:
    """Return the same of many."""
    microseconds: npt.NDArray[np.float64] = np.rint(ns * 1.024) / 1024
    return microseconds


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": arguments}


def _number(found: list[Event]) -> list[Event]:
    """Give every slice its own id: readers keep one of those that share an id."""
    for number, event in enumerate(found, 1):
        if event["ph"] == "X":
            event["args"]["External id"] = number
    return found
