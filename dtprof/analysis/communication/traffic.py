"""Traffic between ranks, waits of ranks for ranks, and durations of operations by size."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.rank_pairs import Places, RankPairs, pair_ranks
from dtprof.analysis.results import GroupLateness, Summary
from dtprof.columns import percentiles
from dtprof.intervals import Column
from dtprof.job.collective_matching import FAR, OperationInstances


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """The arrivals at the operations of one group: how long the first waited for the last."""

    group: str
    ranks: tuple[int, ...]
    last: dict[int, int]  # operations that each rank entered last, more than TICK_NS behind the first
    spread_ns: tuple[int, ...]  # quantiles of the time from first to last: 10, 50, 90, 99 %
    count: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of the whole run; empty where nothing was recorded."""

    ranks: tuple[int, ...]
    sent: RankPairs | None  # bytes of messages; None without messages
    lateness: tuple[Lateness, ...]


TICK_NS = 1_000
QUANTILES = (10, 50, 90, 99)


def find_traffic(sent_bytes: Mapping[int, Mapping[int, int]], instances: OperationInstances, places: Places) -> Traffic:
    """Return the bytes sent between the ranks of `sent_bytes`; the instances say who arrived last."""
    ranks = tuple(sent_bytes)
    return Traffic(ranks=ranks, sent=pair_ranks(ranks, sent_bytes, places), lateness=_find_lateness(instances))


def _find_lateness(instances: OperationInstances) -> tuple[Lateness, ...]:
    groups_lateness = []
    for channel, table in instances.tables.items():
        whole = (table["num_seen"] == channel.num_members) & ~table["mixed_hosts"] & (table["first_start"] < FAR)
        if channel.is_p2p or channel.num_members < 2 or not whole.any():
            continue
        spread: Column = (table["last_start"] - table["first_start"])[whole]
        late = table["last_rank"][whole][spread > TICK_NS]
        who, count = np.unique(late, return_counts=True)
        groups_lateness.append(
            Lateness(
                group=channel.group.name,
                ranks=channel.group.ranks,
                last=dict(zip(who.tolist(), count.tolist(), strict=True)),
                spread_ns=tuple(int(value) for value in percentiles(spread, QUANTILES)),
                count=int(whole.sum()),
            )
        )
    return tuple(sorted(groups_lateness, key=lambda group: -group.spread_ns[1] * group.count))


def list_lateness(instances: OperationInstances) -> tuple[GroupLateness, ...]:
    """Return how late members of each group arrive, the latest group first, and who comes last most often."""
    results = []
    for group in _find_lateness(instances):
        rank = max(group.last, key=lambda rank: (group.last[rank], -rank), default=None)
        p10, median, p90, p99 = group.spread_ns
        results.append(
            GroupLateness(
                group=group.group,
                count=group.count,
                p10_ns=p10,
                median_ns=median,
                p90_ns=p90,
                p99_ns=p99,
                last_rank=rank,
                last_share=None if rank is None else group.last[rank] / group.count,
            )
        )
    return tuple(results)


def measure_overlap(summary: Summary) -> float | None:
    """Return the share of communication that is hidden, weighed by how often and on how many ranks each ran.

    None: of no operation is known how long it was in flight.
    """
    sizes = {group.name: len(group.ranks) for group in summary.groups}
    known = [
        (collective.count * max(1, sizes.get(collective.group, 1)), collective.duration_ns, collective.exposed_ns)
        for collective in summary.collectives
        if collective.duration_ns and collective.exposed_ns is not None
    ]
    in_flight = sum(weight * duration for weight, duration, _ in known)
    exposed = sum(weight * exposed for weight, _, exposed in known)
    return max(0.0, 1 - exposed / in_flight) if in_flight else None
