"""Numbers as a page shows them: as dtprof.formatting writes them, with a space that does not break."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dtprof import formatting

NBSP = "\u00a0"
_QUANTITY = re.compile(r"(?<=\d) (?=(?:ns|us|ms|s|[KMGT]?i?B|%)(?!\w))")


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
    """Return a number of a column with its decimals, or with the few more that a small number needs to be seen."""
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return "<0.001"
    needed = min(3, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{max(decimals, needed)}f}"


def typeset(text: str) -> str:
    """Return a sentence written for a terminal with the quantities in it as a page shows them."""
    return _QUANTITY.sub(NBSP, text).replace(f"{NBSP}us", f"{NBSP}\u00b5s")


def format_duration(ns: float) -> str:
    """Return a duration such as 212 ms."""
    return typeset(formatting.format_ns(ns))


def format_bytes(nbytes: float) -> str:
    """Return a size such as 1.50 GiB."""
    return typeset(formatting.format_bytes(nbytes))


def format_share(share: float) -> str:
    """Return a fraction such as 31 % or 4.2 %."""
    percent = 100 * share
    if percent == 0:
        return f"0{NBSP}%"
    if abs(percent) < 0.1:
        return f"<0.1{NBSP}%"
    return f"{percent:.0f}{NBSP}%" if abs(percent) >= 9.95 else f"{percent:.1f}{NBSP}%"
