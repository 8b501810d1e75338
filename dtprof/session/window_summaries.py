"""The newest profiler windows of a run for its summary: overlap by kernels, and kernels and operators by time."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.errors import NotATraceError
from dtprof.formatting import list_ranks
from dtprof.records.paths import WINDOWS
from dtprof.records.rank_log.strings import read_strings

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.records.reader import Run
    from dtprof.records.tables import Window

MOST_WINDOWS = 8
"""Windows that are read, one a rank: a trace takes a second to read."""


def add_windows(summary: "Summary", run: "Run") -> "Summary":
    """Return the summary with the newest window of each of the ranks that took theirs last."""
    newest: list[tuple[Window, int, Path]] = []
    for rank, attempts in run.folders.items():
        folder = attempts[-1][1]
        if next(folder.glob(WINDOWS), None) is not None:
            taken = [window for window in read_strings(folder, []).windows.values() if window.state == "written"]
            newest += [(window, rank, folder) for window in taken[-1:]]
    if not newest:
        return summary
    # Few runs have windows, and importers take a tenth of the summary of a small run to load.
    from dtprof.analysis.results import Caveat
    from dtprof.analysis.timeline.window_overlap import summarise_window
    from dtprof.interchange.importers.window_trace import read_window

    newest = sorted(newest, key=lambda row: (row[0].realtime_ns, row[1]))[-MOST_WINDOWS:]
    windows, caveats = [], []
    for window, rank, folder in sorted(newest, key=lambda row: row[1]):
        try:
            windows.append(summarise_window(read_window(folder / window.file, window), rank))
        except NotATraceError as error:
            caveats.append(Caveat("windows", f"the one of rank {rank} cannot be read: {error}"))
    if without := [window.rank for window in windows if window.communication_ns is None]:
        caveats.append(Caveat("windows", f"{list_ranks(without)} took no kernel, so overlap by kernels is not known"))
    return replace(summary, windows=tuple(windows), cannot_tell=(*summary.cannot_tell, *caveats))
