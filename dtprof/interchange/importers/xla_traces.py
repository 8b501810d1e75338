"""Profiles of XLA (JAX, TensorFlow), `.xplane.pb` or `.trace.json.gz`, one for each host, as a run: a rank is a device.

Operations of the compiled program carry its name for them (hlo_op). Collectives that the compiler split in a start and
a done last from one to the other; everything else that ran on the device computed.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.diagnosis.sources.flight_recorder.dump_fields import dtype_code
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_records import (
    LAST_NS,
    ImportedOperation,
    ImportedRank,
    ImportedRun,
    Importer,
    RecordBuilder,
    align_steps,
)
from dtprof.interchange.importers.trace_stream import TraceFile, is_json
from dtprof.interchange.importers.xplane_files import XlaEvent, is_xplane, read_events
from dtprof.intervals import Column, union
from dtprof.job.world_size import MAX_WORLD_SIZE
from dtprof.records import events, schema

FORMAT = "XLA"
_XPLANE, _JSON = ".xplane.pb", ".trace.json.gz"
_MARKS = (b'"/host:', b'"/device:', b"highres-ticks", b"hlo_op", b"hlo_module")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(-start|-done)?(?:[.\d]+.*)?$"
)
_WRAPPER = re.compile(r"(while|conditional|call|async-start|async-done|async-update)([.\d]+)?$")
_DEVICE = re.compile(r"/device:(\w+):(\d{1,6})")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_RESULT = re.compile(r"=\s*(\((?:[^()]|\([^()]*\))*\)|\S+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
NAMES = {"collective-broadcast": "broadcast", "ragged-all-to-all": "all_to_all"}
NOT_RECORDED = "?"


@dataclass(kw_only=True)
class _Collective:
    """One collective of a device, us."""

    op: str
    is_split: bool  # in a start and a done
    begin: float
    end: float
    text: str  # of the instruction; empty where the trace has none


@dataclass(kw_only=True)
class _Device:
    """Events of one device."""

    computed: list[tuple[float, float]] = field(default_factory=list)
    collectives: list[_Collective] = field(default_factory=list)
    started: dict[str, _Collective] = field(default_factory=dict)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Host:
    """Events of one file."""

    path: Path
    problems: list[str]
    devices: dict[int, _Device] = field(default_factory=dict)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    processes: dict[object, int] = field(default_factory=dict)  # device of each process of the trace
    step_lines: set[tuple[object, object]] = field(default_factory=set)


def import_xla(files: Sequence[Path]) -> ImportedRun:
    """Read the traces of all hosts.

    Raises:
        NotATraceError: one holds no operation of a compiled program.
    """
    hosts = [_read(file) for file in _without_twins(files)]
    ranks: list[ImportedRank] = []
    size = sum(len(host.devices) for host in hosts)
    if size > MAX_WORLD_SIZE:
        raise NotATraceError(f"the traces are of {size} devices; expected {MAX_WORLD_SIZE} at most.")
    for number, host in enumerate(hosts):
        for device in sorted(host.devices):
            ranks.append(_rank(host, number, device, len(ranks), size))
    return ImportedRun(
        format=FORMAT, files=tuple(map(str, files)), ranks=tuple(align_steps(ranks)), cannot_tell=tuple(_lacks(ranks))
    )


def _without_twins(files: Sequence[Path]) -> list[Path]:
    """Return the files without the JSON of profiles that are there as protobuf, too: that tells more."""
    twins = {file.with_name(file.name.removesuffix(_XPLANE) + _JSON) for file in files if file.name.endswith(_XPLANE)}
    return [file for file in files if file not in twins]


def _read(path: Path) -> _Host:
    with path.open("rb") as file:
        host, count = _read_xplane(path) if is_xplane(file.read(1 << 20)) else _read_json(path)
    if not host.devices:
        raise NotATraceError(
            f"{path} holds no operation of a compiled program (hlo_op) among {count:,} events; expected the "
            "xplane.pb or trace.json.gz that jax.profiler.trace writes. Record steps that run on the devices."
        )
    return host


def _read_xplane(path: Path) -> tuple[_Host, int]:
    host, count = _Host(path=path, problems=[]), 0
    for event in read_events(path):
        count += event.ph == "X"
        _sort(host, event, event.args)
    return host, count


def _read_json(path: Path) -> tuple[_Host, int]:
    file = TraceFile(path, XlaEvent)
    host = _Host(path=path, problems=file.problems)
    for events_of_piece in file.events():
        for event in events_of_piece:
            _sort(host, event, event.args if isinstance(event.args, dict) else {})
    return host, file.count


def _sort(host: _Host, event: XlaEvent, arguments: Mapping[str, Any]) -> None:
    if event.ph == "M":
        _take_name(host, event, arguments)
    elif event.ph == "X" and abs(event.ts) < 1e15 and 0 <= event.dur < 1e15:
        _take(host, event, arguments)


def _take_name(host: _Host, event: XlaEvent, arguments: Mapping[str, Any]) -> None:
    name = arguments.get("name")
    if event.name == "process_name" and isinstance(name, str) and (match := _DEVICE.search(name)):
        host.processes[event.pid] = int(match[2])
    elif event.name == "thread_name" and name == "Steps":
        host.step_lines.add((event.pid, event.tid))


def _take(host: _Host, event: XlaEvent, arguments: Mapping[str, Any]) -> None:
    times = (event.ts, event.ts + event.dur)
    step = arguments.get("step_num")
    if (event.pid, event.tid) in host.step_lines:
        if event.pid in host.processes and event.name.isdecimal() and len(event.name) < 16:
            host.devices.setdefault(host.processes[event.pid], _Device()).steps.setdefault(int(event.name), times)
        return
    if isinstance(step, int | str) and str(step).isdecimal() and len(str(step)) < 16:
        host.steps.setdefault(int(step), times)
    op = arguments.get("hlo_op")
    if not isinstance(op, str):
        return
    ordinal = arguments.get("device_ordinal", host.processes.get(event.pid, 0))
    number = int(ordinal) if isinstance(ordinal, int | str) and str(ordinal).isdecimal() else 0
    device = host.devices.setdefault(min(number, MAX_WORLD_SIZE), _Device())
    match = _COLLECTIVE.match(op)
    if match is None:
        if not _WRAPPER.match(op):
            device.computed.append(times)
        return
    kind, half = match[1], match[2]
    text = next((str(arguments[key]) for key in ("long_name", "hlo_text", "expression") if key in arguments), "")
    pair = op.replace("-start", "").replace("-done", "")
    if half == "-done" and pair in device.started:
        device.started.pop(pair).end = times[1]
        return
    name = NAMES.get(kind, kind.replace("-", "_"))
    collective = _Collective(op=name, is_split=half == "-start", begin=times[0], end=times[1], text=text)
    device.collectives.append(collective)
    if half == "-start":
        device.started[pair] = collective


def _rank(host: _Host, number: int, ordinal: int, rank: int, size: int) -> ImportedRank:
    device = host.devices[ordinal]
    builder = RecordBuilder()
    builder.spans(events.DEVICE_BUSY, *union(_whole_ns(device.computed)).T)
    steps = device.steps or host.steps
    first = min(steps, default=None)
    if steps:
        times = _whole_ns([steps[key] for key in sorted(steps)])
        builder.marks(np.maximum.accumulate(np.r_[times[:1, 0], times[:, 1]]))
    groups: list[dict[str, Any]] = []
    _add_collectives(builder, device.collectives, groups, rank, size)
    return ImportedRank(
        rank=rank,
        world_size=size,
        ops=tuple(builder.ops),
        records=builder.records(),
        groups=tuple(groups),
        entries=({"k": "feature", "name": "backend:xla"},),
        notes=tuple(f"{host.path.name}: {problem}" for problem in host.problems),
        host=f"host-{number}",
        clock=f"host-{number}",
        local_rank=ordinal,
        first_step=first,
    )


def _whole_ns(times: Sequence[tuple[float, float]]) -> Column:
    ns: Column = np.round(np.array(times, np.float64).reshape(-1, 2) * 1000.0).astype(np.int64)
    return ns


def _add_collectives(
    builder: RecordBuilder, collectives: Sequence[_Collective], groups: list[dict[str, Any]], rank: int, size: int
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    operations = []
    for collective in sorted(collectives, key=lambda collective: collective.begin):
        members = _members(collective.text, rank, size)
        if members not in ids:
            ids[members] = len(groups)
            name = ",".join(map(str, members[:8])) if members else NOT_RECORDED
            groups.append(
                {"name": name, "description": "" if members else "members unknown", "size": len(members) or size}
            )
            if members:
                groups[-1]["ranks"] = list(members)
        ((begin, end),) = _whole_ns([(collective.begin, collective.end)]).tolist()
        numel, dtype = _size(collective, len(members))
        operations.append(
            ImportedOperation(op=collective.op, begin=begin, end=end, group=ids[members], numel=numel, dtype=dtype)
        )
    unknown = [number for members, number in ids.items() if not members]
    builder.add(operations, rank=rank, world_size=size, unknown_groups=unknown, device=True)


def _members(text: str, rank: int, size: int) -> tuple[int, ...]:
    """Return the devices that take part, from the instruction; empty where it does not tell."""
    match = _GROUPS.search(text)
    if match is None:
        return _iota_members(text, rank, size)
    if not match[1]:
        return tuple(range(size))
    for listed in re.findall(r"\{([\d,]+)\}", match[1]):
        members = tuple(int(device) for device in listed.split(",") if device and len(device) < 8)
        if rank in members and max(members) < size:
            return members
    return ()


def _iota_members(text: str, rank: int, size: int) -> tuple[int, ...]:
    """Return the members where groups are rows of the numbers of the devices, as an array in another order."""
    match = _IOTA_GROUPS.search(text)
    if match is None:
        return ()
    rows, columns = int(match[1][:8]), int(match[2][:8])
    extents = [int(extent[:8]) for extent in match[3].split(",") if extent]
    order = [int(axis[:8]) for axis in (match[4] or "").split(",") if axis] or list(range(len(extents)))
    if rows * columns != size or math.prod(extents) != size or sorted(order) != list(range(len(extents))):
        return ()
    groups = np.arange(size).reshape(extents).transpose(order).reshape(rows, columns)
    return tuple(groups[np.nonzero(groups == rank)[0][0]].tolist())


def _size(collective: _Collective, members: int) -> tuple[int, int]:
    """Return how many elements one device puts in, and of which type; 0 where not known, or of several types."""
    match = _RESULT.search(collective.text)
    arrays = _ARRAY.findall(match[1]) if match is not None else []
    if collective.is_split and collective.op != "all_reduce":
        arrays = arrays[:1]  # the start of any other gives what goes in before what comes out
    if len({dtype for dtype, _ in arrays}) != 1:
        return 0, schema.NO_CODE
    elements = sum(math.prod(int(extent[:15]) for extent in extents.split(",") if extent) for _, extents in arrays)
    if not collective.is_split and collective.op == "all_gather":
        elements //= members or 1
    elif not collective.is_split and collective.op == "reduce_scatter":
        elements *= members or 1
    known = elements < LAST_NS and (members or collective.op not in ("all_gather", "reduce_scatter"))
    return (elements, dtype_code(arrays[0][0])) if known else (0, schema.NO_CODE)


def _lacks(ranks: Sequence[ImportedRank]) -> list[str]:
    groups = [group for rank in ranks for group in rank.groups]
    lacks = [
        "idle: the partition is that of the device; idle is when no operation of the program ran on it",
        "phases: not in the trace",
        "memory: not in the trace",
        "overhead: not in the trace",
    ]
    if any(group["name"] == NOT_RECORDED for group in groups):
        lacks += [
            "wait_ns: which devices take part in a collective is not in the trace; waits and bandwidths are not known",
            "bytes: sizes are not in the trace",
        ]
    if not any(events.STEP in rank.ops for rank in ranks if rank.first_step is not None):
        lacks.append("steps: the trace has none; jax.profiler.StepTraceAnnotation(name, step_num=i) records them")
    if len({rank.clock for rank in ranks}) > 1:
        lacks.append("ranks: devices of several hosts are numbered in the order of the files")
    return lacks


IMPORTER = Importer(
    name="XLA or JAX traces",
    recognises=lambda head: (
        is_xplane(head) or (is_json(head) and b'"traceEvents"' in head and any(mark in head for mark in _MARKS))
    ),
    read=import_xla,
)
