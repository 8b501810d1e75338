"""Facts read in the logs of one attempt of a job: plain and bounded, without judgement."""

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from dtprof.job.world_size import resolve_world_size
from dtprof.records.sites import Site

MAX_FACTS = 20_000
"""Facts kept of one kind; later ones are counted only."""


SIGNALS = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGILL": 4,
    "SIGABRT": 6,
    "SIGBUS": 7,
    "SIGFPE": 8,
    "SIGKILL": 9,
    "SIGSEGV": 11,
    "SIGTERM": 15,
}


UNNAMED_EXIT = "unnamed-exit"
"""Kind of the note of a process that ended, of which its launcher does not say which it was."""

MAX_RANK = 100_000
"""A higher number is no rank: something else stood where a rank is named."""


BACKWARD = "backward"
"""The call of a backward pass in which native code failed: DistributedDataParallel reduces gradients there."""


class Order(NamedTuple):
    """Where in the input something stood: lines of one file are in the order of time."""

    file: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A watchdog's line: an operation that did not end in time."""

    order: Order
    rank: int | None
    seq: int | None
    """None before torch 1.12, whose lines have no number."""
    op: str
    group_rank: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    limit_ms: int = 0
    ran_ms: int = 0
    stream: str = ""
    rank_in_group: bool = False
    """Whether `rank` is only the rank in the group: no carrier named the global one."""


@dataclass(frozen=True, kw_only=True)
class LoggedProgress:
    """The progress of a process group on a rank."""

    rank: int | None
    group: str
    description: str
    group_rank: int
    work: int | None
    """Position of the operation that failed; None where the line tells only how far the rank had come."""
    enqueued: int | None
    completed: int | None


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The fingerprint of a rank's operation, as TORCH_DISTRIBUTED_DEBUG=DETAIL prints it."""

    order: Order
    rank: int
    seq: int | None
    op: str
    shape: str | None
    dtype: str | None
    reported_by: int | None
    """The rank that printed this message: the rank itself, a peer, or unknown."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """An exception and its traceback, or the line of an exception alone."""

    order: Order
    rank: int | None
    task: int | None
    stream: str
    type: str
    message: str
    pod: int | None = None
    """Number of the pod, container or service, where its name ends with one."""
    site: Site | None = None
    source: str = ""
    call: str = ""
    """Function of torch.distributed that was called, BACKWARD, or `backward pass` where its operation is not known."""
    torch_only: bool = False
    """All frames below the user's are torch's: an operation failed, not the user's code."""
    fatal: bool = False
    """Said to have ended its process by where it stands."""
    handled: bool = False
    """Said not to have ended its process: in a thread, in a destructor."""
    logged: bool = False
    """Printed by logging, below its record: the program caught it, and may go on."""
    bare: bool = False
    chained: bool = False
    """Raised while the exception before it in the same stream was handled."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended."""

    rank: int
    status: int
    """As subprocess has it: below 0 a signal."""
    local_rank: int | None = None
    host: str = ""
    pid: int = 0
    from_table: bool = False
    time_s: int | None = None
    """When, by the clock of its host, in whole seconds since any time."""
    out_of_memory: bool = False
    """The scheduler ended it for want of memory, by itself."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence of the log that means something by itself."""

    order: Order
    rank: int | None
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    number: int = 0


TENSOR = r"(?:grouped_)?(?:allreduce|allgather|broadcast|alltoall|reducescatter|barrier)[._]"
"""How the names of tensors begin in Horovod's reports of stalls."""

MOST_CALLS = 256
"""Calls kept of one communicator: a difference between ranks is among the last."""
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
REDUCTIONS = ("sum", "prod", "max", "min", "avg")


class NcclCall(NamedTuple):
    """The arguments of an NCCL call on which all members must agree."""

    op: str
    numel: int
    dtype: int
    reduction: int
    root: int

    def __str__(self) -> str:
        """Return the call in words."""
        dtype = TYPES[self.dtype] if self.dtype < len(TYPES) else f"type {self.dtype}"
        words = [f"{self.op} of {self.numel} {dtype}"]
        if self.op.startswith(("AllReduce", "Reduce")):
            words.append(REDUCTIONS[self.reduction] if self.reduction < len(REDUCTIONS) else f"op {self.reduction}")
        if self.op in ("Broadcast", "Reduce"):
            words.append(f"root {self.root}")
        return ", ".join(words)


@dataclass
class Communicator:
    """The calls of one process on one communicator."""

    process: str
    """Host and process id."""
    size: int
    rank: int | None = None
    """In the communicator, where the line of its creation is in the log."""
    number: str = ""
    """The same on all members, where NCCL prints it (2.18 and later)."""
    device: int = 0
    file_rank: int | None = None
    calls: deque[tuple[int, NcclCall]] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    """With NCCL's own count."""
    total: int = 0
    """Calls so far, those not kept too."""
    counts_rise: bool = True


Communicators = dict[tuple[str, str, int], Communicator]
"""By process, address, and how many had this address before."""


@dataclass
class Facts:
    """Everything found in one attempt; lists keep the order of the log."""

    timeouts: list[Timeout] = field(default_factory=list)
    progress: list[LoggedProgress] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    local_exits: dict[int, Exit] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    ranks_named: set[int] = field(default_factory=set)
    tasks_named: set[int] = field(default_factory=set)
    declared_sizes: Counter[int] = field(default_factory=Counter)
    """World sizes by how many lines state them."""
    last_local_rank: int = -1
    """The highest that a launcher names."""
    last_activity: dict[str, int] = field(default_factory=dict)
    """By stream: ordinary lines since its newest exception."""
    stacks: dict[int, Site] = field(default_factory=dict)
    """By rank: the user's innermost line under the collective that its watchdog gave up."""
    pods: set[tuple[int, int]] = field(default_factory=set)
    """The number of a pod, container or service, and a rank that its lines name."""
    communicators: Communicators = field(default_factory=dict)
    """NCCL communicators with the calls on them, from NCCL's own log."""
    left_out: int = 0

    def add(self, fact: Timeout | LoggedProgress | Fingerprint | Trace | Note) -> None:
        """Keep a fact, while there is room."""
        kinds: dict[type, list[object]] = {
            Timeout: self.timeouts,  # type: ignore[dict-item]
            LoggedProgress: self.progress,  # type: ignore[dict-item]
            Fingerprint: self.fingerprints,  # type: ignore[dict-item]
            Trace: self.traces,  # type: ignore[dict-item]
            Note: self.notes,  # type: ignore[dict-item]
        }
        kept = kinds[type(fact)]
        if len(kept) < MAX_FACTS:
            kept.append(fact)
        else:
            self.left_out += 1
        rank = getattr(fact, "rank", None)
        if rank is not None:
            self.name_rank(rank)

    def name_rank(self, rank: int) -> None:
        """Note that a rank of this number exists."""
        if 0 <= rank < MAX_RANK:
            self.ranks_named.add(rank)

    @property
    def world_size(self) -> int:
        """Return the number of ranks that the lines state, 0 where they state none."""
        return resolve_world_size(self.declared_sizes.elements(), [self.last_local_rank])

    def declare_size(self, size: int) -> None:
        """Note that a line states a world size, while there is room."""
        if size in self.declared_sizes or len(self.declared_sizes) < MAX_FACTS:
            self.declared_sizes[size] += 1

    def merge(self, other: "Facts") -> None:
        """Take in the facts of another file of the same attempt."""
        for fact in fields(self):
            mine, theirs = getattr(self, fact.name), getattr(other, fact.name)
            if isinstance(mine, list):
                mine.extend(theirs)
            elif isinstance(mine, dict | set):
                mine.update(theirs)
        self.last_local_rank = max(self.last_local_rank, other.last_local_rank)
        self.left_out += other.left_out

    def of_kind(self, *kinds: str) -> list[Note]:
        """Return the notes of these kinds, in order."""
        return [note for note in self.notes if note.kind in kinds]

    @property
    def failed(self) -> bool:
        """Say whether anything here tells of a failure."""
        return bool(self.timeouts or self.fingerprints or self.exits or self.local_exits or self.traces or self.notes)
