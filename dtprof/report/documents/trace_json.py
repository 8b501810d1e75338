"""The profiler windows and memory snapshots of a run as JSON, schema 1."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dtprof.analysis.timeline.window_joining import JoinedWindow, RankWindows
from dtprof.formatting import round_figure

SCHEMA = 1


def trace_json(ranks: Sequence[RankWindows], *, top: int, cannot_tell: Sequence[str]) -> dict[str, Any]:
    """Return the document that `dtprof trace --json` prints."""
    return {
        "schema": SCHEMA,
        "windows": [_window(rank, joined, top) for rank in ranks for joined in rank.windows],
        "snapshots": [
            {"rank": rank.rank, **asdict(snapshot), "file": rank.path_of(snapshot.file)}
            for rank in ranks
            for snapshot in rank.snapshots
        ],
        "cannot_tell": list(cannot_tell),
    }


def _window(rank: RankWindows, joined: JoinedWindow, top: int) -> dict[str, Any]:
    window = joined.window
    return {
        "rank": rank.rank,
        "state": window.state,
        "first": window.first,
        "last": window.last,
        "file": rank.path_of(window.file),
        "bytes": window.size_bytes,
        "begin_ns": _known(window.begin_ns),
        "end_ns": _known(window.end_ns),
        "ready_ns": _known(window.ready_ns),
        "reason": window.reason or None,
        "events": joined.events,
        "traced": joined.traced,
        "matched": joined.matched,
        "matched_fraction": round_figure(joined.share),
        "recorded": joined.recorded,
        "clock_error_ns": joined.clock_ns,
        "has_device": joined.has_device,
        "operations": [asdict(operation) for operation in joined.operations],
        "top": [asdict(share) for share in joined.shares[:top]],
        "problems": list(joined.problems),
    }


def _known(t_ns: int) -> int | None:
    return t_ns if t_ns >= 0 else None
