"""One follower for all that takes the records of a growing run in one process: they are read and decoded once.

Each taker comes when it likes, and gets what ranks have gained since it last came. The launcher makes one before its
job starts, so that this module loads no numpy.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtprof.records.run_follower import Growth, RunFollower

    Growths = Mapping[int, Growth]


class SharedFollower:
    """Follows the ranks of a run for several takers, which may be in several threads."""

    def __init__(self, run: Path, *, boot_id: str | None) -> None:
        """Follow a run directory, of all hosts without a boot id; nothing is read before the first taker comes."""
        self._run, self._boot_id = run, boot_id
        self._lock = threading.Lock()
        self._follower: RunFollower | None = None
        self._waiting: list[deque[Growths]] = []  # of each taker, what others have read since it last came

    def subscribe(self) -> "Subscription":
        """Return the growths for one taker, from now on."""
        waiting: deque[Growths] = deque()
        with self._lock:
            self._waiting.append(waiting)
        return Subscription(lambda: self._take(waiting), lambda: self._leave(waiting))

    def _take(self, waiting: "deque[Growths]") -> "tuple[Growths, bool]":
        """Return the next growths for a taker, and whether they are all that there is by now."""
        with self._lock:
            if waiting:
                return waiting.popleft(), False
            growths = self._opened().poll()
            for other in self._waiting:
                if other is not waiting:
                    other.append(growths)
            return growths, all(growth.is_whole for growth in growths.values())

    def _opened(self) -> "RunFollower":
        if self._follower is None:
            from dtprof.records.run_follower import RunFollower

            # A segment a poll: memory stays bounded, however much there is at the first one.
            self._follower = RunFollower(self._run, boot_id=self._boot_id, at_most=1)
        return self._follower

    def _leave(self, waiting: "deque[Growths]") -> None:
        """Keep nothing for a taker any more; the last one closes the files."""
        with self._lock:
            self._waiting = [other for other in self._waiting if other is not waiting]
            if not self._waiting and self._follower is not None:
                self._follower.close()
                self._follower = None


class Subscription:
    """One consumer's view of a shared follower."""

    def __init__(self, take: "Callable[[], tuple[Growths, bool]]", leave: Callable[[], None]) -> None:
        self._take, self._leave = take, leave

    def take(self) -> "Iterator[tuple[Growths, bool]]":
        """Give the new records of ranks since the last call, part by part, each with whether it is the last."""
        is_last = False
        while not is_last:
            growths, is_last = self._take()
            yield growths, is_last

    def close(self) -> None:
        """Unsubscribe: else the records that others read would be kept for ever."""
        self._leave()
