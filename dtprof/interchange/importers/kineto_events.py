"""The events of one torch.profiler (Kineto) trace that matter here, as columns. Times in ns since 1970."""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dtprof.interchange.importers.imported_records import LAST_NS
from dtprof.interchange.importers.trace_stream import TraceFile
from dtprof.intervals import Column

COMMUNICATION_OP = ("c10d::", "_c10d_functional", "record_param_comms", "gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
CALL = "c10d::"
BACKWARD_OP = "autograd::engine::evaluate_function"
_KERNELS = {"kernel", "Kernel", "concurrent_kernel"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "Runtime", "runtime", "xpu_runtime", "mtia_runtime", "privateuse1_runtime"}
_OPERATORS = {"cpu_op", "Operator", "operator"}
_COPIES = {"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
OPERATOR, NODE, COMMUNICATION, WORK, NOTE, KERNEL, COLLECTIVE, LAUNCH, COPY, FLOW, MEMORY, OTHER = range(12)
"""Classes of events."""
NUM_CLASSES = 12
MAX_NAMES = 100_000
_COLLECTIVE_KERNEL = re.compile(r"^(nccl|rccl|nccl_symk|oneccl)", re.IGNORECASE)
_WORK = re.compile(r"^(gloo|mpi|ucc):")
MAX_US = 1 << 53
MAX_DEVICES = 1 << 16


class EventArguments(msgspec.Struct, gc=False):
    """The arguments of events that are looked at; the others are passed over."""

    external_id: int | str | None = msgspec.field(default=None, name="External id")
    correlation: Any = None
    stream: Any = None
    device: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_text: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    source: Any = msgspec.field(default=None, name="Src Rank")
    target: Any = msgspec.field(default=None, name="Dst Rank")
    concrete: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    device_type: Any = msgspec.field(default=None, name="Device Type")


class Correlated(msgspec.Struct, gc=False):
    """Fields read of kernels and launches, of which there are many."""

    correlation: Any = None
    device: Any = None


class KinetoEvent(msgspec.Struct, gc=False):
    """One event of the trace."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw()  # most are never looked at


_PACKED = msgspec.json.Decoder()
_ARGUMENTS = msgspec.json.Decoder(EventArguments)
_CORRELATED = msgspec.json.Decoder(Correlated)


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """A call, kernel or work of communication."""

    name: str
    begin: int
    end: int
    process: int | str | None
    thread: int | str | None
    arguments: EventArguments

    def inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return dimensions, types and values of the inputs of an operator; empty where they are not recorded."""
        return _unpack(self.arguments.dims), _unpack(self.arguments.types), _unpack(self.arguments.concrete)


def _unpack(raw: msgspec.Raw) -> list[Any]:
    try:
        values = _PACKED.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return values if isinstance(values, list) else []


@dataclass(frozen=True, kw_only=True)
class Times:
    """Begin, end and another number of many events of one sort."""

    begin: "array[float]" = field(default_factory=lambda: array("d"))  # us
    length: "array[float]" = field(default_factory=lambda: array("d"))  # us
    other: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, events: Sequence[KinetoEvent], other: Sequence[int]) -> None:
        """Add events, each with its other number."""
        self.begin.extend([event.ts for event in events])
        self.length.extend([event.dur for event in events])
        self.other.extend(other)

    def add_one(self, begin: float, length: float, other: int) -> None:
        """Add one."""
        self.begin.append(begin)
        self.length.append(length)
        self.other.append(other)

    def columns(self, base_ns: int) -> tuple[Column, Column, Column]:
        """Return begin and end in ns since 1970, and the other number."""
        begin = _whole_ns(np.array(self.begin, np.float64)) + base_ns
        end = begin + np.maximum(_whole_ns(np.array(self.length, np.float64)), 0)
        return begin, end, np.array(self.other, np.int64)


def _whole_ns(us: Any) -> Column:
    ns: Column = np.round(np.clip(np.nan_to_num(us), -MAX_US, MAX_US) * 1000.0).astype(np.int64)
    return ns


@dataclass(kw_only=True)
class KinetoTrace:
    """The events of one file."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    count: int = 0
    pid: int = 0
    threads: list[object] = field(default_factory=list)  # by number
    operators: Times = field(default_factory=Times)  # of the host that do not communicate; other: thread
    backward: Times = field(default_factory=Times)  # nodes of the autograd engine; other: thread
    kernels: Times = field(default_factory=Times)  # of the device that do not communicate; other: correlation
    copies: int = 0
    launches: Times = field(default_factory=Times)  # of kernels by the host; other: correlation
    flows: Times = field(
        default_factory=Times
    )  # from an operator to its backward; other: thread, -1 - thread at its end
    communicating: Times = field(default_factory=Times)  # any operator that communicates or waits; other: thread
    annotations: list[TracedCall] = field(default_factory=list)
    collectives: list[TracedCall] = field(default_factory=list)  # kernels that communicate
    calls: list[TracedCall] = field(default_factory=list)  # of c10d operators
    works: list[TracedCall] = field(default_factory=list)  # what the back end did, on its own threads
    described: dict[object, EventArguments] = field(default_factory=dict)  # record_param_comms by external id
    memory: Times = field(default_factory=Times)  # length: allocated bytes; other: reserved bytes
    devices: set[int] = field(default_factory=set)

    @property
    def base_ns(self) -> int:
        """Where the times of the file count from, in ns since 1970."""
        base = self.facts.get("baseTimeNanoseconds")
        return base if type(base) is int and 0 <= base < LAST_NS else 0

    @property
    def uses_device(self) -> bool:
        """Say whether kernels of a device were recorded."""
        return bool(self.kernels.begin or self.collectives)


def read_events(path: Path, also: Callable[[list[list[KinetoEvent]]], object] | None = None) -> KinetoTrace:
    """Read one trace; `also` is given the events of each piece of the file, by class.

    Raises:
        NotATraceError: it is none that can be read.
    """
    trace = KinetoTrace(path=path)
    file = TraceFile(path, KinetoEvent)
    numbers: dict[object, int] = {}
    classes: dict[str, dict[str, int]] = {}
    for events in file.events():
        by_class = _sort(events, classes)
        _take_piece(trace, by_class, numbers)
        if also is not None:
            also(by_class)
    trace.threads = list(numbers)
    trace.facts, trace.problems, trace.count = file.facts, file.problems, file.count
    return trace


def _sort(events: list[KinetoEvent], classes: dict[str, dict[str, int]]) -> list[list[KinetoEvent]]:
    """Return the events of each class. `classes` keeps the class of each category and name: there are millions."""
    by_class: list[list[KinetoEvent]] = [[] for _ in range(NUM_CLASSES)]
    for event in events:
        try:
            number = classes[event.cat][event.name]
        except KeyError:
            number = _classify(event.cat, event.name)
            known = classes.setdefault(event.cat, {})
            if len(known) < MAX_NAMES:
                known[event.name] = number
        by_class[number].append(event)
    return by_class


def _take_piece(trace: KinetoTrace, events: list[list[KinetoEvent]], numbers: dict[object, int]) -> None:
    """Take in the events of a piece, class by class."""
    for number, into in (
        (OPERATOR, trace.operators),
        (NODE, trace.backward),
        (COMMUNICATION, trace.communicating),
        (WORK, trace.communicating),
    ):
        into.add(events[number], [numbers.setdefault(event.tid, len(numbers)) for event in events[number]])
    for number, into in ((KERNEL, trace.kernels), (LAUNCH, trace.launches)):
        arguments_of = [_correlated(event) for event in events[number]]
        into.add(events[number], [correlation_of(arguments) for arguments in arguments_of])
        if number == KERNEL:
            trace.devices.update(_devices_of(arguments_of))
    trace.annotations += map(_call, events[NOTE])
    collectives = [_call(event) for event in events[COLLECTIVE]]
    trace.devices.update(_devices_of([call.arguments for call in collectives]))
    trace.collectives += collectives
    trace.works += map(_call, events[WORK])
    trace.copies += len(events[COPY])
    for event in events[COMMUNICATION]:
        if event.name.startswith(CALL):
            trace.calls.append(_call(event))
        elif event.name == "record_param_comms" and (told_of := _call(event).arguments).external_id is not None:
            trace.described[told_of.external_id] = told_of
    for event in events[FLOW]:
        thread = numbers.setdefault(event.tid, len(numbers))
        trace.flows.add_one(event.ts, 0.0, thread if event.ph == "s" else -1 - thread)
    for event in events[MEMORY]:
        _take_memory(trace, event, _call(event).arguments)


def _correlated(event: KinetoEvent) -> Correlated | None:
    try:
        return _CORRELATED.decode(event.args)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _devices_of(all_arguments: Sequence[Correlated | EventArguments | None]) -> set[int]:
    devices = {
        arguments.device for arguments in all_arguments if arguments is not None and type(arguments.device) is int
    }
    return {device for device in devices if 0 <= device < MAX_DEVICES}


def _classify(category: str, name: str) -> int:
    """Return the kind of an event."""
    if category in _OPERATORS:
        if name.startswith(BACKWARD_OP):
            return NODE
        if _WORK.match(name):
            return WORK
        if name.startswith(COMMUNICATION_OP) or "wait_tensor" in name:
            return COMMUNICATION
        return NOTE if name.startswith("enumerate(DataLoader)") else OPERATOR
    if category in _KERNELS:
        return COLLECTIVE if _COLLECTIVE_KERNEL.match(name) else KERNEL
    if category in _LAUNCHES:
        return LAUNCH
    if category == "fwdbwd":
        return FLOW
    if name == "[memory]":
        return MEMORY
    if category == "user_annotation":
        if _WORK.match(name):
            return WORK
        return OTHER if name.startswith(("nccl:", "xccl:")) else NOTE
    return COPY if category in _COPIES else OTHER


def _take_memory(trace: KinetoTrace, event: KinetoEvent, arguments: EventArguments) -> None:
    if arguments.device_type != 1:
        return
    if type(arguments.allocated) is int and type(arguments.reserved) is int and arguments.reserved < LAST_NS:
        trace.memory.add_one(event.ts, float(arguments.allocated), arguments.reserved)


def correlation_of(arguments: Correlated | EventArguments | None) -> int:
    """Return the number that a kernel shares with its launch; -1 where there is none."""
    number = arguments.correlation if arguments is not None else None
    return number if type(number) is int and 0 <= number < LAST_NS else -1


def _call(event: KinetoEvent) -> TracedCall:
    """Keep an event; copy the fields that refer to the piece it was read from."""
    try:
        arguments = _ARGUMENTS.decode(event.args)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        arguments = EventArguments()
    for name in ("concrete", "dims", "types"):
        setattr(arguments, name, getattr(arguments, name).copy())
    begin = _bounded(event.ts)
    return TracedCall(
        name=event.name,
        begin=begin,
        end=begin + max(0, _bounded(event.dur)),
        process=event.pid,
        thread=event.tid,
        arguments=arguments,
    )


def _bounded(us: float) -> int:
    return round(us * 1000.0) if -MAX_US < us < MAX_US else 0
