"""The whole run as tracks, a pair of lanes a rank, which the browser draws on a canvas at any zoom."""

from collections.abc import Mapping
from typing import Any

from dtprof.analysis.timeline.run_closeup import Tracks
from dtprof.formatting import format_count, plural
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.tracks_figure import encode_tracks, sum_tracks
from dtprof.report.pages.page_dashboard import Panel
from dtprof.report.pages.page_markup import Markup, element
from dtprof.report.pages.page_tables import render_numbers


def render_run_timeline(panel: Panel, source: Source) -> tuple[Markup, Mapping[str, Any]] | Nothing:
    """Return the placeholder of the canvas with its sums as a table, and its data."""
    tracks = source.closeup.tracks if source.closeup else None
    if tracks is None:
        if len(source.summary.hosts) > 1 and source.summary.clock_error_ns is None:
            return Nothing(
                why="The clocks of the hosts are not aligned, so ranks cannot be drawn on one clock.",
                remedy="`dtprof run` on every host measures them.",
            )
        return Nothing(
            why="No operation and no phase was recorded.",
            remedy="Run the job under `dtprof run`, and look under Quality of the measurement.",
        )
    sentence = _describe(tracks, source)
    rows = sum_tracks(tracks)
    markup = element(
        "figure",
        element("div", id=f"tracks-{panel.anchor}", class_="tracks-place"),
        element("figcaption", sentence),
        render_numbers(panel.title, ("lane", "what", "bars", "time, all ranks"), rows),
    )
    return markup, {"tracks": encode_tracks(tracks)}


def _describe(tracks: Tracks, source: Source) -> str:
    num = len(tracks.tracks)
    bars = sum(len(track.begin_ns) for track in tracks.tracks)
    error = source.summary.time_error_ns
    clock = "" if num == 1 else f" on one clock with {'an unknown error' if error is None else _error(error)}"
    left = f" {format_count(tracks.left_out)} of the shortest are left out." if tracks.left_out else ""
    return (
        f"{format_duration(tracks.end_ns)} of {plural(num, 'rank')}{clock}, "
        f"{format_count(bars)} bars.{left} Where bars are narrower than a pixel, the colour is that of the longest "
        "and its strength the share of the time that is covered."
    )


def _error(error_ns: int) -> str:
    return f"an error of {format_duration(error_ns)}"
