"""A prediction as JSON, schema 1: times in ns, fractions from 0 to 1, slowdowns as ratios."""

from collections.abc import Mapping

from dtprof.analysis.whatif.prediction import Prediction, Scenario

SCHEMA = 1


def whatif_json(result: Prediction) -> dict[str, object]:
    """Return the document; unknown or unpredicted values are null, with their reason under `cannot_tell`."""
    slow = result.slowdowns
    return {
        "schema": SCHEMA,
        "steps": {"used": list(result.steps) if result.steps else None},
        "measured_step_ns": _whole(result.measured_step_ns),
        "replayed_step_ns": _whole(result.replayed_step_ns),
        "replay_error": result.replay_error,
        "ideal_step_ns": _whole(slow.ideal_ns) if slow else None,
        "slowdown": slow.slowdown if slow else None,
        "by_operation": _list("op", slow.by_operation) if slow else [],
        "by_rank": _list("rank", slow.by_rank) if slow else [],
        "by_stage": _list("stage", slow.by_stage) if slow else [],
        "m_w": slow.m_w if slow else None,
        "m_s": slow.m_s if slow else None,
        "scenarios": [_scenario(scenario) for scenario in result.scenarios],
        "cannot_tell": list(result.cannot_tell),
    }


def _list(key: str, shares: Mapping[int, float] | Mapping[str, float]) -> list[dict[str, object]]:
    return [{key: name, "slowdown": share} for name, share in shares.items()]


def _scenario(scenario: Scenario) -> dict[str, object]:
    return {
        "fix": list(scenario.fix),
        "step_ns": _whole(scenario.step_ns),
        "gain": scenario.gain,
        "interval": list(scenario.interval) if scenario.interval else None,
        "assumes": scenario.assumes or None,
        "reason": scenario.reason or None,
    }


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None else None
