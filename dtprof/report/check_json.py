"""What came of limits on a run as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1."""

from collections.abc import Sequence

from dtprof.analysis.limits import LimitResult

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
                "measured": _rounded(result.measured),
                "low": _rounded(result.low),
                "high": _rounded(result.high),
                "sure": _rounded(result.sure),
                "reason": result.reason or None,
            }
            for result in results
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
