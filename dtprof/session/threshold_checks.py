"""Check a run against thresholds: of its figures, of its step time beside a baseline, and of its verdict."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtprof.analysis.comparison.thresholds import FINDINGS, Threshold, ThresholdResult, check_slowdown, check_threshold
from dtprof.diagnosis.findings import Verdict
from dtprof.session.engines import Engine, open_run
from dtprof.session.run_diagnosis import diagnose_run
from dtprof.session.run_measurement import measure


def check_run(
    path: Path,
    engine: Engine,
    *,
    thresholds: Sequence[Threshold] = (),
    slowdown: Threshold | None = None,
    baseline: Path | None = None,
    no_risk: bool = False,
) -> list[ThresholdResult]:
    """Return how a run does against each threshold.

    Parameters:
        thresholds: of its figures.
        slowdown: how much longer its steps may take than those of `baseline`.
        no_risk: its verdict may hold no error and no warning.

    Raises:
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    results: list[ThresholdResult] = []
    if thresholds or slowdown is not None:
        paths = [path] if baseline is None else [path, baseline]
        figures, *others = measure([open_run(run_path, engine) for run_path in paths], engine)
        results += [check_threshold(threshold, figures) for threshold in thresholds]
        if slowdown is not None:
            results += [check_slowdown(slowdown, figures, other) for other in others]
    if no_risk:
        results.append(judge_verdict(diagnose_run(path, engine)))
    return results


def select_failing(results: Sequence[ThresholdResult], *, allow_unknown: bool) -> list[ThresholdResult]:
    """Return the results that fail the check."""
    failing = ("failed",) if allow_unknown else ("failed", "unknown")
    return [result for result in results if result.outcome in failing]


def judge_verdict(verdict: Verdict) -> ThresholdResult:
    """Return how a verdict does against --no-risk."""
    clean = ThresholdResult(
        option="--no-risk",
        figure=FINDINGS,
        unit="findings",
        limit=0.0,
        outcome="passed",
        measured=0.0,
        reason="no error and no warning was found",
    )
    if faults := verdict.faults:
        more = f"; {len(faults) - 1} more: dtprof diagnose" if len(faults) > 1 else ""
        reason = f"{faults[0].kind} ({100 * faults[0].confidence:.0f} % sure): {faults[0].summary}{more}"
        measured, sure = float(len(faults)), faults[0].confidence
        return replace(clean, outcome="failed", measured=measured, sure=sure, reason=reason)
    if verdict.outcome == "unknown":
        why = verdict.cannot_tell[0] if verdict.cannot_tell else "dtprof diagnose cannot tell how the job fared"
        return replace(clean, outcome="unknown", measured=None, reason=why)
    return clean
