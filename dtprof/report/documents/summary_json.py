"""A summary as JSON, schema 1; docs/reference/metrics.md explains every figure.

Times are in ns, sizes in bytes, fractions from 0 to 1. What is not known is null; the reason is under `cannot_tell`.
"""

from dataclasses import asdict
from typing import Any

from dtprof.analysis.results import RankResult, Summary

SCHEMA = 1


def summary_json(summary: Summary) -> dict[str, Any]:
    """Return the document."""
    steps, throughput = summary.steps, summary.throughput
    return {
        "schema": SCHEMA,
        "run": summary.run,
        "command": list(summary.command),
        "world_size": summary.world_size,
        "hosts": list(summary.hosts),
        "backend": summary.backend,
        "torch": summary.torch,
        "tap": summary.hook,
        "complete": summary.complete,
        "missing_ranks": list(summary.missing_ranks),
        "events": summary.events,
        "dropped_events": summary.dropped_events,
        "clock_error_ns": summary.clock_error_ns,
        "wall_ns": summary.wall_ns,
        "clocks": [asdict(clock) for clock in summary.clocks],
        "overhead": asdict(summary.overhead),
        "groups": [
            {"name": group.name, "description": group.description, "ranks": list(group.ranks), "axis": group.axis}
            for group in summary.groups
        ],
        "steps": {
            "count": steps.count,
            "used": list(steps.used) if steps.used else None,
            "duration_ns": asdict(steps.duration_ns) if steps.duration_ns else None,
            "tokens": throughput.tokens_per_step if throughput else None,
            "samples": throughput.samples_per_step if throughput else None,
        },
        "tokens_per_s": throughput.tokens_per_s if throughput else None,
        "samples_per_s": throughput.samples_per_s if throughput else None,
        "ranks": [_rank(rank) for rank in summary.ranks],
        "collectives": [asdict(row) for row in summary.collectives],
        "small_messages": [asdict(row) for row in summary.small_messages],
        "serialised": [asdict(row) for row in summary.serialised],
        "pipeline": asdict(summary.pipeline) if summary.pipeline is not None else None,
        "stragglers": [asdict(straggler) for straggler in summary.stragglers],
        "headroom": [asdict(one) for one in summary.headroom],
        "memory_assumptions": [asdict(one) for one in summary.memory_assumptions],
        "critical_path": asdict(summary.critical_path) if summary.critical_path is not None else None,
        "cannot_tell": list(summary.cannot_tell),
    }


def _rank(rank: RankResult) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "step_ns": rank.step_ns,
        "partition_ns": rank.partition_ns,
        "phases_ns": rank.phases_ns,
        "user_phases_ns": rank.user_phases_ns,
        "memory": {
            "peak_bytes": rank.peak_bytes,
            "categories": rank.memory_categories,
            "largest_bytes": {name: value for name, value in rank.memory_bytes.items() if name.endswith("_bytes")},
            "formula": asdict(rank.memory_formula) if rank.memory_formula is not None else None,
            "growth": asdict(rank.memory_growth) if rank.memory_growth is not None else None,
            "out_of_memory": [
                {
                    "device": one.device,
                    "live_bytes": one.live_bytes,
                    "held_bytes": one.held_bytes,
                    "largest": one.largest,
                    "allocations": list(one.allocations),
                }
                for one in rank.out_of_memory
            ],
        },
        "events": rank.events,
        "ended": rank.ended,
    }
