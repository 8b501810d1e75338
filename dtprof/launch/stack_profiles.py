"""Profiles of the main threads of processes, taken by py-spy from outside, without stopping them."""

import contextlib
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

from dtprof.formatting import format_fraction
from dtprof.launch.stack_sampler import find_py_spy
from dtprof.launch.work_counters import WorkCounters, read_work_counters
from dtprof.records.user_files import is_user_file

_POLL_S = 0.05
TIMES_ALLOWED = 3
"""How many times its duration py-spy may take until it is killed."""
WRITES_WITHIN_S = 0.5
"""In which py-spy writes its samples once the processes have ended."""
MOSTLY = 0.5
"""Share of its time from which on the processor's time of a process is that of a line."""
IDLE_SHARE = 0.25
"""Of a core: below, a process waits."""
FILES_BYTES_A_SECOND = 1 << 20
IN_OPERATION = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
LOADER = "/torch/utils/data/"
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")


class Frame(NamedTuple):
    """A line of a program and the function that it is in."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Samples of the main thread of one process, by its stack, outermost frame first."""

    samples: int
    stacks: Counter[tuple[Frame, ...]]


def read_profile(text: str) -> Profile:
    """Read py-spy's `raw` format: one stack a line, with its count."""
    stacks: Counter[tuple[Frame, ...]] = Counter()
    for row in text.splitlines():
        stack, _, count = row.rpartition(" ")
        thread, *frames = stack.split(";")
        if count.isdecimal() and thread.endswith(": MainThread"):
            found = (_FRAME.fullmatch(frame) for frame in frames)
            stacks[tuple(Frame(each[2], int(each[3]), each[1]) for each in found if each)] += int(count)
    return Profile(samples=stacks.total(), stacks=stacks)


@dataclass(frozen=True, kw_only=True)
class ProfiledLine:
    """A line of the program, a share of the process's time, and the frame that tells what it does there."""

    frame: Frame
    share: float
    innermost: Frame


def find_innermost(called: Sequence[Frame]) -> Frame:
    """Return the frame that tells what the first of these does: the innermost or that of a data loader.

    A loader waits for its workers in the standard library, which tells nothing.
    """
    return next((frame for frame in called[1:] if LOADER in frame.file), called[-1])


@dataclass(frozen=True, kw_only=True)
class WorkRates:
    """Work of a process while it was sampled; None where the kernel does not tell."""

    cores: float | None = None
    delayed: float | None = None  # share of the time that its main thread was ready to run, and had no core
    bytes_per_s: float | None = None  # read and written: the messages of gloo, too

    @classmethod
    def between(cls, before: WorkCounters, after: WorkCounters, duration_s: float) -> "WorkRates":
        """Return the rates between two readings."""

        def rate(name: str) -> float | None:
            first, last = getattr(before, name), getattr(after, name)
            return None if first is None or last is None else (last - first) / duration_s

        return cls(cores=rate("cpu_s"), delayed=rate("delayed_s"), bytes_per_s=rate("io_bytes"))


def describe_work(line: ProfiledLine, rates: WorkRates, others: WorkRates = WorkRates()) -> str | None:
    """Describe the activity of a process at a line; None: its counters do not tell.

    A process on time sends the same messages: what a late one reads and writes beyond such an `other` is its own. The
    processor's time is that of the whole process: it tells of a line at which the process mostly is.
    """
    if LOADER in line.innermost.file:
        return "it waits for its data loader"
    if rates.bytes_per_s is not None and others.bytes_per_s is not None:
        beyond = rates.bytes_per_s - others.bytes_per_s
        if beyond >= FILES_BYTES_A_SECOND:
            return f"it reads and writes files or pipes, {beyond / 1e6:,.0f} MB a second"
    cores = rates.cores
    if cores is None or line.share < MOSTLY:
        return None
    inner = name_inner(line)
    used = f"using {format_fraction(cores, 0)} of a core"
    delayed = rates.delayed or 0.0
    if delayed >= IDLE_SHARE:
        used += f" and waiting for one {format_fraction(delayed, 0)} of the time"
    does = "computes" if cores + delayed >= IDLE_SHARE else "sleeps or waits"
    return f"it {does}{inner}, {used}"


def name_inner(line: ProfiledLine) -> str:
    """Return ` in FUNCTION` where a line is in a function that is not the program's; else nothing."""
    return "" if is_user_file(line.innermost.file) else f" in {line.innermost.function}"


def take_profiles(
    pids: Sequence[int], ended: Event, *, duration_s: float, rate: float
) -> list[tuple[Profile, WorkRates]]:
    """Sample processes side by side `rate` times a second; empty where one cannot be.

    A job that ends meanwhile sets `ended`: py-spy then writes what it has of the processes that are gone.
    """
    spy = find_py_spy()
    if spy is None or not all(pids):
        return []
    before = [read_work_counters(pid) for pid in pids]
    with tempfile.TemporaryDirectory(prefix="dtprof-stacks-") as folder:
        files = [Path(folder) / str(pid) for pid in pids]
        running = [
            _start(spy, pid, file, duration_s=duration_s, rate=rate) for pid, file in zip(pids, files, strict=True)
        ]
        try:
            waited_s = 0.0
            while any(process.poll() is None for process in running):
                if waited_s > TIMES_ALLOWED * duration_s:
                    return []
                if ended.wait(_POLL_S):
                    _wait_for(running)
                    break
                waited_s += _POLL_S
        finally:
            for process in running:
                process.kill()
                process.wait()
        if not all(file.exists() for file in files):
            return []
        after = [read_work_counters(pid) for pid in pids]
        profiles = [read_profile(file.read_text(errors="replace")) for file in files]
    rates = (WorkRates.between(*both, duration_s) for both in zip(before, after, strict=True))
    return list(zip(profiles, rates, strict=True))


def _wait_for(running: Sequence["subprocess.Popen[bytes]"]) -> None:
    end = time.monotonic() + WRITES_WITHIN_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))


def _start(spy: str, pid: int, file: Path, *, duration_s: float, rate: float) -> "subprocess.Popen[bytes]":
    command = [spy, "record", "--pid", str(pid), "--output", str(file), "--format", "raw", "--threads", "--idle"]
    command += ["--nonblocking", "--full-filenames", "--duration", f"{duration_s:.0f}", "--rate", f"{rate:.0f}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
