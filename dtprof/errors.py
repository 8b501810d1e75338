"""Every error that dtprof raises, one class per thing the caller can do about it.

Each class has a slug; docs/reference/messages.md explains every slug.
"""


class DtprofError(Exception):
    """Base of all errors: the message names the value found, the value expected, and the next step."""

    slug = "error"
    exit_status = 2


class UsageError(DtprofError):
    """The command line or a setting cannot be used as given."""

    slug = "usage"


class CommandNotFoundError(UsageError):
    """The command after `--` does not exist or cannot be executed."""

    slug = "command-not-found"
    exit_status = 127


class OutputError(DtprofError):
    """The place to write to is taken, not writable, or full."""

    slug = "output"


class DiskFullError(OutputError):
    """There is no space left for the run; the job runs all the same."""

    slug = "disk-full"


class JobFailedError(DtprofError):
    """A command that has to succeed for the answer has failed."""

    slug = "job-failed"


class NotARunError(DtprofError):
    """The path does not hold a run that dtprof can read."""

    slug = "not-a-run"


class NewerFormatError(NotARunError):
    """The run was written by a newer dtprof."""

    slug = "newer-format"


class NotADumpError(DtprofError):
    """The file is no Flight Recorder dump that dtprof can read, or the dumps are not of one job."""

    slug = "not-a-dump"


class NotATraceError(DtprofError):
    """The files are no traces that dtprof can import, or not of one job."""

    slug = "not-a-trace"


class MissingDependencyError(DtprofError):
    """The request needs an optional package."""

    slug = "missing-dependency"


class NothingToShowError(DtprofError):
    """The run holds nothing that the figure could show."""

    slug = "nothing-to-show"


class WorkerLostError(DtprofError):
    """A process that did part of the analysis ended before it was done."""

    slug = "worker-lost"


class SchedulerError(DtprofError):
    """The Dask scheduler or its workers cannot be used."""

    slug = "scheduler"
