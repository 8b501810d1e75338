"""Kernels of the steps of a profiler window: communication, its overlap, and the kernels that took most time."""

from dtprof.analysis.results import WindowSummary
from dtprof.intervals import subtract, total
from dtprof.records.profiler_windows import WindowTrace

MOST_SHARES = 5


def summarise_window(trace: WindowTrace, rank: int) -> WindowSummary:
    """Measure a window; without kernels only the operators that took most time are known."""
    communication, computation = trace.communication, trace.computation
    in_flight = total(communication) if trace.has_device else None
    exposed = total(subtract(communication, computation)) if trace.has_device else None
    top = [share for share in trace.shares if share.on_device == trace.has_device]
    return WindowSummary(
        rank=rank,
        first=trace.window.first,
        last=trace.window.last,
        top_of="kernels" if trace.has_device else "operators of the host",
        communication_ns=in_flight,
        exposed_ns=exposed,
        overlap=1 - exposed / in_flight if exposed is not None and in_flight else None,
        compute_ns=total(computation) if trace.has_device else None,
        top=tuple(top[:MOST_SHARES]),
    )
