"""A thread of the launcher: it works beside the job, at a lower priority where that is wanted, until it is stopped."""

import contextlib
import os
import threading
from collections.abc import Callable

NICENESS = 10
"""Of threads that compute: the job comes first."""


class LauncherThread(threading.Thread):
    """A thread that works until `ended` is set; it waits for that between two rounds."""

    def __init__(self, work: Callable[[], object], name: str, *, niceness: int = 0) -> None:
        """Prepare the thread."""
        super().__init__(name=f"dtprof-{name}", daemon=True)
        self.ended = threading.Event()
        self._work, self._niceness = work, niceness

    def run(self) -> None:
        """Work."""
        if self._niceness:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        self._work()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the work, where it began, and wait for that."""
        self.ended.set()
        if self.is_alive():
            self.join(timeout_s)
