"""A comparison of two runs as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1, B beside A."""

from dtprof.analysis.comparison.run_comparison import Change, Comparison, RunSide
from dtprof.formatting import round_figure

SCHEMA = 1


def comparison_json(result: Comparison) -> dict[str, object]:
    """Return the document; what is not known or not judged is null, with its reason."""
    return {
        "schema": SCHEMA,
        "a": _side(result.a),
        "b": _side(result.b),
        "confidence": result.confidence,
        "at_least": result.at_least,
        "differs": result.differs,
        "changes": [_change(change) for change in result.changes],
        "cannot_compare": list(result.cannot_compare),
    }


def _side(side: RunSide) -> dict[str, object]:
    return {
        "run": side.run,
        "world_size": side.world_size,
        "steps": {"count": side.num_steps, "used": list(side.used) if side.used else None},
    }


def _change(change: Change) -> dict[str, object]:
    figure = change.figure
    return {
        "table": figure.table,
        "name": figure.name,
        "unit": figure.unit,
        "rank": figure.rank if figure.rank >= 0 else None,
        "group": figure.group or None,
        "members": figure.members or None,
        "op": figure.op or None,
        "api": figure.api or None,
        "a": round_figure(change.a),
        "b": round_figure(change.b),
        "difference": round_figure(change.difference),
        "share": round_figure(change.share),
        "low": round_figure(change.low),
        "high": round_figure(change.high),
        "detectable": round_figure(change.detectable),
        "verdict": change.verdict,
        "reason": change.reason or None,
    }
