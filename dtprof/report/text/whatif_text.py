"""A prediction in text of 80 columns: the answer first, then the slowdowns of the run, then each change."""

import shlex
from collections.abc import Sequence

from dtprof.analysis.whatif.prediction import LEAST_GAIN, NO_GAIN, Prediction, Scenario
from dtprof.formatting import format_fraction, format_ns, format_table, join_lines, list_ranks
from dtprof.report.text.labelled_lines import labelled

LABEL = 10
MAX_ROWS = 12
MAX_PARTS = 4
WORTH_SAYING = 0.005
"""Of the step: parts that slow the run down by less are not listed."""
WORTH_DIVIDING = 1.03
"""Slowdowns below this are not listed."""


def whatif_text(result: Prediction) -> str:
    """Return the text."""
    lines: list[str] = []
    if result.scenarios:
        lines += labelled("what if", _headline(result), LABEL)
    if result.replay_error is not None:
        used = f"steps {result.steps[0]} to {result.steps[1]}" if result.steps else "steps"
        lines += labelled(
            "replay",
            f"{used}: measured {format_ns(result.measured_step_ns)}, replayed {format_ns(result.replayed_step_ns)} a "
            f"step: error {format_fraction(result.replay_error, 2)}",
            LABEL,
        )
    slow = result.slowdowns
    if slow is not None and slow.slowdown is not None:
        parts = [f"{name} {share:.3f}x" for name, share in slow.by_operation.items() if share > 1 + WORTH_SAYING]
        ranks = [f"rank {name} {share:.3f}x" for name, share in slow.by_rank.items() if share > 1 + WORTH_SAYING]
        stages = [f"stage {name} {share:.3f}x" for name, share in slow.by_stage.items() if share > 1 + WORTH_SAYING]
        ideal = f"{format_ns(slow.ideal_ns)} a step; the replayed step takes {slow.slowdown:.3f}x as long"
        lines += labelled("ideal", ideal, LABEL)
        for some in (parts, ranks, stages):
            if some:
                lines += labelled("", ", ".join(some[:MAX_PARTS]), LABEL)
        shares = [
            f"{_format_recovered(share)} if {where} ideal"
            for where, share in ((_are(slow.slowest_ranks), slow.m_w), ("the last stage is", slow.m_s))
            if share is not None and share > WORTH_SAYING
        ]
        if shares and slow.slowdown > WORTH_DIVIDING:
            lines += labelled("", ", ".join(shares), LABEL)
    known = [scenario for scenario in result.scenarios if scenario.gain is not None]
    if known:
        shown = result.telling[:MAX_ROWS]
        lines += ["", *format_table([("change", "step", "gain", "between"), *map(_row, shown)])]
        if len(shown) < len(known):
            hidden, small = len(known) - len(shown), len(known) - len(result.telling)
            which = f", {'' if small == hidden else f'{small} of them '}of 0.0 %" if small else ""
            lines.append(f"{hidden} more{which}: --json")
        lines.append("")
        assumed = (part for scenario in shown for part in scenario.assumes.split("; ") if part)
        for assumption in dict.fromkeys(assumed):
            lines += labelled("assumes", assumption, LABEL)
    for reason in result.cannot_tell:
        lines += labelled("caveat", reason, LABEL)
    lines.append(f"{'next':<{LABEL}}dtprof report {shlex.quote(result.run)}")
    return join_lines(lines)


def _headline(result: Prediction) -> str:
    known = [scenario for scenario in result.scenarios if scenario.gain is not None]
    if not known:
        return "not predicted"
    best = known[0] if len(result.scenarios) == 1 else result.best
    if best is None or best.gain is None:
        return NO_GAIN
    name = " with ".join(best.fix)
    change = f"{100 * abs(best.gain):.1f} % {'shorter' if best.gain >= 0 else 'longer'}"
    between = _between(best.interval, is_loss=best.gain < 0)
    return f"{name}: steps of {format_ns(best.step_ns)}, {change}{f' ({between})' if between else ''}"


def _are(ranks: Sequence[int]) -> str:
    """Return `rank 3 is`, `ranks 3, 7 are`; of many ranks their number."""
    if len(ranks) > MAX_PARTS:
        return f"the {len(ranks)} slowest ranks are"
    return f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _format_recovered(share: float) -> str:
    """Return how much of the slowdown goes; with one part ideal a step may be shorter than with all at their means."""
    return f"{'all' if share >= 1 else format_fraction(share, 0)} of the slowdown goes"


def _between(gain: tuple[float, float] | None, *, is_loss: bool = False) -> str:
    """Return the bounds of a gain, lowest first; of a loss, beside words that say `longer`, with the signs of those."""
    if gain is None:
        return ""
    return " to ".join(map(_percent, (-gain[1], -gain[0]) if is_loss else gain))


def _row(scenario: Scenario) -> tuple[str, ...]:
    gain = _percent(scenario.gain) if scenario.gain is not None else "-"
    return " ".join(scenario.fix), format_ns(scenario.step_ns), gain, _between(scenario.interval)


def _percent(share: float) -> str:
    return f"{100 * share if abs(share) >= LEAST_GAIN else 0:.1f} %"
