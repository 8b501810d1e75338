"""A summary as JSON, schema 1; docs/reference/metrics.md explains every figure.

Times are in ns, sizes in bytes, fractions from 0 to 1. What is not known is null; the reason is under `cannot_tell`.
"""

from dataclasses import asdict, is_dataclass
from typing import Any

from dtprof.analysis.results import RankResult, Summary

SCHEMA = 1
NAMES = {"hook": "tap"}
"""Names that readers of schema 1 rely on, where the summary has another."""
DRAWN_ONLY = ("left_out_ranks", "step_series", "timeline")
"""Fields that charts and sentences are made of."""


def summary_json(summary: Summary) -> dict[str, Any]:
    """Return the document: the fields of the summary in their order."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for name, value in vars(summary).items():
        if name == "throughput":  # its figures stand beside those of the steps
            rates = summary.throughput
            document["steps"] |= {
                "tokens": rates and rates.tokens_per_step,
                "samples": rates and rates.samples_per_step,
                "mean_tokens_per_s": rates and rates.mean_tokens_per_s,
                "mean_samples_per_s": rates and rates.mean_samples_per_s,
            }
            document |= {"tokens_per_s": rates and rates.tokens_per_s, "samples_per_s": rates and rates.samples_per_s}
        elif name == "ranks":
            document[name] = [_rank(rank) for rank in summary.ranks]
        elif name == "cannot_tell":
            document[name] = list(summary.cannot_tell)
        elif name not in DRAWN_ONLY:
            document[NAMES.get(name, name)] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _rank(rank: RankResult) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "clock": rank.clock,
        "host_lead_ns": rank.host_lead_ns,
        "step_ns": rank.step_ns,
        "partition_ns": rank.partition_ns,
        "partition_error_ns": rank.partition_error_ns,
        "phases_ns": rank.phases_ns,
        "user_phases_ns": rank.user_phases_ns,
        "memory": {
            "peak_bytes": rank.peak_bytes,
            "fragmentation": rank.fragmentation,
            "categories": rank.memory_categories,
            "largest_bytes": {name: value for name, value in rank.memory_bytes.items() if name.endswith("_bytes")},
            "formula": asdict(rank.memory_formula) if rank.memory_formula is not None else None,
            "growth": asdict(rank.memory_growth) if rank.memory_growth is not None else None,
            "out_of_memory": [
                {name: value for name, value in asdict(failure).items() if name not in ("t_ns", "message")}
                for failure in rank.out_of_memory
            ],
        },
        "events": rank.events,
        "ended": rank.ended,
    }
