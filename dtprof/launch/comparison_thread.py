"""Compare the calls of the ranks of this host while the job runs, in a thread of the launcher; report mismatches."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dtprof import fence
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.records import paths, writer
from dtprof.records.shared_follower import Subscription

EVERY_S = 2.0
EVERY_AT_MOST_S = 20.0
"""Between comparisons that are so dear that they would take more than a thousandth of a core."""
STOP_S = 30.0
"""How long the end of a job waits for the last comparison."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Mismatched operations at one sequence number of a group."""

    kind: str
    group: str
    seq: int
    instance: int = 0  # of the group
    summary: str
    text: str  # in full, with the lines of both sides


Compare = Callable[[bool], Iterable[Mismatch]]
"""Returns the mismatches that the new records show; the argument says that it is the last comparison."""


class Comparer:
    """Compares every few seconds until it is stopped."""

    def __init__(
        self,
        make: Callable[[Subscription], Compare],
        records: Subscription,
        node_folder: Path,
        *,
        say: Callable[[str], None],
    ) -> None:
        """Start at once. `make` is called in the thread: its imports take a moment."""
        self._make, self._records, self._folder, self._say = make, records, node_folder, say
        self._compares_last = False
        self._thread = LauncherThread(self._work, "comparer", niceness=NICENESS)
        self._thread.start()

    def stop(self, *, compares_last: bool) -> None:
        """Compare the newest records, where wanted, and stop."""
        self._compares_last = compares_last
        self._thread.stop(STOP_S)
        if compares_last and self._thread.is_alive():
            self._say(
                "the newest operations of the ranks were not compared: that takes too long here; diagnose does it"
            )

    @fence.fenced("the comparison of ranks", "has ended; the job goes on")
    def _work(self) -> None:
        try:
            self._compare()
        finally:
            self._records.close()

    def _compare(self) -> None:
        compare: Compare | None = None
        pause_s = EVERY_S
        while not self._thread.ended.wait(pause_s):
            compare = compare or self._make(self._records)
            began_s = time.thread_time()
            self._report(compare(False))
            pause_s = min(max(EVERY_S, 1_000 * (time.thread_time() - began_s)), EVERY_AT_MOST_S)
        if self._compares_last and (compare or any(self._folder.parent.glob("rank-*"))):
            self._report((compare or self._make(self._records))(True))

    def _report(self, found: Iterable[Mismatch]) -> None:
        for mismatch in found:
            about = f"{mismatch.kind} {mismatch.group} {mismatch.seq} {mismatch.instance}"
            if not fence.is_first(self._folder.parent, about, mark=fence.REPORTED):
                continue
            self._say(f"ranks pair mismatched operations: results are invalid; the job goes on\n{mismatch.text}")
            times = {"t_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC), "realtime_ns": time.time_ns()}
            row = times | asdict(mismatch)
            del row["text"]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                writer.append_line(self._folder / paths.MISMATCHES, row)
            except OSError:
                continue  # the disk is full: the watcher reports it
