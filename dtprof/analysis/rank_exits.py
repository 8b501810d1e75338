"""How a rank exited, from plain data: its parent's record first, else its own."""

import signal
from enum import Enum
from typing import Any

from dtprof.records.tables import UNKNOWN_NS, ProcessExit


class EndState(Enum):
    """The ways in which a rank can have ended, as JSON and tables name them."""

    FINISHED = "finished"
    EXITED = "exited {}"
    KILLED = "killed by {}"
    RUNNING = "running"
    NO_RECORD = "exited without an exit record"  # killed together with `dtprof run`, or with the host
    UNKNOWN = "unknown"

    @property
    def example(self) -> str:
        """The words of pages that list the states."""
        return self.value.format("SIGNAL" if self == EndState.KILLED else "N")


class RankEnd(str):
    """How a rank ended, or that it runs: the words of JSON and tables, and what they say."""

    state: EndState
    code: int  # the status that it exited with, or the number of the signal that killed it

    def __new__(cls, state: EndState, code: int = 0) -> "RankEnd":
        """Return the words."""
        end = super().__new__(cls, state.value.format(_signal_name(code) if state == EndState.KILLED else code))
        end.state, end.code = state, code
        return end

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the parts where it is sent to another process."""
        return RankEnd, (self.state, self.code)

    @property
    def words(self) -> str:
        """The words for people."""
        return str(RankEnd(EndState.NO_RECORD) if self.state == EndState.UNKNOWN else self)

    def clause(self, num_ranks: int = 1) -> str:
        """Say what ranks did, as in "rank 1 was killed by SIGKILL"."""
        was = "was" if num_ranks == 1 else "were"
        return f"{was} {self}" if self.state == EndState.KILLED else self.words

    @property
    def is_running(self) -> bool:
        """Say whether it has not ended, as far as anything tells."""
        return self.state == EndState.RUNNING

    @property
    def failed(self) -> bool:
        """Say whether it is known to have ended in another way than by finishing."""
        return self.state in (EndState.EXITED, EndState.KILLED, EndState.NO_RECORD)

    @property
    def was_stopped(self) -> bool:
        """Say whether SIGTERM ended it, by which launchers end those that are left once one has failed."""
        return self == RankEnd(EndState.KILLED, signal.SIGTERM)


def find_end(
    *, exit_seen: ProcessExit | None, ended_ns: int, has_exception: bool, job_has_ended: bool | None
) -> RankEnd:
    """Return how a rank ended.

    Parameters:
        exit_seen: the exit as the parent process learnt it.
        ended_ns: when the interpreter said that it ended in order; UNKNOWN_NS if it never did.
        has_exception: an exception left the program, which makes Python's status 1.
        job_has_ended: None where nothing says so.
    """
    if exit_seen is not None and exit_seen.status < 0:
        return RankEnd(EndState.KILLED, -exit_seen.status)
    if exit_seen is not None or ended_ns != UNKNOWN_NS:
        status = exit_seen.status if exit_seen is not None else int(has_exception)
        return RankEnd(EndState.EXITED, status) if status else RankEnd(EndState.FINISHED)
    return RankEnd(EndState.RUNNING if job_has_ended is False else EndState.UNKNOWN)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
