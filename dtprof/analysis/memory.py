"""The memory of one rank: its peak, what it is held for, and the largest value of each sample."""

import numpy as np

from dtprof import events
from dtprof.tables import RankTables

CATEGORIES = (*events.MEMORY_CATEGORIES, "other")
PEAKS = (events.CUDA_PEAK_ALLOCATED_BYTES, events.PEAK_RSS_BYTES)
"""Where a peak is taken from: of the device's allocated memory where one is used, else of the resident set."""


def find_largest(tables: RankTables) -> dict[str, int]:
    """Return the largest value of each sample."""
    found: dict[str, int] = {}
    for op in np.unique(tables.samples["op"]).tolist():
        if op < len(tables.ops):
            value = int(tables.samples["value"][tables.samples["op"] == op].max())
            found[tables.ops[op]] = max(value, found.get(tables.ops[op], 0))
    return found


def find_peak(tables: RankTables) -> int | None:
    """Return the peak; None where memory was not sampled."""
    largest = find_largest(tables)
    return next((largest[name] for name in PEAKS if name in largest), None)


def find_categories(tables: RankTables) -> dict[str, int | None]:
    """Return the most that was held for each purpose, None where not known; empty where nothing is known.

    The most of each need not have been held at one moment: `other` is what of the peak is left, and not below 0.
    """
    largest, peak = find_largest(tables), find_peak(tables)
    held = {category: largest.get(name) for category, name in events.MEMORY_CATEGORIES.items()}
    if peak is None or held["parameters"] is None:
        return {}
    held["other"] = max(0, peak - sum(filter(None, held.values())))
    return held
