"""A comparison of two runs as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1, B beside A."""

from dtprof.analysis.comparison.run_comparison import Comparison, FigureChange, RunSide
from dtprof.formatting import round_figure

SCHEMA = 1
_FIGURES = ("a", "b", "difference", "share", "low", "high", "detectable")


def comparison_json(result: Comparison) -> dict[str, object]:
    """Return the document; unknown or unjudged values are null, with their reason."""
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


def _change(change: FigureChange) -> dict[str, object]:
    figure = change.figure
    return {
        "table": figure.table,
        "name": figure.name,
        "unit": figure.unit,
        "rank": figure.rank if figure.rank >= 0 else None,
        **{name: getattr(figure, name) or None for name in ("group", "members", "op", "api")},
        **{name: round_figure(getattr(change, name)) for name in _FIGURES},
        "verdict": change.verdict,
        "reason": change.reason or None,
    }
