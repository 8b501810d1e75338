"""Measure the overhead of recording a command: bare and recorded runs of it in turn."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.analysis.comparison import overhead_pairs
from dtprof.analysis.results import Overhead
from dtprof.analysis.run_summary import summarise
from dtprof.errors import DtprofError
from dtprof.launch import job_launch, overhead_trials
from dtprof.session.engines import IN_THIS_PROCESS, open_run


@dataclass(frozen=True, kw_only=True)
class MeasuredOverhead:
    """The overhead of recording a command, and the machine."""

    pairs: overhead_pairs.OverheadResult
    self_reported: Overhead | None  # what the newest recorded run counted itself; None: nothing was recorded
    machine: Mapping[str, Any]


def measure_overhead(command: Sequence[str], *, num_pairs: int, step_clock: bool) -> MeasuredOverhead:
    """Run a command bare, recorded and bare again, `num_pairs` times; `step_clock` times steps of bare runs too.

    Raises:
        CommandNotFoundError: there is no such command.
        UsageError: a run of it failed.
    """
    job_launch.check_command(command[0])
    load = os.getloadavg()[0]  # before we add to it
    with overhead_trials.scratch_folder() as folder:
        timings = overhead_trials.run_trials(
            command, num_pairs=num_pairs, step_clock=step_clock, folder=folder, say=job_launch.say
        )
        newest = timings["recorded"][-1].run
        self_reported = _self_reported(newest) if newest is not None else None
    bare, recorded, control = ([_trial(timing) for timing in timings[arm]] for arm in overhead_trials.ARMS)
    return MeasuredOverhead(
        pairs=overhead_pairs.compare(bare, recorded, control),
        self_reported=self_reported,
        machine={"machine": f"{os.cpu_count()} cores, Python {platform.python_version()}", "load_before": load},
    )


def _trial(timing: overhead_trials.TimedRun) -> overhead_pairs.Trial:
    return overhead_pairs.trial_of(begin_ns=timing.begin_ns, end_ns=timing.end_ns, processes=timing.processes)


def _self_reported(path: Path) -> Overhead | None:
    try:
        run = open_run(path, IN_THIS_PROCESS)
        return summarise(run).overhead if run.ranks else None
    except DtprofError:
        return None
