"""The memory of a run in the lines of its summary: peak, model state beside its formula, headroom, growth."""

from collections.abc import Sequence

from dtprof.analysis.results import Headroom, RankResult, Summary
from dtprof.formatting import format_bytes
from dtprof.report.text.labelled_lines import labelled

_SCHEMES = {"none": "not spread", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def memory_lines(summary: Summary) -> list[str]:
    """Return what is held, and what grows; nothing where that is not known."""
    return [*_peak_lines(summary.ranks), *_growth_lines(summary.ranks)]


def capacity_lines(summary: Summary) -> list[str]:
    """Return what should be held, and what room is left; nothing where that is not known."""
    return [*_formula_lines(summary.ranks), *_headroom_lines(summary.headroom)]


def _growth_lines(ranks: Sequence[RankResult]) -> list[str]:
    leaking = [(one.memory_growth, one.rank) for one in ranks if one.memory_growth and one.memory_growth.leaks]
    if not leaking:
        return []
    growth, rank = max(leaking, key=lambda item: item[0].bytes_per_step)
    low, high = format_bytes(int(growth.low_bytes_per_step)), format_bytes(int(growth.high_bytes_per_step))
    text = f"grows by {format_bytes(int(growth.bytes_per_step))} a step ({low} to {high}) on rank {rank}"
    more = f", and on {len(leaking) - 1} other rank{'s' if len(leaking) > 2 else ''}" if len(leaking) > 1 else ""
    return labelled("memory leak", text + more, max_lines=2)


def _peak_lines(ranks: Sequence[RankResult]) -> list[str]:
    peaks = [(rank.peak_bytes, rank.rank) for rank in ranks if rank.peak_bytes is not None]
    if not peaks:
        return []
    (most, rank), (least, _) = max(peaks), min(peaks)
    lowest = f", least {format_bytes(least)}" if len(peaks) > 1 else ""
    held = next(result.memory_categories for result in ranks if result.rank == rank)
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in held.items() if size]
    what = f": {', '.join(parts)}" if parts else ""
    return labelled("peak memory", f"{format_bytes(most)} on rank {rank}{lowest}{what}", max_lines=3)


def _formula_lines(ranks: Sequence[RankResult]) -> list[str]:
    """Return the model state of the rank with the highest peak beside its formula, and what other schemes take."""
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
    return labelled("model state", text, max_lines=2)


def _headroom_lines(found: Sequence[Headroom]) -> list[str]:
    if not found:
        return []
    least = found[0]
    where = {"host": least.host, "container": f"{least.host}, in its container"}.get(
        least.device, f"{least.device} of {least.host}"
    )
    return labelled(
        "headroom", f"{format_bytes(least.headroom_bytes)} of {format_bytes(least.capacity_bytes)} left on {where}"
    )
