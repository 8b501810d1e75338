"""Durations on the device, from the Flight Recorder: the ring of operations of torch's NCCL back end.

This calls nothing of CUDA: torch's watchdog has measured the durations (TORCH_NCCL_ENABLE_TIMING, which `dtprof run`
sets), and a thread of dtprof polls its ring for a bounded share of the time. Operations overwritten between two polls
have no duration.
"""

import atexit
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dtprof import fence
from dtprof.capture.recorder import Recorder

SHORTEST_PAUSE_S = 1.0
SHARE = 0.002
"""Polling holds the GIL, so it takes at most this share of the time."""
NS_PER_MS = 1_000_000


class NcclDurations:
    """Reads the ring and records each completed operation once."""

    def __init__(self, recorder: Recorder, group_ids: Mapping[str, int], read: Callable[[], bytes]) -> None:
        """Write to the recorder; `group_ids` are ids by name of group, `read` dumps the ring."""
        self._recorder = recorder
        self._group_ids = group_ids
        self._read = read
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._pid = os.getpid()

    def start(self) -> None:
        """Poll from now on, and a last time when the interpreter exits."""
        threading.Thread(target=self._work, name="dtprof-device-times", daemon=True).start()
        atexit.register(self.drain)

    def _work(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while True:
            time.sleep(pause_s)
            cost_s = self.drain()
            if cost_s is None:
                return
            pause_s = max(SHORTEST_PAUSE_S, cost_s / SHARE)

    @fence.fenced("durations on the device")
    def drain(self) -> float | None:
        """Record the operations completed since the last poll; return its seconds, None in a forked process."""
        if os.getpid() != self._pid:
            return None  # forked: a thread that does not exist here may hold the lock
        with self._lock:
            began_s = time.perf_counter()
            # Safe to unpickle: torch wrote these bytes in this process.
            entries = pickle.loads(self._read()).get("entries", [])
            realtime_to_monotonic = time.monotonic_ns() - time.time_ns()
            for entry in self._new(entries):
                taken_ns = entry["time_created_ns"] + realtime_to_monotonic
                seen_ns = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) + realtime_to_monotonic
                group = self._group_ids[entry["process_group"][0]]
                duration_ns = round(entry["duration_ms"] * NS_PER_MS)
                self._recorder.device_time(group, taken_ns, duration_ns, max(seen_ns, taken_ns))
            return time.perf_counter() - began_s

    def _new(self, entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the completed entries with a duration that were not returned before."""
        present, new = set(), []
        for entry in entries:
            number = entry["record_id"]
            present.add(number)
            if entry.get("state") != "completed" or entry.get("duration_ms") is None or number in self._taken:
                continue
            if entry["process_group"][0] in self._group_ids:
                self._taken.add(number)
                new.append(entry)
        self._taken &= present
        return new


@fence.fenced("durations on the device")
def follow(recorder: Recorder, group_ids: Mapping[str, int]) -> None:
    """Take begin and end of NCCL's kernels from its own events; where that cannot be, durations from its ring."""
    from dtprof.capture.native import loader

    use_events = hasattr(recorder, "use_kernel_events")
    reason = loader.use_nccl_events(recorder) if use_events else "the Python hook reads no events"
    if not reason:
        return
    fence.warn_once(f"begins and ends of NCCL's kernels are not recorded, only durations ({reason})")
    if read := reader():
        NcclDurations(recorder, group_ids, read).start()


def reader() -> Callable[[], bytes] | None:
    """Return the function of this torch that dumps NCCL's ring without stacks, or None where it has none.

    `_dump_fr_trace` is another ring since torch 2.13: that of gloo, which tells no durations.
    """
    import torch

    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return None
    return lambda: bytes(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
