"""The result of `dtprof overhead` as JSON, schema 1: times in ns, shares and ratios as fractions."""

from collections.abc import Mapping, Sequence

from dtprof.analysis.comparison.overhead_pairs import ConfidenceInterval, OverheadResult
from dtprof.analysis.results import Overhead


def overhead_json(
    result: OverheadResult, *, own: Overhead | None, command: Sequence[str], where: Mapping[str, object]
) -> dict[str, object]:
    """Return the document; unknown values are null, with a reason under `cannot_tell`."""
    times = {
        quantity.name: {
            "bare_ns": round(quantity.bare_ns),
            "recorded_ns": round(quantity.recorded_ns),
            "difference_ns": _interval(quantity.difference_ns, digits=0),
            "ratio": _interval(quantity.ratio),
            "control_ratio": _interval(quantity.control),
            "differs": quantity.differs,
        }
        for quantity in result.quantities
    }
    check = result.overlap
    return {
        "schema": 1,
        "command": list(command),
        "pairs": result.num_pairs,
        "ranks": result.num_ranks,
        "steps": result.num_steps,
        "where": dict(where),
        "times": {name: times.get(name) for name in ("step", "rank_startup", "startup", "end", "wall")},
        "overlap": None
        if check is None
        else {
            "blocked_share": check.blocked_share,
            "blocked_change": _interval(check.change),
            "control_change": _interval(check.control),
            "changed": check.changed,
        },
        "own_count": None
        if own is None
        else {"capture_ns_per_event": own.capture_ns_per_event, "share_of_step": own.share_of_step},
        "cannot_tell": list(result.cannot_tell),
    }


def _interval(interval: ConfidenceInterval, digits: int = 6) -> dict[str, float]:
    return {
        "median": round(interval.median, digits),
        "low": round(interval.low, digits),
        "high": round(interval.high, digits),
        "confidence": round(interval.confidence, 4),
    }
