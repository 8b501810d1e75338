"""Results as clauses for people, the same in text, Markdown, pages and live views; findings bring their own words."""

from dtprof.analysis.communication.communication_sites import find_costliest_line
from dtprof.analysis.results import RepeatedReductions, Summary, UnevenInput, phase_words
from dtprof.formatting import format_fraction, format_ns, list_ranks, plural
from dtprof.job.axes import axis_words
from dtprof.records.nodes.sampled_lines import HotLine


def hot_line_words(line: HotLine) -> str:
    """Say where a line is, which part of the rank's time it takes, and what it does there."""
    share, name = format_fraction(line.share, 0), line.file.rpartition("/")[2]
    inner = "" if line.inner_function == line.function else f", mostly in {line.inner_function}"
    activity = f": {line.does}" if line.does else inner
    return f"{name}:{line.line} in {line.function} takes {share} of the time of rank {line.rank}{activity}"


def input_words(row: UnevenInput) -> str:
    """Say how unequal input is, and what batches of equal size gain."""
    return (
        f"the rank with most {row.quantity} of a step has {row.largest_over_mean:.2f}x the mean of "
        f"{row.mean_per_step:,.0f}, which explains {format_fraction(row.explained, 0)} of the differences in the "
        f"work of ranks: with equal {row.quantity} a step takes {format_ns(row.gain_ns_per_step)} less"
    )


def reductions_words(row: RepeatedReductions) -> str:
    """Say how often gradients are reduced a step, and what to do about it."""
    where = f"; {row.line.words}" if row.line else ""
    return (
        f"DDP reduces each gradient {row.reductions_per_step} times a step over {axis_words(row.axis)}, once a "
        f"backward pass, and blocks the program for {format_ns(row.exposed_ns_per_step)}: no_sync() around all "
        f"backward passes but the last leaves one{where}"
    )


def costliest_line_words(summary: Summary) -> str:
    """Say which line costs most, and how much; nothing where none is known to cost much."""
    site, share = find_costliest_line(summary)
    if site is None or site.line is None:
        return ""
    cost = f"{format_ns(site.exposed_ns_per_step)} a step ({format_fraction(share, 0)})"
    return (
        f"{site.line.words} costs most, {cost}: {site.operation} over {axis_words(site.axis)} {phase_words(site.phase)}"
    )


def advice_words(summary: Summary) -> str:
    """Say what the advised change gains and how far that can be trusted, or why none is named.

    Steps that were replayed are named where they are not all measured ones.
    """
    advice = summary.advice
    if advice is None:
        return ""
    steps = advice.replayed_steps
    part = f"; steps {steps[0]} to {steps[1]} replayed" if steps is not None and steps != summary.steps.used else ""
    if advice.gain is None or advice.interval is None:
        return f"none: {advice.reason}{part}"
    low, high = advice.interval
    at_most = "at most " if advice.is_bound else ""
    return (
        f"{advice.change}: {at_most}{100 * advice.gain:.1f} % shorter steps ({100 * low:.1f} to {100 * high:.1f} %), "
        f"to {format_ns(advice.step_ns)}; replay error {format_fraction(advice.replay_error)}{part}"
    )


def clock_words(summary: Summary) -> str:
    """Say whose times the figures are in."""
    device = summary.device
    if device.error_ns is None:
        return "of the host" if any(rank.clock for rank in summary.ranks) else "as the other tool took them"
    all_ranks = len(device.ranks) == len(summary.ranks)
    of = "of the device" if all_ranks else f"of the device on {list_ranks(device.ranks)}, else of the host"
    lead = "" if device.host_lead_ns is None else f"; the host leads by {format_ns(device.host_lead_ns)}"
    return f"{of}, off by up to {format_ns(device.error_ns)}{lead}"


def missing_words(summary: Summary) -> str:
    """Say how many ranks are missing, and why; nothing where none is."""
    reasons = ((summary.lost_ranks, "left no log"), (summary.left_out_ranks, "not in the last attempt"))
    return ", ".join(f"{plural(len(ranks), 'rank')} {why}" for ranks, why in reasons if ranks)
