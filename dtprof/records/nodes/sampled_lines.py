"""The lines of the program at which ranks were sampled while the job ran, from the files of the nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dtprof.formatting import format_fraction
from dtprof.records import paths
from dtprof.records.rank_log.strings import json_lines

Sampled = TypeVar("Sampled")


@dataclass(frozen=True, kw_only=True)
class SampledLine:
    """A line of the program, and the share of a rank's time that is meant."""

    file: str
    line: int
    function: str
    share: float


@dataclass(frozen=True, kw_only=True)
class LateLine(SampledLine):
    """A line at which a late rank spends the share of its time more than one that is on time."""

    does: str  # what it does there, a clause

    @property
    def words(self) -> str:
        """Say where it is, for how much longer than the other, and what it does there."""
        share = format_fraction(self.share, 0)
        place = f"{self.file}:{self.line} ({self.function})"
        return f"at {place}, {share} of its time longer than a rank that is on time: {self.does}"


@dataclass(frozen=True, kw_only=True)
class HotLine(SampledLine):
    """A line at which a rank spends the share of its time, outside of what torch runs."""

    rank: int
    inner_function: str  # that it mostly is in there
    does: str | None  # what it does there, a clause; None: not known


def read_late_lines(run: Path) -> dict[int, LateLine]:
    """Return the newest sampled line of each late rank; rows that are no such are left out."""
    return _read_newest(run, paths.LATENESS, lambda row: LateLine(does=str(row["does"]), **_fields(row)))


def read_hot_lines(run: Path) -> tuple[HotLine, ...]:
    """Return the lines of the newest sampling of each rank, the costliest first; rows that are no such are left out."""
    newest = _read_newest(run, paths.HOT_LINES, _hot_lines)
    every = (line for lines in newest.values() for line in lines)
    return tuple(sorted(every, key=lambda line: (-line.share, line.rank)))


def _read_newest(run: Path, name: str, parse: Callable[[Mapping[str, Any]], Sampled]) -> dict[int, Sampled]:
    """Return what the newest row of each rank holds, of the files of this name of all nodes."""
    found: dict[int, tuple[int, Sampled]] = {}
    for node in paths.node_folders(run):
        for row in json_lines(node / name, []):
            try:
                t_ns, rank, sampled = int(row["t_ns"]), int(row["rank"]), parse(row)
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if rank not in found or found[rank][0] <= t_ns:
                found[rank] = t_ns, sampled
    return {rank: sampled for rank, (_, sampled) in found.items()}


def _hot_lines(row: Mapping[str, Any]) -> list[HotLine]:
    return [
        HotLine(
            rank=int(row["rank"]),
            inner_function=str(line["inner_function"]),
            does=None if line["does"] is None else str(line["does"]),
            **_fields(line),
        )
        for line in row["lines"]
    ]


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "file": str(row["file"]),
        "line": int(row["line"]),
        "function": str(row["function"]),
        "share": float(row["share"]),
    }
