"""The memory of one rank: its peak, its categories, and the largest value of each sample."""

from collections.abc import Mapping

from dtprof.columns import distinct
from dtprof.records import events
from dtprof.records.tables import RankTables

CATEGORIES = (*events.MEMORY_CATEGORIES, "other")
PEAKS = (events.CUDA_PEAK_ALLOCATED_BYTES, events.PEAK_RSS_BYTES)
"""Where a peak is taken from: of the device's allocated memory where one is used, else of the resident set."""


def find_largest(tables: RankTables) -> dict[str, int]:
    """Return the largest value of each sample."""
    largest: dict[str, int] = {}
    for op in distinct(tables.samples["op"]).tolist():
        if op < len(tables.ops):
            value = int(tables.samples["value"][tables.samples["op"] == op].max())
            largest[tables.ops[op]] = max(value, largest.get(tables.ops[op], 0))
    return largest


def find_peak(largest: Mapping[str, int]) -> int | None:
    """Return the peak, given the largest value of each sample; None where memory was not sampled."""
    return next((largest[name] for name in PEAKS if name in largest), None)


def find_fragmentation(largest: Mapping[str, int]) -> float | None:
    """Return the share of the memory that the allocator of the device held and nobody used; None without a device.

    1 - allocated / reserved, both at their peaks; `largest` is the largest value of each sample.
    """
    allocated, reserved = largest.get(events.CUDA_PEAK_ALLOCATED_BYTES), largest.get(events.CUDA_PEAK_RESERVED_BYTES)
    return max(0.0, 1 - allocated / reserved) if allocated is not None and reserved else None


def find_categories(largest: Mapping[str, int]) -> dict[str, int | None]:
    """Return the peak of each category, None where it is not known; empty where none is known.

    `largest` is the largest value of each sample.

    The most of each need not have been held at one moment: `other` is what of the peak is left, and not below 0.
    Buffers of communication on a host may be reserved and not used: those larger than the peak are not known.
    """
    peak = find_peak(largest)
    held = {category: largest.get(name) for category, name in events.MEMORY_CATEGORIES.items()}
    if peak is None or held["parameters"] is None:
        return {}
    if (held["communication"] or 0) > peak:
        held["communication"] = None
    held["other"] = max(0, peak - sum(filter(None, held.values())))
    return held
