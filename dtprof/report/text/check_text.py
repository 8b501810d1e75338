"""The check of a run against thresholds: a line each, failures first."""

from collections.abc import Sequence

from dtprof.analysis.comparison.thresholds import CONFIDENCE, FINDINGS, SLOWDOWN, ThresholdResult
from dtprof.formatting import format_bytes, format_ns, format_rate, join_lines
from dtprof.report.text.labelled_lines import wrap_text

_ORDER = ("failed", "unknown", "passed")


def check_text(run: str, results: Sequence[ThresholdResult], *, passed: bool, allow_unknown: bool) -> str:
    """Return the text."""
    lines: list[str] = []
    for result in sorted(results, key=lambda result: _ORDER.index(result.outcome)):
        word = result.outcome.upper() if result.outcome == "failed" else result.outcome
        lines += wrap_text(f"{word:<8} {result.option}: {_describe(result)}", indent=" " * 9)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in _ORDER}
    allowed = " (allowed)" if allow_unknown else ""
    parts = [
        f"{number} {outcome}{allowed if outcome == 'unknown' else ''}"
        for outcome, number in reversed(counts.items())
        if number
    ]
    lines += [f"{'passed' if passed else 'FAILED'}: {run}: {', '.join(parts)}"]
    return join_lines(lines)


def _describe(result: ThresholdResult) -> str:
    if result.measured is None or result.figure == FINDINGS:
        return result.reason
    text = f"{'step time' if result.figure == SLOWDOWN else 'measured'} {_format(result.measured, result)}"
    if result.low is not None and result.high is not None:
        low, high = _format(result.low, result), _format(result.high, result)
        same_unit = low.partition(" ")[2] == high.partition(" ")[2]  # said once: 231 to 272 ms
        text += f" ({low.partition(' ')[0] if same_unit else low} to {high})"
    text += f", threshold {_format(result.limit, result).removeprefix('+')}"
    if result.sure is not None:
        sure = f"more than {100 * result.sure:.0f}" if result.figure == SLOWDOWN else _sure(result.sure)
        text += f"; {sure} % confidence"
    elif result.figure == SLOWDOWN:
        text += f"; not slower beyond the noise at {100 * CONFIDENCE:.0f} % confidence"
    return f"{text}; {result.reason}" if result.reason else text


def _sure(sure: float) -> str:
    if sure > 0.999:
        return "more than 99.9"
    return f"{100 * sure:.0f}" if sure < 0.99 else f"{100 * sure:.1f}"


def _format(value: float, result: ThresholdResult) -> str:
    if result.unit == "ns":
        return format_ns(value)
    if result.unit == "bytes":
        return format_bytes(value)
    if result.unit.endswith("/s"):
        return f"{format_rate(value)} {result.unit}"
    return f"{100 * value:{'+' if result.figure == SLOWDOWN else ''}.1f} %"
