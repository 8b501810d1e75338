"""Figures of a GPU: a measurement prints them one a line, and the file of its part keeps each as it comes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.pairs import Comparison
from dtprof.analysis.comparison.overhead_pairs import ConfidenceInterval, median_interval

MARK = "FIGURE "


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured value; None: not known, and `note` says why. `met` is None where there is no goal."""

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    count: int | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""


def emit(figure: Figure) -> None:
    """Print a figure for the process that keeps it, on a line of its own whatever was printed before."""
    print("\n" + MARK + json.dumps(asdict(figure)), flush=True)


def read_figure(line: str) -> Figure | None:
    """Return the figure of a line; None where it is other output."""
    return Figure(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def emit_ratio(name: str, compared: Comparison, *, most: float | None = None) -> ConfidenceInterval:
    """Print the median difference, and of the ratios less 1, with their 95 % intervals; `most` is the goal of these."""
    change = median_interval(compared.differences)
    emit(
        Figure(
            name=f"{name}: added",
            value=change.median,
            unit=compared.unit,
            low=change.low,
            high=change.high,
            count=len(compared.a),
        )
    )
    ratio = median_interval(compared.ratios)
    emit(
        Figure(
            name=f"{name}: added, share",
            value=100 * (ratio.median - 1),
            unit="%",
            low=100 * (ratio.low - 1),
            high=100 * (ratio.high - 1),
            count=len(compared.a),
            goal="" if most is None else f"at most {100 * most:g} %",
            met=None if most is None else is_below(ratio, 1 + most),
        )
    )
    return ratio


def is_below(interval: ConfidenceInterval, most: float) -> bool | None:
    """Say whether a median is at most so much; None where its interval leaves that open."""
    return True if interval.high <= most else False if interval.low > most else None


class FigureFile:
    """The figures of a part, in PART.json and PART.md of a folder: both whole after each figure."""

    def __init__(self, folder: Path, part: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._part = folder, part
        self._figures: list[tuple[str, Figure]] = []
        self._failures: list[tuple[str, str]] = []

    @property
    def failures(self) -> Sequence[tuple[str, str]]:
        """Return what could not be measured, and why."""
        return self._failures

    def add(self, measurement: str, figure: Figure) -> None:
        """Keep a figure."""
        self._figures.append((measurement, figure))
        self._write()

    def fail(self, measurement: str, reason: str) -> None:
        """Keep the reason why a measurement did not come to its end."""
        self._failures.append((measurement, reason))
        self._write()

    def _write(self) -> None:
        document = {
            "part": self._part,
            "figures": [{"measurement": name, **asdict(figure)} for name, figure in self._figures],
            "failures": [{"measurement": name, "reason": reason} for name, reason in self._failures],
        }
        self._replace(f"{self._part}.json", json.dumps(document, indent=1) + "\n")
        self._replace(f"{self._part}.md", self._as_markdown())

    def _replace(self, name: str, text: str) -> None:
        scratch = self._folder / f".{name}.part"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self._folder / name)

    def _as_markdown(self) -> str:
        lines = [f"# make gpu PART={self._part}", "", "| figure | value | 95 % interval | n | goal | met | note |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [_row(figure) for _, figure in self._figures]
        if self._failures:
            lines += ["", "## Not measured", ""]
            lines += [f"- {name}: {' '.join(reason.split())}" for name, reason in self._failures]
        return "\n".join(lines) + "\n"


def show_value(figure: Figure) -> str:
    """Return the value with its unit; of a figure that has only words, these."""
    if figure.value is None:
        return figure.note if not figure.unit and not figure.goal else "not known"
    return f"{figure.value:.4g} {figure.unit}".rstrip()


def _row(figure: Figure) -> str:
    interval = "" if figure.low is None or figure.high is None else f"{figure.low:.4g} to {figure.high:.4g}"
    met = {None: "cannot tell" if figure.goal else "", True: "yes", False: "**no**"}[figure.met]
    cells = (figure.name, show_value(figure), interval, figure.count, figure.goal, met, " ".join(figure.note.split()))
    return "| " + " | ".join("" if cell is None else str(cell).replace("|", "/") for cell in cells) + " |"
