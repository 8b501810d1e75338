"""The state of a job that rules read: newest operations, exit and stack of every rank, and the members of groups.

Each folder or file of `sources/` fills it, and says what it does not know.
"""

import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtprof.diagnosis.known_errors import is_refused_by_host
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob
from dtprof.diagnosis.stack_groups import BUSY, Frame, PythonState, RankStack
from dtprof.formatting import format_fraction
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation, RankOperations
from dtprof.job.stalls import JobProgress, had_stalled
from dtprof.job.wait_graph import Wait, find_waits
from dtprof.lint.program_order import SourcePlace
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.exit_records import STOPPING_SIGNALS
from dtprof.records.oom_victims import OomVictim
from dtprof.records.sites import Site, site_of_stack
from dtprof.records.tables import (
    UNKNOWN_NS,
    CrashStack,
    EarlyUse,
    ExceptionRecord,
    Group,
    OptimizerAge,
    OutOfMemory,
    Pipeline,
    ProcessExit,
    Snapshot,
    ThreadException,
    WrappedParameters,
)
from dtprof.records.user_files import is_user_file

if TYPE_CHECKING:
    from dtprof.analysis.results import MemoryGrowth, StragglerResult

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
    "detected at least one rank that exhausted inputs",
)
"""Parts of messages by which gloo, NCCL, the store and Join say that a peer is gone, late or through: victims say so,
not culprits."""

BACK_ENDS = ("gloo", "nccl", "torch/distributed", "c10d", "processgroup", "store", "backward", "monitoredbarrier")
"""Parts of a traceback through an operation, or of a message of a backend."""
CHAINED = ("direct cause of the following exception", "During handling of the above exception")


_RAISED = re.compile(r'^  File "(.+)", line (\d{1,9}), in (.+)$', re.MULTILINE)
"""A frame in the text of a traceback of Python."""
_TORCH = re.compile(r"(^|/)(lib)?(torch|c10|gloo)")
"""Of the path of a file, or of a library: torch, which waits for operations."""
_OF_DTPROF = re.compile(r"(^|/)dtprof/")
_IN_PACKAGES = re.compile(r".*/(?:(?:site|dist)-packages|lib(?:64)?/python[\d.]+)/")
"""The part of a path before the module of a library."""
DEVICE_CALL = re.compile(r"(cuda|cu|hip|nccl|rccl|acl|aclrt|ze)[A-Z]\w*$|\w*(Stream|Device|Event|Ctx)Synchronize\w*$")
"""Functions in which the host calls a device: of drivers, runtimes and NCCL."""
MOVED_BYTES = 1 << 16
"""Read or written within the half second of a sample by a process that works on files or pipes."""
NEW_PAGES = 64
"""Page faults within it of a process that takes memory into use."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The sampled state and stack of a process."""

    state: str
    cpu_share: float | None
    frames: tuple[Site, ...]  # of the main thread, innermost first
    reason: str = ""
    device_call: str = ""  # the function of a driver or of NCCL that the main thread is in; empty: none is seen
    children_cpu_share: float | None = None
    io_bytes: int | None = None
    page_faults: int | None = None
    python_state: PythonState | None = None
    t_ns: int | None = None  # when it was taken
    in_library: bool = False  # the main thread is in a library that is not torch, as of threads, queues or processes
    library_call: str = ""  # the function of a library that the program called and is in, and its file

    @property
    def progress(self) -> tuple[str, ...]:
        """Evidence of progress while others wait; empty where there is none."""
        busy, share = self.is_busy, self.children_cpu_share or 0.0
        is_unseen = bool(self.reason) and self.python_state is None
        facts = (
            ((self.io_bytes or 0) >= MOVED_BYTES, f"{(self.io_bytes or 0) / 1e6:,.1f} MB read or written"),
            (share > BUSY, f"its children use {format_fraction(share, 0)} of a core"),
            (busy and (self.page_faults or 0) >= NEW_PAGES, f"{self.page_faults or 0:,} page faults"),
            (busy and self.python_state == PythonState.CHANGED, "its local variables change"),
            (busy and self.python_state == PythonState.UNSEEN, "it uses the CPU"),
            (busy and self.python_state == PythonState.NATIVE, "it computes in native code"),
            (is_unseen and (self.cpu_share or 0.0) > BUSY, "it uses the CPU, and no stack shows for what"),
        )
        return tuple(words for is_so, words in facts if is_so)

    @property
    def is_busy(self) -> bool:
        """Say whether it works; runnable counts whatever its share: on a host with much to do it waits for a core."""
        return self.state == "running" or (self.cpu_share is not None and self.cpu_share > BUSY)


@dataclass(frozen=True, kw_only=True)
class PipelinePass:
    """One step of a pipeline schedule on one rank."""

    plan: Pipeline | None
    ended: bool
    forwards: dict[int, int]  # microbatches that went forward, by stage
    number: int = -1  # from 0; -1: not known, as the oldest records are not read


@dataclass(frozen=True, kw_only=True)
class LongPhase:
    """A checkpoint or a compilation that took long, several in a row as one; or work between two operations."""

    phase: str  # empty: work that no phase names
    site: Site | None
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class RankState(RankOperations):
    """One rank: its issued operations, and the fate of its process."""

    attempt: int
    pid: int
    host: str
    call_sites: tuple[Site, ...] = ()  # of its operations, and of others
    groups: dict[GroupId, Group] = field(default_factory=dict)
    exceptions: tuple[ExceptionRecord, ...] = ()
    thread_exceptions: tuple[ThreadException, ...] = ()
    lost_peer: bool | None = None  # the last of them only reports a lost or late peer; None: as its text says
    out_of_memory: tuple[OutOfMemory, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()  # of its memory, in files
    early_uses: tuple[EarlyUse, ...] = ()
    wrapped_parameters: tuple[WrappedParameters, ...] = ()
    optimizer_ages: tuple[OptimizerAge, ...] = ()
    crash: CrashStack | None = None  # what a signal left, which need not have ended it
    exit: ProcessExit | None = None
    ended_ns: int = UNKNOWN_NS
    last_ns: int
    moments: tuple[int, ...] = ()  # the newest at which it began something, or an operation ended well; ascending
    longest_gap_ns: int = 0  # between operations that followed each other
    active_intervals: tuple[int, ...] = ()  # the newest in which it began something, as stalls.Pauses takes them
    last_site: Site | None = None
    left_at: Site | None = None  # where it ended itself, by sys.exit for example, if that is its last record
    open_phases: tuple[str, ...] = ()
    steps: int | None = 0  # None: not known
    in_init: bool = False
    stack: Stack | None = None
    alive: bool | None = None  # None: not known
    sees_questions: bool = False  # whether handles were asked for completion or a future is known
    sees_program: bool = True  # what it does outside operations is known: phases, exceptions, its end
    batches: int = 0  # taken from data loaders
    exhausted: int = 0  # times that a data loader had no batch left
    exhaustions: tuple[int, ...] = ()  # when, the newest; ascending
    newest_is_exhaustion: bool = False  # it was the last that happened to data
    group_sites: tuple[Site | None, ...] = ()  # of each call of new_group and split_group
    group_members: tuple[int, ...] = ()  # what stands for the members asked for in each of them; 0: all, or not known
    outside_calls: tuple[tuple[int, Site], ...] = ()  # when and where it called a group that it is no member of
    making_group: Site | None = None  # the call of new_group it is in
    device_phases: tuple[str, ...] = ()  # that its device has begun and not ended
    passes: tuple[PipelinePass, ...] = ()  # steps of a pipeline: the newest that has ended, and the newest
    only_pipeline: Pipeline | None = None  # where the rank has one schedule alone, be it that it has trained no step
    long_phases: tuple[LongPhase, ...] = ()
    steps_ended: int | None = None  # optimizer steps that have ended, unless none was recorded
    versions: Mapping[str, str] = field(default_factory=dict)  # by program, torch and Python, where they are known
    blocked_share: float | None = None  # of its steps that operations took, at most; None: not known
    leak: "MemoryGrowth | None" = None  # of its memory over its steps; None: there is none, or too few samples

    @cached_property
    def blocking(self) -> tuple[Operation, ...]:
        """Operations that block its program: none where it began to wait for none, and its stack is in other code."""
        is_elsewhere = self.stack is not None and self.stack.in_library
        if is_elsewhere and not any(o.blocks or o.on_device for o in self.open_operations):
            return ()
        return super().blocking

    @property
    def own_exception(self) -> ExceptionRecord | None:
        """The last exception that left the program, unless it only reports a lost or late peer."""
        if not self.exceptions or self.transport_exception is not None:
            return None
        return self.exceptions[-1]

    @property
    def transport_exception(self) -> ExceptionRecord | None:
        """The last exception, where it only reports a lost or late peer."""
        if not self.exceptions or self.lost_peer is False or is_refused_by_host(self.exceptions[-1].message):
            return None
        last = self.exceptions[-1]
        if self.lost_peer:
            return last
        # An exception raised in a handler hides the one handled, which its traceback begins with.
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
        return self.exit is not None and -self.exit.status in STOPPING_SIGNALS

    @property
    def finished(self) -> bool:
        """Say whether the program exited without an error, whatever became of the process during its shutdown."""
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
        if self.last_frames:
            return site_of_stack(self.last_frames)
        if self.first_blocking is not None and self.first_blocking.site is not None:
            return self.first_blocking.site
        if self.interruption is not None and self.interruption.frame is not None:
            return self.interruption.frame
        if self.stack is not None and self.stack.frames and self.ended_ns == UNKNOWN_NS and not self.has_left:
            return site_of_stack(self.stack.frames)
        return None

    @property
    def last_frames(self) -> tuple[Site, ...]:
        """The frames of the user's code, innermost first, that the signal which ended the process has left."""
        if self.crash is None or self.exit is None or self.exit.status != -self.crash.signal:
            return ()
        return tuple(frame for frame in self.crash.frames if is_user_file(frame.file))

    @cached_property
    def raised_frames(self) -> tuple[tuple[Site, ...], ...]:
        """The frames of the user's code, innermost first, of the last exception and of those it was raised from."""
        text = self.exceptions[-1].traceback if self.exceptions else ""
        raised = (_RAISED.findall(part) for part in reversed(text.split("Traceback (most recent call last):")))
        return tuple(
            tuple(
                Site(file=file, line=int(line), function=function)
                for file, line, function in reversed(frames)
                if is_user_file(file)
            )
            for frames in raised
        )

    @property
    def raised_at(self) -> Site | None:
        """The line at which its own exception was raised, with the callers that its traceback names."""
        at = self.own_exception.frame if self.own_exception is not None else None
        if at is None:
            return None
        place = at.file, at.line
        frames = next((own for own in self.raised_frames if own and (own[0].file, own[0].line) == place), ())
        return site_of_stack((at, *frames[1:])) if frames else at

    @property
    def has_left(self) -> bool:
        """Say whether the program has ended and the interpreter waits for threads that are no daemons."""
        frames = self.stack.frames if self.stack is not None else ()
        return bool(frames) and frames[0].function == "_shutdown" and frames[0].file.endswith("/threading.py")


@dataclass(frozen=True, kw_only=True)
class DeviceHealth:
    """The last NVML sample of the GPUs of a host."""

    troubles: tuple[str, ...] = ()
    reason: str = ""  # why something is not known


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """What one host sends another by TCP, over the newest seconds in which it does."""

    sender: str
    receiver: str
    bytes_per_s: float  # of the time in which something was under way
    busy_share: float  # that time; of several connections at once, more than 1
    window_s: float
    usual_bytes_per_s: float | None = None  # what it reached in a quarter of the run; None: too little was sent
    is_below_round_trips: bool = False  # slower than one segment after the other, each with its answer, would be
    segment_bytes: float  # on average
    rtt_s: float
    min_rtt_s: float  # in the whole run
    retransmitted_share: float = 0.0  # of the segments
    queued_share: float | None = None  # of the samples: something waited in the queues of the sender's interfaces


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """How full the memory of a host, or the limit of its container, was when a rank ended."""

    share: float  # at the last sample before
    since_s: float = 0.0  # from that sample to the end
    growth_per_s: float = 0.0  # of the share, over the samples before

    @property
    def at_end(self) -> float:
        """The share if it grew on as it did before."""
        return self.share + max(0.0, self.growth_per_s) * self.since_s


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The progress of a job when it was stopped from outside."""

    quiet_ns: int  # nothing had started or ended for so long
    usual_ns: int  # the longest that a rank had started nothing before
    by_kill: bool = False  # all its ranks were killed together by SIGKILL; else somebody asked them to end

    @property
    def had_stalled(self) -> bool:
        """Say whether that was longer than the job is known to take."""
        return had_stalled(quiet_ns=self.quiet_ns, longest_pause_ns=self.usual_ns)


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """The stragglers that the analysis of steps found."""

    steps: int  # analysed
    found: "tuple[StragglerResult, ...]"
    newest_s: float | None = None  # for so long these steps took, the newest of many; None: all were analysed


@dataclass(frozen=True, kw_only=True)
class Handler:
    """An exception handler, or a finally block, that encloses a collective, read from the source."""

    text: str
    line: int
    call: str  # the text of the line of the collective
    is_finally: bool = False


@dataclass(frozen=True, kw_only=True)
class RendezvousWait:
    """A launcher that has started no rank: it is in a rendezvous. Options are as it was given them."""

    host: str
    pid: int
    waited_s: float
    for_store: bool  # it has not reached the store at the endpoint
    is_static: bool = False  # nodes are numbered, and node 0 keeps the store
    nodes: int  # at least as many have to come
    endpoint: str = ""
    rdzv_id: str = ""
    node_rank: int | None = None
    ranks_per_node: int | None = None
    hosts: tuple[str, ...] = ()  # that the scheduler gave the job
    hosts_from: str = ""  # its variable that says so


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
    host_oom_kills: int = 0  # on its hosts, in any control group
    oom_victims: tuple[OomVictim, ...] = ()  # on the hosts of the job, by their kernels' logs
    timed_out: bool | None = None  # what failed waited until a time limit; None: not known
    unnamed: tuple[RankState, ...] = ()  # processes that failed, whose rank nobody knows
    log: LoggedJob | None = None  # what only logs tell
    find_stragglers: Callable[[], Stragglers] | None = None  # costs: the whole run is read again
    find_handlers: Callable[[str], Mapping[int, Handler]] | None = None  # of a source file, by line of the collective
    find_place: Callable[[str, int], SourcePlace | None] | None = None  # of a line of a source file
    was_changed: Callable[[str], bool] | None = None  # a source file, after the job had started
    find_resident: Callable[[], Mapping[int, int]] | None = None  # bytes in RAM by rank, as each was last sampled
    find_memory_use: Callable[[], Mapping[int, "MemoryUse"]] | None = None  # by rank, when it ended
    common_callers: Mapping[Site, int] = field(default_factory=dict)  # by line, how many count where not all do
    find_links: Callable[[], tuple[LinkRate, ...]] | None = None  # between hosts; those over which something is sent
    find_device_health: Callable[[], Mapping[int, DeviceHealth]] | None = None  # by rank
    problems: tuple[str, ...] = ()
    starting: Mapping[int, RankState] = field(default_factory=dict)  # of those missing: the process was seen
    rendezvous: tuple[RendezvousWait, ...] = ()  # of launchers, in a job without any rank
    unwaiting_hosts: tuple[str, ...] = ()  # that take part in the run while the launchers of others wait
    earlier_hosts: tuple[tuple[str, ...], str] = ((), "")  # of the newest other run like this one; its name
    asleep_s: float | None = None  # all ranks have slept outside any operation for so long
    members: tuple[int, ...] | None = None  # ranks of the job where those are known one by one
    explained: frozenset[int] = frozenset()  # ranks that findings explain already
    silent_s: Mapping[str, float] = field(default_factory=dict)  # by host: for how long the others alone were heard of
    lost: tuple[int, ...] = ()  # missing, though every rank that is alive leaves evidence
    sources: tuple[str, ...] = ("run",)  # what was read
    evidence_name: str = "record"  # what each rank is expected to have left
    how_to_complete: str = (
        "where other hosts keep runs of their own, give them all (dtprof diagnose NODE_DIR...)"  # where ranks miss
    )

    def place_in_source(self, site: Site | None) -> SourcePlace | None:
        """Return the place of a line in the program's source; None where that cannot be read."""
        return self.find_place(site.file, site.line) if self.find_place is not None and site is not None else None

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

    @cached_property
    def waits(self) -> dict[int, tuple[Wait, ...]]:
        """The waits of each blocked rank."""
        waiting = (rank.rank for rank in self.ranks.values() if not rank.finished)
        return find_waits(self.ranks, waiting, lost=self.lost)

    @property
    def went_wrong(self) -> bool:
        """Say whether the job stalled, or ended with a status other than 0."""
        return self.stalled or self.manifest.exit_status not in (None, 0)

    @property
    def is_complete(self) -> bool:
        """Say whether no rank dropped events: else operations can be compared, but not counted."""
        return all(rank.complete for rank in self.ranks.values())

    def goes_on(self, rank: RankState) -> bool:
        """Say whether a rank may still issue the operations that it has not issued."""
        return not (self.manifest.ended_realtime_ns or rank.finished or rank.exit is not None)

    def group(self, key: GroupId) -> Group:
        """Return the group as recorded by the rank that knows most of it; only its name where no record is left."""
        known = self._groups.get(key) or Group(name=key.name, description="", size=len(key.ranks))
        return replace(known, instance=key.instance) if key.instance else known

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


def main_stack(seen: RankStack) -> Stack:
    """Return the stack of the main thread: its frames in the user's files, all where there are none."""
    frames = seen.main.frames if seen.main is not None else ()
    own = tuple(frame for frame in frames if is_user_file(frame.file))
    inner = frames[: frames.index(own[0])] if own else ()
    calls = (frame.function for frame in frames if frame.line == 0 and DEVICE_CALL.match(frame.function))
    return Stack(
        state=seen.state,
        cpu_share=seen.cpu_share,
        frames=tuple(Site(file=f.file, line=f.line, function=f.function) for f in own or frames),
        reason=seen.reason,
        device_call=next(calls, ""),
        children_cpu_share=seen.children_cpu_share,
        io_bytes=seen.io_bytes,
        page_faults=seen.page_faults,
        python_state=seen.python_state,
        in_library=bool(inner) and not any(_TORCH.search(frame.file) for frame in inner),
        library_call=next((_library_words(frame) for frame in reversed(inner) if _is_called(frame)), ""),
    )


def _is_called(frame: Frame) -> bool:
    """Say whether a frame below the user's code is what that calls: no wrapper around it, of dtprof or a decorator."""
    return frame.line > 0 and not _OF_DTPROF.search(frame.file) and "wrap" not in frame.function.rpartition(".")[2]


def _library_words(frame: Frame) -> str:
    return f"{frame.function} ({_IN_PACKAGES.split(frame.file)[-1]})"


def assemble_job(ranks: Iterable[RankState], **job: Any) -> JobState:
    """Put the ranks together."""
    return JobState(ranks={rank.rank: rank for rank in ranks}, **job)
