"""Tell the metrics of this node while a job runs: over HTTP, in a file, or both; in threads of the launcher."""

import errno
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import fence, settings
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.records.shared_follower import SharedFollower, Subscription

if TYPE_CHECKING:
    from dtprof.monitor.prometheus.metrics_server import MetricsServer
    from dtprof.monitor.prometheus.metrics_textfile import MetricsFile
    from dtprof.monitor.prometheus.node_state import NodeState

PERIOD_S = 15.0
EARLY_PERIOD_S, EARLY_LOOKS = 1.0, 30
"""Polling interval at the beginning: ranks appear soon after they start."""


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where the metrics of this node are served or written."""

    port: int | None = None  # 0: any that is free
    address: str = settings.METRICS_ADDRESS.default
    file: Path | None = None


NO_METRICS = MetricsSettings()


class Metrics:
    """Follows the ranks of this node and publishes new metrics each period, until it is stopped."""

    def __init__(
        self,
        records: Subscription,
        state: "Callable[[], NodeState]",
        *,
        server: "MetricsServer | None",
        file: "MetricsFile | None",
    ) -> None:
        """Start at once where there is anybody to tell."""
        self._records, self._state = records, state
        self._server, self._file = server, file
        self._thread = LauncherThread(self._work, "metrics", niceness=NICENESS)
        if server is not None or file is not None:
            self._thread.start()
        else:
            records.close()

    @classmethod
    def start(
        cls,
        chosen: MetricsSettings,
        follower: SharedFollower,
        state: "Callable[[], NodeState]",
        *,
        say: Callable[[str], None],
    ) -> "Metrics":
        """Start the requested exposition; where it cannot start, print the reason, and let the job go on without it."""
        return cls(follower.subscribe(), state, server=_serve(chosen, say), file=_keep(chosen, say))

    def stop(self) -> None:
        """Tell the last state, then nothing more."""
        self._thread.stop()

    @fence.fenced("the metrics", "are no longer served")
    def _work(self) -> None:
        ended = self._thread.ended
        try:
            from dtprof.monitor.prometheus.metrics_collector import Collector  # numpy: not before the job was started

            collector = Collector(self._records, state=self._state)
            for number in itertools.count():
                is_last = ended.is_set()
                text = collector.collect()
                if self._server is not None:
                    self._server.show(text)
                if self._file is not None:
                    self._file.show(text)
                if is_last:
                    return
                ended.wait(EARLY_PERIOD_S if number < EARLY_LOOKS else PERIOD_S)
        finally:
            self._records.close()
            if self._server is not None:
                self._server.stop()
            if self._file is not None:
                self._file.remove()


def _serve(chosen: MetricsSettings, say: Callable[[str], None]) -> "MetricsServer | None":
    if chosen.port is None:
        return None
    from dtprof.monitor.prometheus.metrics_server import MetricsServer

    try:
        server = MetricsServer(chosen.address, chosen.port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        instead = (
            "another --metrics-port, 0 for any that is free"
            if is_port
            else "as --metrics-address an address of this host, 0.0.0.0 for all it has"
        )
        say(
            f"metrics cannot be served on {chosen.address}, port {chosen.port} ({error.strerror}): the job goes on "
            f"without them; give {instead}"
        )
        return None
    say(f"metrics of this node are at {server.url}")
    return server


def _keep(chosen: MetricsSettings, say: Callable[[str], None]) -> "MetricsFile | None":
    if chosen.file is None:
        return None
    from dtprof.monitor.prometheus.metrics_textfile import MetricsFile

    try:
        return MetricsFile(chosen.file)
    except OSError as error:
        say(
            f"metrics cannot be kept in {chosen.file} ({error.strerror}): the job goes on without them; "
            "give --metrics-file a file in a folder that may be written to"
        )
        return None
