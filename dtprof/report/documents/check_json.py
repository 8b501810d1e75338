"""What came of limits on a run as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1."""

from collections.abc import Sequence

from dtprof.analysis.comparison.thresholds import LimitResult
from dtprof.formatting import round_figure

SCHEMA = 1


def check_json(run: str, results: Sequence[LimitResult], *, passed: bool, allow_unknown: bool) -> dict[str, object]:
    """Return the document; what is not known is null, with its reason."""
    return {
        "schema": SCHEMA,
        "run": run,
        "passed": passed,
        "allow_unknown": allow_unknown,
        "limits": [
            {
                "option": result.option,
                "figure": result.figure,
                "unit": result.unit,
                "limit": result.limit,
                "outcome": result.outcome,
                "measured": round_figure(result.measured),
                "low": round_figure(result.low),
                "high": round_figure(result.high),
                "sure": round_figure(result.sure),
                "reason": result.reason or None,
            }
            for result in results
        ],
    }
