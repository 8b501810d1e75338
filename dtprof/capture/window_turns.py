"""Whose turn it is to take a profiler window, by the clock alone: ranks agree without a message.

The time since 1970 is cut into turns of equal length, and turn n belongs to rank n modulo the number of ranks. A rank
takes a window at the first step end of a turn of its own. Its windows are bounded by their share of time and of disk.
"""

from collections.abc import Sequence

from dtprof import settings

STEPS = 2
"""Steps in a window that is taken in turn."""
MOST_TIME = 0.01
"""Share of the job's time in which any of its ranks takes a window, beyond the first one of each."""


class WindowTurns:
    """The turns of one rank."""

    def __init__(self, *, every_ns: int, ranks: Sequence[int], rank: int) -> None:
        """Take turns with `ranks`, of which this is one, `every_ns` each."""
        self._every_ns = every_ns
        self._num_ranks, self._position = len(ranks), ranks.index(rank)
        self._turn: int | None = None
        self._first_ns: int | None = None
        self._spent_ns = self._largest_bytes = 0

    def is_due(self, realtime_ns: int) -> bool:
        """Say whether a turn of this rank has begun since this was last asked: once, however many turns have passed.

        The turn in which it is first asked does not count, nor do turns that the clock repeats after a jump back.
        """
        turn, before = realtime_ns // self._every_ns, self._turn
        self._turn = turn
        return before is not None and self._count_turns(turn) > self._count_turns(before)

    def _count_turns(self, turn: int) -> int:
        return (turn - self._position) // self._num_ranks

    def charge(self, begin_ns: int, ready_ns: int) -> None:
        """Count a window whose preparation delayed its rank from begin to ready."""
        self._first_ns = begin_ns if self._first_ns is None else self._first_ns
        self._spent_ns += max(0, ready_ns - begin_ns)

    def keep(self, size_bytes: int) -> None:
        """Count the file of a window, written or too large to be."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)

    def lacks_room(self, left_bytes: int) -> bool:
        """Say whether a window as large as the largest so far would find no room."""
        return left_bytes < self._largest_bytes

    def refusal(self, now_ns: int, left_bytes: int) -> str:
        """Return why this rank lets its turn pass, in the same words each time; empty where it does not."""
        spent_ns = self._spent_ns * self._num_ranks
        if self._first_ns is not None and spent_ns > MOST_TIME * (now_ns - self._first_ns):
            return f"all windows in turn may take {100 * MOST_TIME:g} % of the time; this rank's have taken more"
        if self.lacks_room(left_bytes):
            return f"what is left of the {settings.MAX_TRACE_MB.option} of this rank is less than one window has taken"
        return ""
