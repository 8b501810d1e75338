"""The memory of a run in the lines of its summary: peak, model state beside its formula, headroom, growth."""

from collections.abc import Sequence

from dtprof.analysis.results import Headroom, RankResult, Summary
from dtprof.formatting import format_bytes, plural
from dtprof.report.text.labelled_lines import labelled

_SCHEMES = {"none": "unsharded", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def memory_lines(summary: Summary) -> list[str]:
    """Return the peak memory and a leak; nothing where they are unknown."""
    return [*_peak_lines(summary.ranks), *_growth_lines(summary.ranks)]


def capacity_lines(summary: Summary) -> dict[str, list[str]]:
    """Return the lines of the model state beside its formula and of the headroom, by label, as far as known."""
    lines = {"model state": _formula_lines(summary.ranks), "headroom": _headroom_lines(summary.headroom)}
    return {label: shown for label, shown in lines.items() if shown}


def _growth_lines(ranks: Sequence[RankResult]) -> list[str]:
    leaking = [(rank.memory_growth, rank.rank) for rank in ranks if rank.memory_growth and rank.memory_growth.leaks]
    if not leaking:
        return []
    growth, rank = max(leaking, key=lambda item: item[0].bytes_per_step)
    low, high = format_bytes(int(growth.low_bytes_per_step)), format_bytes(int(growth.high_bytes_per_step))
    text = f"grows by {format_bytes(int(growth.bytes_per_step))} a step ({low} to {high}) on rank {rank}"
    more = f", and on {plural(len(leaking) - 1, 'other rank')}" if len(leaking) > 1 else ""
    return labelled("memory leak", text + more)


def _peak_lines(ranks: Sequence[RankResult]) -> list[str]:
    peaks = [(rank.peak_bytes, rank.rank) for rank in ranks if rank.peak_bytes is not None]
    if not peaks:
        return []
    (most, rank), (least, _) = max(peaks), min(peaks)
    lowest = f", lowest {format_bytes(least)}" if len(peaks) > 1 else ""
    held = next(result.memory_categories for result in ranks if result.rank == rank)
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in held.items() if size]
    what = f": {', '.join(parts)}" if parts else ""
    return labelled("peak memory", f"{format_bytes(most)} on rank {rank}{lowest}{what}")


def _formula_lines(ranks: Sequence[RankResult]) -> list[str]:
    """Return the model state of the rank with the highest peak beside its formula, and that of other schemes."""
    known = [(rank.peak_bytes or 0, -rank.rank, rank.memory_formula) for rank in ranks if rank.memory_formula]
    if not known:
        return []
    formula = max(known)[2]
    text = f"holds {format_bytes(formula.state_bytes)}, by formula {format_bytes(formula.state_formula_bytes)}"
    others = [f"{_SCHEMES[name]} {format_bytes(size)}" for name, size in formula.by_scheme_bytes.items()]
    if formula.shards > 1:
        text += f" (over {formula.shards} ranks: {', '.join(others)})"
    if formula.activation_bytes is not None and formula.activation_formula_bytes is not None:
        activations, expected = format_bytes(formula.activation_bytes), format_bytes(formula.activation_formula_bytes)
        text += f"; activations {activations}, by formula {expected}"
    return labelled("model state", text)


def _headroom_lines(headrooms: Sequence[Headroom]) -> list[str]:
    if not headrooms:
        return []
    least = headrooms[0]
    where = {"host": least.host, "container": f"{least.host}, in its container"}.get(
        least.device, f"{least.device} of {least.host}"
    )
    return labelled(
        "headroom", f"{format_bytes(least.headroom_bytes)} of {format_bytes(least.capacity_bytes)} left on {where}"
    )
