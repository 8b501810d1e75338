"""Check a run against thresholds: of its figures, of its step time beside a baseline, and of its verdict."""

from collections.abc import Sequence
from pathlib import Path

from dtprof.analysis.comparison.thresholds import FINDINGS, Limit, LimitResult, judge_limit, judge_slowdown
from dtprof.diagnosis.findings import Verdict
from dtprof.session.engines import Engine, open_run
from dtprof.session.run_diagnosis import diagnose_run
from dtprof.session.run_results import measure


def check_run(
    path: Path,
    engine: Engine,
    *,
    limits: Sequence[Limit] = (),
    slowdown: Limit | None = None,
    baseline: Path | None = None,
    no_risk: bool = False,
) -> list[LimitResult]:
    """Return how a run does against each threshold.

    Parameters:
        limits: of its figures.
        slowdown: how much longer its steps may take than those of `baseline`.
        no_risk: its verdict may hold no error and no warning.

    Raises:
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    results: list[LimitResult] = []
    if limits or slowdown is not None:
        paths = [path] if baseline is None else [path, baseline]
        figures, *others = measure([open_run(one, engine) for one in paths], engine)
        results += [judge_limit(limit, figures) for limit in limits]
        if slowdown is not None:
            results += [judge_slowdown(slowdown, figures, other) for other in others]
    if no_risk:
        results.append(judge_verdict(diagnose_run(path, engine)))
    return results


def select_failing(results: Sequence[LimitResult], *, allow_unknown: bool) -> list[LimitResult]:
    """Return the results that fail the check."""
    failing = ("failed",) if allow_unknown else ("failed", "unknown")
    return [result for result in results if result.outcome in failing]


def judge_verdict(verdict: Verdict) -> LimitResult:
    """Return how a verdict does against --no-risk."""
    faults = verdict.faults
    if faults:
        more = f"; {len(faults) - 1} more: dtprof diagnose" if len(faults) > 1 else ""
        return LimitResult(
            option="--no-risk",
            figure=FINDINGS,
            unit="findings",
            limit=0.0,
            outcome="failed",
            measured=float(len(faults)),
            sure=faults[0].confidence,
            reason=f"{faults[0].kind} ({100 * faults[0].confidence:.0f} % sure): {faults[0].summary}{more}",
        )
    unknown = verdict.outcome == "unknown"
    why = verdict.cannot_tell[0] if verdict.cannot_tell else "dtprof diagnose cannot tell how the job fared"
    return LimitResult(
        option="--no-risk",
        figure=FINDINGS,
        unit="findings",
        limit=0.0,
        outcome="unknown" if unknown else "passed",
        measured=None if unknown else 0.0,
        reason=why if unknown else "no error and no warning was found",
    )
