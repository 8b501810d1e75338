"""The memory of a run in the lines of its summary: peak, model state beside its formula, headroom, growth."""

from collections.abc import Sequence

from dtprof.analysis.results import Assumption, GpuUse, Headroom, RankResult, Summary
from dtprof.formatting import format_bytes, format_fraction, format_held, plural
from dtprof.report.text.labelled_lines import labelled

MAX_TROUBLED = 2
LEAST_HELD = 0.1
"""Share of the samples at work in which a clock was held down, to be worth a line."""
_SCHEMES = {"none": "unsharded", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def memory_lines(summary: Summary) -> list[str]:
    """Return the peak memory, a leak and where memory ran out, then with the headroom; nothing where unknown."""
    lines = [*_peak_lines(summary.ranks), *_growth_lines(summary.ranks), *_exhausted_lines(summary.ranks)]
    return [*lines, *(_headroom_lines(summary.headroom) if _is_short(summary.ranks) else ())]


def capacity_lines(summary: Summary) -> dict[str, list[str]]:
    """Return the lines of the model state beside its formula and of the headroom, by label, as far as known."""
    lines = {
        "model state": _formula_lines(summary.ranks, summary.memory_assumptions),
        "headroom": [] if _is_short(summary.ranks) else _headroom_lines(summary.headroom),  # above, beside the cause
    }
    lines["gpus"] = _gpu_lines(summary.gpus)
    return {label: shown for label, shown in lines.items() if shown}


def _is_short(ranks: Sequence[RankResult]) -> bool:
    return any(rank.out_of_memory or (rank.memory_growth is not None and rank.memory_growth.leaks) for rank in ranks)


def _exhausted_lines(ranks: Sequence[RankResult]) -> list[str]:
    """Return what the first rank that ran out of memory held then, and how many others did."""
    failed = [(failure.t_ns, rank.rank, failure) for rank in ranks for failure in rank.out_of_memory[:1]]
    if not failed:
        return []
    _, rank, failure = min(failed, key=lambda item: item[:2])
    others = f", and {plural(len(failed) - 1, 'other rank')}" if len(failed) > 1 else ""
    held = f"; it held {format_held(failure.held_bytes)}" if any(failure.held_bytes.values()) else ""
    return labelled("ran out", f"of memory on {failure.device}: rank {rank}{others}{held}")


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
    result = next(result for result in ranks if result.rank == rank)
    held = result.memory_categories
    if result.fragmentation is not None:
        lowest += f", fragmentation {format_fraction(result.fragmentation)}"
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in held.items() if size]
    what = f": {', '.join(parts)}" if parts else ""
    return labelled("peak memory", f"{format_bytes(most)} on rank {rank}{lowest}{what}")


def _formula_lines(ranks: Sequence[RankResult], assumptions: Sequence[Assumption]) -> list[str]:
    """Return the model state of the rank with the highest peak beside its formula, and that of other schemes."""
    known = [(rank.peak_bytes or 0, -rank.rank, rank.memory_formula) for rank in ranks if rank.memory_formula]
    if not known:
        return []
    formula = max(known)[2]
    held = "not known" if formula.state_bytes is None else f"holds {format_bytes(formula.state_bytes)}"
    text = f"{held}, by formula {format_bytes(formula.state_formula_bytes)}"
    others = [f"{_SCHEMES[name]} {format_bytes(size)}" for name, size in formula.by_scheme_bytes.items()]
    if formula.shards > 1:
        text += f" (over {formula.shards} ranks: {', '.join(others)})"
    if formula.activation_bytes is not None and formula.activation_formula_bytes is not None:
        activations, expected = format_bytes(formula.activation_bytes), format_bytes(formula.activation_formula_bytes)
        text += f"; activations {activations}, by formula {expected}"
    broken = [assumption.text for assumption in assumptions if assumption.holds is False]
    if broken:
        text += f"; formulas assume what does not hold here: {'; '.join(broken)}"
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


def _gpu_lines(gpus: Sequence[GpuUse]) -> list[str]:
    """Return how the GPUs worked together, then what is wrong with the first of those with which something is."""
    if not gpus:
        return []
    busy = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    clocks = [gpu.sm_clock_mhz for gpu in gpus if gpu.sm_clock_mhz is not None]
    heat = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    parts = [f"{format_fraction(sum(busy) / len(busy))} busy"] if busy else []
    if clocks:
        least = f"{min(clocks):.0f} to " if min(clocks) < max(clocks) else ""
        parts.append(f"{least}{max(clocks):.0f} MHz at work")
    parts += [f"up to {max(heat):.0f} \u00b0C"] if heat else []
    lines = labelled("gpus", f"{plural(len(gpus), 'GPU')} sampled{': ' if parts else ''}{', '.join(parts)}")
    troubled = [(gpu, words) for gpu in gpus if (words := _trouble_words(gpu))]
    for gpu, words in troubled[:MAX_TROUBLED]:
        lines += labelled("", f"{gpu.device} of {gpu.host}: {', '.join(words)}")
    if len(troubled) > MAX_TROUBLED:
        lines += labelled("", f"and {plural(len(troubled) - MAX_TROUBLED, 'more GPU')} in the report")
    return lines


def _trouble_words(gpu: GpuUse) -> list[str]:
    held = {name: share for name, share in (gpu.held_down or {}).items() if share >= LEAST_HELD}
    words = [f"held down by {name} for {format_fraction(share)} of its work" for name, share in held.items()]
    words += [plural(gpu.ecc_uncorrected, "uncorrected memory error")] if gpu.ecc_uncorrected else []
    words += [f"Xid {gpu.last_xid}"] if gpu.xid_errors and gpu.last_xid is not None else []
    words += ["lost to its driver"] if gpu.lost else []
    return words
