"""Traffic between ranks, waits of ranks for ranks, and durations of operations by size."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.communication.rank_pairs import Places, RankPairs, pair_ranks
from dtprof.analysis.results import GroupLateness, Summary
from dtprof.columns import percentiles
from dtprof.intervals import Column
from dtprof.job.collective_matching import FAR, OperationInstances
from dtprof.job.groups import Channel
from dtprof.job.valid_records import stride_of
from dtprof.records.tables import Array


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """The arrivals at the operations of one group: how long the first waited for the last."""

    group: str
    ranks: tuple[int, ...]
    last: dict[int, int]  # by rank, ascending: operations that it entered last, more than TICK_NS behind the first
    spread_ns: tuple[int, ...]  # quantiles of the time from first to last: 10, 50, 90, 99 %
    count: int

    @property
    def most_often_last(self) -> int | None:
        """The rank that arrives last most often, the lowest of several; None: all arrive together."""
        return max(self.last, key=self.last.__getitem__, default=None)

    @property
    def share_last(self) -> float | None:
        """Its share of the operations that a rank entered late."""
        rank = self.most_often_last
        return None if rank is None else self.last[rank] / sum(self.last.values())


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of the whole run; empty where nothing was recorded."""

    ranks: tuple[int, ...]
    sent: RankPairs | None  # bytes of messages; None without messages
    lateness: tuple[Lateness, ...]


TICK_NS = 1_000
QUANTILES = (10, 50, 90, 99)
MAX_SPREADS = 1 << 18
"""Spreads of a group that are kept; of more operations those of every second, fourth, ... tell the quantiles."""


@dataclass(kw_only=True)
class LatenessTally:
    """The arrivals at operations of one group, as far as they have been counted."""

    seqs: Column  # of the operations whose spread is kept
    spreads: Column  # ns from the first to the last
    last: Counter[int] = field(default_factory=Counter)  # operations that each rank entered last
    count: int = 0

    def add(self, others: "LatenessTally") -> None:
        """Take in other operations of the group."""
        self.last.update(others.last)
        self.count += others.count
        self.seqs, self.spreads = (
            np.concatenate(both) for both in ((self.seqs, others.seqs), (self.spreads, others.spreads))
        )
        self.thin()

    def thin(self) -> None:
        """Keep the spread of every so many-th operation where there are more than MAX_SPREADS."""
        stride = stride_of(self.count, MAX_SPREADS)
        if stride > 1:
            kept = self.seqs % stride == 0
            self.seqs, self.spreads = self.seqs[kept], self.spreads[kept]


Tallies = dict[Channel, LatenessTally]


def find_traffic(sent_bytes: Mapping[int, Mapping[int, int]], lateness: Tallies, places: Places) -> Traffic:
    """Return the bytes sent between the ranks of `sent_bytes`; the tallies say who arrived last."""
    ranks = tuple(sent_bytes)
    return Traffic(ranks=ranks, sent=pair_ranks(ranks, sent_bytes, places), lateness=_state_lateness(lateness))


def tally_lateness(instances: OperationInstances) -> Tallies:
    """Count who arrived last at the collectives that all members recorded, by group."""
    return {channel: tally for channel, table in instances.tables.items() if (tally := tally_rows(channel, table))}


def tally_rows(channel: Channel, table: Array) -> LatenessTally | None:
    """Count who arrived last at some operations of a group, rows of INSTANCE; None where nothing is known of any."""
    if channel.is_p2p or channel.num_members < 2:
        return None
    whole = (table["num_seen"] == channel.num_members) & ~table["mixed_hosts"] & (table["first_start"] < FAR)
    if not whole.any():
        return None
    spread: Column = (table["last_start"] - table["first_start"])[whole]
    who, count = np.unique(table["last_rank"][whole][spread > TICK_NS], return_counts=True)
    tally = LatenessTally(
        seqs=table["seq"][whole],
        spreads=spread,
        last=Counter(dict(zip(who.tolist(), count.tolist(), strict=True))),
        count=int(whole.sum()),
    )
    tally.thin()
    return tally


def add_lateness(known: Tallies, others: Tallies) -> None:
    """Add other tallies to those that are known."""
    for channel, tally in others.items():
        if channel in known:
            known[channel].add(tally)
        else:
            known[channel] = tally


def _state_lateness(tallies: Tallies) -> tuple[Lateness, ...]:
    groups_lateness = [
        Lateness(
            group=channel.group.name,
            ranks=channel.group.ranks,
            last=dict(sorted(tally.last.items())),
            spread_ns=tuple(int(value) for value in percentiles(tally.spreads, QUANTILES)),
            count=tally.count,
        )
        for channel, tally in tallies.items()
    ]
    return tuple(sorted(groups_lateness, key=lambda group: -group.spread_ns[1] * group.count))


def list_lateness(tallies: Tallies) -> tuple[GroupLateness, ...]:
    """Return how late members of each group arrive, the latest group first, and who comes last most often."""
    results = []
    for group in _state_lateness(tallies):
        rank = group.most_often_last
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
