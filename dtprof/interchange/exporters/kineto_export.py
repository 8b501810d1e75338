"""Traces in torch.profiler's format, one per rank, for the tools that read those.

HolisticTraceAnalysis reads any such trace. torch-tb-profiler 0.4.3 has its own rules, and loses views where one is
broken (docs/how-to/use-tensorboard.md): steps are called ProfilerStep#N; communication counts only under five names
and within a step; every rank must have as many of these operations, in the same order. So messages and operations that
have no such name are there twice: as they are called, which only the trace view shows, and under the nearest of the
five names on a thread of their own; and a rank with fewer operations in a step than another gets empty ones that lie
within the last it has.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.analysis.results import PARTS, PHASES
from dtprof.analysis.timeline.operation_detail import RankDetail, RunDetail, map_ranks
from dtprof.columns import distinct
from dtprof.interchange.exporters.exported_steps import StepWindow, choose_window
from dtprof.interchange.exporters.gzip_parts import Part, pack, write_parts
from dtprof.interchange.exporters.trace_tracks import assign_lanes, name_group, name_rank
from dtprof.intervals import Column, Intervals, intersect
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.records import events
from dtprof.records.tables import UNKNOWN_NS, Group

MAX_EVENTS = 100_000
"""Of all ranks; their readers take about 10 us an event and keep all of them in memory."""
COUNTED = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
NEAREST = {
    "send": "broadcast",
    "recv": "broadcast",
    "scatter": "broadcast",
    "gather": "reduce",
    "all_to_all": "all_gather",
}
"""Names for operations that torch-tb-profiler does not know; all others become all_reduce."""
WORK = ("forward", "recompute", "backward", "evaluation")
DATA_LOADER = "enumerate(DataLoader)#dtprof.__next__"
MAIN, FIRST_LANE, FIRST_COUNTED_LANE, FILLED = 1, 100, 1000, 2000
CPU, GPU = 0, 1
SEPARATOR = ", "
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of one rank that count: those that are done, within one step."""

    step: Column  # number
    begin: Column
    end: Column
    name: list[str]  # as they are called
    lane: Column
    arguments: list[str]  # JSON, without braces

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank of a trace: its events, and the columns of its operations that other ranks lack."""

    rank: int
    backend: str
    origin_ns: int
    events: Part  # from the begin of the file on
    num_events: int
    step: Column  # of each operation, and when it began and ended
    begin: Column
    end: Column
    last_counted: dict[int, str]  # what the last operation of a step is counted as, by step


def write_kineto(
    run: RunDetail, folder: Path, *, steps: tuple[int, int] | None = None, executor: Executor = THIS_PROCESS
) -> list[str]:
    """Write the folder; return remarks on omitted events."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    write_traces(list(map_ranks(run, trace_collector(run, window), executor)), folder)
    return window.describe()


def write_traces(traces: Sequence[RankTrace], folder: Path) -> None:
    """Write a trace of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = _count_by_step(traces)
    shortest = _shortest(traces, counts)
    for trace in traces:
        filled = "".join(SEPARATOR + event for event in _fill_places(trace, counts, shortest))
        rest = pack([f"{filled}]}}".encode()])
        write_parts([trace.events, rest], folder / f"rank{trace.rank:05}.pt.trace.json.gz")


def trace_collector(run: RunDetail, window: StepWindow) -> Callable[[RankDetail], RankTrace]:
    """Return the picklable function that makes a trace of a rank."""
    facts = run.surveys.facts
    backends = {group.backend for fact in facts for group in fact.groups.values()}
    backend = "nccl" if any("nccl" in (name or "") for name in backends) else "gloo"
    return partial(_collect_trace, window, run.first_ns, backend, run.surveys.world_size)


def _collect_trace(window: StepWindow, origin: int, backend: str, world_size: int, rank: RankDetail) -> RankTrace:
    """Return the trace of one rank, times from `origin` on."""
    since, until = window.bounds(rank)
    end = np.iinfo(np.int64).max if until is None else until
    numbers, windows = rank.steps.numbers, rank.steps.windows
    shown = (windows[:, 0] >= since) & (windows[:, 1] <= end)
    operations = _operations(rank, numbers[shown], windows[shown])
    tid_names = {MAIN: "steps and work"}
    tid_names |= {FIRST_LANE + lane: "communication" for lane in distinct(operations.lane).tolist()}
    renamed = np.array([name not in COUNTED for name in operations.name], np.bool_)
    lanes = distinct(operations.lane[renamed]).tolist()
    tid_names |= {FIRST_COUNTED_LANE + lane: "messages, as the Distributed view counts them" for lane in lanes}
    pid = rank.tables.rank
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": backend, "rank": pid, "world_size": world_size},
        "deviceProperties": [],
        "baseTimeNanoseconds": origin + rank.tables.monotonic_to_realtime_ns,
        "traceName": f"rank {pid}",
        "traceEvents": [],
    }
    head = json.dumps(document).removesuffix("]}")  # HolisticTraceAnalysis looks for `"rank": `, blank included
    head += json.dumps(_metadata("process_name", pid, 0, name=name_rank(rank.tables)))
    named = [json.dumps(_metadata("thread_name", pid, tid, name=name)) for tid, name in tid_names.items()]
    # Readers keep one of those slices that share an id: each has its place in the file.
    ids = count_from(2 + len(named))
    names = [f"ProfilerStep#{number}" for number in numbers[shown].tolist()]
    steps = _slices("user_annotation", names, pid, windows[shown] - origin, ids)
    work = [
        _slices("cpu_op", [name] * len(times), pid, times - origin, ids)
        for name, found in _work(rank, since, end)
        for times in (found[(found[:, 0] >= since) & (found[:, 1] <= end)],)
    ]
    memory = [json.dumps(event) for event, _ in zip(_memory(rank, since, end, origin), ids, strict=False)]
    lists = (named, steps, *work, memory, _counted(operations, pid, origin, backend, ids))
    events = pack([head.encode(), *((SEPARATOR + SEPARATOR.join(texts)).encode() for texts in lists if texts)])
    last = dict(zip(operations.step.tolist(), operations.name, strict=True))
    return RankTrace(
        rank=pid,
        backend=backend,
        origin_ns=origin,
        events=events,
        num_events=next(ids) - 1,
        step=operations.step,
        begin=operations.begin,
        end=operations.end,
        last_counted={step: _counted_as(name) for step, name in last.items()},
    )


def _slices(category: str, names: Sequence[str], pid: int, times: Intervals, ids: Iterator[int]) -> list[str]:
    """Return slices of the main thread, JSON."""
    template = f'{{"ph": "X", "cat": "{category}", "name": "%s", "pid": {pid}, "tid": {MAIN}, "ts": %r, "dur": %r, '
    template += '"args": {"External id": %d}}'
    begin = _microseconds(times[:, 0])
    length = _microseconds(times[:, 1]) - begin
    return [template % row for row in zip(names, begin.tolist(), length.tolist(), ids, strict=False)]


def _work(rank: RankDetail, since: int, end: int) -> list[tuple[str, Intervals]]:
    """Return the computation of the program around the time shown, where communication does not block it."""
    (phase_times, phase), (part_times, part) = (
        (times[shown], owner[shown])
        for times, owner in (rank.phase_stretches, rank.part_stretches)
        for shown in ((times[:, 1] >= since) & (times[:, 0] <= end),)
    )
    by_phase = {name: phase_times[phase == PHASES.index(name)] for name in PHASES}
    if rank.parts is None:
        work = {name: by_phase[name] for name in (*WORK, events.OPTIMIZER, events.CHECKPOINT)}
        return [*work.items(), (DATA_LOADER, by_phase[events.DATA])]
    by_part = {name: part_times[part == PARTS.index(name)] for name in PARTS}
    work = {name: intersect(by_part["compute"], by_phase[name]) for name in WORK}
    work |= {name: by_part[name] for name in (events.OPTIMIZER, events.CHECKPOINT)}
    return [*work.items(), (DATA_LOADER, by_part[events.DATA])]


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
    groups = {number: _describe_group(rank.tables.groups.get(number)) for number in distinct(rows["group"]).tolist()}
    describe = {number: json.dumps(group)[1:-1] for number, group in groups.items()}
    quoted = {name: json.dumps(name) for name in set(names)}
    columns = (names, *(rows[name][chosen].tolist() for name in ("group", "seq", "nbytes")))
    wait = [ns if ns != UNKNOWN_NS else "null" for ns in rank.timing.wait[chosen].tolist()]
    return Operations(
        step=numbers[at[chosen]] if len(numbers) else np.zeros(0, np.int64),
        begin=begin[chosen],
        end=done[chosen],
        name=names,
        lane=assign_lanes(begin[chosen], done[chosen]) if len(chosen) else np.zeros(0, np.int64),
        arguments=[
            f'"Input Dims": [[{nbytes}]], "Input type": ["unsigned char"], "Collective name": {quoted[name]}, '
            f'{describe[group]}, "Seq": {seq}, "wait_ns": {waited}'
            for name, group, seq, nbytes, waited in zip(*columns, wait, strict=True)
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
        for step, count in zip(*np.unique(trace.step, return_counts=True), strict=True):
            counts[int(step)] = max(counts.get(int(step), 0), int(count))
    return counts


def _shortest(traces: Sequence[RankTrace], counts: dict[int, int]) -> dict[int, Column]:
    """Return for each place of each step how long the shortest operation there is on any rank."""
    shortest = {step: np.full(count, np.iinfo(np.int64).max) for step, count in counts.items()}
    for trace in traces:
        for step in counts:
            lengths = (trace.end - trace.begin)[trace.step == step]
            shortest[step][: len(lengths)] = np.minimum(shortest[step][: len(lengths)], lengths)
    return shortest


def _counted(operations: Operations, pid: int, origin: int, backend: str, ids: Iterator[int]) -> list[str]:
    """Return the operations of a rank, JSON: as they are called, and as they are counted."""
    begin = _microseconds(operations.begin - origin)
    length = _microseconds(operations.end - origin) - begin
    names = set(operations.name)
    head = f'{{"ph": "X", "cat": "user_annotation", "name": %s, "pid": {pid}, "tid": '
    called = {name: head % json.dumps(name) for name in names if name not in COUNTED}
    counted = {name: head % json.dumps(f"{backend}:{_counted_as(name)}") for name in names}
    slices = []
    columns = (operations.name, begin.tolist(), length.tolist(), operations.lane.tolist(), operations.arguments)
    for name, ts, dur, lane, arguments in zip(*columns, strict=True):
        rest = f', "ts": {ts!r}, "dur": {dur!r}, "args": {{{arguments}, "External id": '
        tid = FIRST_LANE + lane
        if name in called:
            slices.append(f"{called[name]}{tid}{rest}{next(ids)}}}}}")
            tid = FIRST_COUNTED_LANE + lane
        slices.append(f"{counted[name]}{tid}{rest}{next(ids)}}}}}")
    return slices


def _counted_as(name: str) -> str:
    return name if name in COUNTED else NEAREST.get(name, "all_reduce")


def _fill_places(trace: RankTrace, counts: dict[int, int], shortest: dict[int, Column]) -> Iterator[str]:
    """Yield operations of no effect, JSON: as many as a rank has fewer than others."""
    named, ids = False, count_from(trace.num_events + 1)
    for step, count in counts.items():
        rows = np.flatnonzero(trace.step == step)
        if not named and 0 < len(rows) < count:
            yield json.dumps(_metadata("thread_name", trace.rank, FILLED, name="empty operations that fill a place"))
            next(ids)
            named = True
        for place in range(len(rows), count if len(rows) else 0):
            length = min(int(shortest[step][place]), int(shortest[step][len(rows) - 1]))
            end = _microsecond(int(trace.end[rows[-1]]) - trace.origin_ns)
            begin = _microsecond(int(trace.end[rows[-1]]) - length - trace.origin_ns)
            nothing = {"Input Dims": [[0]], "Input type": ["unsigned char"], "Collective name": "none: fills a place"}
            event = {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"{trace.backend}:{trace.last_counted[step]}",
                "pid": trace.rank,
                "tid": FILLED,
                "ts": begin,
                "dur": end - begin,
                "args": {**nothing, "External id": next(ids)},
            }
            yield json.dumps(event)


def _memory(rank: RankDetail, since: int, end: int, origin: int) -> list[Event]:
    """Return memory over time as allocations and releases of the differences."""
    samples, ops = rank.tables.samples, rank.tables.ops

    def series(name: str) -> tuple[Column, Column]:
        rows = samples[np.isin(samples["op"], [i for i, op in enumerate(ops) if op == name])]
        inside = (rows["t_ns"] >= since) & (rows["t_ns"] <= end)
        return rows["t_ns"][inside].astype(np.int64), rows["value"][inside].astype(np.int64)

    events_of_memory: list[Event] = []
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
            events_of_memory.append(event | {"tid": MAIN, "ts": _microsecond(t_ns - origin), "args": arguments})
    return events_of_memory


def _microsecond(ns: int) -> float:
    """Return a time within half a ns in units that floats add exactly: else neighbours would overlap by 1e-10."""
    return round(ns * 1.024) / 1024


def _microseconds(ns: Column) -> npt.NDArray[np.float64]:
    """Return the same of many."""
    microseconds: npt.NDArray[np.float64] = np.rint(ns * 1.024) / 1024
    return microseconds


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": arguments}
