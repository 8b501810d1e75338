"""The profiler windows of a run as tables: overlap by kernels, and the kernels or operators with most time."""

from collections.abc import Sequence

from dtprof.formatting import format_count, format_fraction, format_ns, shorten
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_markup import Markup, join
from dtprof.report.pages.page_sections import render_nothing
from dtprof.report.pages.page_tables import render_plain_table

MOST_CHARACTERS = 60


def render_windows(panel: Panel, source: Source, _: Sequence[Dashboard]) -> Markup:
    """List the newest window of each rank, and its kernels and operators by time."""
    windows = source.summary.windows
    if not windows:
        return render_nothing(
            Nothing(
                why="No window of torch.profiler was taken.",
                remedy="`dtprof run --trace-every 10m` takes windows of 2 steps on ranks in turn.",
            )
        )
    overlaps = [
        (
            str(window.rank),
            f"{window.first} to {window.last}",
            *map(format_ns, (window.compute_ns, window.communication_ns, window.exposed_ns)),
            format_fraction(window.overlap),
        )
        for window in windows
    ]
    shares = [
        (
            str(window.rank),
            shorten(share.name, MOST_CHARACTERS),
            "device" if share.on_device else "host",
            format_count(share.count),
            format_ns(share.self_ns),
        )
        for window in windows
        for share in window.top
    ]
    head = ("rank", "steps", "kernels that compute", "that communicate", "exposed", "overlap")
    return join(
        render_plain_table(head, overlaps, caption=panel.title),
        render_plain_table(("rank", "most time of its own", "on", "calls", "time"), shares, caption="Most time"),
    )
