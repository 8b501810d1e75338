"""Take windows of torch.profiler and snapshots of memory at step ends: planned by a setting, in turn, or on request.

A window begins where the step before its first step ends, and ends with its last step, both on the thread that steps.
Stopping the profiler and writing its trace holds the GIL on any thread, so both happen at once; another thread
compresses the file.
"""

import atexit
import multiprocessing.util
import os
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from time import monotonic_ns
from typing import Any

from dtprof import fence, settings
from dtprof.capture.memory_sampler import PAGE_BYTES, Budget, Memory
from dtprof.capture.recorder import Recorder
from dtprof.capture.snapshots import Snapshots
from dtprof.capture.string_entries import timed_entry
from dtprof.capture.window_files import TooLargeError, TracedStep, pack
from dtprof.capture.window_profiler import UserProfilers, WindowProfiler, forget_in_child
from dtprof.capture.window_turns import STEPS, WindowTurns
from dtprof.records import paths, trace_requests
from dtprof.records.trace_requests import TURN, TraceRequest

POLL_EVERY_NS = 500_000_000
NEVER = sys.maxsize
MEMORY_PER_FILE = 8
"""An open window may grow the process by this many times the size limit of its file."""
FREE_BYTES = 256 << 20
DELETED = "deleted to leave room for later windows in turn"
USER_PROFILER = "the program runs a torch.profiler of its own"


class _Open:
    """A window that is open."""

    def __init__(self, planned: dict[str, Any], profiler: WindowProfiler) -> None:
        """Begin now, on this thread."""
        self.first, self.last = int(planned["first"]), int(planned["last"])
        self.profiler = profiler
        self.thread = threading.get_ident()
        self.resident = _resident_bytes()
        self.steps: list[tuple[int, int, int]] = []
        self.step_begin_ns = 0
        begin_ns, realtime_ns = _clocks()
        self.facts = planned | {"begin_ns": begin_ns, "realtime_ns": realtime_ns}
        """Fields of all its entries."""


class Windows:
    """The windows and snapshots of one process."""

    def __init__(self, memory: Memory) -> None:
        """Wait for the log: without one there is nowhere to write."""
        self._memory = memory
        self._user_profilers = UserProfilers()
        self._poll_budget = Budget(POLL_EVERY_NS)
        self._reset()

    def _reset(self) -> None:
        self._recorder: Recorder | None = None
        self._folder = Path()
        self._request_file = ""
        self._open: _Open | None = None
        self._plan = (NEVER, NEVER)
        self._turns: WindowTurns | None = None
        self._in_turn: deque[tuple[_Open, dict[str, int], Path, int]] = deque()
        self._passed: set[str] = set()
        self._count = self._ended = 0
        self._left_bytes = 0
        self._snapshots: Snapshots | None = None

    def install(self) -> None:
        """Hook profilers of the program; a forked process takes no windows of its parent."""
        self._user_profilers.install()
        os.register_at_fork(after_in_child=self._forget)

    @fence.fenced("a profiler window in a forked process", "goes on")
    def _forget(self) -> None:
        if self._open is not None:
            forget_in_child()
        self._reset()

    @fence.fenced("profiler windows", "are not taken in this process")
    def begin_log(self, recorder: Recorder, folder: Path, rank: int, world_size: int) -> None:
        """Read the planned window of this rank, and its turns, from the settings; write files to the folder."""
        self._reset()
        self._recorder, self._folder = recorder, folder
        self._request_file = str(folder / paths.TRACE_REQUEST)
        limit = settings.from_environment(settings.MAX_TRACE_MB)
        self._left_bytes = int(settings.parse_number(limit, setting=settings.MAX_TRACE_MB, minimum=1) * (1 << 20))
        self._snapshots = Snapshots(self._memory, recorder, folder)
        steps, ranks = map(settings.from_environment, (settings.TRACE_STEPS, settings.TRACE_RANKS))
        chosen = settings.parse_traced_ranks(ranks)
        in_turn = [r for r in range(world_size) if not chosen or any(first <= r <= last for first, last in chosen)]
        if steps and rank in in_turn:
            self._plan = settings.parse_traced_steps(steps)
        if rank in in_turn and (every := settings.from_environment(settings.TRACE_EVERY)):
            every_ns = int(settings.parse_trace_every(every) * 1e9)
            self._turns = WindowTurns(every_ns=every_ns, ranks=in_turn, rank=rank)
        # Processes of multiprocessing leave by os._exit, without atexit: both ends finish the window, the second does
        # nothing.
        atexit.register(self.finish)
        multiprocessing.util.Finalize(None, self.finish, exitpriority=-50)

    @fence.fenced("a profiler window", "is not taken")
    def at_step_end(self, ended: int) -> None:
        """Begin, continue or end a window: `ended` steps have ended."""
        self._ended = ended
        if self._open is not None:
            self._continue(self._open, ended)
        elif self._plan[0] == ended + 1:
            self._begin(*self._plan, request="")
        elif self._turns is not None and self._turns.is_due(time.time_ns()):
            self._take_turn(self._turns, ended)
        elif self._recorder is not None and self._poll_budget.allows():
            began_ns = monotonic_ns()
            is_requested = os.access(self._request_file, os.F_OK)
            self._poll_budget.charge(monotonic_ns() - began_ns)
            if is_requested:
                self._take_requested(ended)

    def _take_turn(self, turns: WindowTurns, ended: int) -> None:
        """Take the next steps, or let the turn pass; each reason for that is recorded once."""
        first, last = ended + 1, ended + STEPS
        refusal = turns.refusal(monotonic_ns(), self._left_bytes)
        if not (refusal or (refusal := self._refusal())):
            self._begin(first, last, request=TURN)
        elif refusal not in self._passed:
            self._passed.add(refusal)
            self._count += 1
            planned = {"id": self._count, "first": first, "last": last, "request": TURN}
            self._entry("failed", planned | {"reason": refusal})
            fence.warn_once(f"no profiler window is taken in turn: {refusal}")

    def _take_requested(self, ended: int) -> None:
        request: TraceRequest | None = trace_requests.take(self._folder)
        if request is None:
            return
        if request.memory:
            self.take_snapshot("request", request=request.id)
        if request.steps:
            self._begin(ended + 1, ended + request.steps, request=request.id)

    @fence.fenced("a memory snapshot", "is not taken")
    def take_snapshot(self, why: str, *, request: str = "") -> None:
        """Write a snapshot of memory within the size limit of the rank."""
        if self._snapshots is not None:
            self._left_bytes -= self._snapshots.take(why, self._ended, limit_bytes=self._left_bytes, request=request)

    def _begin(self, first: int, last: int, *, request: str) -> None:
        self._count += 1
        planned = {"id": self._count, "first": first, "last": last, **({"request": request} if request else {})}
        if refusal := self._refusal():
            self._entry("failed", planned | {"reason": refusal})
            fence.warn_once(f"no profiler window over steps {first} to {last} is taken: {refusal}")
            return
        try:
            window = _Open(planned, WindowProfiler(self._yield_to_user_profiler))
            self._write("begun", window)
            window.profiler.start()
        except Exception as error:
            self._entry("failed", planned | {"reason": f"{type(error).__name__}: {error}"})
            raise
        window.step_begin_ns = monotonic_ns()
        self._open = window

    def _refusal(self) -> str:
        """Return why no window can begin now; empty where one can."""
        if self._user_profilers.any:
            return USER_PROFILER
        if self._left_bytes <= 0:
            return f"the {settings.MAX_TRACE_MB.option} of this rank is used up"
        if shutil.disk_usage(self._folder).free < FREE_BYTES:
            return f"less than {FREE_BYTES >> 20} MiB are free on the disk of the run"
        return ""

    def _continue(self, window: _Open, ended: int) -> None:
        if threading.get_ident() != window.thread:
            return  # another model stepped: only the thread that started a profiler can stop it
        now_ns = monotonic_ns()
        window.steps.append((ended, window.step_begin_ns, now_ns))
        grown = _resident_bytes() - window.resident
        if ended >= window.last:
            self._end(window)
        elif grown > MEMORY_PER_FILE * self._left_bytes:
            self._end(window, f"ended after step {ended}: the process had grown by {grown >> 20} MiB")
        else:
            window.step_begin_ns = now_ns

    @fence.fenced("a profiler window", "is not kept")
    def _yield_to_user_profiler(self) -> None:
        if self._open is not None and threading.get_ident() == self._open.thread:
            self._end(self._open, f"ended early: {USER_PROFILER}")

    @fence.fenced("a profiler window", "is not kept")
    def finish(self) -> None:
        """End the open window where the program exits."""
        window = self._open
        if window is None:
            return
        if threading.get_ident() != window.thread:
            self._open = None
            self._write("failed", window, reason="the thread that began it ended no further step")
            return
        done = window.steps[-1][0] if window.steps else window.first - 1
        self._end(window, f"ended early: the job ended after step {done}", beside=False)

    def _end(self, window: _Open, reason: str = "", *, beside: bool = True) -> None:
        """Stop the profiler and write its file, on a thread if `beside`; `reason` says why it ends early."""
        self._open = None
        end_ns, realtime_ns = _clocks()
        raw = self._folder / f".window-{window.first}.json"
        try:
            window.profiler.stop()
            window.profiler.save(raw)
        except Exception as error:
            self._write("failed", window, end_ns=end_ns, reason=f"{type(error).__name__}: {error}")
            raise
        ready_ns = monotonic_ns()
        turns = self._turns if window.facts.get("request") == TURN else None
        if turns is not None:
            turns.charge(window.facts["begin_ns"], ready_ns)
        offset = realtime_ns - end_ns
        steps = [TracedStep(number, begin + offset, end + offset) for number, begin, end in window.steps]
        last = max(window.steps[-1][0] if window.steps else window.first, window.first)
        target = self._folder / paths.window_name(window.first, last)

        @fence.fenced("a profiler window", "is not kept")
        def write() -> None:
            times = {"end_ns": end_ns, "ready_ns": ready_ns}
            facts = {**window.facts, "end_ns": end_ns, "end_realtime_ns": realtime_ns}
            room = max(0, self._left_bytes)
            try:
                size = pack(raw, target, pid=os.getpid(), steps=steps, facts=facts, limit_bytes=room)
            except (OSError, ValueError, TooLargeError) as error:
                failure = _failure(error, room)
                if turns is not None and isinstance(error, TooLargeError):
                    turns.keep(room + 1)
                self._write("failed", window, **times, reason=failure)
                fence.warn_once(
                    f"the profiler window over steps {window.first} to {window.last} is not kept: {failure}"
                )
                return
            self._left_bytes -= size
            self._write("written", window, **times, file=target.name, bytes=size, reason=reason)
            if turns is not None:
                turns.keep(size)
                self._in_turn.append((window, times, target, size))
                self._make_room(turns)

        if beside:
            threading.Thread(target=write, name="dtprof-window").start()  # no daemon: the interpreter joins it at exit
        else:
            write()

    def _make_room(self, turns: WindowTurns) -> None:
        """Delete the oldest windows taken in turn, but for the newest, until the next one has room."""
        while len(self._in_turn) > 1 and turns.lacks_room(self._left_bytes):
            window, times, file, size = self._in_turn.popleft()
            file.unlink(missing_ok=True)
            self._left_bytes += size
            self._write("failed", window, **times, reason=DELETED)

    def _write(self, state: str, window: _Open, **fields: object) -> None:
        self._entry(state, window.facts | {name: value for name, value in fields.items() if value != ""})

    def _entry(self, state: str, fields: dict[str, object]) -> None:
        if self._recorder is not None:
            self._recorder.write_entry(timed_entry("window", state=state, **fields))


def _failure(error: Exception, room_bytes: int) -> str:
    if isinstance(error, TooLargeError):
        return (
            f"it takes more than the {room_bytes >> 20} MiB that are left of {settings.MAX_TRACE_MB.option}; "
            "take fewer steps or give more"
        )
    return f"{type(error).__name__}: {error}"


def _clocks() -> tuple[int, int]:
    """Return the times of the monotonic clock and of the wall clock."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.clock_gettime_ns(time.CLOCK_REALTIME)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES
