"""Format 2 of a run on disk: every file, field and code, in one place.

The writer, the reader, the native hook (through a generated C++ header) and docs/reference/run_format.md are all
derived from the tables below. Standard library only: this module is imported inside the user's job.

Changes, newest first:
    2 (2026-11-23)  time on the device: kinds device_operation, device_wait, device_phase; flag followed; entry stream
    1 (2026-11-21)  first format
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 2
MAGIC = b"DTPROF\r\n"
BYTE_ORDER_MARK = 0x01020304
HEADER_SIZE = 4096
RECORD_SIZE = 64
SEGMENT_SIZE = 4 * 1024 * 1024
SEGMENT_CAPACITY = (SEGMENT_SIZE - HEADER_SIZE) // RECORD_SIZE
MAX_TABLE_ENTRIES = 65_535
"""Entries a rank may declare per string table; later ones share the last id."""
FIRST_LABELLED_SITE = 0x80000000
"""Ids of sites with a label count from here, those without from 1."""
MOST_CALLERS = 6
"""Lines of the user's code that a site names beside its own: those that led there."""
FRAMES_OF_CALLERS = 64
"""Frames, of whatever code, among which they are looked for, from that of the site on."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a binary structure: its offset, coding and meaning."""

    name: str
    code: str
    offset: int
    unit: str
    meaning: str
    exported: str = ""  # what exported tables of operations say of it; empty: they leave it out

    @property
    def size(self) -> int:
        """Bytes the field takes."""
        return struct.calcsize("<" + self.code)


_Row = tuple[str, str, str, str] | tuple[str, str, str, str, str]


def lay_out(rows: Sequence[_Row]) -> tuple[Field, ...]:
    """Lay fields out one after the other, without padding."""
    fields, offset = [], 0
    for name, code, unit, meaning, *exported in rows:
        field = Field(name=name, code=code, offset=offset, unit=unit, meaning=meaning, exported="".join(exported))
        fields.append(field)
        offset += field.size
    return tuple(fields)


# A field is one line here: from it follow the C++ header, the tables of readers (records/tables.py), exported tables
# where it has a fifth text, and docs/reference/run_format.md.
RECORD = lay_out(
    [
        (
            "state",
            "B",
            "code",
            "how far the event came, see States; written last when the event is issued",
            "how far it came: issued, returned, done, failed",
        ),
        ("kind", "B", "code", "what the event is, see Kinds", "collective or p2p"),
        ("dtype", "B", "code", "element type of the tensors, see Element types; 255 when there is none"),
        ("reduce_op", "B", "code", "reduction, see Reductions; 255 when the operation does not reduce"),
        (
            "op",
            "H",
            "id",
            "operation or phase, declared by an `op` entry of the strings file",
            "operation: all_reduce, send, ...",
        ),
        (
            "thread",
            "H",
            "id",
            "issuing thread, declared by a `thread` entry; of device kinds: stream, declared by a `stream` entry; "
            "0 unknown",
        ),
        (
            "group",
            "H",
            "id",
            "process group, declared by a `group` entry; unused for spans and samples",
            "name of the process group",
        ),
        ("flags", "B", "bits", "see Flags, of device kinds Device flags; written when the event is issued"),
        ("waits", "B", "count", "times the handle was waited for, saturating"),
        (
            "seq",
            "I",
            "count",
            "position in the group: collectives and point-to-point operations count apart, from 0",
            "position in the group, collectives and messages counted apart",
        ),
        (
            "peer",
            "i",
            "group rank",
            "root of a rooted collective, peer of a point-to-point operation; spans: pipeline stage; -1 none",
            "root or peer as rank in the group; masked: none",
        ),
        (
            "tag",
            "i",
            "",
            "point to point: the tag; collectives: id of a `sizes` entry, 0 where sizes are even; spans of a pipeline "
            "stage: the microbatch; spans `pp_step`: id of a `pipeline` entry; spans `step`: how many there have "
            "been, with this one; spans `new_group`: CRC-32 of the members asked for, 0 for all; device kinds: how "
            "far its times may be off on the host's clock, in ns",
        ),
        ("site", "I", "id", "line of the user's code and attribution, declared by a `site` entry; 0 unknown"),
        (
            "step",
            "I",
            "count",
            "optimizer steps this rank had ended when the event was issued",
            "optimizer steps that this rank had ended before",
        ),
        (
            "issued_ns",
            "Q",
            "ns",
            "CLOCK_MONOTONIC at issue (spans: at begin; device kinds: when the device came to it)",
            "when it was issued, on the host's monotonic clock",
        ),
        (
            "numel",
            "Q",
            "elements",
            "elements this rank puts in (receives: takes out); samples: the value; device operations: `issued_ns` of "
            "the operation; device waits and phases: CLOCK_MONOTONIC when the host was at the begin",
            "elements that this rank puts in",
        ),
        (
            "returned_after",
            "f",
            "ns",
            "from issue until the call returned; device waits and phases: time of the host from begin to end; device "
            "operations: from when the caller's stream came to the call until the operation began",
        ),
        ("waited_from", "f", "ns", "from issue until the first wait began; meaningful where waits > 0"),
        ("waited_for", "f", "ns", "time the issuing program was blocked in waits, summed"),
        (
            "done_after",
            "f",
            "ns",
            "from issue until completion (spans: until the end); meaningful in state done, failed",
        ),
    ]
)

HEADER = lay_out(
    [
        ("magic", "8s", "", "the bytes `DTPROF\\r\\n`"),
        ("format_version", "I", "count", "version of this format"),
        ("byte_order", "I", "", "0x01020304 in the byte order of the writer"),
        ("header_size", "I", "bytes", "where the first record starts"),
        ("record_size", "I", "bytes", "size of a record"),
        ("capacity", "I", "count", "records the segment has room for"),
        ("segment", "I", "count", "number of the segment, from 0; a gap means that segments were dropped"),
        ("rank", "i", "global rank", "rank of the process"),
        ("local_rank", "i", "rank", "rank on its host; -1 unknown"),
        ("world_size", "i", "count", "ranks of the job"),
        ("attempt", "I", "count", "restart attempt"),
        ("pid", "I", "", "process id"),
        ("tap", "I", "code", "1 native hook, 2 Python hook"),
        ("opened_monotonic_ns", "Q", "ns", "CLOCK_MONOTONIC when the segment was opened"),
        ("opened_realtime_ns", "Q", "ns", "CLOCK_REALTIME at the same moment"),
        ("head", "Q", "count", "records claimed so far; may pass the capacity by the claims that moved on"),
        ("capture_ns", "Q", "ns", "time dtprof itself spent in the events of this segment"),
        ("dropped", "Q", "count", "events of earlier segments that were dropped, and events that found no room"),
        ("errors", "Q", "count", "events that could not be recorded because of an error in dtprof"),
        ("marks", "I", "bits", "see Marks"),
        ("reserved", "I", "", "zero"),
        ("host", "64s", "", "host name, zero-padded UTF-8"),
        ("boot_id", "40s", "", "boot id of the host: equal ids share one CLOCK_MONOTONIC"),
        ("torch_version", "32s", "", "torch.__version__"),
        ("dtprof_version", "32s", "", "dtprof.__version__"),
    ]
)

STATES = {
    "empty": (0, "no event, or one that was never finished being written"),
    "issued": (1, "the call was made and has not returned"),
    "returned": (2, "the call returned, completion not seen"),
    "done": (3, "complete"),
    "failed": (4, "raised, or completed with an error"),
}
KINDS = {
    "collective": (1, "collective operation"),
    "p2p": (2, "point-to-point operation"),
    "span": (3, "phase of the program: begin and end"),
    "sample": (4, "one value at one moment"),
    "device_time": (
        5,
        "how long an operation of a group took on its device: issued_ns is when its back end took it, within the call; "
        "numel the duration in ns; done_after until it was seen complete",
    ),
    "device_operation": (
        6,
        "an operation on its device, once that has started it: `group`, `seq` and `numel` say which; state issued: "
        "started and not complete",
    ),
    "device_wait": (
        7,
        "how long a stream stood in a wait for an operation, which `group` and `seq` name",
    ),
    "device_phase": (8, "a phase of the program on the stream that was current: its begin and end there"),
}
FLAGS = {
    "async": (1, "the caller asked for a handle (async_op=True)"),
    "completion": (2, "completion is observed: done_after will be exact or as late as the first wait"),
    "device": (4, "the tensors live on an accelerator"),
    "no_work": (8, "the back end returned no handle (it runs on the current stream)"),
    "inferred_site": (16, "no user frame on this thread: the site is that of the running backward call"),
    "skipped": (32, "optimizer span: the step was skipped by a GradScaler; data span: no batch was left"),
    "followed": (
        32,
        "operation: its device is followed, and a `device_operation` comes once it starts (native recorder; set when "
        "the call has returned)",
    ),
    "polled": (64, "completion is seen at the wait or the next event of the rank: done_after is an upper bound"),
    "asked": (128, "its handle was asked for completion, its result or a future (native recorder; set afterwards)"),
}
DEVICE_FLAGS = {
    "p2p": (1, "the operation is point to point: `seq` counts among those"),
    "exact": (2, "begin and end are those of the back end's own kernel"),
    "on_stream": (4, "it ran on the caller's stream, or that waited for it at once: all of it was exposed"),
    "polled": (8, "its end was found by polling: it is an upper bound, late by milliseconds"),
    "several": (16, "one of several operations that the back end joined: the times are those of all together"),
}
MARKS = {
    "truncated": (1, "recording stopped early: the disk was full or the limit could not be kept"),
    "closed": (2, "the process ended in order and closed the log"),
    "sealed": (4, "the process will not write to this segment again: it may be archived"),
}
DTYPES = (
    ("uint8", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
    ("bool", 1),
    ("qint8", 1),
    ("quint8", 1),
    ("qint32", 4),
    ("bfloat16", 2),
    ("quint4x2", 1),
    ("quint2x4", 1),
    ("bits1x8", 1),
    ("bits2x4", 1),
    ("bits4x2", 1),
    ("bits8", 1),
    ("bits16", 2),
    ("float8_e5m2", 1),
    ("float8_e4m3fn", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e4m3fnuz", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
)
"""Name and bytes an element; the code is the position (c10::ScalarType's own numbering)."""
REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""Name by code (c10d::ReduceOp's own numbering)."""
NO_CODE = 255
"""dtype or reduce_op of an event that has none."""

STRING_ENTRIES = {
    "process": "who writes: rank, local_rank, world_size, attempt, meeting (the address of the rendezvous of its "
    "ranks, or its replica group; null unknown), pid, host, command, torch, python, tap, clocks",
    "op": "id, name: an operator of torch's c10d namespace, or the name of a phase or sample",
    "site": "id, file, line, function, api: a line of the user's code and the call it made, package: the installed "
    "package that issued the operation, if one did, and callers: the `frame`s of the user's code that led there, from "
    "the caller on; or id, of, label: the site `of` (0 unknown) on behalf of a label",
    "frame": "id, file, line, function: a line of the user's code that led to a site",
    "label": "id, api, text, module, stage, microbatch: the part of a framework that issued an operation, "
    "like `fsdp all-gather of layers.4`; what does not apply is left out",
    "group": "id, name, description, size, rank, ranks, backend, timeout_s: a process group at its first use; a later "
    "entry of the same id adds what became known; instead of `ranks`, the global ranks in order, there may be `range`: "
    "the first, how many, and the distance from each to the next",
    "axis": "group, axis, by: a group of this name serves the axis (dp, tp, pp), as its user `by` says",
    "mesh": "device_type, names, shape, coordinate, groups, flattened: a device mesh; per dimension the name (none for "
    "an unnamed mesh), the ranks along it, where this rank lies and the name of its group; `flattened` joins several "
    "dimensions of another mesh",
    "sharding": "scheme, shards, by: a framework shards the model over so many ranks, as ZeRO does: `scheme` is none, "
    "zero1 (optimizer state), zero2 (and gradients), zero3 (and parameters) or tables (embedding tables alone)",
    "ddp": "t_ns, id, group, buckets, parameters: bytes of the buckets of a DistributedDataParallel from this time on, "
    "by index, and how many parameters they hold",
    "parameters": "t_ns, group, by, names, count, some, place: DistributedDataParallel or fully_shard, called at "
    "`place` (file, line, function), communicates so many parameters over a group, in an order of whose names `names` "
    "is the CRC-32; `some`: the first 8 of them",
    "optimizer": "t_ns, steps, parameters, elements: an optimizer of so many parameters made its first step here, and "
    "had made so many before, by the state that it was given",
    "pipeline": "id, schedule, num_stages, stages, microbatches, group, group_rank, group_size, order, "
    "offered: a pipeline schedule and what this rank does in it; `order` is the plan of this rank, one string a slot: "
    "empty (idle), or actions like `0F3` (stage 0, forward, microbatch 3), with a space between those that overlap; "
    "null without a plan; `offered`: the schedules of a framework that has few",
    "thread": "id, name, native_id: a thread that issued events",
    "thread_start": "native_id, file, line, function: the line of the user's code that started a thread",
    "device": "t_ns, device, name, uuid: the accelerator that the rank computes on, such as cuda:0, its name and "
    "UUID (`GPU-...` as NVML has it; of a MIG slice its own)",
    "stream": "id, device, index, stream: a stream of a device (cuda, 0) by torch's number; the native recorder alone",
    "sizes": "id, inputs, outputs: element counts of an uneven operation, per peer or per tensor",
    "feature": "name: something the job uses: `backend:NAME` of the default group, `ddp`, `layers:sequence_first`, "
    "`inputs:packed`",
    "exception": "t_ns, type, message, traceback, frame: an exception that left the program",
    "thread_exception": "t_ns, thread, type, message, traceback, frame: an exception that ended a thread of this name "
    "beside the main one; the process lives on",
    "out_of_memory": "t_ns, device, message, live_bytes, held_bytes, largest, allocations: of an exception that says "
    "that memory ran out: what was allocated, what of it parameters, gradients, optimizer state, communication and "
    "other held, which held most, and the largest blocks where torch records them",
    "early_use": "t_ns, id, use, by, used, op, group, seq, site, step, dropped: a tensor of the operation `op` (an "
    "id), issued at `site`, was `read` or `written` before its wait, by the operator `by` at the site `used`; "
    "`dropped`: its handle was gone by then; a later entry of the same id with `waited` says that the wait came "
    "afterwards; without the check of handles only writes are seen, at the wait: `by` and `used` are empty",
    "window": "t_ns, id, state, first, last, begin_ns, end_ns, ready_ns, realtime_ns, file, bytes, reason, request: a "
    "window of torch.profiler over the steps `first` to `last`; `state` is begun, written or failed, and a later entry "
    "of the same id takes the place of an earlier one; the rank was kept from its program from begin_ns on to start "
    "it, and from end_ns, the end of its last step, to ready_ns to write it; realtime_ns is CLOCK_REALTIME, which the "
    "trace counts in, at begin_ns; `request` is that of `dtprof trace --now`",
    "snapshot": "t_ns, state, why, step, device, file, bytes, held_bytes, reason, request: a snapshot of memory in a "
    "file of this folder",
    "exit": "t_ns, how, code: the interpreter ended in order",
    "note": "t_ns, text: something that went wrong in dtprof itself",
}
"""Lines of `strings.jsonl`: one JSON object each, its kind under "k", written before an id is first used."""

RECORD_STRUCT = struct.Struct("<" + "".join(field.code for field in RECORD))
HEADER_STRUCT = struct.Struct("<" + "".join(field.code for field in HEADER))
OFFSET = {field.name: field.offset for field in RECORD}
HEADER_OFFSET = {field.name: field.offset for field in HEADER}
STATE = {name: code for name, (code, _) in STATES.items()}
KIND = {name: code for name, (code, _) in KINDS.items()}
FLAG = {name: code for name, (code, _) in FLAGS.items()}
DEVICE_FLAG = {name: code for name, (code, _) in DEVICE_FLAGS.items()}
MARK = {name: code for name, (code, _) in MARKS.items()}
HOOKS = {1: "native", 2: "python"}

TEXTS = tuple(field.name for field in HEADER if field.code.endswith("s") and field.name != "magic")
"""Fields of the header that hold zero-padded text."""

_COMMON: dict[str, int | str | bytes] = {
    "magic": MAGIC,
    "format_version": FORMAT_VERSION,
    "byte_order": BYTE_ORDER_MARK,
    "header_size": HEADER_SIZE,
    "record_size": RECORD_SIZE,
}

if RECORD_STRUCT.size != RECORD_SIZE:
    raise AssertionError(f"a record takes {RECORD_STRUCT.size} bytes, the format says {RECORD_SIZE}")


def unpack_header(head: bytes) -> dict[str, Any]:
    """Return the fields of the header that a segment begins with, texts without their padding.

    Raises:
        struct.error: these are fewer bytes than a header has.
    """
    values = HEADER_STRUCT.unpack_from(head)
    header: dict[str, Any] = dict(zip(HEADER_OFFSET, values, strict=True))
    for name in TEXTS:
        header[name] = header[name].rstrip(b"\0").decode("utf-8", "replace")
    return header


def pack_header(**values: int | str | bytes) -> bytes:
    """Return the header of a segment: the common fields, and these; texts are cut to their room.

    Raises:
        struct.error: a number has no room in its field.
    """
    known = _COMMON | {"capacity": SEGMENT_CAPACITY} | values
    return HEADER_STRUCT.pack(*(_as_stored(field, known.get(field.name)) for field in HEADER))


def _as_stored(field: Field, value: int | str | bytes | None) -> int | bytes:
    if value is None:
        return b"" if field.code.endswith("s") else 0
    return value.encode("utf-8", "replace")[: field.size - 1] if isinstance(value, str) else value


def cpp_header(record: Sequence[Field] = RECORD) -> str:
    """Return the C++ constants that the native hook is compiled with."""
    lines = [
        "// Generated from dtprof/records/schema.py.",
        "#pragma once",
        "#include <cstdint>",
        "namespace dtprof {",
    ]
    numbers = {
        "FORMAT_VERSION": FORMAT_VERSION,
        "BYTE_ORDER_MARK": BYTE_ORDER_MARK,
        "HEADER_SIZE": HEADER_SIZE,
        "RECORD_SIZE": RECORD_SIZE,
        "SEGMENT_SIZE": SEGMENT_SIZE,
        "SEGMENT_CAPACITY": SEGMENT_CAPACITY,
        "MAX_TABLE_ENTRIES": MAX_TABLE_ENTRIES,
        "FIRST_LABELLED_SITE": FIRST_LABELLED_SITE,
        "MOST_CALLERS": MOST_CALLERS,
        "FRAMES_OF_CALLERS": FRAMES_OF_CALLERS,
        "NO_CODE": NO_CODE,
    }
    lines += [f"constexpr uint64_t {name} = {value}ull;" for name, value in numbers.items()]
    codes = {"STATE": STATE, "KIND": KIND, "FLAG": FLAG, "DEVICE_FLAG": DEVICE_FLAG, "MARK": MARK}
    for prefix, table in codes.items():
        lines += [f"constexpr uint8_t {prefix}_{name.upper()} = {code};" for name, code in table.items()]
    lines += [f"constexpr uint64_t AT_{field.name.upper()} = {field.offset};" for field in record]
    lines += [f"constexpr uint64_t HEAD_AT_{field.name.upper()} = {field.offset};" for field in HEADER]
    return "\n".join([*lines, "}", ""])
