"""Sample the stacks of a rank that is late again and again, beside one that is on time, while the job runs.

Lateness is seen in the records of this host's ranks: who comes last to operations that all have come to. Only where one
rank does so repeatedly, at a notable cost, are two processes sampled, a few times in a job. What the late rank does
more than the other one, outside of operations, is the line that makes it late.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import fence
from dtprof.formatting import format_fraction
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.launch.stack_sampler import find_py_spy
from dtprof.launch.work_counters import WorkCounters, read_work_counters
from dtprof.records import paths, writer
from dtprof.records.shared_follower import Subscription
from dtprof.records.user_files import is_user_file

if TYPE_CHECKING:
    from dtprof.analysis.stragglers.late_arrivals import LateArrivals, LateRank

EVERY_S = 2.0
SAMPLE_S, RATE = 2.0, 50
MOST_SAMPLINGS = 4
PAUSE_S = 60.0
"""Between two samplings."""
FEWEST_SAMPLES, MIN_EXCESS = 20, 0.1
"""Of a profile, and the share of the samples that the late rank has more of at the line."""
MOSTLY = 0.5
"""Share of its time from which on the processor's time of a process is that of a line."""
IDLE_SHARE = 0.25
"""Of a core: below, a process waits."""
FILES_BYTES_A_SECOND = 1 << 20
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_IN_OPERATION = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_LOADER = "/torch/utils/data/"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Samples of the main thread of one process."""

    samples: int
    lines: Mapping[tuple[str, int, str], Counter[tuple[str, str]]]
    """By line of the program: the file and function it is in there, the innermost or that of a data loader."""


def read_profile(text: str) -> Profile:
    """Read py-spy's `raw` format: one stack a line, outermost frame first, with its count."""
    lines: dict[tuple[str, int, str], Counter[tuple[str, str]]] = {}
    samples = 0
    for row in text.splitlines():
        stack, _, count = row.rpartition(" ")
        thread, *frames = stack.split(";")
        if not count.isdecimal() or not thread.endswith(": MainThread"):
            continue
        samples += int(count)
        parts = [(found[2], int(found[3]), found[1]) for frame in frames if (found := _FRAME.fullmatch(frame))]
        last = max((i for i, part in enumerate(parts) if is_user_file(part[0])), default=None)
        if last is not None and not any(file.endswith(_IN_OPERATION) for file, _, _ in parts):
            # A loader waits for its workers in the standard library, which tells nothing.
            called = parts[last:]
            file, _, function = next((part for part in called[1:] if _LOADER in part[0]), called[-1])
            lines.setdefault(parts[last], Counter())[file, function] += int(count)
    return Profile(samples=samples, lines=lines)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The line at which a late rank spends more of its time than one that is on time, and its activity there."""

    file: str
    line: int
    function: str
    share: float  # of its time, more than the other
    inner_file: str
    inner_function: str


def compare_profiles(late: Profile, on_time: Profile) -> Difference | None:
    """Return where the late rank spends its time; None where no line stands out."""
    if min(late.samples, on_time.samples) < FEWEST_SAMPLES:
        return None
    shares = {
        place: inner.total() / late.samples - on_time.lines.get(place, Counter()).total() / on_time.samples
        for place, inner in late.lines.items()
    }
    place = max(shares, key=shares.__getitem__, default=None)
    if place is None or shares[place] < MIN_EXCESS:
        return None
    (inner_file, inner_function), _ = late.lines[place].most_common(1)[0]
    file, line, function = place
    return Difference(
        file=file,
        line=line,
        function=function,
        share=round(shares[place], 3),
        inner_file=inner_file,
        inner_function=inner_function,
    )


@dataclass(frozen=True, kw_only=True)
class WorkRates:
    """Work of a process while it was sampled; None where the kernel does not tell."""

    cores: float | None = None
    bytes_per_s: float | None = None  # read and written: the messages of gloo, too

    @classmethod
    def between(cls, before: WorkCounters, after: WorkCounters) -> "WorkRates":
        """Return the rates between two readings, `SAMPLE_S` apart."""
        return cls(
            cores=None if before.cpu_s is None or after.cpu_s is None else (after.cpu_s - before.cpu_s) / SAMPLE_S,
            bytes_per_s=None
            if before.io_bytes is None or after.io_bytes is None
            else (after.io_bytes - before.io_bytes) / SAMPLE_S,
        )


def describe_work(difference: Difference, late: WorkRates, on_time: WorkRates) -> str:
    """Describe the activity of a late process at a line, as far as its counters tell.

    Both processes send the same messages: only what the late one reads and writes beyond the other is its own. The
    processor's time is that of the whole process: it tells of a line at which the process mostly is.
    """
    if _LOADER in difference.inner_file:
        return "it waits for its data loader"
    if late.bytes_per_s is not None and on_time.bytes_per_s is not None:
        beyond = late.bytes_per_s - on_time.bytes_per_s
        if beyond >= FILES_BYTES_A_SECOND:
            return f"it reads and writes files or pipes, {beyond / 1e6:,.0f} MB a second"
    inner = "" if is_user_file(difference.inner_file) else f" in {difference.inner_function}"
    share = late.cores
    if share is None or difference.share < MOSTLY:
        return f"what it does{inner} is not known"
    if share < IDLE_SHARE:
        return f"it sleeps or waits{inner}, using {format_fraction(share, 0)} of a core"
    return f"it computes{inner}, using {format_fraction(share, 0)} of a core"


class LateRanks:
    """Looks for late ranks until it is stopped, and samples them."""

    def __init__(self, records: Subscription, node_folder: Path) -> None:
        """Start at once."""
        self._records, self._folder = records, node_folder
        self._thread = LauncherThread(self._work, "late-ranks", niceness=NICENESS)
        self._thread.start()

    def stop(self) -> None:
        """Stop, in the middle of a sampling, too."""
        self._thread.stop()

    @fence.fenced("the sampling of late ranks", "has ended; the job goes on")
    def _work(self) -> None:
        try:
            self._look()
        finally:
            self._records.close()

    def _look(self) -> None:
        from dtprof.analysis.stragglers.late_arrivals import (
            LateArrivals,  # numpy, which the start of a job waits for not
        )

        arrivals = LateArrivals()
        samplings, newest_s = 0, -PAUSE_S
        while samplings < MOST_SAMPLINGS and not self._thread.ended.wait(EVERY_S):
            for growths, _ in self._records.take():
                arrivals.take(growth.tables for growth in growths.values())
            late = arrivals.find_late()
            if late is not None and time.monotonic() - newest_s >= PAUSE_S:
                self._sample(late, arrivals)
                samplings, newest_s = samplings + 1, time.monotonic()
                arrivals.forget()

    def _sample(self, lateness: "LateRank", arrivals: "LateArrivals") -> None:
        spy = find_py_spy()
        pids = [arrivals.pids.get(rank, 0) for rank in (lateness.late, lateness.on_time)]
        if spy is None or not all(pids):
            return
        before = [read_work_counters(pid) for pid in pids]
        with tempfile.TemporaryDirectory(prefix="dtprof-late-") as folder:
            files = [Path(folder) / str(pid) for pid in pids]
            running = [_start(spy, pid, file) for pid, file in zip(pids, files, strict=True)]
            try:
                deadline_s = time.monotonic() + 3 * SAMPLE_S
                while any(process.poll() is None for process in running):
                    if self._thread.ended.wait(0.05) or time.monotonic() > deadline_s:
                        return
            finally:
                for process in running:
                    process.kill()
                    process.wait()
            after = [read_work_counters(pid) for pid in pids]
            profiles = [read_profile(file.read_text(errors="replace")) if file.exists() else None for file in files]
        late, on_time = profiles
        found = compare_profiles(late, on_time) if late is not None and on_time is not None else None
        if late is None or found is None:
            return
        row = {
            "t_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
            "rank": lateness.late,
            "on_time": lateness.on_time,
            "samples": late.samples,
            "does": describe_work(found, *map(WorkRates.between, before, after)),
            **asdict(found),
        }
        writer.append_line(self._folder / paths.LATENESS, row)


def _start(spy: str, pid: int, file: Path) -> "subprocess.Popen[bytes]":
    command = [spy, "record", "--pid", str(pid), "--output", str(file), "--format", "raw", "--threads", "--idle"]
    command += ["--nonblocking", "--full-filenames", "--duration", f"{SAMPLE_S:g}", "--rate", str(RATE)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
