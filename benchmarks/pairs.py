"""Measure two variants in turn, A B A B ..., and say how they differ."""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import history
from dtprof.analysis.comparison.overhead_pairs import median_interval

MANY = 40
"""From so many values on the spread names the quartiles, too."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures of two variants, measured in pairs."""

    unit: str
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def differences(self) -> list[float]:
        """B minus A, pair by pair."""
        return [b - a for a, b in zip(self.a, self.b, strict=True)]

    @property
    def ratios(self) -> list[float]:
        """B over A, pair by pair."""
        return [b / a for a, b in zip(self.a, self.b, strict=True)]


def run_alone(measure: Callable[[], None], description: str | None) -> None:
    """Run one benchmark as `python -m benchmarks.NAME`; its only option is --help, which prints the description."""
    argparse.ArgumentParser(
        prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    measure()


def in_turn(a: Callable[[], float], b: Callable[[], float], *, pairs: int, unit: str) -> Comparison:
    """Measure both variants `pairs` times in turn, after one of each that is not counted."""
    a()
    b()
    measured = [(a(), b()) for _ in range(pairs)]
    return Comparison(unit=unit, a=tuple(x for x, _ in measured), b=tuple(y for _, y in measured))


def cpu_s(pid: int) -> tuple[float, float]:
    """Return user and system processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (lowest to highest)`, for many values with the middle half before the semicolon."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) < MANY:
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
    first, _, third = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({first:.{digits}f} to {third:.{digits}f}; {low:.{digits}f} to {high:.{digits}f})"


def show(name: str, what: str, values: Sequence[float], digits: int = 2) -> None:
    """Print one line of the values of a figure, such as "processor time [s]", and keep them; smaller must be better."""
    history.keep(f"{name}: {what}", values)
    print(f"  {what:<28} {spread(values, digits)}", flush=True)


def machine() -> str:
    """Return a line about this machine and how busy it is."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f}"


def report(name: str, comparison: Comparison, *, a: str, b: str, digits: int = 2) -> None:
    """Print one comparison."""
    history.keep(f"{name}: {b} over {a} [{comparison.unit}]", comparison.ratios)
    print(f"{name} [{comparison.unit}, {len(comparison.a)} pairs]")
    print(f"  {a:<28} {spread(comparison.a, digits)}")
    print(f"  {b:<28} {spread(comparison.b, digits)}")
    print(f"  {'difference':<28} {spread(comparison.differences, digits)}")
    print(f"  {'ratio':<28} {spread(comparison.ratios, 4)}", flush=True)
    if len(comparison.a) >= MANY:
        middle = median_interval(comparison.ratios)
        print(f"  {'its median, with':<28} {middle.low:.4f} to {middle.high:.4f}, {middle.confidence:.0%} confidence")
