"""The profiler windows and memory snapshots of a run as text."""

from collections.abc import Sequence

from dtprof.analysis.timeline.window_joining import JoinedWindow, RankWindows
from dtprof.formatting import (
    format_bytes,
    format_count,
    format_fraction,
    format_held,
    format_ns,
    format_table,
    join_lines,
    shorten,
)
from dtprof.records.tables import Snapshot

MOST_CHARACTERS = 60


def trace_text(ranks: Sequence[RankWindows], *, top: int, cannot_tell: Sequence[str]) -> str:
    """Return the text that `dtprof trace` prints."""
    blocks = [_window(rank, joined, top) for rank in ranks for joined in rank.windows]
    blocks += [[_snapshot(rank, snapshot) for snapshot in rank.snapshots] for rank in ranks if rank.snapshots]
    blocks += [[f"cannot tell: {reason}" for reason in cannot_tell]] if cannot_tell else []
    return "\n\n".join(map(join_lines, blocks))


def steps_text(first: int, last: int) -> str:
    """Return "step 5" or "steps 5 to 7"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _window(rank: RankWindows, joined: JoinedWindow, top: int) -> list[str]:
    window = joined.window
    what = f"rank {rank.rank}, {steps_text(window.first, window.last)}"
    if window.state != "written":
        reason = window.reason or "it was started and not written: the job runs, or was killed"
        return [f"{what}: no window: {reason}"]
    lines = [
        f"{what}: {rank.path_of(window.file)}",
        f"  {format_count(joined.events)} events, {format_bytes(window.size_bytes)}; the rank was paused for "
        f"{format_ns(max(0, window.ready_ns - window.end_ns))} to write it",
    ]
    lines += [f"  {window.reason}"] if window.reason else []
    lines += [f"  {problem}" for problem in joined.problems]
    lines += ["", *_operations(joined), "", *_shares(joined, top)]
    return lines


def _operations(joined: JoinedWindow) -> list[str]:
    if not joined.traced:
        return ["  no communication in the trace"]
    head = ("  operation", "count", "found", "recorded", "in the trace", "calls apart")
    rows = [
        (
            f"  {row.op}",
            format_count(row.count),
            format_count(row.matched),
            format_ns(row.recorded_ns),
            format_ns(row.traced_ns),
            format_ns(row.issued_apart_ns),
        )
        for row in joined.operations
    ]
    kind = "kernels" if joined.has_device else "operations"
    return [
        f"  {format_count(joined.matched)} of {format_count(joined.traced)} {kind} of communication found in the "
        f"records ({format_fraction(joined.share)}); recorded in this time: {format_count(joined.recorded)}",
        *format_table([head, *rows]),
    ]


def _shares(joined: JoinedWindow, top: int) -> list[str]:
    head = ("  most time of its own", "on", "calls", "own", "total")
    rows = [
        (
            f"  {shorten(share.name, MOST_CHARACTERS)}",
            "device" if share.on_device else "host",
            format_count(share.count),
            format_ns(share.self_ns),
            format_ns(share.total_ns),
        )
        for share in joined.shares[:top]
    ]
    return format_table([head, *rows], left=2) if rows else []


def _snapshot(rank: RankWindows, snapshot: Snapshot) -> str:
    what = f"rank {rank.rank}, after step {snapshot.step}, memory"
    if snapshot.state != "written":
        return f"{what}: no snapshot: {snapshot.reason}"
    held = format_held(snapshot.held_bytes)
    return f"{what} ({snapshot.why}): {rank.path_of(snapshot.file)}" + (f"; {held}" if held else "")
