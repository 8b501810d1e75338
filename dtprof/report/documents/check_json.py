"""The check of a run against thresholds as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1."""

from collections.abc import Sequence

from dtprof.analysis.comparison.thresholds import ThresholdResult
from dtprof.formatting import round_figure

SCHEMA = 1


def check_json(run: str, results: Sequence[ThresholdResult], *, passed: bool, allow_unknown: bool) -> dict[str, object]:
    """Return the document; unknown values are null, with their reason."""
    return {
        "schema": SCHEMA,
        "run": run,
        "passed": passed,
        "allow_unknown": allow_unknown,
        "limits": [
            {name: _plain(value) for name, value in vars(result).items()}
            | {"limit": result.limit, "reason": result.reason or None}
            for result in results
        ],
    }


def _plain(value: str | float | None) -> str | float | None:
    return value if isinstance(value, str) else round_figure(value)
