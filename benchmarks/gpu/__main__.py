"""Run a part of `make gpu`, or all: `python -m benchmarks.gpu PART --into FOLDER`; .ci/gpu sets up what it needs.

Each measurement is a process of its own, with a time limit: one that fails, hangs or crashes is reported, and the
others still run. They run in the order of their worth, so that `--seconds` cuts off what is least missed.
`--rehearse` tries all of it on the CPU with gloo, where the figures say nothing of a GPU.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.gpu.figures import FigureFile, read_figure, show_value
from benchmarks.gpu.placement import KEPT, REHEARSED, end_tree, patience

PART_S = 570.0
"""A part ends within this, set-up included; what has not begun by then is reported as not measured."""
LAST_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A module of this package to run, and how long it may take; a piecewise one keeps most figures when cut off."""

    module: str
    most_s: float
    piecewise: bool = False


BUILD = (Measurement(module="machine", most_s=60), Measurement(module="hook_builds", most_s=400))
"""What every part begins with."""
TESTS = Measurement(module="device_tests", most_s=540, piecewise=True)
ACCURACY = (
    Measurement(module="kernel_durations", most_s=90),
    Measurement(module="exposed_time", most_s=90),
    Measurement(module="step_on_device", most_s=240),
)
COSTS = (
    Measurement(module="equal_losses", most_s=180),
    Measurement(module="launch_on_device", most_s=120),
    Measurement(module="concurrent_kernels", most_s=90),
)
PRESETS = Measurement(module="trained_presets", most_s=500, piecewise=True)
LAYOUTS = Measurement(module="trained_layouts", most_s=500, piecewise=True)
PARTS = {
    "build": BUILD,
    "tests": (*BUILD, TESTS),
    "bench": (*BUILD, *ACCURACY, *COSTS),
    "trainer": (*BUILD, PRESETS),
    "layouts": (*BUILD, LAYOUTS),
    "all": (*BUILD, *ACCURACY, TESTS, *COSTS, LAYOUTS, PRESETS),
}
LIMITS_S = {"all": 4 * PART_S}


def main(arguments: Sequence[str]) -> int:
    """Run parts; return 0 where everything was measured and every test passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--into", type=Path, default=Path("gpu-figures"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, metavar="S", help="end within this, set-up included (a part: 570)")
    parser.add_argument("--spent", type=float, default=0.0, metavar="S", help="seconds that setting up has taken")
    parser.add_argument("--only", default="", metavar="NAME,...", help="of the part, these measurements alone")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with gloo: tries the scripts")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what is recorded there")
    given = parser.parse_args(arguments)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
        os.environ[KEPT] = str(given.keep.resolve())
    os.environ[REHEARSED] = "1" if given.rehearse else ""
    limit_s = given.seconds or patience(LIMITS_S.get(given.part, PART_S))
    deadline_s = time.monotonic() + limit_s - given.spent
    known = [one.module for one in PARTS[given.part]]
    only = given.only.split(",") if given.only else known
    if unknown := [name for name in only if name not in known]:
        parser.error(f"part {given.part} has no {', '.join(unknown)}; it has {', '.join(dict.fromkeys(known))}")
    chosen = [one for one in PARTS[given.part] if one.module in only]
    file = FigureFile(given.into, given.part)
    with (given.into / "gpu.log").open("a", encoding="utf-8") as log:
        for position, measurement in enumerate(chosen):
            left_s = time_for(measurement, deadline_s - time.monotonic(), last=position == len(chosen) - 1)
            run_measurement(measurement, file, log, limit_s=left_s)
    for measured, reason in file.failures:
        print(f"not measured: {measured}: {reason}", file=sys.stderr)
    print(f"==> figures of PART={given.part}: {given.into / given.part}.md and .json", flush=True)
    return 1 if file.failures else 0


def time_for(measurement: Measurement, left_s: float, *, last: bool) -> float:
    """Return how long a measurement may take; a piecewise one leaves half of the time to those that follow it."""
    share = 0.5 if measurement.piecewise and not last else 1.0
    return min(patience(measurement.most_s), share * left_s)


def run_measurement(measurement: Measurement, file: FigureFile, log: TextIO, *, limit_s: float) -> None:
    """Run one measurement, keep its figures as they come, and report why it ended early."""
    name = measurement.module
    if limit_s < 1:
        file.fail(name, f"the time was used up before it began; alone: make gpu ONLY={name}")
        return
    print(f"==> {name} (at most {limit_s:.0f} s)", flush=True)
    log.write(f"==> {name}\n")
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.gpu.{name}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        end_tree(process)

    timer = threading.Timer(limit_s, end)
    timer.start()
    newest: list[str] = []
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if (figure := read_figure(line)) is not None:
                file.add(name, figure)
                missed = "  (goal missed)" if figure.met is False else ""
                print(f"    {figure.name}: {show_value(figure)}{missed}", flush=True)
            else:
                log.write(line)
                log.flush()
                newest = [*newest[1 - LAST_LINES :], line]
    status = process.wait()
    timer.cancel()
    took_s = time.monotonic() - began_s
    if timed_out.is_set():
        file.fail(name, f"no end within {limit_s:.0f} s; its last lines: {' '.join(newest)[-1500:]}")
    elif status:
        file.fail(name, f"exit status {status} after {took_s:.0f} s; its last lines: {' '.join(newest)[-1500:]}")
    log.write(f"    {name} took {took_s:.1f} s\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
