"""The figures of a node as Prometheus' metrics."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import Metric

from dtprof import __version__
from dtprof.interchange.metric_families import DeclaredMetric, Histogram
from dtprof.job.world_size import resolve_world_size
from dtprof.monitor.prometheus import metric_catalogue as c
from dtprof.monitor.prometheus.node_metrics import list_node_metrics
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.prometheus.node_tally import KNOWN_OF, NodeTally, RankTally
from dtprof.monitor.prometheus.step_counts import no_counts
from dtprof.records import events

FOREMOST = 8
"""Ranks most waited for that have series of their own where there are too many to tell of all."""
MEMORY_KINDS = {
    "rss": events.RSS_BYTES,
    "device_allocated": events.CUDA_ALLOCATED_BYTES,
    "device_reserved": events.CUDA_RESERVED_BYTES,
}


def list_metrics(tally: NodeTally, state: NodeState, *, shown: Sequence[int], cpu_s: float) -> list[Metric]:
    """Return all metrics.

    Parameters:
        tally: of the ranks of this node.
        state: of the node.
        shown: ranks that have series of their own.
        cpu_s: processor time that this has taken so far.
    """
    ranks = [*tally.ranks.values()]
    every = tally.every
    newest = ranks[0].tables if ranks else None
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    oldest = min((own.oldest_open_ns for own in ranks if own.oldest_open_ns is not None), default=now_ns)
    last_ns = max((own.last_ns for own in ranks), default=0)
    torch = newest.torch_version if newest is not None else ""
    return [
        c.RUN_INFO.single(1, state.run, state.host, __version__, torch),
        c.RANKS.single(len(ranks)),
        c.WORLD_SIZE.single(_world_size(ranks) or None),
        c.HANG.single(int(state.is_hung)),
        c.LAST_PROGRESS.single((last_ns + time.time_ns() - now_ns) / 1e9 if last_ns else None),
        c.OLDEST_OPEN.single(max(0, now_ns - oldest) / 1e9),
        *_operations(tally),
        c.STEP_DURATION.family({(): _durations(every)} if every else {}),
        c.PHASE.family(_phases(tally)),
        *_consumed(tally),
        *_ranks(tally.ranks, shown),
        c.MEMORY_HELD.family(_held(ranks)),
        c.EVENTS.single(sum(own.num_events for own in every)),
        c.DROPPED.single(sum(own.tables.dropped_events for own in every)),
        c.TRUNCATED.single(int(state.truncated)),
        c.CAPTURE.single(sum(own.tables.capture_ns for own in every) / 1e9),
        c.COLLECT.single(cpu_s),
        c.MISSED.single(sum(own.lost for own in every)),
        c.OOM_KILLS.single(state.oom_kills),
        *list_node_metrics(state),
    ]


def _world_size(ranks: Sequence[RankTally]) -> int:
    newest = max((own.tables.attempt for own in ranks), default=0)
    tables = [own.tables for own in ranks if own.tables.attempt == newest]
    return resolve_world_size((table.world_size for table in tables), (table.rank for table in tables))


def choose_ranks(tally: NodeTally, shown: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks to have series of their own: all, or those shown before and those most waited for now."""
    if len(tally.ranks) <= c.MAX_RANKS:
        return tuple(sorted(tally.ranks))
    foremost = sorted(tally.ranks, key=lambda rank: (-(tally.ranks[rank].waited_for_ns or 0), rank))[:FOREMOST]
    return (*shown, *(rank for rank in foremost if rank not in shown))[: c.MAX_RANKS]


def _operations(tally: NodeTally) -> Iterable[Metric]:
    def table(metric: DeclaredMetric, name: str, scale: float | None = None) -> Metric:
        values = tally.sums[name]
        counted = values if name == "open" else tally.sums[KNOWN_OF.get(name, "count")]
        return metric.family(
            {
                (group, op): int(values[i, j]) if scale is None else float(values[i, j]) / scale
                for i, group in enumerate(tally.groups)
                for j, op in enumerate(tally.ops)
                if counted[i, j] > 0
            }
        )

    yield table(c.OPEN, "open")
    yield table(c.OPERATIONS, "count")
    yield table(c.BYTES, "nbytes")
    yield table(c.FAILED, "failed")
    yield table(c.DURATION, "duration_ns", 1e9)
    yield table(c.BLOCKED, "blocked_ns", 1e9)
    yield table(c.WAIT, "wait_ns", 1e9)


def _durations(ranks: Iterable[RankTally]) -> Histogram:
    counts, total_ns = no_counts(), 0
    for own in ranks:
        mine, ns = own.steps.durations()
        counts = [a + b for a, b in zip(counts, mine, strict=True)]
        total_ns += ns
    return Histogram(bounds=c.STEP_BOUNDS, counts=tuple(counts), total=total_ns / 1e9)


def _ranks(ranks: Mapping[int, RankTally], shown: Sequence[int]) -> Iterable[Metric]:
    figures: tuple[tuple[DeclaredMetric, float, Callable[[RankTally], int | None]], ...] = (
        (c.RANK_STEPS, 1, lambda own: own.steps.num_ended),
        (c.RANK_STEP, 1e9, lambda own: own.steps.durations()[1]),
        (c.RANK_BLOCKED, 1e9, lambda own: own.blocked_ns),
        (c.RANK_WAIT, 1e9, lambda own: own.wait_ns),
        (c.RANK_WAITED_FOR, 1e9, lambda own: own.waited_for_ns),
    )
    for metric, scale, figure in figures:
        known = {rank: value for rank in shown if (value := figure(ranks[rank])) is not None}
        yield metric.family({(str(rank),): value / scale for rank, value in known.items()})
    yield c.RANK_MEMORY.family(
        {
            (str(rank), kind): ranks[rank].memory[name]
            for rank in shown
            for kind, name in MEMORY_KINDS.items()
            if name in ranks[rank].memory
        }
    )


def _phases(tally: NodeTally) -> dict[tuple[str, ...], float]:
    times = tally.phase_ns.tolist()
    return {(name,): times[number] / 1e9 for number, name in enumerate(tally.phases)}


def _consumed(tally: NodeTally) -> Iterable[Metric]:
    for metric, total in zip((c.TOKENS, c.SAMPLES), tally.consumed().tolist(), strict=True):
        yield metric.single(total or None)  # what nothing is known of is no 0


def _held(ranks: Sequence[RankTally]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for category, name in events.MEMORY_CATEGORIES.items():
        held = [own.memory[name] for own in ranks if name in own.memory]
        if held:
            found[category,] = max(held)
    return found
