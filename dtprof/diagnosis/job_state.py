"""The state of a job that rules read: newest operations, exit and stack of every rank, and the members of groups.

Each folder or file of `sources/` fills it, and says what it does not know.
"""

import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from dtprof.analysis.results import StragglerResult
from dtprof.diagnosis.stack_groups import RankStack
from dtprof.job.groups import GroupId
from dtprof.job.stalls import JobProgress, had_stalled
from dtprof.records.tables import (
    UNKNOWN_NS,
    Array,
    ExceptionRecord,
    Group,
    Manifest,
    OutOfMemory,
    Pipeline,
    ProcessExit,
    Site,
)

_POLITE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
TRANSPORT_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "socket timeout",
    "wait timeout after",
    "read error",
    "write error",
    "remote process exited",
    "watchdog caught collective operation timeout",
    "failed to recv, got 0 bytes",
    "unhandled system error",
    "nccl communicator was aborted",
    "preamble.length",
    "monitoredbarrier",
)
"""Parts of messages by which gloo, NCCL and the store say that a peer is gone or late: victims say so, not culprits."""

BACK_ENDS = ("gloo", "nccl", "torch/distributed", "c10d", "processgroup", "store", "backward", "monitoredbarrier")
"""Parts of a traceback through an operation, or of what a back end says."""
CHAINED = ("direct cause of the following exception", "During handling of the above exception")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one rank."""

    group: GroupId
    op: str
    api: str
    seq: int
    p2p: bool
    peer: int
    tag: int
    numel: int
    dtype: int
    reduce_op: int
    site: Site | None
    step: int | None  # None: not known
    inside_call: bool
    failed: bool
    done: bool
    issued_ns: int
    done_ns: int
    observed: bool  # completion can be known
    started: bool | None = None  # its device began it; None: not known
    on_device: bool = False  # it ends on a device of its own on every member, after its call has returned
    waited: bool = False  # a wait for it began
    asked: bool = False  # its handle was asked for completion or a future
    nbytes: int = 0
    thread: int = 0
    is_async: bool = False
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of uneven operations: what goes in, what comes out
    even_sizes: bool = False  # of an all_gather into one tensor: every member must bring as much
    nth: int = -1  # point to point: messages of this channel issued before; -1 where that is not known

    @property
    def blocks(self) -> bool:
        """Say whether the program is seen to wait for it."""
        return self.open and (self.inside_call or self.waited or self.failed)

    @property
    def peer_rank(self) -> int:
        """The global rank of the peer or root; -1 for none, or any source."""
        return self.group.ranks[self.peer] if 0 <= self.peer < len(self.group.ranks) else -1

    @property
    def open(self) -> bool:
        """Say whether it is known not to have ended well."""
        return self.failed or (self.observed and not self.done) or self.inside_call

    @property
    def label(self) -> tuple[GroupId, str, tuple[str, int] | None]:
        """What makes two operations of two ranks the same place in the program."""
        return self.group, self.op, (self.site.file, self.site.line) if self.site else None


class LazyOperations(Sequence[Operation]):
    """Operations of a rank, made from its rows as rules ask for them: of most they never do."""

    def __init__(self, make: Callable[[int], Operation], *, first: int, end: int) -> None:
        """Stand for the rows from `first` up to `end`."""
        self._make = make
        self._first = first
        self._made: list[Operation | None] = [None] * (end - first)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Operation]:
        for at, operation in enumerate(self._made):
            yield operation or self[at]

    @overload
    def __getitem__(self, at: int) -> Operation: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Operation, ...]: ...

    def __getitem__(self, at: int | slice) -> Operation | tuple[Operation, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        operation = self._made[at]
        if operation is None:
            operation = self._made[at] = self._make(self._first + range(len(self))[at])
        return operation


BUSY = 0.2
"""Share of a core above which a process counts as working."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a process was seen doing from outside."""

    state: str
    cpu_share: float | None
    frames: tuple[Site, ...]  # of the main thread, innermost first
    reason: str = ""

    @property
    def is_busy(self) -> bool:
        """Say whether it works; runnable counts whatever its share: on a host with much to do it waits for a core."""
        return self.state == "running" or (self.cpu_share is not None and self.cpu_share > BUSY)


@dataclass(frozen=True)
class ChannelEnd:
    """What point-to-point messages go through in order, as one of its ends counts them."""

    group: GroupId
    peer: int  # global rank; -1: any source
    tag: int
    sends: bool


MESSAGE = np.dtype(
    [
        ("nth", "i8"),  # messages of the channel issued before
        ("at", "i8"),  # in RankState.operations
        ("nbytes", "i8"),
        ("site", "u4"),  # equal for messages of one line
        ("plain", "?"),  # a send or a receive, not several as one
        ("done", "?"),  # as Operation.done
        ("settled", "?"),  # done, failed, inside its call, waited for or asked about
    ]
)


@dataclass(frozen=True, kw_only=True)
class PipelinePass:
    """One step of a pipeline schedule on one rank."""

    plan: Pipeline | None
    ended: bool
    forwards: dict[int, int]  # microbatches that went forward, by stage


@dataclass(frozen=True, kw_only=True)
class LongPhase:
    """A checkpoint or a compilation that took long, several in a row as one."""

    phase: str
    site: Site | None
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of a rank in columns (columns.COLLECTIVE), to compare whole runs."""

    groups: dict[GroupId, Array]  # by position
    operation: Callable[[int], Operation]  # of a row


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank."""

    rank: int
    attempt: int
    pid: int
    host: str
    operations: Sequence[Operation] = ()  # the newest, in the order of issue
    open_operations: tuple[Operation, ...] = ()  # those of them that had not ended well
    first_row: int = 0  # of the first of `operations` among all of the rank
    counts: dict[tuple[GroupId, bool], int] = field(default_factory=dict)  # operations issued, by group and p2p
    groups: dict[GroupId, Group] = field(default_factory=dict)
    exceptions: tuple[ExceptionRecord, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    exit: ProcessExit | None = None
    ended_ns: int = UNKNOWN_NS
    last_ns: int
    moments: tuple[int, ...] = ()  # the newest at which it began something, or an operation ended well; ascending
    longest_gap_ns: int = 0  # between operations that followed each other
    active_intervals: tuple[int, ...] = ()  # the newest in which it began something, as stalls.Pauses takes them
    last_site: Site | None = None
    open_phases: tuple[str, ...] = ()
    steps: int | None = 0  # None: not known
    in_init: bool = False
    stack: Stack | None = None
    alive: bool | None = None  # None: not known
    channels: dict[ChannelEnd, int] = field(default_factory=dict)  # messages issued
    messages: dict[ChannelEnd, Array] = field(default_factory=dict)  # those among `operations` in columns (MESSAGE)
    sees_questions: bool = False  # `Operation.asked` is known
    sees_program: bool = True  # what it does outside operations is known: phases, exceptions, its end
    complete: bool = True  # nothing was dropped: messages can be counted
    batches: int = 0  # taken from data loaders
    exhausted: int = 0  # times that a data loader had no batch left
    newest_is_exhaustion: bool = False  # it was the last that happened to data
    group_sites: tuple[Site | None, ...] = ()  # of each call of new_group and split_group
    making_group: Site | None = None  # the call of new_group it is in
    passes: tuple[PipelinePass, ...] = ()  # steps of a pipeline: the newest that has ended, and the newest
    long_phases: tuple[LongPhase, ...] = ()
    collectives: RankCollectives | None = None

    @cached_property
    def blocking(self) -> tuple[Operation, ...]:
        """What holds its program up: operations it waits for; all that are open where no wait was seen."""
        return tuple(o for o in self.open_operations if o.blocks) or self.open_operations

    @cached_property
    def newest_collectives(self) -> dict[GroupId, Array]:
        """The collectives among `operations` in columns, by group."""
        groups = self.collectives.groups if self.collectives is not None else {}
        newest = ((group, table, table["row"] >= self.first_row) for group, table in groups.items())
        return {group: table if chosen.all() else table[chosen] for group, table, chosen in newest}

    @property
    def first_blocking(self) -> Operation | None:
        """The oldest operation that holds the rank up, or did at its end."""
        return self.blocking[0] if self.blocking else None

    @property
    def own_exception(self) -> ExceptionRecord | None:
        """The last exception that left the program, unless it only tells of a lost or late peer."""
        if not self.exceptions or self.transport_exception is not None:
            return None
        return self.exceptions[-1]

    @property
    def transport_exception(self) -> ExceptionRecord | None:
        """The last exception, where it only tells of a lost or late peer."""
        if not self.exceptions:
            return None
        last = self.exceptions[-1]
        # An exception raised in a handler tells of what was handled: its traceback begins with that.
        chained = any(words in last.traceback for words in CHAINED)
        whole = f"{last.traceback}{last.type}: {last.message}".lower()
        text = whole if chained else f"{last.type}: {last.message}".lower()
        of_torch = any(words in whole for words in BACK_ENDS)  # others lose connections, too: to loggers, to storage
        return last if of_torch and any(words in text for words in TRANSPORT_WORDS) else None

    @property
    def interruption(self) -> ExceptionRecord | None:
        """The last exception, where it is that of Ctrl-C (SIGINT): its frame is where the signal found the program."""
        last = self.exceptions[-1] if self.exceptions else None
        return last if last is not None and last.type == "KeyboardInterrupt" else None

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the process."""
        if self.exit is None or self.exit.status >= 0:
            return None
        try:
            return signal.Signals(-self.exit.status).name
        except ValueError:
            return f"signal {-self.exit.status}"

    @property
    def stopped_politely(self) -> bool:
        """Say whether it was ended by a signal that launchers and people send to stop a job."""
        return self.exit is not None and -self.exit.status in _POLITE

    @property
    def finished(self) -> bool:
        """Say whether the program ended in order, whatever became of the process during its shutdown."""
        if self.exceptions:
            return False
        return self.ended_ns != UNKNOWN_NS or (self.exit is not None and self.exit.status == 0)

    @property
    def groups_made(self) -> int:
        """Calls of new_group and split_group."""
        return len(self.group_sites)

    @property
    def place(self) -> Site | None:
        """Where the rank is or last was: its open operation, its stack, its last record."""
        return self.place_held or self.last_site

    @property
    def place_held(self) -> Site | None:
        """Where the rank is or was at its end, as its open operation, its interruption or its stack shows."""
        if self.first_blocking is not None and self.first_blocking.site is not None:
            return self.first_blocking.site
        if self.interruption is not None and self.interruption.frame is not None:
            return self.interruption.frame
        if self.stack is not None and self.stack.frames and self.ended_ns == UNKNOWN_NS:
            return self.stack.frames[0]
        return None


@dataclass(frozen=True, kw_only=True)
class Stop:
    """How a job was going when it was stopped from outside."""

    quiet_ns: int  # nothing had begun or ended for so long
    usual_ns: int  # the longest that a rank had begun nothing before
    by_kill: bool = False  # all its ranks were killed together by SIGKILL; else somebody asked them to end

    @property
    def had_stalled(self) -> bool:
        """Say whether that was longer than the job is known to take."""
        return had_stalled(quiet_ns=self.quiet_ns, longest_pause_ns=self.usual_ns)


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """What the analysis of steps says of ranks that the others wait for."""

    steps: int  # looked at
    found: tuple[StragglerResult, ...]


@dataclass(frozen=True, kw_only=True)
class Handler:
    """An exception handler that a collective stands in, as the source has it."""

    text: str
    line: int
    call: str  # the text of the line of the collective


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The whole job."""

    ranks: dict[int, RankState]
    world_size: int
    manifest: Manifest
    stalled: bool  # nobody made progress for long, or ranks ended while operations were open
    progress: JobProgress | None = None  # of a job that runs
    stop: Stop | None = None  # the job was stopped from outside
    stopped_on_hang_ns: int | None  # dtprof stopped the job at this time
    oom_kills: int = 0
    find_stragglers: Callable[[], Stragglers] | None = None  # costs: the whole run is read again
    find_handlers: Callable[[str], Mapping[int, Handler]] | None = None  # of a source file, by line of the collective
    find_resident: Callable[[], Mapping[int, int]] | None = None  # bytes in RAM by rank, as each was last sampled
    problems: tuple[str, ...] = ()
    starting: Mapping[int, RankState] = field(default_factory=dict)  # of those missing: the process was seen
    at_rest_s: float | None = None  # for so long all ranks of a running job have slept outside any operation
    members: tuple[int, ...] | None = None  # ranks of the job where those are known one by one
    explained: frozenset[int] = frozenset()  # ranks that findings explain already
    lost: tuple[int, ...] = ()  # missing, though ranks that live and can answer leave evidence: that tells of them
    evidence_name: str = "record"  # what each rank is expected to have left
    how_to_complete: str = (
        "where other hosts keep runs of their own, give them all (dtprof diagnose NODE_DIR...)"  # where ranks miss
    )

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job that left no record."""
        members = range(self.world_size) if self.members is None else self.members
        return tuple(rank for rank in members if rank not in self.ranks and rank not in self.explained)

    def without(self, explained: Collection[int]) -> "JobState":
        """Return the job without ranks whose state is explained: neither there nor missing."""
        return replace(
            self,
            ranks={rank: state for rank, state in self.ranks.items() if rank not in explained},
            explained=self.explained.union(explained),
            lost=tuple(rank for rank in self.lost if rank not in explained),
        )

    @property
    def went_wrong(self) -> bool:
        """Say whether the job stands still, or ended with a status other than 0."""
        return self.stalled or self.manifest.exit_status not in (None, 0)

    def goes_on(self, rank: RankState) -> bool:
        """Say whether a rank may yet do what it has not done."""
        return not (self.manifest.ended_realtime_ns or rank.finished or rank.exit is not None)

    def group(self, key: GroupId) -> Group:
        """Return the group as the rank that knows most of it tells; its name alone where the records have lost it."""
        known = self._groups.get(key)
        return known if known is not None else Group(name=key.name, description="", size=len(key.ranks))

    @cached_property
    def _groups(self) -> dict[GroupId, Group]:
        best: dict[GroupId, Group] = {}
        for rank in self.ranks.values():
            for key, group in rank.groups.items():
                known = best.get(key)
                if known is None or _knowledge(known) < _knowledge(group):
                    best[key] = group
        return best


def _knowledge(group: Group) -> tuple[int, bool]:
    return len(group.ranks), group.timeout_s is not None


def main_stack(seen: RankStack, *, is_user: Callable[[str], bool]) -> Stack:
    """Return the stack of the main thread: its frames in files that `is_user` accepts, all where there are none."""
    frames = seen.main.frames if seen.main is not None else ()
    own = tuple(frame for frame in frames if is_user(frame.file))
    return Stack(
        state=seen.state,
        cpu_share=seen.cpu_share,
        frames=tuple(Site(file=f.file, line=f.line, function=f.function) for f in own or frames),
        reason=seen.reason,
    )


def assemble_job(ranks: Iterable[RankState], **job: Any) -> JobState:
    """Put the ranks together."""
    return JobState(ranks={rank.rank: rank for rank in ranks}, **job)
