"""Format quantities with units, and aligned tables of plain text."""

import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_BANDWIDTHS = ((1_000_000_000, "GB/s"), (1_000_000, "MB/s"), (1_000, "kB/s"), (1, "B/s"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
UNKNOWN = "-"
MOST_PARTS = 16
"""Ranks, and ranges of ranks, that a list of ranks names."""
_UNPRINTED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that move a cursor, break a line, turn the direction of writing, or cannot be encoded."""


def format_ns(ns: float | None) -> str:
    """Return a time in the unit that suits it: 12.3 ms."""
    return _format(ns, _TIMES)


def format_age(seconds: float) -> str:
    """Return an age in whole units: 12 s, 5 min, 3 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def format_bytes(nbytes: float | None) -> str:
    """Return a size in the binary unit that suits it: 1.2 GiB."""
    return _format(nbytes, _SIZES)


def format_held(nbytes: Mapping[str, int]) -> str:
    """Return memory by category, largest first, without what holds none: 40.0 MiB other, 6.00 MiB optimizer state."""
    held = sorted(((size, name) for name, size in nbytes.items() if size), reverse=True)
    return ", ".join(f"{format_bytes(size)} {name.replace('_', ' ')}" for size, name in held)


def format_fraction(fraction: float | None, decimals: int = 1) -> str:
    """Return a fraction as a percentage: 12.3 %."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.{decimals}f} %"


def format_times(values: Sequence[float | None]) -> tuple[str, list[str]]:
    """Return the unit of a column of times and its numbers: the largest has three significant digits.

    Where that leaves fewer than two to the smallest, all have one more.
    """
    return _format_column(values, _TIMES, min_digits=2)


def format_rates(gb_per_s: Sequence[float | None]) -> tuple[str, list[str]]:
    """Return the unit of a column of bandwidths and its numbers, as `format_times` does."""
    return _format_column([rate and rate * 1e9 for rate in gb_per_s], _BANDWIDTHS)


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: 1 rank, 2 ranks, 4 microbatches."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{format_count(number)} {noun}{'' if number == 1 else ending}"


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: rank 2; ranks 0, 1, 3; ranks 0-6, 8; of more than MOST_PARTS, how many are left."""
    ordered = sorted(ranks)
    begins = [at for at, rank in enumerate(ordered) if at == 0 or rank != ordered[at - 1] + 1]
    parts: list[str] = []
    shown = 0
    for begin, end in itertools.pairwise((*begins, len(ordered))):
        one_by_one = [str(rank) for rank in ordered[begin:end]]
        of_part = one_by_one if len(one_by_one) < 3 else [f"{one_by_one[0]}-{one_by_one[-1]}"]
        if len(parts) + len(of_part) > MOST_PARTS:
            break
        parts, shown = [*parts, *of_part], end
    more = f" and {format_count(len(ordered) - shown)} more" if shown < len(ordered) else ""
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}{more}"


def format_count(count: int) -> str:
    """Return a count with thousands marked: 152,000."""
    return f"{count:,}"


def format_rate(per_s: float) -> str:
    """Return a rate to three figures, or with thousands marked: 12.3, 152,000."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def round_figure(value: float | None) -> float | None:
    """Return a figure as JSON has it: rounded to six places, unknown as None."""
    return None if value is None else round(value, 6)


def format_table(rows: Sequence[Sequence[str]], *, left: int = 1, gap: str = "  ") -> list[str]:
    """Return the lines of a table, the first `left` columns aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if position < left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(cells).rstrip())
    return lines


def shorten(text: str, width: int) -> str:
    """Return the text, or its begin and end with dots between, at most `width` long; words are left whole where it can.

    What is left out is in the middle: of a command, its program and its last arguments tell most.
    """
    if len(text) <= width:
        return text
    words, first, last = text.split(" "), "", ""
    while words:
        longer = (f"{first}{words[0]} ", last) if len(first) <= len(last) else (first, f" {words[-1]}{last}")
        if sum(map(len, longer)) + 3 > width:
            break
        del words[0 if len(first) <= len(last) else -1]
        first, last = longer
    if first and last and 3 * (len(first) + len(last)) > 2 * width:
        return f"{first}...{last}"
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def join_lines(lines: Iterable[str]) -> str:
    r"""Return lines as one text, with control characters and the like as escapes: \x1b.

    Names and messages come from jobs and their logs. A terminal must show them, not obey them.
    """
    return "\n".join(line if line.isascii() and line.isprintable() else _escaped(line) for line in lines)


def _escaped(line: str) -> str:
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNPRINTED else char for char in line
    )


def _format_column(
    values: Sequence[float | None], units: tuple[tuple[int, str], ...], *, min_digits: int = 1
) -> tuple[str, list[str]]:
    known = [abs(value) for value in values if value]
    largest, smallest = max(known, default=units[0][0]), min(known, default=units[0][0])
    size, unit = next((row for row in units if largest >= row[0] * 0.9995), units[-1])
    decimals = 0 if size == 1 or largest / size >= 99.95 else 1 if largest / size >= 9.995 else 2
    if size > 1 and decimals < 2 and smallest / size < 10 ** (min_digits - 1 - decimals):
        decimals += 1
    if all(value is None for value in values):
        unit = ""  # a unit over nothing but unknowns would claim a measurement
    return unit, [UNKNOWN if value is None else _format_number(value / size, decimals) for value in values]


def _format_number(number: float, decimals: int) -> str:
    if 0 < abs(number) < 0.5 * 10**-decimals:
        return f"<{10**-decimals:g}"  # only what is 0 reads as 0
    return f"{number:,.{decimals}f}" if number else "0"


def _format(value: float | None, units: tuple[tuple[int, str], ...]) -> str:
    if value is None:
        return UNKNOWN
    size, unit = next((row for row in units if abs(value) >= row[0] * 0.9995), units[-1])
    number = value / size
    if 0 < value < 0.5:
        return f"<1 {unit}"  # not none: the mean of few a step
    if size == 1 or abs(number) >= 99.95:
        return f"{number:,.0f} {unit}"
    return f"{number:.1f} {unit}" if abs(number) >= 9.995 else f"{number:.2f} {unit}"
