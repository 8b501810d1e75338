"""Numbers as text: three significant digits, a unit, and a space that does not break."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

NBSP = "\u00a0"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit and how many base units (nanoseconds, bytes) it holds."""

    name: str
    size: float


DURATIONS = (
    Unit(name="ns", size=1),
    Unit(name="\u00b5s", size=1e3),
    Unit(name="ms", size=1e6),
    Unit(name="s", size=1e9),
)
SIZES = (
    Unit(name="B", size=1),
    Unit(name="KiB", size=2**10),
    Unit(name="MiB", size=2**20),
    Unit(name="GiB", size=2**30),
    Unit(name="TiB", size=2**40),
)


def choose_unit(values: Iterable[float | None], units: tuple[Unit, ...]) -> Unit:
    """Return the largest unit of which the largest value holds at least one."""
    largest = max((abs(value) for value in values if value is not None), default=0)
    fitting = [unit for unit in units if largest >= unit.size]
    return fitting[-1] if fitting else units[0]


def choose_decimals(values: Iterable[float | None]) -> int:
    """Return the decimals that show the largest value with three significant digits, for a column of numbers."""
    largest = max((abs(value) for value in values if value is not None), default=0)
    if largest == 0:
        return 0
    return min(3, max(0, 2 - math.floor(math.log10(largest))))


def format_number(value: float, decimals: int) -> str:
    """Return a number of a column with its decimals, or with the more that a small number needs to be seen."""
    if value == 0:
        return "0"
    needed = min(5, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{max(decimals, needed)}f}"


def format_duration(ns: float) -> str:
    """Return a duration such as 212 ms."""
    return _with_unit(ns, DURATIONS)


def format_bytes(size: float) -> str:
    """Return a size such as 1.50 GiB."""
    return _with_unit(size, SIZES)


def format_count(count: int) -> str:
    """Return a count such as 152,000."""
    return f"{count:,}"


def format_share(share: float) -> str:
    """Return a fraction such as 31 % or 4.2 %."""
    percent = 100 * share
    if percent == 0:
        return f"0{NBSP}%"
    if abs(percent) < 0.1:
        return f"<0.1{NBSP}%"
    return f"{percent:.0f}{NBSP}%" if abs(percent) >= 9.95 else f"{percent:.1f}{NBSP}%"


def _with_unit(value: float, units: tuple[Unit, ...]) -> str:
    unit = choose_unit([value], units)
    number = value / unit.size
    decimals = 0 if unit is units[0] or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:.{decimals}f}{NBSP}{unit.name}"
