"""Every error that dtprof raises, one class per thing the caller can do about it.

Each class has a slug; docs/reference/messages.md explains every slug.
"""


class DtprofError(Exception):
    """Say what was found, what was expected, and what to do next."""

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
    """There is no space left where the run should lie; a job is not kept from running by that."""

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
    """The file is no Flight Recorder dump that dtprof can read, or dumps do not belong together."""

    slug = "not-a-dump"


class NotATraceError(DtprofError):
    """The files are no traces that dtprof can import, or do not belong together."""

    slug = "not-a-trace"


class MissingDependencyError(DtprofError):
    """An optional package is needed for what was asked."""

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
