"""Results of benchmarks, kept by commit and machine, and what became slower between two of them.

A file holds every value measured, so that two files can be compared as `dtprof compare` compares runs: by the means and
an interval of their difference (Welch's t), which holds for all figures together with 95 % (Bonferroni).
"""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from dtprof.analysis.comparison.comparison_statistics import MIN_STEPS, estimate_mean, subtract_means

SCHEMA = 1
ERROR = 0.05
AT_LEAST = 0.01
"""A smaller difference is not reported: two machines of one kind differ by more."""
ROOT = Path(__file__).parents[1]


class HistoryError(Exception):
    """A file that is no result of benchmarks, or of another machine."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What one call of the benchmarks measured: values of each figure, smaller is better."""

    schema: int = SCHEMA
    commit: str
    machine: str
    python: str
    date: str
    load: float
    figures: dict[str, list[float]] = field(default_factory=dict)


_measured: dict[str, list[float]] = {}


def keep(figure: str, values: Sequence[float]) -> None:
    """Keep the values of a figure, such as "summary, 8 ranks: processor time [s]"; smaller must be better."""
    _measured.setdefault(figure, []).extend(map(float, values))


def this_state() -> Results:
    """Return what was kept in this process, with the commit and the machine."""
    return Results(
        commit=_commit(),
        machine=f"{_processor()}, {os.cpu_count()} cores",
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        load=round(os.getloadavg()[0], 1),
        figures=dict(_measured),
    )


def save(folder: Path, results: Results) -> Path:
    """Write results into a folder, as DATE-COMMIT.json, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.date.replace(':', '')}-{results.commit[:12]}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return path


def read(path: Path) -> Results:
    """Return the results in a file.

    Raises:
        HistoryError: it cannot be read, or is no result of benchmarks.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise HistoryError(f"{path}: {error.strerror}; expected a file that --record wrote") from error
    except msgspec.DecodeError as error:
        raise HistoryError(f"{path}: {error}; expected a file that --record wrote") from error
    if results.schema != SCHEMA:
        raise HistoryError(f"{path}: schema {results.schema}; expected {SCHEMA}")
    return results


def compare(before: Results, after: Results) -> list[str]:
    """Return a line for each figure of both: slower, faster, none beyond noise, or why it is not judged.

    Raises:
        HistoryError: the results are of two machines.
    """
    if (before.machine, before.python) != (after.machine, after.python):
        raise HistoryError(
            f"measured on {before.machine}, Python {before.python}, and on {after.machine}, Python {after.python}; "
            "expected one machine: measure both there"
        )
    shared = [figure for figure in after.figures if figure in before.figures]
    error = ERROR / max(1, len(shared))
    lines = [_compare_figure(name, before.figures[name], after.figures[name], error) for name in shared]
    for where, only in (
        ("before", before.figures.keys() - after.figures),
        ("after", after.figures.keys() - before.figures),
    ):
        lines += [f"{name}: only measured {where}" for name in sorted(only)]
    return lines


def _compare_figure(name: str, before: Sequence[float], after: Sequence[float], error: float) -> str:
    old, new = (estimate_mean(np.array(values, dtype=np.float64)) for values in (before, after))
    change = subtract_means(old, new, error=error)
    if change is None:
        return f"{name}: not judged, {min(len(before), len(after))} values; {MIN_STEPS} are needed"
    if not old.mean:
        return f"{name}: not judged, it was 0"
    interval = f"({change.low / old.mean:+.1%} to {change.high / old.mean:+.1%})"
    verdict = change.judge(AT_LEAST * old.mean)
    if verdict in ("none", "negligible"):
        return f"{name}: no change beyond noise {interval}"
    word = "slower" if verdict == "larger" else "faster"
    return f"{name}: {word} by {abs(change.difference / old.mean):.1%} {interval}"


def _commit() -> str:
    """Return the commit, with "-changed" where files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return commit.stdout.strip() + ("-changed" if changed.stdout else "")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
