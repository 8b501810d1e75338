"""Sample the memory of this process where a step ends; in a few steps, also what it is held for."""

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

from dtprof import fence
from dtprof.capture.forward_passes import Forward
from dtprof.capture.memory_categories import Categories
from dtprof.capture.own_files import OwnFile
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.records import events

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
SECOND_NS = 1_000_000_000
MOST_OF_THE_TIME = 1_000
"""What is dear takes one part in this many of the time at most."""
FIRST_STEPS = 3


class Budget:
    """Allows a measurement once in a period, so that what it takes is a thousandth of the time.

    Periods begin where the time of day is a multiple of them, and are a least one doubled as often as needed: ranks
    that step together so measure in the same step. Were each on its own time, a job would wait for one of them now and
    for another then, in every step if they are many.
    """

    def __init__(self, least_ns: int, time_ns: Callable[[], int] = time_ns) -> None:
        """Allow the first at once; `time_ns` gives the time of day."""
        self._least_ns = self._period_ns = least_ns
        self._time_ns = time_ns
        self._period = -1

    def allows(self) -> bool:
        """Say whether the next one may be taken."""
        return self._time_ns() // self._period_ns != self._period

    def charge(self, taken_ns: int) -> None:
        """Say how long one took that ends now."""
        self._period_ns = self._least_ns
        while self._period_ns < MOST_OF_THE_TIME * taken_ns:
            self._period_ns *= 2
        self._period = self._time_ns() // self._period_ns


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Memory:
    """Samples of one process."""

    def __init__(self, spans: Spans, forward: Forward) -> None:
        """Measure nothing before the first step."""
        self._spans = spans
        self._statm: OwnFile | None = None
        self._dear = (
            (events.USS_BYTES, _unique_bytes, Budget(SECOND_NS)),
            (events.HEAP_BYTES, self.heap_bytes, Budget(SECOND_NS)),
        )
        self._categories_budget = Budget(10 * SECOND_NS)
        self._num_steps = 0
        self._mallinfo: Callable[[], Any] | None = None
        self.categories = Categories(forward, self.live_bytes)

    @fence.fenced("memory")
    def install(self) -> None:
        """Look for what the C library can tell, and see forward and backward passes."""
        mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
        if mallinfo is not None:
            mallinfo.restype = _Mallinfo
            self._mallinfo = mallinfo
        self.categories.install(self._spans)
        os.register_at_fork(after_in_child=self._forget_file)

    def _forget_file(self) -> None:
        self._statm = None  # a forked process has a file of its own

    def see_optimizer(self, optimizer: Any) -> None:
        """Remember an optimizer: its parameters and state are the model's."""
        self.categories.see_optimizer(optimizer)

    @fence.fenced("memory")
    def at_step_end(self, recorder: Recorder) -> None:
        """Sample."""
        self._num_steps += 1
        values = {**self._resident(), **self._device()}
        for name, measure, budget in self._dear:
            if budget.allows():
                began_ns = monotonic_ns()
                if (taken := measure()) is not None:
                    values[name] = taken
                budget.charge(monotonic_ns() - began_ns)
        if self.categories.watching:
            for category, held in self.categories.at_step_end().items():
                values[events.MEMORY_CATEGORIES[category]] = held
            self._categories_budget.charge(self.categories.taken_ns)
        due = self._num_steps < FIRST_STEPS or self._categories_budget.allows()
        self.categories.watch(due)
        for name, value in values.items():
            recorder.sample(self._spans.id_of(recorder, name), value)

    def _resident(self) -> dict[str, int]:
        if self._statm is None:
            self._statm = OwnFile(Path("/proc/self/statm"), os.O_RDONLY)
        resident = int(os.pread(self._statm.descriptor(), 128, 0).split()[1]) * PAGE_BYTES
        return {
            events.RSS_BYTES: resident,
            events.PEAK_RSS_BYTES: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    @staticmethod
    def _device() -> dict[str, int]:
        """Return what torch's allocator holds on the current device; peaks are the program's to reset."""
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        stats = torch.cuda.memory_stats_as_nested_dict()
        return {
            events.CUDA_ALLOCATED_BYTES: stats["allocated_bytes"]["all"]["current"],
            events.CUDA_RESERVED_BYTES: stats["reserved_bytes"]["all"]["current"],
            events.CUDA_PEAK_ALLOCATED_BYTES: stats["allocated_bytes"]["all"]["peak"],
            events.CUDA_PEAK_RESERVED_BYTES: stats["reserved_bytes"]["all"]["peak"],
            events.CUDA_INACTIVE_SPLIT_BYTES: stats["inactive_split_bytes"]["all"]["current"],
            events.CUDA_OUT_OF_MEMORY: stats["num_ooms"],
        }

    def heap_bytes(self) -> int | None:
        """Return what the C library has handed out; None where another allocator has taken its place."""
        if self._mallinfo is None:
            return None
        info = self._mallinfo()
        return (info.uordblks + info.hblkhd) or None

    def live_bytes(self) -> int | None:
        """Return what is allocated now where the model lies: on the device, else on the heap."""
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return int(torch.cuda.memory_allocated())
        return self.heap_bytes()


def _unique_bytes() -> int | None:
    """Return the memory that this process shares with no other; None where the kernel does not tell.

    The kernel walks all pages for it: about 6 ms for each 200 MB.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_bytes().splitlines()
    except OSError:
        return None
    private = [int(line.split()[1]) for line in lines if line.startswith((b"Private_Clean:", b"Private_Dirty:"))]
    return sum(private) * 1024
