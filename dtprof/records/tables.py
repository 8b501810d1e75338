"""The tables of one rank, from readers and importers to analysis and diagnosis, with declared columns.

Times are int64 nanoseconds of the host's CLOCK_MONOTONIC; `UNKNOWN_NS` stands for a time that is not known.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof.records import schema
from dtprof.records.axis_names import KNOWN_AXES, canonical_axis
from dtprof.records.sites import Site

UNKNOWN_NS = -1

Array = npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One column of a table of operations, spans or samples, and its description in exported tables."""

    name: str
    code: str = "i8"  # of numpy
    field: str = ""  # of the record, which it holds as it is; empty: it follows from several
    unit: str = ""
    exported: str = ""  # its meaning in exported tables; empty: they leave it out
    exported_as: str = ""  # its name there, where that differs
    unknown: int | None = None  # the number that stands for not known


_CODES = {"B": "u1", "H": "u2", "i": "i4", "I": "i8", "Q": "i8"}
"""Types of columns by those of fields: room enough to count with. Ids stay as they are."""


def column_of(field: schema.Field) -> TableColumn:
    """Return the column that holds a field of the record as it is."""
    return TableColumn(
        name=field.name,
        code="u4" if (field.code, field.unit) == ("I", "id") else _CODES[field.code],
        field=field.name,
        unit=field.unit,
        exported=field.exported,
        unknown=-1 if field.unit == "group rank" else None,
    )


def columns_of(fields: Sequence[schema.Field]) -> tuple[TableColumn, ...]:
    """Return columns for all fields but those that count from the issue."""
    return tuple(column_of(field) for field in fields if field.code != "f")


def dtype_of(columns: Sequence[TableColumn]) -> np.dtype[Any]:
    """Return the type of a row."""
    return np.dtype([(column.name, column.code) for column in columns], align=True)


_FIELDS = {column.name: column for column in columns_of(schema.RECORD)}
OPERATIONS = (
    *_FIELDS.values(),
    TableColumn(name="nbytes", unit="bytes", exported="the same in bytes"),
    TableColumn(
        name="returned_ns", unit="ns", exported="when the call returned; masked: it has not", unknown=UNKNOWN_NS
    ),
    TableColumn(
        name="wait_begin_ns", unit="ns", exported="first wait for its handle; masked: none", unknown=UNKNOWN_NS
    ),
    TableColumn(name="wait_ns", unit="ns", exported="time blocked in waits for its handle"),
    TableColumn(name="done_ns", unit="ns", exported="when it was done; masked: not known", unknown=UNKNOWN_NS),
    TableColumn(
        name="device_ns", unit="ns", exported="how long it took on its device; masked: not known", unknown=UNKNOWN_NS
    ),
)
"""Ids are indexes or keys of RankTables: op of ops, thread of threads, group of groups, site of sites."""
SPANS = (
    replace(_FIELDS["op"], exported="phase or pipeline action", exported_as="phase"),
    *(_FIELDS[name] for name in ("state", "flags", "thread", "site", "step")),
    TableColumn(name="begin_ns", field="issued_ns", unit="ns", exported="begin, on the host's monotonic clock"),
    TableColumn(name="end_ns", unit="ns", exported="end; masked: still open", unknown=UNKNOWN_NS),
    TableColumn(
        name="stage", code="i4", field="peer", exported="stage of the pipeline that acts; masked: none", unknown=-1
    ),
    TableColumn(name="microbatch", code="i4", field="tag", exported="on which microbatch; masked: no stage"),
)
SAMPLES = (
    replace(_FIELDS["op"], exported="what was sampled: rss_bytes, cuda_allocated_bytes, ...", exported_as="name"),
    _FIELDS["step"],
    TableColumn(name="t_ns", field="issued_ns", unit="ns", exported="when, on the host's monotonic clock"),
    TableColumn(name="value", field="numel", exported="in the unit that the name ends with"),
)
DEVICE_INTERVALS = (
    *(_FIELDS[name] for name in ("kind", "state", "op", "group", "seq", "flags", "site", "step")),
    TableColumn(name="stream", code="u2", field="thread"),  # key of RankTables.streams
    TableColumn(name="begin_ns", field="issued_ns", unit="ns"),  # on the device, by the host's clock; as is end_ns
    TableColumn(name="end_ns", unit="ns", unknown=UNKNOWN_NS),  # not known: the device has not come to it
    TableColumn(name="error_ns", field="tag", unit="ns"),  # of both times, at most
    TableColumn(name="reached_ns", unit="ns"),  # operations: when the caller's stream came to the call; else begin_ns
    TableColumn(name="host_begin_ns", field="numel", unit="ns"),  # an operation's issue; when the host was at the begin
    TableColumn(name="host_end_ns", unit="ns", unknown=UNKNOWN_NS),  # waits and phases: when the host was at the end
    TableColumn(name="row", unknown=-1),  # in RankTables.operations: the operation, or the one waited for
)
"""Device times: operations, waits of streams, phases on the stream that was current.

`kind` is one of schema.KIND's device kinds, `flags` are schema.DEVICE_FLAG. An operation that has the flag `followed`
and no row here had not been started by its device.
"""
OPERATION, SPAN, SAMPLE = dtype_of(OPERATIONS), dtype_of(SPANS), dtype_of(SAMPLES)
DEVICE_INTERVAL = dtype_of(DEVICE_INTERVALS)
DROPPED = np.dtype(
    [
        ("kind", "u1"),  # schema.KIND
        ("op", "u2"),  # index into RankTables.ops
        ("group", "u2"),  # key of RankTables.groups; operations only
        ("dtype", "u1"),
        ("site", "u4"),
        ("events", "i8"),
        ("failed", "i8"),
        ("numel", "i8"),  # summed; samples: the largest value
        ("waited_ns", "i8"),
        ("took_ns", "i8"),  # of events with a known completion
        ("nbytes", "i8"),  # of operations, from numel and dtype
    ],
    align=True,
)


def select(rows: Array, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]) -> Array:
    """Return some rows of a table, as `rows[chosen]` does, which copies field by field and takes 20 times as long."""
    selected: Array = rows.view(f"V{rows.dtype.itemsize}")[chosen].view(rows.dtype)
    return selected


def ids_named(names: Sequence[str], wanted: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return a mask over all 16-bit ids: those of the wanted names; of ranks with the same names the same mask."""
    return _ids_named(tuple(names), tuple(wanted))


@functools.lru_cache(maxsize=64)
def _ids_named(names: tuple[str, ...], wanted: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    table = np.zeros(1 << 16, np.bool_)
    table[[i for i, name in enumerate(names) if name in wanted]] = True
    table.flags.writeable = False
    return table


def join(parts: Sequence[Array]) -> Array:
    """Return the rows of several tables of one type in one; np.concatenate copies field by field, as in `select`."""
    if len(parts) == 1:
        return parts[0]
    joined: Array = np.concatenate([rows.view(f"V{rows.dtype.itemsize}") for rows in parts]).view(parts[0].dtype)
    return joined


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process group as one rank knows it."""

    name: str
    description: str
    size: int
    ranks: tuple[int, ...] = ()  # global ranks by rank in the group; empty if unknown
    backend: str | None = None
    timeout_s: float | None = None
    axis: str | None = None  # of parallelism: dp, tp, pp; as a mesh or its user names it
    instance: int = 0  # groups of this name and these members that were created before, where a finding names it

    @property
    def is_nccl(self) -> bool:
        """Say whether NCCL carries what goes between devices: it matches messages without their tags."""
        return "nccl" in (self.backend or "")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A device mesh as one rank knows it: one value a dimension in every field."""

    names: tuple[str, ...]  # empty: unnamed
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None  # where this rank lies; None: not in the mesh
    groups: tuple[str, ...]  # names of this rank's groups; empty where it is not in the mesh
    device_type: str = ""
    flattened: bool = False  # joins several dimensions of another mesh


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a framework shards the model of a rank, in the terms of ZeRO."""

    scheme: str  # none, zero1, zero2, zero3; tables: those of embeddings alone
    shards: int
    by: str


@dataclass(frozen=True, kw_only=True)
class Action:
    """A planned action of a pipeline: a computation of a stage for a microbatch."""

    stage: int
    name: str  # events.PP_FORWARD, ...; as the plan has it where that is none of them
    microbatch: int = -1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline schedule as one rank knows it."""

    schedule: str  # name of its class
    num_stages: int
    stages: tuple[int, ...]  # of this rank
    num_microbatches: int
    group: str = ""  # name of the group of the ranks of the pipeline
    group_rank: int = -1
    group_size: int = 0
    order: tuple[tuple[Action, ...], ...] | None = None  # the plan of this rank by slots; None: it has none
    offered: tuple[str, ...] | None = None  # the schedules of its framework; None: not limited
    inferred: bool = False  # from messages and passes: the program wrote the pipeline itself

    def could_be(self, schedule: str) -> bool:
        """Say whether the framework of the pipeline has a schedule of this name."""
        return self.offered is None or schedule in self.offered


@dataclass(frozen=True, kw_only=True)
class ExceptionRecord:
    """An exception that left the program of a rank."""

    t_ns: int
    type: str
    message: str
    traceback: str
    frame: Site | None


@dataclass(frozen=True, kw_only=True)
class ThreadException(ExceptionRecord):
    """An exception that ended a thread beside the main one, and not the process."""

    thread: str  # its name


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """Memory by category when an exception reported that it ran out."""

    t_ns: int
    device: str  # cpu, cuda:0
    message: str
    live_bytes: int | None  # allocated where the model lies
    held_bytes: dict[str, int]  # by category
    largest: str | None  # category
    allocations: tuple[str, ...] = ()  # the largest blocks and where they were allocated, where torch recorded that


@dataclass(frozen=True, kw_only=True)
class CrashStack:
    """The Python stack that a fatal signal left; the process may have survived it."""

    signal: int
    t_ns: int
    thread: str  # that it hit: main, Python, native; of a native one the frames are those of the main thread
    frames: tuple[Site, ...]  # innermost first
    computes: bool = False  # a signal to end it found it between system calls: it was at work


@dataclass(frozen=True, kw_only=True)
class WrappedParameters:
    """Parameters that DistributedDataParallel or fully_shard communicates over a group."""

    group: str  # its name
    by: str
    names: int  # checksum of the names in order
    count: int
    some: tuple[str, ...]  # the first names
    site: Site | None


@dataclass(frozen=True, kw_only=True)
class OptimizerAge:
    """An optimizer at its first step in this process."""

    steps: int  # made before, in other processes
    parameters: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class EarlyUse:
    """A tensor of an asynchronous operation that the program touched before it waited for the operation."""

    t_ns: int
    use: str  # read, written
    by: str  # operator of torch, such as aten::add_; empty: only that it was written to is known
    used: Site | None
    op: str  # canonical name of the operation
    group: Group | None
    seq: int
    site: Site | None  # of its call
    step: int
    dropped: bool  # its handle was gone by then
    waited: bool = False  # the wait came afterwards


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of torch.profiler that a rank took, or did not take, over some steps."""

    number: int  # in this log, from 1
    state: str  # begun, written, failed
    first: int  # step, from 1
    last: int
    begin_ns: int = UNKNOWN_NS  # when the rank left its program to start the profiler
    end_ns: int = UNKNOWN_NS  # when the last step ended
    ready_ns: int = UNKNOWN_NS  # when the rank went on with its program
    file: str = ""  # in the folder of the rank
    size_bytes: int = 0
    realtime_ns: int = 0  # what CLOCK_REALTIME said at begin_ns
    reason: str = ""  # why it failed, or ended before its last step
    request: str = ""  # of `dtprof trace --now`; "turn": of `--trace-every`; empty: of `--trace-steps`


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of memory in a file."""

    state: str  # written, failed
    why: str  # request, out of memory
    step: int  # steps ended before
    t_ns: int
    device: str = ""
    file: str = ""  # in the folder of the rank
    size_bytes: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)  # by category
    reason: str = ""  # why it failed
    request: str = ""


class BucketLayout(NamedTuple):
    """The gradient buckets of a reducer of DistributedDataParallel from a time on."""

    t_ns: int
    reducer: int
    group: str
    sizes: tuple[int, ...]  # bytes
    num_parameters: int


@dataclass(frozen=True, kw_only=True)
class Past:
    """Counts of the oldest records of a rank with a long log, whose tables hold only the newest."""

    counts: Mapping[tuple[int, bool], int]  # by id of the group and p2p: operations issued, where the tables have none
    messages: Mapping[tuple[int, int, int, int], int]  # by id of the group, id of the operation, peer and tag
    batches: int  # spans of data loaders that gave one
    exhausted: int  # and that had none left
    newest_is_exhaustion: bool  # of these spans the last
    forwards: int  # spans of forward passes
    updates: int  # spans of optimizers
    longest_gap_ns: int  # between operations, the last and the first in the tables included; steps begun


@dataclass(frozen=True, kw_only=True)
class RankTables:
    """Everything recorded by one rank in one attempt."""

    rank: int
    attempt: int
    world_size: int
    local_rank: int = -1
    pid: int = 0
    host: str = ""
    boot_id: str = ""
    hook: str = ""
    torch_version: str = ""
    python_version: str = ""
    ops: tuple[str, ...] = ()  # canonical operation names and phase names, by id
    raw_ops: tuple[str, ...] = ()  # the names as recorded
    sites: dict[int, Site] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=dict)  # of devices, such as "cuda:0 stream 7"
    device_uuid: str = ""  # of the accelerator that the rank computes on, as NVML has it
    sizes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    meshes: tuple[Mesh, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    pipelines: dict[int, Pipeline] = field(default_factory=dict)
    bucket_layouts: tuple[BucketLayout, ...] = ()  # of DDP, in the order of time
    features: tuple[str, ...] = ()
    operations: Array = field(default_factory=lambda: np.zeros(0, OPERATION))  # by issued_ns
    spans: Array = field(default_factory=lambda: np.zeros(0, SPAN))  # by begin_ns
    samples: Array = field(default_factory=lambda: np.zeros(0, SAMPLE))  # by t_ns
    device_intervals: Array = field(default_factory=lambda: np.zeros(0, DEVICE_INTERVAL))  # by begin_ns
    device_error_ns: int | None = None  # operations and spans have the times of the device, off by so much at most
    host_lead_ns: int | None = None  # then: from the host's mark until the device reaches it, median
    exceptions: tuple[ExceptionRecord, ...] = ()
    thread_exceptions: tuple[ThreadException, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    early_uses: tuple[EarlyUse, ...] = ()
    wrapped_parameters: tuple[WrappedParameters, ...] = ()
    optimizer_ages: tuple[OptimizerAge, ...] = ()
    crash: CrashStack | None = None
    windows: tuple[Window, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    ended_ns: int = UNKNOWN_NS  # the interpreter ended in order at this time
    first_ns: int = 0  # when the log was opened
    last_ns: int = 0  # the last time in the log
    monotonic_to_realtime_ns: int = 0  # add to a host time for wall-clock time
    capture_ns: int = 0  # time dtprof spent recording
    past: Past | None = None  # counts of records not in the tables, where only the newest were read
    first_whole_step: int | None = None  # where only some steps of a run are read: the first that is here in full
    own_steps: tuple[int, int] | None = None  # then, of a range: its first and last `step`; others tell of these
    dropped_events: int = 0
    dropped: Array = field(default_factory=lambda: np.zeros(0, DROPPED))  # sums of the events dropped for want of room
    errors: int = 0
    truncated: bool = False
    closed: bool = False
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # what of the files could not be read, a sentence each

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this rank lies along each axis of parallelism: its rank in the group that serves the axis.

        Dimensions of one rank, and those of a mesh of which nothing says what they are for, have no place in a layout.
        """
        known = {
            group.axis: group.ranks.index(self.rank)
            for group in self.groups.values()
            if group.axis and self.rank in group.ranks and len(group.ranks) > 1
        }
        for mesh in self.meshes:
            for name, size, place in zip(mesh.names, mesh.shape, mesh.coordinate or (), strict=False):
                if size > 1:
                    known[canonical_axis(name)] = place
        clear = {axis: place for axis, place in known.items() if axis in KNOWN_AXES}
        return clear or known

    @property
    def num_events(self) -> int:
        """Events read, of all kinds."""
        return len(self.operations) + len(self.spans) + len(self.samples)


def is_own(tables: RankTables, rows: Array) -> npt.NDArray[np.bool_]:
    """Say which rows of a table are of the range of steps that was read, and not there for what they tell of it."""
    if tables.own_steps is None:
        return np.ones(len(rows), np.bool_)
    first, last = tables.own_steps
    step = np.ascontiguousarray(rows["step"])
    own: npt.NDArray[np.bool_] = (step >= first) & (step <= last)
    return own


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The exit of a process of the job, as its parent saw it."""

    pid: int
    status: int  # exit status; negative: the signal that ended it
    t_ns: int


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """A memory of a node, and the most of it that was in use by any process while the job ran."""

    host: str
    device: str  # "host", "container": what a control group allows, "gpu 0"
    capacity_bytes: int
    most_used_bytes: int


class Manifest:
    """The facts that `dtprof run` wrote about the whole job; empty for a run without them."""

    command: tuple[str, ...] = ()
    started_realtime_ns: int = 0
    ended_realtime_ns: int = 0  # 0: still running, or dtprof itself was killed
    exit_status: int | None = None
    stopped_on_hang: bool = False  # by dtprof
    hosts: tuple[str, ...] = ()
    dtprof_version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    imported: str = ""  # the format of the files that the run was imported from; empty: it was recorded
    cannot_tell: tuple[str, ...] = ()  # of an imported run: what its format lacks; the subject, a colon, the reason
    replicas: int = 1  # groups of ranks that ran under the same numbers
