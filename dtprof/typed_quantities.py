"""Quantities as they are typed: numbers, shares, times, sizes, ports."""

import math
import re

from dtprof import settings
from dtprof.errors import UsageError

MAX_PORT = 65_535
_AGE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smhdw])")
_SECONDS = settings.SECONDS | {"d": 86_400, "w": 7 * 86_400}
_SIZES = {
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_share(option: str, text: str, *, most: float = 1.0) -> float:
    """Return a share from `25%` or `0.25`.

    Raises:
        UsageError: it is none, or lies outside 0 to `most`.
    """
    number = text.strip()
    share = plain_number(number.removesuffix("%").rstrip()) / (100 if number.endswith("%") else 1)
    if not 0 <= share <= most:
        upper = f"from 0 to {100 * most:g} %" if math.isfinite(most) else "of 0 % or more"
        raise UsageError(f"{option} is {text!r}; expected a share {upper}, for example {option} 25% or 0.25")
    return share


def parse_milliseconds(option: str, text: str) -> float:
    """Return a time in ns from a number of ms.

    Raises:
        UsageError: it is no number above 0.
    """
    value = plain_number(text.strip())
    if not 0 < value < math.inf:
        raise UsageError(
            f"{option} is {text!r}; expected a number of milliseconds above 0, for example {option} 300 or 12.5"
        )
    return value * 1e6


def parse_number(option: str, text: str, *, example: str, below: float = math.inf) -> float:
    """Return a number above 0.

    Raises:
        UsageError: it is none, or not below `below`.
    """
    value = plain_number(text.strip())
    if not 0 < value < below:
        raise UsageError(f"{option} is {text!r}; expected a number above 0, for example {option} {example}")
    return value


def parse_whole(option: str, text: str, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`.

    Raises:
        UsageError: it is none.
    """
    number = int(text) if re.fullmatch(r"\s*\d{1,18}\s*", text) else least - 1
    if not least <= number <= most:
        raise UsageError(f"{option} is {text!r}; expected a whole number from {least} to {most:,}")
    return number


def parse_size(option: str, text: str) -> int:
    """Return a size in bytes from `8GiB`, `512 MiB`, `16GB`.

    Raises:
        UsageError: it is none above 0, or without a unit.
    """
    size = size_bytes(text)
    if size is None:
        raise UsageError(
            f"{option} is {text!r}; expected a size above 0 with its unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), "
            f"for example {option} 8GiB"
        )
    return round(size)


def size_bytes(text: str, *, unit: str = "") -> float | None:
    """Return the bytes of a size such as 8GiB, above 0; None where it is none.

    Parameters:
        unit: of a number without one; none: it must have one.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    size = plain_number(match[1]) * _SIZES.get(match[2].upper() or unit, 0) if match else 0.0
    return size if 0 < size < math.inf else None


def age_seconds(text: str) -> float | None:
    """Return the seconds of an age such as 12h, 7d, 2w; None where it is none."""
    found = _AGE.fullmatch(text.strip())
    return float(found[1]) * _SECONDS[found[2]] if found else None


def parse_days(option: str, text: str) -> float:
    """Return the days of an age.

    Raises:
        UsageError: it is none.
    """
    age_s = age_seconds(text)
    if age_s is None:
        raise UsageError(f"{option} is {text!r}; expected a time such as 14d or 12h")
    return age_s / 86_400


def parse_port(text: str, *, option: str, example: int, least: int = 0) -> int:
    """Return the port that an option names; 0 is any free one.

    Raises:
        UsageError: it is none.
    """
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MAX_PORT):
        raise UsageError(
            f"{option} is {text!r}; expected a port from {least} to {MAX_PORT}, for example "
            f"{option.split()[0]} {example}"
        )
    return int(text)


def plain_number(text: str) -> float:
    """Return a plain decimal number; -1 for anything else."""
    return float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+|[0-9]+\.", text) else -1.0
