"""Keep the metrics of a node up to date from the records of its ranks, look by look."""

import time
from collections.abc import Callable
from pathlib import Path

from dtprof.interchange.metric_families import exposition
from dtprof.monitor.prometheus.job_metrics import choose_ranks, list_metrics
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.prometheus.node_tally import NodeTally
from dtprof.records.run_follower import RunFollower


class Collector:
    """Follows the ranks of this node."""

    def __init__(self, run: Path, *, boot_id: str | None, state: Callable[[], NodeState]) -> None:
        """Follow a run directory, of all hosts without a boot id; `state` gives what the launcher knows."""
        self._follower = RunFollower(run, boot_id=boot_id)
        self._tally = NodeTally()
        self._state = state
        self._shown: tuple[int, ...] = ()
        self._cpu_s = 0.0

    def collect(self) -> bytes:
        """Look once; return all metrics as they are now."""
        begin_s = time.thread_time()
        self._tally.take(self._follower.look())
        self._shown = choose_ranks(self._tally, self._shown)
        text = exposition(list_metrics(self._tally, self._state(), shown=self._shown, cpu_s=self._cpu_s))
        self._cpu_s += time.thread_time() - begin_s
        return text

    def close(self) -> None:
        """Close the files of the run."""
        self._follower.close()
