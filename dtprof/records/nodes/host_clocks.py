"""The clocks of the hosts of a run: measurements of launchers, and the mapping between clocks that follows.

Launchers write `node-HOST/clock.jsonl`, JSON lines. The first says whose clock it is: `host`, `boot_id`, and of the
host whose clock all others are measured against, `is_reference`. Each other line is one measurement: `t_ns` (this
host), `offset_ns` (add to this host's time for the reference's), `error_ns`, `round_trip_ns`, `rounds`.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtprof.records import paths

WANDER_PPM = 1.0
"""Assumed largest change of the rate between two clocks from one measurement to the next."""
WANDER_OUTSIDE_PPM = 10.0
"""The same before the first measurement and after the last."""
MAX_DRIFT_PPM = 500.0
"""Two clocks that nobody disciplines run apart by up to 100 millionths; NTP slews one by up to 500."""


@dataclass(frozen=True, kw_only=True)
class ClockPoint:
    """One measurement."""

    t_ns: int  # on the host measured
    offset_ns: float  # add to its time for that of the reference
    error_ns: float  # the offset is off by this much at most


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """The mapping of one host's CLOCK_MONOTONIC to that of the reference host of the run."""

    host: str
    boot_id: str
    reference: str  # host
    points: tuple[ClockPoint, ...]  # by time; none: it is the reference's own clock, offset and error 0

    @property
    def drift_ppm(self) -> float:
        """Return how much faster the reference runs, in millionths, over all measurements; 0 for a single one."""
        if len(self.points) < 2 or self.points[-1].t_ns == self.points[0].t_ns:
            return 0.0
        first, last = self.points[0], self.points[-1]
        return (last.offset_ns - first.offset_ns) / (last.t_ns - first.t_ns) * 1e6

    @property
    def drift_error_ppm(self) -> float:
        """Return how far the drift may be off: by the errors of the first and last measurement, or all of it."""
        if len(self.points) < 2 or self.points[-1].t_ns == self.points[0].t_ns:
            return MAX_DRIFT_PPM
        first, last = self.points[0], self.points[-1]
        by_errors = (first.error_ns + last.error_ns) / (last.t_ns - first.t_ns) * 1e6
        return min(by_errors, MAX_DRIFT_PPM + abs(self.drift_ppm))

    def straighten(self) -> "HostClock":
        """Return the clock on the line from its first measurement to its last."""
        return replace(self, points=(self.points[0], self.points[-1]) if len(self.points) > 2 else self.points)

    def offset_at(self, t_ns: int) -> float:
        """Return the offset for a time of this host: linear between measurements, beyond them by the drift."""
        if not self.points:
            return 0.0
        before, after = self._around(t_ns)
        if before is None or after is None:
            edge = before or after
            assert edge is not None
            return edge.offset_ns + (t_ns - edge.t_ns) * self.drift_ppm * 1e-6
        share = (t_ns - before.t_ns) / (after.t_ns - before.t_ns)
        return before.offset_ns + share * (after.offset_ns - before.offset_ns)

    def error_at(self, t_ns: int) -> float:
        """Return the largest error of the offset at a time."""
        if not self.points:
            return 0.0
        before, after = self._around(t_ns)
        if before is None or after is None:
            edge = before or after
            assert edge is not None
            return edge.error_ns + abs(t_ns - edge.t_ns) * (self.drift_error_ppm + WANDER_OUTSIDE_PPM) * 1e-6
        nearest_ns = min(t_ns - before.t_ns, after.t_ns - t_ns)
        return max(before.error_ns, after.error_ns) + nearest_ns * WANDER_PPM * 1e-6

    def _around(self, t_ns: int) -> tuple[ClockPoint | None, ClockPoint | None]:
        position = bisect_right(self.points, t_ns, key=lambda point: point.t_ns)
        before = self.points[position - 1] if position else None
        return before, self.points[position] if position < len(self.points) else None


def host_clocks(run: Path) -> dict[str, HostClock]:
    """Return the known clocks of the hosts of a run by host name; empty where none was measured.

    A host with the boot id of the reference shares its clock. A host without a measurement is omitted: its clock is
    unknown, not exact.
    """
    nodes = [node for file in paths.node_files(run, paths.CLOCK) if (node := _read(file)) is not None]
    reference = next((owner for owner, _ in nodes if owner.get("is_reference")), None)
    if reference is None:
        return {}
    clocks = {}
    for owner, points in nodes:
        shared = owner["boot_id"] == reference["boot_id"]
        if shared or points:
            clocks[str(owner["host"])] = HostClock(
                host=str(owner["host"]),
                boot_id=str(owner["boot_id"]),
                reference=str(reference["host"]),
                points=() if shared else points,
            )
    return clocks


def _read(file: Path) -> tuple[dict[str, Any], tuple[ClockPoint, ...]] | None:
    """Return owner and measurements of a clock file, without damaged lines."""
    owner: dict[str, Any] | None = None
    points = []
    for line in _lines(file):
        try:
            row = json.loads(line)
            if "host" in row and "boot_id" in row:
                owner = row if owner is None or row.get("is_reference") else owner
            else:
                point = ClockPoint(
                    t_ns=int(row["t_ns"]), offset_ns=float(row["offset_ns"]), error_ns=float(row["error_ns"])
                )
                points.append(point)
        except (ValueError, TypeError, KeyError):
            continue
    return None if owner is None else (owner, _sharpest(points))


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []


def _sharpest(points: list[ClockPoint]) -> tuple[ClockPoint, ...]:
    """Return the points by time; of several at one time the most exact."""
    best: dict[int, ClockPoint] = {}
    for point in points:
        if point.t_ns not in best or point.error_ns < best[point.t_ns].error_ns:
            best[point.t_ns] = point
    return tuple(best[t_ns] for t_ns in sorted(best))
