"""The tracks of the whole run as JSON for the canvas of the page, and as a table of sums."""

from typing import Any

import numpy as np

from dtprof.analysis.timeline.run_closeup import Tracks
from dtprof.analysis.timeline.run_tracks import COMMUNICATION
from dtprof.formatting import format_count
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.palette import hue_of

TICK_NS = 100
"""Times are kept to this."""
MAX_STEP_MARKS = 2_000


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


def sum_tracks(tracks: Tracks) -> list[tuple[str, str, str, str]]:
    """Return lane, kind, number of bars and their time over all ranks."""
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
