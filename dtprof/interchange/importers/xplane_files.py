"""Profiles that XLA writes as protobuf, `.xplane.pb`: their events, and of each program the text of its collectives.

The messages are those of https://github.com/openxla/xla (tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto,
xla/xla_data.proto), read by the numbers of their fields. A plane is a device or the threads of the host, a line a
thread or a queue of it. The plane of metadata holds each program as HLO, after partitioning: which devices take part in
a collective, and its sizes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dtprof.errors import NotATraceError
from dtprof.interchange.importers.wire_format import Value, fields, numbers, real, signed, text

_PLANES = (b"/host:", b"/device:", b"Task Environment", b"#Chip")
_PLANE_FIELD = 0x0A
_OPERATIONS = ("XLA Ops", "Async XLA Ops")
"""Lines of a device on which each event is an operation of the program."""
_PROGRAM = "Hlo Proto"
MAX_DEVICES = 1 << 17
"""Of a mesh: larger ones are taken for damage."""
_MAX_DEPTH = 8  # of a tuple in tuples
_ELEMENT_TYPES = (
    *("", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple", "opaque", "c64"),
    *("bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz"),
)
"""By the numbers of xla.PrimitiveType."""


class XlaEvent(msgspec.Struct, gc=False):
    """An event as the JSON of a profile has it, us; those of protobuf from the first line on."""

    ph: str = ""  # "M" for the name of a process or thread, "X" for an event
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str | None = None
    tid: int | str | None = None
    args: Any = None


class _Plane(NamedTuple):
    name: str
    lines: list[memoryview]
    events: dict[int, memoryview]  # metadata by id
    stats: dict[int, str]  # names by id


def is_xplane(head: bytes) -> bool:
    """Say whether a file begins with a plane of a profile."""
    return head[:1] == bytes([_PLANE_FIELD]) and any(name in head for name in _PLANES)


def read_events(path: Path) -> Iterator[XlaEvent]:
    """Yield the events of a profile; those of a program have the text of their instruction as `long_name`.

    Raises:
        NotATraceError: it cannot be read, or is no such profile.
    """
    try:
        yield from _read_events(memoryview(path.read_bytes()))
    except OSError as error:
        reason = error.strerror or str(error)
        raise NotATraceError(f"{path} cannot be read: {reason}. Give a file that you may read.") from None
    except NotATraceError as error:
        raise NotATraceError(f"{path} is damaged, or no xplane.pb of XLA's profiler: {error}") from None


def _read_events(space: memoryview) -> Iterator[XlaEvent]:
    planes = [_plane(value) for number, value in fields(space) if number == 1 and not isinstance(value, int)]
    programs: dict[int, dict[str, str]] = {}
    for plane in planes:
        programs |= _programs(plane)
    lines = [(pid, plane, _line(line)) for pid, plane in enumerate(planes) for line in plane.lines]
    # In ns, and of some devices since 1970: us since then would be too long for the fractions that they have.
    base = min((line.begin_ns for _, _, line in lines if line.events), default=0)
    for pid, plane in enumerate(planes):
        yield XlaEvent("M", "process_name", 0, 0, pid, 0, {"name": plane.name})
    for tid, (pid, plane, line) in enumerate(lines):
        yield XlaEvent("M", "thread_name", 0, 0, pid, tid, {"name": line.name})
        described = {key: _describe(value, plane.stats) for key, value in plane.events.items()}
        of_device = plane.name.startswith("/device:") and line.name in _OPERATIONS
        for event in line.events:
            yield _event(event, described, plane, pid, tid, (line.begin_ns - base) / 1e3, programs, of_device)


class _Line(NamedTuple):
    name: str
    begin_ns: int
    events: list[memoryview]


def _plane(message: memoryview) -> _Plane:
    plane = _Plane("", [], {}, {})
    name = ""
    for number, value in fields(message):
        if number == 2:
            name = text(value)
        elif number == 3 and not isinstance(value, int):
            plane.lines.append(value)
        elif number in (4, 5):
            key, held = _map_entry(value)
            if number == 4:
                plane.events[key] = held
            else:
                plane.stats[key] = next((text(name) for field, name in fields(held) if field == 2), "")
    return plane._replace(name=name)


def _map_entry(value: Value) -> tuple[int, memoryview]:
    key, held = 0, memoryview(b"")
    for number, part in fields(_message(value)):
        if number == 1 and isinstance(part, int):
            key = part
        elif number == 2:
            held = _message(part)
    return key, held


def _message(value: Value) -> memoryview:
    return memoryview(b"") if isinstance(value, int) else value


def _line(message: memoryview) -> _Line:
    name, begin_ns, found = "", 0, []
    for number, value in fields(message):
        if number == 2:
            name = text(value)
        elif number == 3 and isinstance(value, int):
            begin_ns = signed(value)
        elif number == 4 and not isinstance(value, int):
            found.append(value)
    return _Line(name, begin_ns, found)


class _Described(NamedTuple):
    name: str
    display_name: str
    stats: dict[str, Any]


_UNKNOWN = _Described("", "", {})


def _describe(message: memoryview, names: Mapping[int, str]) -> _Described:
    name, display_name, stats = "", "", {}
    for number, value in fields(message):
        if number == 2:
            name = text(value)
        elif number == 4:
            display_name = text(value)
        elif number == 5:
            key, held = _stat(value, names)
            stats[key] = held
    return _Described(name, display_name, stats)


def _stat(value: Value, names: Mapping[int, str]) -> tuple[str, Any]:
    """Return name and value of a stat; the bytes of a program as they are."""
    key = ""
    held: Any = None
    for number, part in fields(_message(value)):
        if number == 1 and isinstance(part, int):
            key = names.get(part, "")
        elif number == 2:
            held = real(part)
        elif number in (3, 4) and isinstance(part, int):
            held = signed(part)
        elif number == 5:
            held = text(part)
        elif number == 6:
            held = part
        elif number == 7 and isinstance(part, int):
            held = names.get(part, "")
    return key, held


def _event(
    message: memoryview,
    described: Mapping[int, _Described],
    plane: _Plane,
    pid: int,
    tid: int,
    begin_us: float,
    programs: Mapping[int, Mapping[str, str]],
    of_device: bool,
) -> XlaEvent:
    known, offset_ps, duration_ps = _UNKNOWN, 0, 0
    stats: dict[str, Any] = {}
    for number, value in fields(message):
        if number == 1 and isinstance(value, int):
            known = described.get(value, _UNKNOWN)
        elif number == 2 and isinstance(value, int):
            offset_ps = signed(value)
        elif number == 3 and isinstance(value, int):
            duration_ps = signed(value)
        elif number == 4:
            key, held = _stat(value, plane.stats)
            stats[key] = held
    arguments = known.stats | stats
    if of_device:  # the name is the text of the instruction
        arguments.setdefault("hlo_op", known.display_name or known.name.partition(" = ")[0].removeprefix("%"))
        arguments.setdefault("long_name", known.name)
    program, op = arguments.get("program_id"), arguments.get("hlo_op")
    if isinstance(program, int) and isinstance(op, str) and op in (own := programs.get(program, {})):
        arguments["long_name"] = own[op]
    return XlaEvent("X", known.name, begin_us + offset_ps / 1e6, duration_ps / 1e6, pid, tid, arguments)


def _programs(plane: _Plane) -> dict[int, dict[str, str]]:
    """Return the text of the collectives of each program, by its id and their names."""
    if _PROGRAM not in plane.stats.values():
        return {}
    found: dict[int, dict[str, str]] = {}
    for key, message in plane.events.items():
        stats = _describe(message, plane.stats).stats
        program, module = stats.get("program_id", key), stats.get(_PROGRAM)
        if isinstance(module, memoryview) and isinstance(program, int):
            found[program] = {
                name: instruction
                for number, hlo in fields(module)
                if number == 1
                for name, instruction in _collectives(_message(hlo))
            }
    return found


def _collectives(module: memoryview) -> Iterator[tuple[str, str]]:
    for number, computation in fields(module):
        if number == 3:
            for field, instruction in fields(_message(computation)):
                if field == 2 and (found := _instruction(_message(instruction))) is not None:
                    yield found


def _instruction(message: memoryview) -> tuple[str, str] | None:
    """Return name and text of an instruction over groups of devices; None of any other."""
    name, shape, groups, pairs = "", "", None, []
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 3:
            shape = _shape(_message(value))
        elif number == 49:
            groups = [*(groups or []), _replica_group(value)]
        elif number == 52:
            pairs.append([part for _, some in fields(_message(value)) for part in numbers(some)])
        elif number == 87:
            groups = _device_list(_message(value))
        elif number == 93:
            groups = _mesh_groups(_message(value))
    if groups is None and not pairs:
        return None
    written = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups or []) + "}"
    return name, f"%{name} = {shape} , replica_groups={written}" if groups is not None else f"%{name} = {shape}"


def _shape(message: memoryview, depth: int = 0) -> str:
    element, dimensions, parts = 0, [], []
    for number, value in fields(message):
        if number == 2 and isinstance(value, int):
            element = value
        elif number == 3:
            dimensions += numbers(value)
        elif number == 4 and depth < _MAX_DEPTH:
            parts.append(_shape(_message(value), depth + 1))
    if parts:
        return f"({', '.join(parts)})"
    name = _ELEMENT_TYPES[element] if element < len(_ELEMENT_TYPES) else ""
    return f"{name}[{','.join(map(str, dimensions))}]"


def _replica_group(value: Value) -> list[int]:
    return [part for number, some in fields(_message(value)) if number == 1 for part in numbers(some)]


def _device_list(message: memoryview) -> list[list[int]] | None:
    """Return the groups of a list of devices: as they are, or as rows of the numbers 0 to n in another order."""
    listed = [_replica_group(value) for number, value in fields(message) if number == 1]
    for number, value in fields(message):
        if number == 2:
            held: dict[int, list[int]] = {}
            for field, part in fields(_message(value)):
                held.setdefault(field, []).extend(numbers(part))
            (size,) = held.get(2, [0])[-1:]
            extents = held.get(3, [])
            return _rows(extents, held.get(4) or list(range(len(extents))), size)
    return listed


def _mesh_groups(message: memoryview) -> list[list[int]] | None:
    """Return the groups along axes of a mesh: devices that differ in nothing but these; None of parts of an axis."""
    extents: list[int] = []
    along: list[int] = []
    for number, value in fields(message):
        if number == 1:
            for field, part in fields(_message(value)):
                if field == 1:
                    extents += [n for key, size in fields(_message(part)) if key == 2 for n in numbers(size)][:1] or [1]
                else:
                    return None  # the devices have an order of their own
        elif number == 2:
            axis = dict(fields(_message(value)))
            if set(axis) - {1}:
                return None
            along += numbers(axis.get(1, 0))
    if any(not 0 <= axis < len(extents) for axis in along):
        return None
    others = [axis for axis in range(len(extents)) if axis not in along]
    return _rows(extents, [*others, *along], math.prod(extents[axis] for axis in along))


def _rows(extents: list[int], order: list[int], size: int) -> list[list[int]] | None:
    """Return the numbers of an array with these extents, its axes in another order, as rows of a size."""
    count = math.prod(extents)
    if sorted(order) != list(range(len(extents))) or not 0 < size <= count <= MAX_DEVICES or count % size:
        return None
    strides = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    turned = [
        sum(place * strides[axis] for place, axis in zip(places, order, strict=True))
        for places in itertools.product(*(range(extents[axis]) for axis in order))
    ]
    return [turned[begin : begin + size] for begin in range(0, count, size)]
