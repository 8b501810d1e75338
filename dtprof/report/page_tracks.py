"""The whole run as tracks, a pair of lanes a rank, which the browser draws on a canvas at any zoom."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtprof.analysis.closeup import Tracks
from dtprof.analysis.tracks import COMMUNICATION
from dtprof.figures.drawing import Nothing
from dtprof.figures.palette import hue_of
from dtprof.figures.quantities import format_duration
from dtprof.figures.source import Source
from dtprof.formatting import format_count
from dtprof.report.page_dashboard import Panel
from dtprof.report.page_markup import Markup, element
from dtprof.report.page_tables import render_plain_table

TICK_NS = 100
"""Times are kept to this."""
MAX_STEP_MARKS = 2_000


def render_run_timeline(panel: Panel, source: Source) -> tuple[Markup, Mapping[str, Any]] | Nothing:
    """Return the place of the canvas with its sums as a table, and what is drawn there."""
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
    rows = _rows(tracks)
    markup = element(
        "figure",
        element("div", id=f"tracks-{panel.anchor}", class_="tracks-place"),
        element("figcaption", sentence),
        element(
            "details",
            element("summary", f"Numbers of this figure ({format_count(len(rows))} rows)"),
            render_plain_table(
                ("lane", "what", "bars", "time, all ranks"), rows, caption=f"{panel.title}: the numbers"
            ),
            class_="numbers",
        ),
    )
    return markup, {"tracks": encode_tracks(tracks)}


def encode_tracks(tracks: Tracks) -> dict[str, Any]:
    """Return the tracks as JSON: begins as differences, kinds and names by number, times in TICK_NS."""
    table: dict[tuple[int, int, int], int] = {}
    ranks = []
    for track in tracks.tracks:
        codes = (
            track.lane.astype(np.int64) << 40 | track.kind.astype(np.int64) << 32 | track.name.astype(np.int64)
        ).tolist()
        begin = (track.begin_ns - tracks.origin_ns) // TICK_NS
        ranks.append(
            {
                "rank": track.rank,
                "begin": np.diff(begin, prepend=0).tolist(),
                "length": np.maximum(track.length_ns // TICK_NS, 1).tolist(),
                "what": [
                    table.setdefault((code >> 40, code >> 32 & 0xFF, code & 0xFFFF), len(table)) for code in codes
                ],
            }
        )
    first = tracks.tracks[0].step_ends_ns if tracks.tracks else np.zeros(0, np.int64)
    stride = -(-len(first) // MAX_STEP_MARKS) or 1
    return {
        "tick_ns": TICK_NS,
        "end": tracks.end_ns // TICK_NS,
        "kinds": [[kind, hue_of(kind).label or kind] for kind in tracks.kinds],
        "names": list(tracks.names),
        "what": [list(key) for key in table],
        "ranks": ranks,
        "steps": ((first[::stride] - tracks.origin_ns) // TICK_NS).tolist(),
    }


def _describe(tracks: Tracks, source: Source) -> str:
    num = len(tracks.tracks)
    bars = sum(len(track.begin_ns) for track in tracks.tracks)
    error = source.summary.clock_error_ns
    clock = "" if num == 1 else f" on one clock with {'an unknown error' if error is None else _error(error)}"
    left = f" {format_count(tracks.left_out)} of the shortest are left out." if tracks.left_out else ""
    return (
        f"{format_duration(tracks.end_ns)} of {num} rank{'' if num == 1 else 's'}{clock}, "
        f"{format_count(bars)} bars.{left} Where bars are narrower than a pixel, its colour is that of the longest "
        "and its strength the share of the time that is covered."
    )


def _error(error_ns: int) -> str:
    return f"an error of {format_duration(error_ns)}"


def _rows(tracks: Tracks) -> list[tuple[str, str, str, str]]:
    counts = np.zeros((2, len(tracks.kinds)), np.int64)
    times = np.zeros_like(counts)
    for track in tracks.tracks:
        np.add.at(counts, (track.lane, track.kind), 1)
        np.add.at(times, (track.lane, track.kind), track.length_ns)
    return [
        (
            "communication" if lane == COMMUNICATION else "work",
            hue_of(kind).label or kind,
            format_count(int(counts[lane, number])),
            format_duration(int(times[lane, number])),
        )
        for lane in range(2)
        for number, kind in enumerate(tracks.kinds)
        if counts[lane, number]
    ]
