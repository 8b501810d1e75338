"""Keep the metrics of a node up to date from the records of its ranks, poll by poll."""

import time
from collections.abc import Callable

from dtprof.interchange.metric_families import exposition
from dtprof.monitor.prometheus.job_metrics import choose_ranks, list_metrics
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.prometheus.node_tally import NodeTally
from dtprof.records.shared_follower import Subscription


class Collector:
    """Follows the ranks of this node."""

    def __init__(self, records: Subscription, *, state: Callable[[], NodeState]) -> None:
        """Read the records of the ranks of this node; `state` gives the launcher's own facts."""
        self._records = records
        self._tally = NodeTally()
        self._state = state
        self._shown: tuple[int, ...] = ()
        self._cpu_s = 0.0

    def collect(self) -> bytes:
        """Read new records; return all metrics as they are now."""
        begin_s = time.thread_time()
        for growths, _ in self._records.take():
            self._tally.take(growths)
        self._shown = choose_ranks(self._tally, self._shown)
        text = exposition(list_metrics(self._tally, self._state(), shown=self._shown, cpu_s=self._cpu_s))
        self._cpu_s += time.thread_time() - begin_s
        return text

    def close(self) -> None:
        """Take no more records."""
        self._records.close()
