"""Run a command many times, bare and recorded in turn, and time each run from outside, for `dtprof overhead`."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtprof import settings
from dtprof.errors import JobFailedError, OutputError
from dtprof.launch import interpreter
from dtprof.records import step_times_file

ARMS = ("bare", "recorded", "control")
ORDERS = tuple(itertools.permutations(ARMS))
"""Each pair runs its three arms in another order, so that a drift of the machine affects all alike."""
STOP_GRACE_S = 10.0
SHOWN_LINES = 5


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One run of the command, timed from outside."""

    arm: str
    begin_ns: int
    end_ns: int
    processes: tuple[step_times_file.StepTimes, ...]
    run: Path | None  # of the recorded arm


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder on the disk where runs lie by default, and remove it."""
    parent = Path(settings.from_environment(settings.OUTPUT) or settings.RUNS).absolute()
    parent = parent if parent.is_dir() else parent.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".dtprof-overhead-", dir=parent))
    except OSError as error:
        raise OutputError(f"{parent} cannot be written to ({error.strerror}); run in a folder that can") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_trials(
    command: Sequence[str], *, num_pairs: int, step_clock: bool, folder: Path, say: Callable[[str], None]
) -> dict[str, list[TimedRun]]:
    """Run every arm once uncounted, then all arms in turn for each pair; return the counted runs by arm.

    Raises:
        JobFailedError: a run ended with a status other than 0.
        CommandNotFoundError: the command cannot be started.
    """
    numbers = itertools.count()

    def measure(arm: str) -> TimedRun:
        place = folder / f"{next(numbers)}-{arm}"
        place.mkdir()
        return _run(command, arm, place, step_clock=step_clock)

    longest_ns = 0
    for arm in ("bare", "recorded"):
        uncounted = measure(arm)
        longest_ns = max(longest_ns, uncounted.end_ns - uncounted.begin_ns)
        _delete_run(uncounted)
    say(f"one run takes {longest_ns / 1e9:.1f} s; {len(ARMS) * num_pairs} follow ...")
    timings: dict[str, list[TimedRun]] = {arm: [] for arm in ARMS}
    for pair in range(num_pairs):
        for arm in ORDERS[pair % len(ORDERS)]:
            if timings[arm]:
                _delete_run(timings[arm][-1])
            timings[arm].append(measure(arm))
        say(f"pair {pair + 1} of {num_pairs} measured")
    return timings


def _delete_run(timing: TimedRun) -> None:
    """Free the disk space of a run; only the newest run stays, for inspection."""
    if timing.run is not None:
        shutil.rmtree(timing.run, ignore_errors=True)


def _run(command: Sequence[str], arm: str, place: Path, *, step_clock: bool) -> TimedRun:
    environment = {name: value for name, value in os.environ.items() if name not in settings.OF_A_JOB}
    run = place / "run" if arm == "recorded" else None
    line = list(command)
    if run is not None:
        line = [sys.executable, "-m", "dtprof", "run", "-o", str(run), "--", *command]
    if step_clock:
        environment[settings.ENV_STEP_CLOCK] = str(place)
        if run is None:
            environment["PYTHONPATH"] = interpreter.injected_path(environment.get("PYTHONPATH", ""))
    output = place / "output"
    with output.open("wb") as file:
        begin_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        process = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            status = process.wait()
        except BaseException:
            _stop(process)
            raise
        end_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    if status != 0:
        raise JobFailedError(_failure(arm, status, output))
    processes = tuple(step_times_file.read_folder(place))
    return TimedRun(arm=arm, begin_ns=begin_ns, end_ns=end_ns, processes=processes, run=run)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a run that the user interrupted."""
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(arm: str, status: int, output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = " | ".join(line.strip() for line in lines[-SHOWN_LINES:]) or "nothing"
    end = f"status {status}" if status > 0 else f"signal {-status}"
    how = "recorded" if arm == "recorded" else "bare"
    return f"the command ended with {end} when run {how}; expected 0 each time it is run. It printed last: {tail}"
