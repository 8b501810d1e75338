"""Sample the memory of this process at the end of each step; in a few steps, also by category."""

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
from dtprof.capture.recorder import Recorder
from dtprof.capture.reopened_files import ReopenedFile
from dtprof.capture.spans import Spans
from dtprof.capture.string_entries import timed_entry
from dtprof.records import events

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
SECOND_NS = 1_000_000_000
BUDGET_FRACTION = 1_000
"""A costly measurement takes at most one part in this many of the time."""
FIRST_STEPS = 3
"""Steps measured by category whatever that costs: a short run has no others."""
FIRST_OPTIMIZERS = 8
"""After the first step of each of so many optimizers, too: an outer one steps every so many steps."""
OTHER = "other"
"""Memory of no known category."""


class Budget:
    """Allows a measurement once a period, so that measuring takes a thousandth of the time.

    A period is the shortest one doubled as often as needed, and begins where the time of day is a multiple of it.
    Ranks that step together therefore measure in the same step. With periods of their own, another rank would delay
    the job each time, in every step if they are many.
    """

    def __init__(self, shortest_ns: int, time_ns: Callable[[], int] = time_ns) -> None:
        """Allow the first measurement at once; `time_ns` gives the time of day."""
        self._shortest_ns = self._period_ns = shortest_ns
        self._time_ns = time_ns
        self._period = -1

    def allows(self) -> bool:
        """Say whether a measurement is due."""
        return self._time_ns() // self._period_ns != self._period

    def charge(self, cost_ns: int) -> None:
        """Account for a measurement that ends now, and set the period by its cost."""
        self._period_ns = self._shortest_ns
        while self._period_ns < BUDGET_FRACTION * cost_ns:
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
    """Samples the memory of this process."""

    def __init__(self, spans: Spans, forward: Forward) -> None:
        """Prepare to measure; the first sample is due at the end of the first step."""
        self._spans = spans
        self._statm: ReopenedFile | None = None
        self._costly = (
            (events.USS_BYTES, _unique_bytes, Budget(SECOND_NS)),
            (events.HEAP_BYTES, self.heap_bytes, Budget(SECOND_NS)),
        )
        self._categories_budget = Budget(10 * SECOND_NS)
        self._num_steps = self._num_optimizers = 0
        self._device_known = False
        self._mallinfo: Callable[[], Any] | None = None
        self.categories = Categories(forward, self.live_bytes)

    @fence.fenced("memory")
    def install(self) -> None:
        """Find the C library's statistics of its heap, and hook forward and backward passes."""
        mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
        if mallinfo is not None:
            mallinfo.restype = _Mallinfo
            self._mallinfo = mallinfo
        self.categories.install(self._spans)
        os.register_at_fork(after_in_child=self._forget_file)

    def _forget_file(self) -> None:
        self._statm = None  # a forked process has a file of its own

    @fence.fenced("memory")
    def at_step_end(self, recorder: Recorder) -> None:
        """Record the samples of the step that ends now."""
        self._num_steps += 1
        if not self._device_known and (device := _device_in_use()):
            self._device_known = True
            if hasattr(recorder, "follow_device"):
                recorder.follow_device(device)
            recorder.write_entry(describe_device(device))
        values = {**self._resident(), **self._device()}
        for name, measure, budget in self._costly:
            if budget.allows():
                began_ns = monotonic_ns()
                if (nbytes := measure()) is not None:
                    values[name] = nbytes
                budget.charge(monotonic_ns() - began_ns)
        if self.categories.watching:
            for category, nbytes in self.categories.at_step_end().items():
                values[events.MEMORY_CATEGORIES[category]] = nbytes
            self._categories_budget.charge(self.categories.cost_ns)
        optimizers = min(len(self.categories.optimizers), FIRST_OPTIMIZERS)
        due = self._num_steps < FIRST_STEPS or optimizers > self._num_optimizers or self._categories_budget.allows()
        self._num_optimizers = optimizers
        self.categories.watch(due)
        for name, value in values.items():
            recorder.sample(self._spans.id_of(recorder, name), value)

    def _resident(self) -> dict[str, int]:
        if self._statm is None:
            self._statm = ReopenedFile(Path("/proc/self/statm"), os.O_RDONLY)
        resident = int(os.pread(self._statm.descriptor(), 128, 0).split()[1]) * PAGE_BYTES
        return {
            events.RSS_BYTES: resident,
            # The kernel counts pages roughly, and keeps the peak apart: it may lag behind.
            events.PEAK_RSS_BYTES: max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }

    @staticmethod
    def _device() -> dict[str, int]:
        """Return the statistics of torch's allocator on the current device; only the program resets its peaks."""
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
        """Return the bytes in use on the C library's heap; None where another allocator replaces it."""
        if self._mallinfo is None:
            return None
        info = self._mallinfo()
        return (info.uordblks + info.hblkhd) or None

    def live_bytes(self) -> int | None:
        """Return the bytes allocated now where the model lies: on the device, else on the heap."""
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return int(torch.cuda.memory_allocated())
        return self.heap_bytes()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes held now by category, with the remainder as `other` where the total is known."""
        held = self.categories.held()
        if (live := self.live_bytes()) is not None:
            held[OTHER] = max(0, live - sum(held.values()))
        return held


def _device_in_use() -> str:
    """Return the current device, such as `cuda:0`; empty before the program itself has initialised it."""
    import torch

    for name in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", bool)():
            return f"{name}:{module.current_device()}"
    return ""


def describe_device(device: str) -> str:
    """Return the entry that names a device, such as `cuda:0`, as the samples of its node do."""
    import torch

    kind, _, index = device.partition(":")
    try:
        properties = getattr(torch, kind).get_device_properties(int(index))
    except (AttributeError, RuntimeError):  # not every back end has them
        properties = None
    uuid = getattr(properties, "uuid", None)
    named = f"GPU-{uuid}" if uuid is not None and kind == "cuda" else str(uuid or "")
    return timed_entry("device", device=device, name=getattr(properties, "name", ""), uuid=named)


def _unique_bytes() -> int | None:
    """Return the memory that this process shares with no other; None where the kernel does not count it.

    The kernel walks all pages for it: about 6 ms for each 200 MB.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_bytes().splitlines()
    except OSError:
        return None
    private = [int(line.split()[1]) for line in lines if line.startswith((b"Private_Clean:", b"Private_Dirty:"))]
    return sum(private) * 1024
