"""Check figures of a run against thresholds: met, not met or unknown, each with its confidence."""

from dataclasses import dataclass
from typing import Literal

from dtprof.analysis.comparison.comparison_series import BUBBLE, EXPOSED, JOB, STEP, Figure, RunFigures
from dtprof.analysis.comparison.comparison_statistics import MIN_STEPS, Estimate, subtract_means
from dtprof.analysis.metric_registry import NO_STEPS, OF_JOB
from dtprof.formatting import list_ranks, plural

CONFIDENCE = 0.95
Outcome = Literal["passed", "failed", "unknown"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "unknown")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """The most that a figure may be, or the least."""

    option: str  # as it is typed: --max-step-ms 300
    figure: str  # of metric_registry.OF_JOB, or "slowdown"
    bound: float
    is_least: bool = False


@dataclass(frozen=True, kw_only=True)
class ThresholdResult:
    """The outcome of one threshold."""

    option: str
    figure: str
    unit: str  # ns, bytes, fraction, tokens/s, samples/s, findings
    limit: float
    outcome: Outcome
    measured: float | None = None
    low: float | None = None  # what the true value lies between, with CONFIDENCE
    high: float | None = None
    sure: float | None = None  # how sure the outcome is, where the noise is known
    reason: str = ""  # why it is not known, or what a pass leaves open


def _find(name: str, run: RunFigures) -> Estimate | str:
    """Return the mean of a figure over steps, or why there is none."""
    if run.used is None:
        return NO_STEPS
    shares = {"exposed_fraction": run.exposed_fraction, "wait_fraction": run.wait_fraction}
    if name in shares:
        return shares[name] or run.unknown.get(Figure(JOB, EXPOSED), OF_JOB[name].null)
    figure = Figure(JOB, name)
    return run.estimates.get(figure) or run.unknown.get(figure, OF_JOB[name].null)


WITH_UNKNOWN_BUBBLE = ("exposed_fraction", "wait_fraction")
"""Figures that contain an unknown bubble: upper bounds then, with which only a threshold that is met is certain."""
PEAK, SLOWDOWN, FINDINGS = "peak_bytes", "slowdown", "findings"


def check_threshold(threshold: Threshold, run: RunFigures) -> ThresholdResult:
    """Check a figure of a run against its threshold: it fails where its mean lies beyond, with any confidence."""
    if threshold.figure == PEAK:
        return _judge_peak(threshold, run)
    unit, estimate = OF_JOB[threshold.figure].unit, _find(threshold.figure, run)
    if isinstance(estimate, str):
        return _unknown(threshold, unit, estimate)
    interval, above = estimate.interval(CONFIDENCE), estimate.confidence_above(threshold.bound)
    is_above = estimate.mean > threshold.bound
    is_beyond = estimate.mean < threshold.bound if threshold.is_least else is_above
    bubble = run.unknown.get(Figure(JOB, BUBBLE)) if threshold.figure in WITH_UNKNOWN_BUBBLE else None
    if bubble and is_beyond:
        return _unknown(threshold, unit, f"{bubble}, and counts as exposed wait")
    reasons = [] if interval else [f"confidence unknown: fewer than {MIN_STEPS} measured steps"]
    if bubble:
        reasons.append("it contains the bubble, which is unknown")
    if run.missing_ranks:
        reasons.append(f"without {list_ranks(run.missing_ranks)}, whose records are missing")
    return ThresholdResult(
        option=threshold.option,
        figure=threshold.figure,
        unit=unit,
        limit=threshold.bound,
        outcome="failed" if is_beyond else "passed",
        measured=estimate.mean,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        sure=None if above is None else above if is_above else 1 - above,
        reason="; ".join(reasons),
    )


def _unknown(threshold: Threshold, unit: str, reason: str) -> ThresholdResult:
    return ThresholdResult(
        option=threshold.option,
        figure=threshold.figure,
        unit=unit,
        limit=threshold.bound,
        outcome="unknown",
        reason=reason,
    )


def _judge_peak(threshold: Threshold, run: RunFigures) -> ThresholdResult:
    if not run.peak_bytes:
        return _unknown(threshold, "bytes", "memory was not sampled")
    rank, peak = max(run.peak_bytes.items(), key=lambda item: (item[1], -item[0]))
    return ThresholdResult(
        option=threshold.option,
        figure=threshold.figure,
        unit="bytes",
        limit=threshold.bound,
        outcome="failed" if peak > threshold.bound else "passed",
        measured=float(peak),
        reason=f"the highest of {plural(len(run.peak_bytes), 'rank')}, on rank {rank}",
    )


def check_slowdown(threshold: Threshold, run: RunFigures, baseline: RunFigures) -> ThresholdResult:
    """Check the step time against that of a baseline: it fails where it is slower beyond the noise."""
    if run.world_size != baseline.world_size:
        return _unknown(
            threshold, "fraction", f"the baseline has {plural(baseline.world_size, 'rank')}, the run {run.world_size}"
        )
    if run.layout != baseline.layout and run.layout and baseline.layout:
        return _unknown(threshold, "fraction", "the baseline has another layout (dtprof compare describes both)")
    of_run, of_baseline = _find(STEP, run), _find(STEP, baseline)
    if isinstance(of_baseline, str):
        return _unknown(threshold, "fraction", f"baseline: {of_baseline}")
    if isinstance(of_run, str):
        return _unknown(threshold, "fraction", of_run)
    # Each bound of the interval leaves out 5 %: whether it is slower is judged on one side.
    subtracted = subtract_means(of_baseline, of_run, error=2 * (1 - CONFIDENCE))
    if subtracted is None:
        return _unknown(threshold, "fraction", f"fewer than {MIN_STEPS} steps in the run or the baseline")
    step = of_baseline.mean
    failed = subtracted.low / step > threshold.bound
    return ThresholdResult(
        option=threshold.option,
        figure=threshold.figure,
        unit="fraction",
        limit=threshold.bound,
        outcome="failed" if failed else "passed",
        measured=subtracted.difference / step,
        low=subtracted.low / step,
        high=subtracted.high / step,
        sure=CONFIDENCE if failed else None,
        reason=""
        if failed
        else f"{100 * (threshold.bound + subtracted.detectable / step):.1f} % or more would be detected",
    )
