"""A torch.profiler window of a rank: its operations, and the kernels and operators by time."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtprof.intervals import NONE, Intervals
from dtprof.records.tables import UNKNOWN_NS, Array, Window

TRACED = np.dtype(
    [
        ("op", "u2"),  # index into WindowTrace.ops
        ("issued_ns", "i8"),  # when the program called it; of a kernel when it was launched
        ("returned_ns", "i8"),  # when the call returned; UNKNOWN_NS of a kernel
        ("begin_ns", "i8"),  # when the back end or the device began it; UNKNOWN_NS where that is not in the trace
        ("end_ns", "i8"),  # when it was done; UNKNOWN_NS where that is not in the trace
        ("on_device", "?"),  # it is a kernel
    ],
    align=True,
)
"""One operation of a window, times on the clock of the records."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The time of one operator or kernel in a window, all calls together."""

    name: str
    on_device: bool
    count: int
    total_ns: int  # begin to end
    self_ns: int  # without what ran inside it; of a kernel the same as the total


@dataclass(frozen=True, kw_only=True)
class WindowTrace:
    """The contents of the trace of a window."""

    window: Window
    ops: tuple[str, ...] = ()
    operations: Array = field(default_factory=lambda: np.zeros(0, TRACED))  # by issued_ns
    shares: tuple[Share, ...] = ()  # the most time first
    events: int = 0
    has_device: bool = False
    clock_ns: int | None = None  # how far the profiler's clock and the mapped clock of the records are apart
    problems: tuple[str, ...] = ()
    communication: Intervals = field(
        default_factory=lambda: NONE
    )  # in which any kernel that communicates runs; empty without a device
    computation: Intervals = field(default_factory=lambda: NONE)  # in which any other kernel runs

    def duration_ns(self) -> npt.NDArray[np.int64]:
        """Return how long each operation took, from its call, or of its kernel; UNKNOWN_NS where it is not known."""
        rows = self.operations
        begin = np.where(rows["on_device"], rows["begin_ns"], rows["issued_ns"])
        return np.where(rows["end_ns"] >= begin, rows["end_ns"] - begin, UNKNOWN_NS)
