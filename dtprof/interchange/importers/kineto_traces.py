"""Traces of torch.profiler (Kineto), one for each rank, as a run.

Where kernels of a device were recorded, times are those of the device: an operation begins and ends with its kernel, a
step ends with the last kernel that was launched in it, and what the device computed says what communication it hid.
Else they are those of the host: an operation begins with its call and ends with the work of the back end, and operators
say what was computed. The names of steps and phases come from the annotations of torch and of the program.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.columns import distinct
from dtprof.errors import NotATraceError
from dtprof.formatting import plural
from dtprof.interchange.importers.imported_records import (
    ImportedRank,
    ImportedRun,
    Importer,
    RecordBuilder,
    align_steps,
)
from dtprof.interchange.importers.kineto_communication import (
    NOT_RECORDED,
    Groups,
    device_operations,
    host_operations,
)
from dtprof.interchange.importers.kineto_events import KinetoTrace, Times, TracedCall, correlation_of, read_events
from dtprof.interchange.importers.kineto_phases import STEP, host_phases, host_steps
from dtprof.interchange.importers.trace_stream import is_json
from dtprof.intervals import Column, cover
from dtprof.job.parallel_reading import read_files
from dtprof.job.world_size import MAX_WORLD_SIZE
from dtprof.records import events

FORMAT = "torch.profiler"
_MARKS = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"', b'"traceName"')
_ON_HOST = (events.DATA, events.CHECKPOINT)


def import_kineto(files: Sequence[Path]) -> ImportedRun:
    """Read the traces of all ranks.

    Raises:
        NotATraceError: one cannot be read, or they are not of one job.
    """
    ranks, lacks = join_ranks(list(zip(files, read_files(read_kineto, files), strict=True)))
    return ImportedRun(
        format=FORMAT,
        files=tuple(map(str, files)),
        ranks=tuple(ranks),
        cannot_tell=tuple(lacks),
        starts_at_epoch=True,
    )


def read_kineto(path: Path) -> ImportedRank:
    """Read the trace of one rank; its rank is -1 where the trace does not name it.

    Raises:
        NotATraceError: it is none, or cannot be read.
    """
    trace = read_events(path)
    if not trace.count:
        raise NotATraceError(
            f"{path} holds no event; expected a trace of torch.profiler. {_join(trace.problems)}Record it again."
        )
    rank, world_size = _rank_of(trace)
    builder = RecordBuilder()
    groups = Groups(rank=max(rank, 0), world_size=world_size, configured=_configured(trace))
    steps = host_steps(trace)
    phases = host_phases(trace)
    if trace.uses_device:
        launched = _launch_times(trace)
        ends = _add_device(builder, trace, launched, steps[1])
        phases = [(name, *_on_device(name, begin, end, trace, launched)) for name, begin, end in phases]
    else:
        ends = steps[1]
        builder.spans(events.HOST_BUSY, *cover(*_host_busy(trace)).T)
    operations = device_operations(trace, groups) if trace.uses_device else host_operations(trace, groups)
    builder.add(
        sorted(operations, key=lambda operation: operation.begin),
        rank=groups.rank,
        world_size=world_size,
        unknown_groups=groups.unknown,
        device=trace.uses_device,
        base_ns=trace.base_ns,
    )
    for name, begin, end in phases:
        builder.spans(name, begin, end)
    _add_memory(builder, trace, ends)
    builder.marks(ends)
    return ImportedRank(
        rank=rank,
        world_size=world_size,
        records=builder.records(),
        ops=tuple(builder.ops),
        groups=tuple(groups.entries),
        entries=({"k": "feature", "name": f"backend:{backend}"},) if (backend := _backend(trace)) else (),
        notes=_notes(trace, operations),
        host=str(trace.facts.get("host_name") or ""),
        pid=_pid(trace),
        local_rank=min(trace.devices) if len(trace.devices) == 1 else -1,
        first_step=steps[0],
    )


def _join(problems: Sequence[str]) -> str:
    return "".join(f"It is {problem}. " for problem in problems[:1])


def _rank_of(trace: KinetoTrace) -> tuple[int, int]:
    info = trace.facts.get("distributedInfo")
    rank, size = (info.get(key) for key in ("rank", "world_size")) if isinstance(info, dict) else (None, None)
    if type(rank) is int and type(size) is int and 0 <= rank < size <= MAX_WORLD_SIZE:
        return rank, size
    return -1, 1


def _configured(trace: KinetoTrace) -> dict[str, Any]:
    info = trace.facts.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    if isinstance(listed, dict):
        listed = [{"pg_name": name, **group} for name, group in listed.items() if isinstance(group, dict)]
    rows = listed if isinstance(listed, list) else []
    return {str(group["pg_name"]): group for group in rows if isinstance(group, dict) and "pg_name" in group}


def _backend(trace: KinetoTrace) -> str:
    info = trace.facts.get("distributedInfo")
    backend = info.get("backend") if isinstance(info, dict) else None
    return backend if isinstance(backend, str) and len(backend) < 64 else ""


def _pid(trace: KinetoTrace) -> int:
    """Return the process that ran the steps; 0 where the trace does not show."""
    processes = [call.process for call in trace.annotations if STEP.match(call.name)]
    return next((process for process in processes if type(process) is int and 0 <= process < 1 << 31), 0)


def _launch_times(trace: KinetoTrace) -> Column:
    """Return when the host launched each kernel that computes; where that is not recorded, when it began."""
    begin, _, correlation = trace.kernels.columns(trace.base_ns)
    return _launch_of(trace, correlation, begin)


def _launch_of(trace: KinetoTrace, correlation: Column, begin: Column) -> Column:
    at, _, known = trace.launches.columns(trace.base_ns)
    if not len(at):
        return begin
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], correlation), len(known) - 1)
    is_known = known[order][place] == correlation
    return np.where(is_known, at[order][place], begin)


def _add_device(builder: RecordBuilder, trace: KinetoTrace, launched: Column, steps: Column) -> Column:
    """Add when the device computed; return where steps end on it, the begin of the first before them."""
    begin, end, _ = trace.kernels.columns(trace.base_ns)
    builder.spans(events.DEVICE_BUSY, *cover(begin, end).T)
    if not len(steps):
        return steps
    calls = trace.collectives
    their_begin, their_end = (np.array(column, np.int64) + trace.base_ns for column in _times_of(calls))
    theirs = np.array([correlation_of(call.arguments) for call in calls], np.int64)
    all_launched = np.r_[launched, _launch_of(trace, theirs, their_begin)]
    all_ends = np.r_[end, their_end]
    ends = steps.copy()
    step = np.asarray(np.searchsorted(steps, all_launched, "right")) - 1
    inside = (step >= 0) & (step < len(steps) - 1)
    latest = np.zeros(len(steps), np.int64)
    np.maximum.at(latest, step[inside] + 1, all_ends[inside])
    ends = np.where(latest > 0, latest, ends)
    return np.maximum.accumulate(ends)


def _times_of(calls: Sequence[TracedCall]) -> tuple[list[int], list[int]]:
    return [call.begin for call in calls], [call.end for call in calls]


def _on_device(name: str, begin: Column, end: Column, trace: KinetoTrace, launched: Column) -> tuple[Column, Column]:
    """Return the interval in which the device ran the kernels that the host launched in a phase."""
    if name in _ON_HOST or not len(begin):
        return begin, end
    kernel_begin, kernel_end, _ = trace.kernels.columns(trace.base_ns)
    order = np.argsort(launched, kind="stable")
    first, last = (np.searchsorted(launched[order], times, "left") for times in (begin, end))
    has = last > first
    first, last = first[has], last[has]
    if not len(first):
        return begin[:0], end[:0]
    bounds = np.stack((first, last), axis=1).ravel()
    begins = np.minimum.reduceat(np.r_[kernel_begin[order], np.iinfo(np.int64).max], bounds)[::2]
    ends = np.maximum.reduceat(np.r_[kernel_end[order], 0], bounds)[::2]
    begins, ends = cover(begins, ends).T
    return begins, ends


def _host_busy(trace: KinetoTrace) -> tuple[Column, Column]:
    """Return when operators computed: those in which nothing communicates or waits."""
    base = trace.base_ns
    begin, end, thread = _joined([trace.operators, trace.backward], base)
    at, _, waiting = trace.communicating.columns(base)
    keep = np.ones(len(begin), np.bool_)
    for number in distinct(waiting).tolist():
        rows = np.flatnonzero(thread == number)
        times = np.sort(at[waiting == number])
        keep[rows] = np.searchsorted(times, begin[rows], "left") == np.searchsorted(times, end[rows], "left")
    return begin[keep], end[keep]


def _joined(parts: Sequence[Times], base_ns: int) -> tuple[Column, Column, Column]:
    begin, end, other = zip(*(part.columns(base_ns) for part in parts), strict=True)
    return np.concatenate(begin), np.concatenate(end), np.concatenate(other)


def _add_memory(builder: RecordBuilder, trace: KinetoTrace, ends: Column) -> None:
    """Add the most that was allocated up to the end of each step."""
    times, _, reserved = trace.memory.columns(trace.base_ns)
    if not len(times):
        return
    allocated = np.array(trace.memory.length, np.float64).astype(np.int64)
    order = np.argsort(times, kind="stable")
    at = ends[1:] if len(ends) > 1 else times[order][-1:]
    place = np.searchsorted(times[order], at, "right") - 1
    at, place = at[place >= 0], place[place >= 0]
    for name, values in (
        (events.CUDA_PEAK_ALLOCATED_BYTES, allocated),
        (events.CUDA_PEAK_RESERVED_BYTES, reserved),
    ):
        builder.samples(name, at, np.maximum.accumulate(np.maximum(values[order], 0))[place])


def _notes(trace: KinetoTrace, operations: Sequence[Any]) -> tuple[str, ...]:
    notes = [f"{trace.path.name}: {problem}" for problem in trace.problems]
    unfinished = sum(operation.end < operation.begin for operation in operations)
    if unfinished:
        notes.append(f"{trace.path.name}: the end of {unfinished:,} operations is not in the trace")
    return tuple(notes)


def join_ranks(ranks: Sequence[tuple[Path, ImportedRank]]) -> tuple[list[ImportedRank], list[str]]:
    """Return the ranks of one job, on their clocks, and the caveats of the traces.

    Raises:
        NotATraceError: they are not of one job.
    """
    if len(ranks) == 1 and ranks[0][1].rank < 0:
        ranks = [(ranks[0][0], replace(ranks[0][1], rank=0))]
    seen: dict[int, Path] = {}
    for path, rank in ranks:
        if rank.rank < 0:
            raise NotATraceError(
                f"{path} does not name its rank: it has no distributedInfo. Expected traces recorded after "
                "init_process_group where there are several; import this one alone."
            )
        if rank.rank in seen:
            raise NotATraceError(
                f"{path} and {seen[rank.rank]} are both of rank {rank.rank}; expected one trace of each rank. "
                "Give those of one recording."
            )
        seen[rank.rank] = path
    sizes = {rank.world_size: path for path, rank in ranks}
    if len(sizes) > 1:
        (a, path_a), (b, path_b) = list(sizes.items())[:2]
        raise NotATraceError(
            f"{path_a} is of a job of {plural(a, 'rank')} and {path_b} of one of {b}; expected traces of one job. "
            "Import each job into a run of its own."
        )
    aligned = align_steps([rank for _, rank in ranks])
    aligned, lacks = _on_clocks(aligned)
    return aligned, [*lacks, *_lacks(aligned)]


def _on_clocks(ranks: Sequence[ImportedRank]) -> tuple[list[ImportedRank], list[str]]:
    """Say which ranks share a clock: those of one host name; without names all, unless two have the same device."""
    named = all(rank.host for rank in ranks)
    devices = [(rank.local_rank, rank.pid) if rank.local_rank < 0 else (rank.local_rank, -1) for rank in ranks]
    if named:
        return [replace(rank, clock=f"host {rank.host}") for rank in ranks], []
    if len(ranks) < 2:
        return [replace(rank, clock="one") for rank in ranks], []
    if len(set(devices)) == len(ranks):
        reason = "clock_error_ns: the traces do not name their hosts; no two ranks use the same device or process id, "
        return [replace(rank, clock="one") for rank in ranks], [reason + "and so they are taken to be of one host"]
    return [replace(rank, host=f"host-of-rank-{rank.rank}", clock=f"rank {rank.rank}") for rank in ranks], []


def _lacks(ranks: Sequence[ImportedRank]) -> list[str]:
    names = {name for rank in ranks for name in rank.ops}
    lacks = [
        "overhead: a trace does not show what the profiler cost; step times contain it",
        "pipeline: a trace does not name the schedule, nor whose microbatch a kernel is of; bubbles are in the waits",
        "api: which line or framework issued an operation is not taken from traces; it is null",
    ]
    if events.DEVICE_BUSY in names:
        lacks.append(
            "idle: the partition of traces with a device is that of the device; idle is when no kernel ran, copies and "
            "waiting for the host included"
        )
    else:
        lacks.append(
            "exposed_ns: a trace does not show when the program was blocked; exposed is when an operation was under "
            "way and no operator ran, so that Python between operators counts as blocked: an upper bound"
        )
    if events.CUDA_PEAK_ALLOCATED_BYTES not in names:
        lacks.append("memory: not in these traces; profile_memory=True records that of GPUs")
    if events.STEP not in names or not any(_has(rank, events.STEP) for rank in ranks):
        lacks.append("steps: the traces have no ProfilerStep; prof.step() after each step records them")
    missing = [name for name in (events.FORWARD, events.BACKWARD, events.OPTIMIZER, events.DATA) if name not in names]
    if missing:
        lacks.append(f"phases: {', '.join(missing)} are not in these traces; their time is in host or compute")
    if any(group["name"] == NOT_RECORDED for rank in ranks for group in rank.groups):
        lacks.append(
            "wait_ns: which group an operation was of is not in the traces, and the groups have different members: "
            "operations of different ranks cannot be matched"
        )
    if any(_without_size(rank) for rank in ranks):
        lacks.append("bytes: sizes are not in these traces (record_shapes=True records them)")
    return lacks


def _has(rank: ImportedRank, name: str) -> bool:
    return name in rank.ops and bool((rank.records["op"] == rank.ops.index(name)).any())


def _without_size(rank: ImportedRank) -> bool:
    collectives = rank.records["kind"] == 1
    return bool(collectives.any() and not rank.records["numel"][collectives].any())


IMPORTER = Importer(
    name="torch.profiler traces",
    recognises=lambda head: is_json(head) and any(mark in head for mark in _MARKS),
    read=import_kineto,
)
