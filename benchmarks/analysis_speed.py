"""How fast runs are read and summarised, in processor time, and how much memory that takes.

Generated runs (tests/synthetic) of ranks times events. Each figure is the median of fresh processes; wall times are
printed beside, but on a machine that does other work only processor time says something. `command` is `dtprof summary
RUN --json` as typed, with as many worker processes as it chooses, start included; memory is that of all its processes
together. BENCHMARK_SIZES names the sizes to measure, such as `8x152000,1024x20000`; BENCHMARK_REPEATS how often.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.pairs import run_alone, show, spread

SIZES = os.environ.get("BENCHMARK_SIZES", "8x152000,1024x20000,16384x500")
REPEATS = int(os.environ.get("BENCHMARK_REPEATS", "5"))
SAMPLED_EVERY_S = 0.1
LINE = (5_000, 10_000, 20_000, 40_000)
"""Events a rank of the runs through which the line is laid, 8 ranks each."""
_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
run = open_run(Path(sys.argv[1]))
begin, wall = time.process_time(), time.perf_counter()
if sys.argv[2] == "read":
    events = sum(run.load(rank).num_events for rank in run.ranks)
else:
    events = summarise(run).events
print(json.dumps([events, time.process_time() - begin, time.perf_counter() - wall,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


class Measured(NamedTuple):
    """One process: what it did and what that took."""

    events: int
    cpu_s: float
    wall_s: float
    peak_bytes: int


def measure(run: Path, what: str) -> Measured:
    """Read or summarise a run in a process of its own, after one that has the files in memory."""
    command = [sys.executable, "-c", _MEASURE, str(run), what]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600).stdout
    return Measured(*json.loads(output))


def measure_command(run: Path) -> Measured:
    """Run `dtprof summary` on a run; processor time is that of the command and the workers that it waited for."""
    before, wall = os.times(), time.perf_counter()
    with (run.parent / "summary.json").open("w+", encoding="utf-8") as output:
        process = psutil.Popen([sys.executable, "-m", "dtprof", "summary", str(run), "--json"], stdout=output)
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _resident_bytes(process))
            time.sleep(SAMPLED_EVERY_S)
        wall_s, after = time.perf_counter() - wall, os.times()
        output.seek(0)
        events = json.load(output)["events"]
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(events, cpu_s, wall_s, peak_bytes)


def _resident_bytes(process: psutil.Process) -> int:
    """Return the memory of a process and all it started; pages that they share count once for each."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += one.memory_info().rss
    return total


def generate(folder: Path, ranks: int, events: int) -> Path:
    """Write a run: with tensor and pipeline parallelism where there are ranks enough."""
    tp, pp = (8, 4) if ranks >= 1024 else (2, 2)
    run = folder / f"{ranks}x{events}"
    layout = ["--ranks", str(ranks), "--tp", str(tp), "--pp", str(pp), "--slow", "3"]
    command = [sys.executable, "-m", "tests.synthetic", *layout, "--events", str(events), str(run)]
    subprocess.run(command, check=True, capture_output=True, timeout=3600)
    return run


def report(name: str, found: list[Measured]) -> None:
    """Print what several processes took."""
    events = found[0].events
    speed = spread([one.events / one.cpu_s / 1e6 for one in found])
    print(f"{name}: {events:,} events, {len(found)} processes")
    show(name, "processor time [s]", [one.cpu_s for one in found])
    show(name, "wall time [s]", [one.wall_s for one in found])
    print(f"  million events a core second {speed}")
    show(name, "peak memory [MB]", [one.peak_bytes / 1e6 for one in found], 0)


def fit(folder: Path) -> None:
    """Lay a line through the processor time of runs of growing length and print how far they lie from it."""
    events, seconds = [], []
    for size in LINE:
        run = generate(folder, 8, size)
        found = sorted((measure(run, "summary") for _ in range(REPEATS)), key=lambda one: one.cpu_s)
        events.append(found[0].events)
        seconds.append(found[len(found) // 2].cpu_s)
    slope, start = np.polyfit(events, seconds, 1)
    off = max(abs(start + slope * n - s) / s for n, s in zip(events, seconds, strict=True))
    print(f"summary of 8 ranks with {LINE} events each: {', '.join(f'{s:.2f}' for s in seconds)} s of processor time")
    print(f"  line: {start:.2f} s and {slope * 1e6:.2f} us an event; off by {off:.0%} at most")


def main() -> None:
    """Measure every size, then the line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in filter(None, SIZES.split(",")):
            ranks, events = map(int, size.split("x"))
            run = generate(folder, ranks, events)
            for what in ("read", "summary"):
                report(f"{what}, {ranks:,} ranks of {events:,} events", [measure(run, what) for _ in range(REPEATS)])
            report(f"command, {ranks:,} ranks of {events:,} events", [measure_command(run) for _ in range(REPEATS)])
        fit(folder)


if __name__ == "__main__":
    run_alone(main, __doc__)
