"""How a rank exited, from plain data: its parent's record first, else its own."""

import signal

from dtprof.records.tables import UNKNOWN_NS, ProcessExit

RUNNING = "running"
NO_EXIT_RECORD = "exited without an exit record"
"""Nobody saw how the process ended: killed together with `dtprof run`, or with the host."""
STOPPED = "killed by SIGTERM"
"""As launchers end those that are left once one has failed."""


def describe_end(
    *, exit_seen: ProcessExit | None, ended_ns: int, has_exception: bool, job_has_ended: bool | None
) -> str:
    """Return "finished", "exited 1", "killed by SIGKILL", "running" or "unknown".

    Args:
        exit_seen: the exit as the parent process learnt it.
        ended_ns: when the interpreter said that it ended in order; UNKNOWN_NS if it never did.
        has_exception: an exception left the program, which makes Python's status 1.
        job_has_ended: None where nothing says so.
    """
    if exit_seen is not None:
        if exit_seen.status < 0:
            return f"killed by {_signal_name(-exit_seen.status)}"
        return f"exited {exit_seen.status}" if exit_seen.status else "finished"
    if ended_ns != UNKNOWN_NS:
        return "exited 1" if has_exception else "finished"
    return RUNNING if job_has_ended is False else "unknown"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
