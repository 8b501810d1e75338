"""Plans in text of 80 columns: the best first, then the error of a plan, then the refused layouts."""

from dtprof.analysis.planning.plans import AXES, Plan
from dtprof.analysis.planning.run_calibration import PlanResult
from dtprof.formatting import format_bytes, format_fraction, format_ns, format_table, join_lines, plural
from dtprof.report.text.labelled_lines import labelled

LABEL = 10
MAX_REFUSED, MAX_NAMED = 4, 8
"""Reasons that are listed, and layouts of each."""


def plan_text(result: PlanResult) -> str:
    """Return the text."""
    plans = result.plans
    lines: list[str] = []
    if plans.plans:
        best = plans.plans[0]
        step = f"a step of {format_ns(best.step_ns)}, " if best.step_ns is not None else ""
        lines += labelled(
            "best", f"{describe_layout(best)}: {step}{format_bytes(sum(best.memory_bytes.values()))} a rank", LABEL
        )
        rows = [("layout", "step", "bubble", "exposed", "memory"), *map(_row, plans.plans)]
        lines += ["", *format_table(rows), ""]
    else:
        lines += labelled("best", "none of the layouts fits", LABEL)
    lines += labelled("layouts", f"{plans.considered:,} with schedules and microbatches", LABEL)
    for checked in result.checked:
        off = f"{100 * checked.off:+.1f} %" if checked.off is not None else "not known"
        lines += labelled(
            "check",
            f"{checked.figure}: planned {_figure(checked.figure, checked.planned)}, measured "
            f"{_figure(checked.figure, checked.measured)}: {off}",
            LABEL,
        )
    by_reason: dict[str, list[str]] = {}
    for refused in plans.refused:
        by_reason.setdefault(refused.reason, []).append(_axes(refused.layout))
    for reason, layouts in list(by_reason.items())[:MAX_REFUSED]:
        more = f" and {len(layouts) - MAX_NAMED} more" if len(layouts) > MAX_NAMED else ""
        lines += labelled("refused", f"{', '.join(layouts[:MAX_NAMED])}{more}: {reason}", LABEL)
    if len(by_reason) > MAX_REFUSED:
        lines += labelled("", f"for {plural(len(by_reason) - MAX_REFUSED, 'more reason')}: --json", LABEL)
    for reason in (*plans.cannot_tell, *result.reasons):
        lines += labelled("caveat", reason, LABEL)
    return join_lines(lines)


def describe_layout(plan: Plan) -> str:
    """Return a layout in words."""
    sizes = _axes({axis: getattr(plan, axis) for axis in AXES})
    if plan.pp > 1:
        return f"{sizes}, {plan.schedule} of {plan.microbatches}"
    return f"{sizes}, {plan.microbatches} accumulated" if plan.microbatches > 1 else sizes


def _axes(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one rank"


def _row(plan: Plan) -> tuple[str, ...]:
    return (
        describe_layout(plan),
        format_ns(plan.step_ns),
        format_fraction(plan.bubble_fraction) if plan.bubble_fraction else "0",
        format_ns(plan.exposed_ns),
        format_bytes(sum(plan.memory_bytes.values())),
    )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "not known"
    if name.endswith("_ns"):
        return format_ns(value)
    return format_bytes(value) if name.endswith("_bytes") else format_fraction(value)
