"""The figures that matter, as cards, and the mean step as one bar."""

from collections.abc import Mapping
from typing import NamedTuple

from dtprof.analysis.communication.traffic import measure_overlap
from dtprof.analysis.pipeline.bubbles import has_unknown_bubble
from dtprof.analysis.results import BUBBLE, EXPOSED_PARTS, Summary
from dtprof.analysis.steps.throughput import describe_mean_rate
from dtprof.formatting import format_count, format_rate, list_ranks, plural
from dtprof.report.figures.figure_numbers import NBSP, format_bytes, format_duration, format_share
from dtprof.report.figures.palette import hue_of
from dtprof.report.pages.page_markup import Markup, element, join

NOT_KNOWN = "not known"


class KeyFigure(NamedTuple):
    """One card: its name, the figure, and its context."""

    name: str
    value: str
    beside: str


def key_figures(summary: Summary) -> dict[str, KeyFigure]:
    """Return the cards of the overview by the keys of their definitions, in order; unknown figures say so."""
    return {
        "step_time": _step_time(summary),
        "throughput": _throughput(summary),
        "exposed_communication": _exposed_communication(summary),
        "overlap": _overlap(summary),
        "bubble": _bubble(summary),
        "peak_memory": _peak_memory(summary),
        "slowdown": _slowdown(summary),
        "clock_error": _clock_error(summary),
        "overhead": _overhead(summary),
        "events": _events(summary),
    }


def render_key_figures(summary: Summary, definitions: Mapping[str, str]) -> Markup:
    """Return the bar of the mean step and the cards."""
    cards = [
        element(
            "div",
            element("dt", card.name),
            element("dd", card.value, class_="value" if card.value != NOT_KNOWN else "value unknown"),
            element("dd", card.beside, class_="beside"),
            class_="card",
            title=definitions.get(key),
        )
        for key, card in key_figures(summary).items()
    ]
    return join(_render_mean_step(summary), element("dl", *cards, class_="cards"))


def _render_mean_step(summary: Summary) -> Markup:
    known = summary.part_shares
    if known is None:
        return Markup("")
    shares = {part: share for part, share in known.items() if share}
    unknown = [part for part, share in known.items() if share is None]
    segments = [
        element(
            "span",
            style=f"flex-grow:{shares[part]:.5f};--hue:var(--hue-{part})",
            class_="segment",
            title=f"{hue_of(part).label}: {format_share(shares[part])}: {hue_of(part).meaning}",
        )
        for part in shares
    ]
    legend = [
        element(
            "li",
            element("span", class_="swatch", style=f"--hue:var(--hue-{part})"),
            f"{hue_of(part).label} ",
            element("b", format_share(shares[part]) if part in shares else NOT_KNOWN),
        )
        for part in (*shares, *unknown)
    ]
    return element(
        "div",
        element("p", "A step, mean of all ranks", class_="label"),
        element("div", *segments, class_="split", aria_hidden="true"),
        element("ul", *legend, class_="legend"),
        class_="mean-step",
    )


def _step_time(summary: Summary) -> KeyFigure:
    spread, used = summary.steps.duration_ns, summary.steps.used
    if spread is None or used is None:
        return KeyFigure("Step time", NOT_KNOWN, plural(summary.steps.count, "step"))
    low, high = format_duration(spread.p10), format_duration(spread.p90)
    return KeyFigure(
        "Step time",
        format_duration(spread.median),
        f"p10\u2013p90 {low} \u2013 {high}; steps {used[0]}\u2013{used[1]} of {summary.steps.count}",
    )


def _throughput(summary: Summary) -> KeyFigure:
    """Tokens where they are known, else samples: of the whole job."""
    rates = summary.throughput
    tokens, samples = (rates.tokens_per_s, rates.samples_per_s) if rates is not None else (None, None)
    per_step = rates and (rates.samples_per_step if tokens is None else rates.tokens_per_step)
    if tokens is None and samples is None:
        why = next(iter(summary.reasons("tokens_per_s")), "no batch was recognised")
        return KeyFigure("Tokens per second", NOT_KNOWN, why)
    what, rate = ("Samples", samples) if tokens is None else ("Tokens", tokens)
    beside = [f"{per_step:,.0f} a step, all ranks" if per_step else ""]
    if tokens is not None and samples is not None:
        beside.append(f"{format_rate(samples)} samples/s")
    if rates is not None:
        beside.append(describe_mean_rate(rates))
    return KeyFigure(f"{what} per second", format_rate(rate or 0), "; ".join(filter(None, beside)))


def _exposed_communication(summary: Summary) -> KeyFigure:
    name = "Exposed communication"
    shares, exposed = summary.part_shares, summary.exposed_share
    if shares is None or exposed is None:
        return KeyFigure(name, NOT_KNOWN, "no step could be split")
    transfer, wait = (format_share(shares[part] or 0) for part in EXPOSED_PARTS)
    return KeyFigure(name, format_share(exposed), f"of the step: {wait} wait, {transfer} transfer")


def _overlap(summary: Summary) -> KeyFigure:
    overlap = measure_overlap(summary)
    if overlap is None:
        beside = "no collectives" if not summary.collectives else "completion times are missing"
        return KeyFigure("Overlap", NOT_KNOWN, beside)
    return KeyFigure("Overlap", format_share(overlap), "of communication is hidden behind work")


def _bubble(summary: Summary) -> KeyFigure:
    pipeline = summary.pipeline
    name = "Pipeline bubble"
    if pipeline is None and ((summary.part_shares or {}).get(BUBBLE, 0) is None or has_unknown_bubble(summary)):
        return KeyFigure(name, NOT_KNOWN, "the caveats say why")
    if pipeline is None:
        return KeyFigure(name, "none", "no pipeline ran")
    theory = "no formula" if pipeline.theory_fraction is None else f"theory {format_share(pipeline.theory_fraction)}"
    sizes = f"{plural(pipeline.stages, 'stage')}, {plural(pipeline.microbatches, 'microbatch')}"
    whose = "inferred from messages and passes: " if pipeline.inferred else ""
    beside = f"of its window; {theory}; {whose}{pipeline.schedule}, {sizes}"
    return KeyFigure(name, format_share(pipeline.bubble_fraction), beside)


def _peak_memory(summary: Summary) -> KeyFigure:
    peaks = {rank.rank: rank.peak_bytes for rank in summary.ranks if rank.peak_bytes is not None}
    if not peaks:
        return KeyFigure("Peak memory", NOT_KNOWN, "no memory samples")
    worst, least = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
    beside = f"rank {worst}" if worst == least else f"rank {worst}; least {format_bytes(peaks[least])}, rank {least}"
    formula = next(rank.memory_formula for rank in summary.ranks if rank.rank == worst)
    if formula is not None:
        held = NOT_KNOWN if formula.state_bytes is None else format_bytes(formula.state_bytes)
        expected = format_bytes(formula.state_formula_bytes)
        beside += f"; model state {held}, by formula {expected}"
        if any(assumption.holds is False for assumption in summary.memory_assumptions):
            beside += ", whose assumptions do not all hold"
    return KeyFigure("Peak memory", format_bytes(peaks[worst]), beside)


def _slowdown(summary: Summary) -> KeyFigure:
    name = "Slowdown by stragglers"
    worst = summary.worst_straggler
    if worst is None:
        value, beside = NOT_KNOWN, next(iter(summary.reasons("stragglers")), "no waits were measured")
        if summary.world_size == 1:
            value, beside = "none", "one rank waits for nobody"
        elif summary.stragglers is not None:
            value, beside = "none", "no rank holds the others up"
        return KeyFigure(name, value, beside)
    ranks = [straggler.rank for straggler in summary.stragglers or ()]
    blame = worst.blame_ns_per_step
    beside = f"rank {worst.rank}" + (f", costs others {format_duration(blame)} a step" if blame is not None else "")
    if len(ranks) > 1:
        beside = f"{list_ranks(ranks)} together"
    slowdown = summary.straggler_slowdown
    if slowdown is None and worst.slowdown is not None:
        beside += f"; rank {worst.rank} alone {worst.slowdown:.2f}\u00d7"
    return KeyFigure(name, NOT_KNOWN if slowdown is None else f"{slowdown:.2f}\u00d7", beside)


def _clock_error(summary: Summary) -> KeyFigure:
    error, num_hosts = summary.time_error_ns, len(summary.hosts)
    beside = "one host, one clock" if num_hosts == 1 else f"{num_hosts} hosts" if num_hosts else "hosts not known"
    if summary.device.ranks:
        beside = f"times of devices, on {plural(num_hosts, 'host')}"
        if summary.device.host_lead_ns is not None:
            beside += f"; hosts {format_duration(summary.device.host_lead_ns)} ahead"
    if error is None:
        return KeyFigure("Clock error", NOT_KNOWN, beside)
    return KeyFigure("Clock error", f"\u00b1{NBSP}{format_duration(error)}", beside)


def _overhead(summary: Summary) -> KeyFigure:
    overhead = summary.overhead
    per_event = overhead.capture_ns_per_event
    beside = f"{format_duration(per_event)} an event" if per_event is not None else "no events"
    if overhead.share_of_step is None:
        return KeyFigure("Own overhead", NOT_KNOWN, beside)
    return KeyFigure(
        "Own overhead",
        format_share(overhead.share_of_step),
        f"of the step; {beside}" + (f", {summary.hook} hook" if summary.hook else ""),
    )


def _events(summary: Summary) -> KeyFigure:
    lost = [f"{format_count(summary.dropped_events)} dropped"] if summary.dropped_events else []
    if summary.missing_ranks:
        lost.append(f"{plural(len(summary.missing_ranks), 'rank')} missing")
    return KeyFigure(
        "Events",
        format_count(summary.events),
        f"{plural(len(summary.ranks), 'rank')} of {summary.world_size}; "
        + (", ".join(lost) or "none dropped, none missing"),
    )
