"""Every setting of dtprof in one table: option, environment variable, default, meaning.

Standard library only: read inside the user's job as well as by the command line.
"""

import os
import re
from dataclasses import dataclass

from dtprof.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its option, environment variable and meaning."""

    option: str
    env: str
    default: str
    metavar: str
    help: str


RUNS = "dtprof-runs"
"""Folder of runs, in the working directory, where no other is named."""
OUTPUT = Setting(
    option="--output",
    env="DTPROF_OUTPUT",
    default="",
    metavar="DIR",
    help=f"run directory to create (default: {RUNS}/DATE-TIME-NAME)",
)
MAX_LOG_MB = Setting(
    option="--max-log-mb",
    env="DTPROF_MAX_LOG_MB",
    default="256",
    metavar="N",
    help="disk space for the records of one rank, in MiB; the first quarter and the newest are kept",
)
HANG_AFTER = Setting(
    option="--hang-after",
    env="DTPROF_HANG_AFTER",
    default="60",
    metavar="S",
    help="seconds without progress on any rank before the job is diagnosed; 0 never",
)
ON_HANG = Setting(
    option="--on-hang",
    env="DTPROF_ON_HANG",
    default="report",
    metavar="report|stop",
    help="what to do then: print the verdict and go on, or stop the job with exit status 3",
)
NO_NATIVE = Setting(
    option="--no-native",
    env="DTPROF_NO_NATIVE",
    default="",
    metavar="",
    help="use the Python hook, which needs no compiler and costs 15 to 30 us more per operation",
)
JOIN = Setting(
    option="--join",
    env="DTPROF_JOIN",
    default="",
    metavar="",
    help="join the run in the output directory that another host's dtprof run of this job has created, or create it",
)
ENGINE = Setting(
    option="--engine",
    env="DTPROF_ENGINE",
    default="local",
    metavar="local|dask",
    help="where the analysis runs: in processes of this host, or on Dask workers (default: local)",
)
SCHEDULER = Setting(
    option="--scheduler",
    env="DTPROF_SCHEDULER",
    default="",
    metavar="ADDRESS",
    help="with --engine dask: address or file of a running scheduler (default: a cluster made on this host)",
)
JOBS = Setting(
    option="--jobs",
    env="DTPROF_JOBS",
    default="",
    metavar="N",
    help="worker processes on this host, 1 for none (default: all cores for large runs, else 1)",
)
ANALYSIS_SETTINGS = (ENGINE, SCHEDULER, JOBS)
METRICS_PORT = Setting(
    option="--metrics-port",
    env="DTPROF_METRICS_PORT",
    default="",
    metavar="PORT",
    help="serve metrics of this node for Prometheus at /metrics on this port, 0 any that is free",
)
METRICS_ADDRESS = Setting(
    option="--metrics-address",
    env="DTPROF_METRICS_ADDRESS",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="address to serve them on (default: 127.0.0.1; 0.0.0.0 lets other hosts read them)",
)
METRICS_FILE = Setting(
    option="--metrics-file",
    env="DTPROF_METRICS_FILE",
    default="",
    metavar="FILE",
    help="keep the same metrics in a file while the job runs, for the textfile collector of Prometheus' node exporter",
)
TRACE_STEPS = Setting(
    option="--trace-steps",
    env="DTPROF_TRACE_STEPS",
    default="",
    metavar="A:B",
    help="take a window of torch.profiler over these steps, both included, on the ranks chosen",
)
TRACE_EVERY = Setting(
    option="--trace-every",
    env="DTPROF_TRACE_EVERY",
    default="",
    metavar="TIME",
    help="take a window of 2 steps each TIME, such as 10m, on the ranks chosen in turn",
)
TRACE_RANKS = Setting(
    option="--trace-ranks",
    env="DTPROF_TRACE_RANKS",
    default="",
    metavar="LIST",
    help="ranks that take it, such as 0,5 or 0-3,8 (default: all)",
)
MAX_TRACE_MB = Setting(
    option="--max-trace-mb",
    env="DTPROF_MAX_TRACE_MB",
    default="64",
    metavar="N",
    help="disk space for the windows and memory snapshots of one rank, in MiB; what takes more is not kept",
)
CHECK = Setting(
    option="--check",
    env="DTPROF_CHECK",
    default="",
    metavar="handles",
    help="look at every operator of torch for tensors of asynchronous operations that are used before their wait",
)
COLLECT = Setting(
    option="--collect",
    env="DTPROF_COLLECT",
    default="",
    metavar="TARGET",
    help="send the run while it is recorded to the dtprof collect at HOST:PORT, or to a URL such as s3://BUCKET/runs",
)
RUN_SETTINGS = (
    *(OUTPUT, MAX_LOG_MB, HANG_AFTER, ON_HANG, NO_NATIVE, JOIN),
    *(METRICS_PORT, METRICS_ADDRESS, METRICS_FILE),
    *(TRACE_STEPS, TRACE_EVERY, TRACE_RANKS, MAX_TRACE_MB),
    *(CHECK, COLLECT),
)
FIRST_TRACED_STEP = 2
"""The begin of the first step is not recorded."""
MOST_TRACED_STEPS = 100
LEAST_TRACE_EVERY_S, MOST_TRACE_EVERY_S = 1, 7 * 86400
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
MOST_RANKS = 1 << 20

# Set by `dtprof run` for the processes of the job, not by users.
ENV_RUN_DIR = "DTPROF_RUN_DIR"
ENV_NATIVE_HOOK = "DTPROF_NATIVE_TAP"
ENV_WATCHER_PID = "DTPROF_WATCHER_PID"
ENV_HOST = "DTPROF_HOST"  # by users: a name for this host where host names are not unique
ENV_COLLECT_TOKEN = "DTPROF_COLLECT_TOKEN"  # by users: the token of the collector
ENV_COLLECT_TOKEN_FILE = "DTPROF_COLLECT_TOKEN_FILE"  # by users: a file that holds it, which others cannot read
ENV_COLLECT_CA = "DTPROF_COLLECT_CA"  # by users: the certificate that its TLS is checked against
ENV_ALWAYS = "DTPROF_ALWAYS"  # by images: the store of the runs of every torch job; by what is injected
ENV_OFF = "DTPROF_OFF"  # by users: dtprof is off (also in dtprof_start.py, which imports nothing)
ENV_LOCAL_DIR = "DTPROF_LOCAL_DIR"  # by users: where records of a run on a network file system lie meanwhile
ENV_STEP_CLOCK = "DTPROF_STEP_CLOCK"  # by `dtprof overhead`: folder for the times of steps
ENV_RANK_ABOVE = "DTPROF_RANK_ABOVE"  # by a rank of several: its pid and its run, for the processes that it starts
ENV_PROBE_DIR = "DTPROF_PROBE_DIR"  # by `dtprof doctor`: folder for what the ranks find out, instead of the program
ENV_PROBE_SECONDS = "DTPROF_PROBE_SECONDS"  # how long a rank may take for that
ENV_PROBE_PORT = "DTPROF_PROBE_PORT"  # a free port of this host, for launchers that name none
JOBS_FOLDER = "/tmp/dtprof-jobs-%d"  # of a user id: jobs that run, for processes whose environment was cleared
OF_A_JOB = (ENV_RUN_DIR, ENV_NATIVE_HOOK, ENV_WATCHER_PID, ENV_STEP_CLOCK, ENV_RANK_ABOVE, ENV_PROBE_DIR)


def parse_number(text: str, *, setting: Setting, minimum: float) -> float:
    """Return the number given for a setting.

    Raises:
        UsageError: it is not a number, or below the minimum.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= minimum or value == float("inf"):
        raise UsageError(
            f"{setting.option} (or {setting.env}) is {text!r}; expected a number of at least {minimum:g}, "
            f"for example {setting.option} {setting.default}"
        )
    return value


def parse_check(text: str) -> str:
    """Return the check asked for, empty for none.

    Raises:
        UsageError: there is no such check.
    """
    if text not in ("", CHECK.metavar):
        raise UsageError(
            f"{CHECK.option} (or {CHECK.env}) is {text!r}; expected {CHECK.metavar}, the only check there is: "
            f"{CHECK.option} {CHECK.metavar}"
        )
    return text


def parse_traced_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of A:B, or of a single number.

    Raises:
        UsageError: it is neither, begins before the second step, or is too long.
    """
    option = TRACE_STEPS.option
    given = f"{option} (or {TRACE_STEPS.env}) is {text!r}"
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text.strip(), re.ASCII)
    if found is None:
        raise UsageError(f"{given}; expected A:B, first and last step, for example {option} 10:13")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise UsageError(f"{given}, which ends before it begins; expected for example {option} {last}:{first}")
    if first < FIRST_TRACED_STEP:
        raise UsageError(
            f"{given}; the begin of the first step is not seen, so expected step {FIRST_TRACED_STEP} or later, "
            f"for example {option} {FIRST_TRACED_STEP}:{max(last, FIRST_TRACED_STEP)}"
        )
    if last - first >= MOST_TRACED_STEPS:
        raise UsageError(
            f"{given}; a window is held in the memory of the job while it lasts, so expected at most "
            f"{MOST_TRACED_STEPS} steps, for example {option} {first}:{first + 3}"
        )
    return first, last


def parse_trace_every(text: str) -> float:
    """Return the seconds of a time such as 90, 90s, 10m or 1.5h.

    Raises:
        UsageError: it is no such time, or not between a second and a week.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)", text.strip(), re.ASCII)
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not LEAST_TRACE_EVERY_S <= seconds <= MOST_TRACE_EVERY_S:
        raise UsageError(
            f"{TRACE_EVERY.option} (or {TRACE_EVERY.env}) is {text!r}; expected a time from 1s to 168h, for example "
            f"{TRACE_EVERY.option} 10m"
        )
    return seconds


def parse_traced_ranks(text: str, *, setting: Setting = TRACE_RANKS) -> list[tuple[int, int]]:
    """Return the ranges of ranks in a list such as 0-3,8, first and last each; none for an empty text: all ranks.

    Raises:
        UsageError: it is no such list.
    """
    ranges = []
    for part in text.split(",") if text.strip() else ():
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip(), re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last >= MOST_RANKS:
            raise UsageError(
                f"{setting.option} (or {setting.env}) is {text!r}; expected ranks such as {setting.option} 0,5 or "
                f"{setting.option} 0-3,8"
            )
        ranges.append((first, last))
    return ranges


def is_switched_on(variable: str) -> bool:
    """Say whether an environment variable is set to anything but `0`."""
    return os.environ.get(variable, "") not in ("", "0")


def from_environment(setting: Setting) -> str:
    """Return the value of a setting in the environment, else its default."""
    return os.environ.get(setting.env, "") or setting.default
