"""Python tracebacks and torchelastic's table of failures, put together from the interleaved lines of many processes."""

import calendar
import re
import time
from dataclasses import dataclass, field

from dtprof.diagnosis.sources.logs import traceback_boxes
from dtprof.diagnosis.sources.logs.line_prefixes import LogLine
from dtprof.diagnosis.sources.logs.log_facts import BACKWARD, Exit, Facts, Order, Trace
from dtprof.records.sites import Site, site_of_stack
from dtprof.records.user_files import is_user_file

FRAME = re.compile(r'\s*File "([^"]{1,1000})", line (\d{1,9})(?:, in (.{1,200}))?\s*$')
RAISED = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\[\w+\])?(?:\(\w+\))?)(?::\s?(.*))?$", re.DOTALL)
RECORD = re.compile(r"(?:^|[\s\[|<(-])(?:WARNING|WARN|ERROR|CRITICAL)(?:[]:>)|\s]|$)")
"""The level in a record of logging."""
BARE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (.+)")
MARKS = re.compile(r"[\s~^]*$")
CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
NOT_FATAL = (
    "Exception ignored in",
    "Exception in thread",
    "--- Logging error ---",
    "Task exception was never retrieved",
)
SPAWNED = re.compile(r"-- Process (\d{1,6}) terminated with the following error")
ENTRY_TIME = re.compile(r"\s*time\s+: (\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)")
ENTRY_RANK = re.compile(r"\s*rank\s+: (\d{1,7}) \(local_rank: (\d{1,6})\)")
ENTRY_HOST = re.compile(r"\s*host\s+: (\S{1,200})")
ENTRY_EXIT = re.compile(r"\s*exitcode\s+: (-?\d{1,5})(?: \(pid: (\d{1,10})\)|\s*$)")
ENTRY_TRACE = re.compile(r"\s*traceback\s+: (.*)")

API = re.compile(
    r"^(?:monitored_)?(?:all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|reduce|gather|scatter|send|recv)"
    r"(?:_coalesced|_into_tensor|_tensor|_single|_object_list|_object|_multigpu)?$|^_(?:all_gather|reduce_scatter)_base$"
    r"|^(?:isend|irecv|batch_isend_irecv|init_process_group|new_group|destroy_process_group)$"
)
CALLED = re.compile(r"\.\s*(\w+)\s*\(")
GAVE_UP = "Stack trace of the failed collective:"
LEVEL = re.compile(r"#\d{1,4} (.{1,200}) from (.{1,1000}):(\d{1,9})\s*$")
"""A line of the stack that a watchdog prints below that, the innermost first."""
RANKED = re.compile(r"\(RANK (\d{1,7})\)")
"""Behind the head of a traceback that torch.distributed.checkpoint prints for another rank."""
MAX_STREAMS = 20_000
MAX_FRAMES = 200


@dataclass
class _Open:
    """A traceback whose last line has not come yet."""

    order: Order
    rank: int | None
    task: int | None
    pod: int | None
    from_torch: bool
    logged: bool
    indent: int
    is_headless: bool = False  # frames without a head: only what is named as an exception ends them
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    sources: dict[int, str] = field(default_factory=dict)


@dataclass
class _Stream:
    """The state of the output of one process."""

    open: _Open | None = None
    before: str = ""  # the line before, where it is of no traceback
    chained: bool = False
    handled: bool = False
    spawned: int | None = None
    entry_rank: int | None = None
    entry_local: int | None = None
    entry_time_s: int | None = None
    entry_host: str = ""


class Tracebacks:
    """Collects tracebacks and tables, one state for each process's output."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._streams: dict[str, _Stream] = {}
        self._gave_up: int | None = None  # the rank whose watchdog prints the stack that is read

    def read(self, line: LogLine, order: Order) -> bool:
        """Take a line; say whether it belonged to a traceback or a table."""
        stream = self._streams.get(line.stream)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[line.stream] = _Stream()
        text = line.text
        if self._read_stack(text, line):
            return True
        if traceback_boxes.is_boxed(text):
            unboxed = traceback_boxes.unboxed(text)
            if unboxed is None:
                return stream.open is not None
            text = unboxed
        if self._read_table(text, stream):
            return True
        before, stream.before = stream.before, ""
        if stream.open is None and FRAME.match(text):  # its first lines were cut off
            self._begin(line, order, stream, logged=False, is_headless=not line.from_torch)
        elif traceback_boxes.START in text:
            self._begin(line, order, stream, logged=RECORD.search(before) is not None)
            return True
        if stream.open is not None:
            return self._continue(text, order, stream, line)
        if text.startswith(CHAIN):
            stream.chained = True
        elif any(words in text for words in NOT_FATAL):
            stream.handled = True
        elif match := SPAWNED.search(text):
            stream.spawned = int(match[1])
        elif match := BARE.match(text):
            self._add_bare(match, line, order)
        else:
            stream.before = text
            return False
        return True

    def _read_stack(self, text: str, line: LogLine) -> bool:
        """Take the stack of a collective that a watchdog gives up: one record, of which only the head has a prefix."""
        if GAVE_UP in text:
            self._gave_up = line.rank
            return True
        match = LEVEL.match(text) if self._gave_up is not None else None
        if match is None or self._gave_up is None:
            self._gave_up = None
            return False
        if is_user_file(match[2]):
            site = Site(file=match[2], line=int(match[3]), function=match[1])
            self.facts.stacks.setdefault(self._gave_up, site)
        return True

    def _begin(self, line: LogLine, order: Order, stream: _Stream, *, logged: bool, is_headless: bool = False) -> None:
        rank = stream.spawned if stream.spawned is not None else line.rank
        of_other = RANKED.search(line.text)
        rank = int(of_other[1]) if of_other else rank
        in_table = ENTRY_TRACE.match(line.text)
        if in_table and stream.entry_rank is not None:
            rank = stream.entry_rank
        certain = line.from_torch or stream.spawned is not None or in_table is not None
        stream.open = _Open(order, rank, line.task, line.pod, certain, logged, _indent(line.text), is_headless)

    def _continue(self, text: str, order: Order, stream: _Stream, line: LogLine) -> bool:
        current = stream.open
        if current is None:
            return False
        if match := FRAME.match(text):
            if len(current.frames) < MAX_FRAMES:
                current.frames.append((match[1], int(match[2]), (match[3] or "").strip()))
            return True
        if not current.frames:
            stream.open = None if text.strip() else current
            return False
        # Source lines are indented by 4, the exception not at all; a carrier may have taken a space.
        if MARKS.match(text) or _indent(text) > current.indent + 1:
            current.sources.setdefault(len(current.frames) - 1, text.strip()[:300])
            return True
        stream.open = None
        raised = BARE.match(text) if current.is_headless else RAISED.match(text)
        if raised is None or not (raised[2] or raised[1].rpartition(".")[2][:1].isupper()):
            return False
        self._close(current, raised[1], raised[2] or "", stream, line, order)
        return True

    def _close(self, done: _Open, kind: str, message: str, stream: _Stream, line: LogLine, order: Order) -> None:
        site, source, call, torch_only = place_of(done.frames, done.sources)
        self.facts.add(
            Trace(
                order=order,
                rank=done.rank,
                task=done.task,
                pod=done.pod,
                stream=line.stream,
                type=kind,
                message=message.strip()[:400],
                site=site,
                source=source,
                call=call,
                torch_only=torch_only,
                fatal=done.from_torch,
                handled=stream.handled,
                logged=done.logged,
                chained=stream.chained,
            )
        )
        stream.chained = stream.handled = False
        stream.spawned = None
        self.facts.last_activity[line.stream] = 0

    def _add_bare(self, match: re.Match[str], line: LogLine, order: Order) -> None:
        self.facts.add(
            Trace(
                order=order,
                rank=line.rank,
                task=line.task,
                pod=line.pod,
                stream=line.stream,
                type=match[1],
                message=match[2].strip()[:400],
                fatal=line.from_torch,  # its hook for uncaught exceptions: the lines above were cut off
                bare=True,
            )
        )

    def _read_table(self, text: str, stream: _Stream) -> bool:
        if " : " not in text:
            return False
        if match := ENTRY_TIME.match(text):
            stream.entry_time_s = _seconds(match[1])
        elif match := ENTRY_HOST.match(text):
            stream.entry_host = match[1]
        elif match := ENTRY_RANK.match(text):
            stream.entry_rank, stream.entry_local = int(match[1]), int(match[2])
        elif (match := ENTRY_EXIT.match(text)) and stream.entry_rank is not None:
            rank = stream.entry_rank
            self.facts.name_rank(rank)
            self.facts.exits[rank] = Exit(
                rank=rank,
                status=int(match[1]),
                local_rank=stream.entry_local,
                host=stream.entry_host,
                pid=int(match[2] or 0),
                from_table=True,
                time_s=stream.entry_time_s,
            )
            stream.entry_time_s = None
        else:
            return False
        return True


def _seconds(text: str) -> int | None:
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%d_%H:%M:%S"))
    except ValueError:
        return None


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def is_torch(file: str) -> bool:
    """Say whether a frame's file is torch's."""
    return "/torch/" in file or file.endswith("contextlib.py")


def place_of(frames: list[tuple[str, int, str]], sources: dict[int, str]) -> tuple[Site | None, str, str, bool]:
    """Return the user's innermost line, its source, the call of torch.distributed, and whether only torch is below."""
    own = [i for i, (file, _, _) in enumerate(frames) if is_user_file(file)]
    outside = own or [i for i, (file, _, _) in enumerate(frames) if not is_torch(file)]
    last = outside[-1] if outside else -1
    below = frames[last + 1 :]
    call = next((name for file, _, name in reversed(below) if "/torch/" in file and API.match(name)), "")
    if not call and any(name in ("backward", "_engine_run_backward") for _, _, name in below):
        # DistributedDataParallel's hook is native; one in Python, of another wrapper, may make any operation.
        call = "backward pass" if any("/torch/distributed/" in file for file, _, _ in below) else BACKWARD
    source = sources.get(last, "")
    if not call and source and (not below or all(name == "wait" for _, _, name in below)):
        call = next((name for name in CALLED.findall(source) if API.match(name)), "")
    lines = [Site(file=file, line=line, function=name) for file, line, name in (frames[i] for i in reversed(outside))]
    site = site_of_stack(lines) if lines else None
    return site, source, call, bool(below) and all(is_torch(file) for file, _, _ in below)
