"""Limits on the figures of a run: what is kept, what is not, what cannot be told, and how sure that is."""

from dataclasses import dataclass
from typing import Literal

from dtprof.analysis.comparison.comparison_series import BUBBLE, EXPOSED, JOB, STEP, Figure, RunFigures
from dtprof.analysis.comparison.comparison_statistics import MIN_STEPS, Estimate, subtract_means
from dtprof.analysis.metric_registry import NO_STEPS, THRESHOLDS
from dtprof.job.sound_records import list_ranks

CONFIDENCE = 0.95
Outcome = Literal["passed", "failed", "unknown"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "unknown")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that a figure may be, or the least."""

    option: str  # as it is typed: --max-step-ms 300
    figure: str  # of metric_registry.THRESHOLDS, or "slowdown"
    bound: float
    is_least: bool = False


@dataclass(frozen=True, kw_only=True)
class LimitResult:
    """What came of one limit."""

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
        return shares[name] or run.unknown.get(Figure(JOB, EXPOSED), THRESHOLDS[name].null)
    figure = Figure(JOB, name)
    return run.estimates.get(figure) or run.unknown.get(figure, THRESHOLDS[name].null)


WITH_UNKNOWN_BUBBLE = ("exposed_fraction", "wait_fraction")
"""Figures that hold the bubble where it is not known: upper bounds then, of which only a limit that is kept is sure."""
PEAK, SLOWDOWN, FINDINGS = "peak_bytes", "slowdown", "findings"


def judge_limit(limit: Limit, run: RunFigures) -> LimitResult:
    """Hold a figure of a run against its limit: it fails where its mean lies beyond, sure or not."""
    if limit.figure == PEAK:
        return _judge_peak(limit, run)
    unit, found = THRESHOLDS[limit.figure].unit, _find(limit.figure, run)
    if isinstance(found, str):
        return _unknown(limit, unit, found)
    interval, above = found.interval(CONFIDENCE), found.confidence_above(limit.bound)
    is_above = found.mean > limit.bound
    is_beyond = found.mean < limit.bound if limit.is_least else is_above
    bubble = run.unknown.get(Figure(JOB, BUBBLE)) if limit.figure in WITH_UNKNOWN_BUBBLE else None
    if bubble and is_beyond:
        return _unknown(limit, unit, f"{bubble}, and counts as exposed wait")
    reasons = [] if interval else [f"fewer than {MIN_STEPS} steps: how sure is not known"]
    if bubble:
        reasons.append("the bubble, which is not known, is in it")
    if run.missing_ranks:
        reasons.append(f"without {list_ranks(run.missing_ranks)}, whose records are missing")
    return LimitResult(
        option=limit.option,
        figure=limit.figure,
        unit=unit,
        limit=limit.bound,
        outcome="failed" if is_beyond else "passed",
        measured=found.mean,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        sure=None if above is None else above if is_above else 1 - above,
        reason="; ".join(reasons),
    )


def _unknown(limit: Limit, unit: str, reason: str) -> LimitResult:
    return LimitResult(
        option=limit.option, figure=limit.figure, unit=unit, limit=limit.bound, outcome="unknown", reason=reason
    )


def _judge_peak(limit: Limit, run: RunFigures) -> LimitResult:
    if not run.peak_bytes:
        return _unknown(limit, "bytes", "memory was not sampled")
    rank, peak = max(run.peak_bytes.items(), key=lambda item: (item[1], -item[0]))
    return LimitResult(
        option=limit.option,
        figure=limit.figure,
        unit="bytes",
        limit=limit.bound,
        outcome="failed" if peak > limit.bound else "passed",
        measured=float(peak),
        reason=f"the highest of {len(run.peak_bytes)} ranks, on rank {rank}",
    )


def judge_slowdown(limit: Limit, run: RunFigures, baseline: RunFigures) -> LimitResult:
    """Hold the step time against that of a baseline: it fails where the noise leaves no doubt that it is slower."""
    if run.world_size != baseline.world_size:
        return _unknown(limit, "fraction", f"the baseline has {baseline.world_size} ranks, the run {run.world_size}")
    if run.layout != baseline.layout and run.layout and baseline.layout:
        return _unknown(limit, "fraction", "the baseline has another layout (dtprof compare describes both)")
    of_run, of_baseline = _find(STEP, run), _find(STEP, baseline)
    if isinstance(of_baseline, str):
        return _unknown(limit, "fraction", f"baseline: {of_baseline}")
    if isinstance(of_run, str):
        return _unknown(limit, "fraction", of_run)
    # Both limits of the interval leave out 5 %: that it is slower is judged on one side.
    found = subtract_means(of_baseline, of_run, error=2 * (1 - CONFIDENCE))
    if found is None:
        return _unknown(limit, "fraction", f"fewer than {MIN_STEPS} steps in the run or the baseline")
    step = of_baseline.mean
    failed = found.low / step > limit.bound
    return LimitResult(
        option=limit.option,
        figure=limit.figure,
        unit="fraction",
        limit=limit.bound,
        outcome="failed" if failed else "passed",
        measured=found.difference / step,
        low=found.low / step,
        high=found.high / step,
        sure=CONFIDENCE if failed else None,
        reason="" if failed else f"{100 * (limit.bound + found.detectable / step):.1f} % or more would be detected",
    )
