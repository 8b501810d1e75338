"""The result of `dtprof overhead` as a table and one sentence each for steps, start and overlap."""

import shlex
from collections.abc import Mapping, Sequence

from dtprof.analysis.comparison.overhead_pairs import ConfidenceInterval, OverheadResult, OverlapCheck, Quantity
from dtprof.analysis.results import Overhead
from dtprof.formatting import format_fraction, format_ns, format_table, join_lines, plural, shorten
from dtprof.report.text.labelled_lines import LABEL, WIDTH, labelled

_NAMES = {
    "step": "step",
    "rank_startup": "start of a rank",
    "startup": "start of the job",
    "end": "end of the job",
    "wall": "whole command",
}


def overhead_text(
    result: OverheadResult, *, own: Overhead | None, command: Sequence[str], where: Mapping[str, object]
) -> str:
    """Return the text."""
    counted = f"{result.num_pairs} pairs"
    if result.num_ranks:
        counted += f"; {plural(result.num_ranks, 'rank')}, {plural(result.num_steps, 'step')} a run"
    lines = [
        *labelled("command", shorten(shlex.join(command), WIDTH - LABEL)),
        *labelled("measured", counted),
        *labelled("machine", f"{where['machine']}, load {where['load_before']:.1f} before"),
        "",
        *_table(result.quantities),
        "",
    ]
    for quantity in result.quantities:
        if quantity.name in ("step", "rank_startup") or len(result.quantities) == 1:
            lines += labelled(_NAMES[quantity.name].split()[0], _sentence(quantity))
    if result.overlap is not None:
        lines += labelled("overlap", _overlap_sentence(result.overlap))
    if own is None:
        lines += labelled("own count", "none: the recorded runs hold no rank, so recording was not measured")
    elif own.share_of_step is not None:
        lines += labelled(
            "own count", f"recording itself counted {_percent(own.share_of_step, signed=False)} of a step"
        )
    for caveat in result.cannot_tell:
        lines += labelled("caveat", caveat)
    return join_lines(lines)


def _table(quantities: Sequence[Quantity]) -> list[str]:
    head = ("", "bare", "recorded", "recorded / bare", "bare / bare")
    rows = [
        (
            _NAMES[quantity.name],
            format_ns(quantity.bare_ns),
            format_ns(quantity.recorded_ns),
            _ratio(quantity.ratio),
            f"{quantity.control.low:.3f} to {quantity.control.high:.3f}",
        )
        for quantity in quantities
    ]
    return format_table([head, *rows])


def _ratio(interval: ConfidenceInterval) -> str:
    return f"{interval.median:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _sentence(quantity: Quantity) -> str:
    ratio, difference = quantity.ratio, quantity.difference_ns
    sure = f"{_confidence(ratio)} confidence"
    if not quantity.differs:
        low, high = _percent(ratio.low - 1), _percent(ratio.high - 1)
        return f"no difference beyond the noise: between {low} and {high}, {sure}"
    word = "longer" if ratio.median > 1 else "shorter"
    text = (
        f"{_percent(abs(ratio.median - 1), signed=False)} {word} when recorded ({_percent(ratio.low - 1)} to "
        f"{_percent(ratio.high - 1)}, {sure}): {format_ns(abs(difference.median))}"
    )
    if not quantity.control.includes(1.0):
        text += "; but bare runs differ from bare runs here, too: measure more pairs on a quieter machine"
    return text


def _overlap_sentence(check: OverlapCheck) -> str:
    low, high = _percent(check.change.low), _percent(check.change.high)
    spread = f"between {low} and {high} of a step, {_confidence(check.change)} confidence"
    base = f"ranks are blocked for {format_fraction(check.blocked_share)} of a bare step"
    if not check.changed:
        return f"{base}; no change beyond the noise when recorded: {spread}"
    word = "longer" if check.change.median > 0 else "shorter"
    text = f"{base}, and {word} when recorded: {spread}"
    return text if check.control.includes(0.0) else f"{text}; but bare runs differ from bare runs here, too"


def _percent(fraction: float, *, signed: bool = True) -> str:
    digits = 1 if abs(fraction) >= 0.01 else 2
    return f"{100 * fraction:{'+' if signed else ''}.{digits}f} %"


def _confidence(interval: ConfidenceInterval) -> str:
    return f"{100 * interval.confidence:.0f} %"
