"""Every setting of dtprof in one table: option, environment variable, default, meaning.

Standard library only: read inside the user's job as well as by the command line.
"""

import os
from dataclasses import dataclass

from dtprof.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: where it is given and what it means."""

    option: str
    env: str
    default: str
    metavar: str
    help: str


OUTPUT = Setting(
    option="--output",
    env="DTPROF_OUTPUT",
    default="",
    metavar="DIR",
    help="run directory to create (default: dtprof-runs/DATE-TIME-NAME)",
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
    help="use the Python tap, which needs no compiler and costs about 30 us more per operation",
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
    help="worker processes on this host, 1 for none (default: all cores where the run is large enough for that to pay)",
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
RUN_SETTINGS = (
    *(OUTPUT, MAX_LOG_MB, HANG_AFTER, ON_HANG, NO_NATIVE, JOIN),
    *(METRICS_PORT, METRICS_ADDRESS, METRICS_FILE),
)

# Set by `dtprof run` for the processes of the job, not by users.
ENV_RUN_DIR = "DTPROF_RUN_DIR"
ENV_NATIVE_TAP = "DTPROF_NATIVE_TAP"
ENV_WATCHER_PID = "DTPROF_WATCHER_PID"
ENV_HOST = "DTPROF_HOST"  # by users: a name for this host where host names are not unique
ENV_LOCAL_DIR = "DTPROF_LOCAL_DIR"  # by users: where records of a run on a network file system lie meanwhile
ENV_STEP_CLOCK = "DTPROF_STEP_CLOCK"  # by `dtprof overhead`: folder for the times of steps
JOBS_FOLDER = "/tmp/dtprof-jobs-%d"  # of a user id: jobs that run, for processes whose environment was cleared
OF_A_JOB = (ENV_RUN_DIR, ENV_NATIVE_TAP, ENV_WATCHER_PID, ENV_STEP_CLOCK)


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


def from_environment(setting: Setting) -> str:
    """Return what the environment says for a setting, else its default."""
    return os.environ.get(setting.env, "") or setting.default
