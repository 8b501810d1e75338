"""Keep the metrics of a node up to date while its job runs: a thread of the launcher that follows the records."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dtprof import fence
from dtprof.exposition import render
from dtprof.metrics.families import choose_ranks, list_metrics
from dtprof.metrics.node import NodeState
from dtprof.metrics.tally import NodeTally
from dtprof.run_format.follow import RunFollower

PERIOD_S = 5.0
NICENESS = 10


class Collector:
    """Follows the ranks of this node; `text` is what is served, written anew each period."""

    def __init__(self, run: Path, *, boot_id: str | None, state: Callable[[], NodeState]) -> None:
        """Follow a run directory, of all hosts without a boot id; `state` gives what the launcher knows."""
        self._follower = RunFollower(run, boot_id=boot_id)
        self._tally = NodeTally()
        self._state = state
        self._shown: tuple[int, ...] = ()
        self._cpu_s = 0.0
        self.text = ""

    def collect(self) -> None:
        """Look once."""
        begin_s = time.thread_time()
        self._tally.take(self._follower.look())
        self._shown = choose_ranks(self._tally, self._shown)
        self.text = render(list_metrics(self._tally, self._state(), shown=self._shown, cpu_s=self._cpu_s))
        self._cpu_s += time.thread_time() - begin_s

    def close(self) -> None:
        """Close the files of the run."""
        self._follower.close()


class CollectorThread:
    """Lets a collector look each period, and gives its text to whoever keeps it, until it is stopped."""

    def __init__(self, collector: Collector, keep: Callable[[str], None], *, period_s: float = PERIOD_S) -> None:
        """Start at once."""
        self._collector = collector
        self._keep = keep
        self._period_s = period_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dtprof-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time and stop."""
        self._end.set()
        self._thread.join()

    @fence.fenced("the metrics", "are not kept up to date any longer")
    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while True:
                is_last = self._end.is_set()
                self._collector.collect()
                self._keep(self._collector.text)
                if is_last:
                    return
                self._end.wait(self._period_s)
        finally:
            self._collector.close()
