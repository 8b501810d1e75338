"""Who sends how much to whom, who waited for whom, and how long operations take by their size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.analysis.results import CollectiveResult, Summary
from dtprof.analysis.run_summary import MAX_PAIRED
from dtprof.intervals import Column
from dtprof.job.axes import purpose_of
from dtprof.job.collective_matching import FAR, OperationInstances
from dtprof.records.events import POINT_TO_POINT

Matrix = npt.NDArray[np.int64]


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
    sent: Matrix | None  # bytes of messages from row to column; None without messages
    lateness: tuple[Lateness, ...]


TICK_NS = 1_000
QUANTILES = (10, 50, 90, 99)


def find_traffic(sent_bytes: Mapping[int, Mapping[int, int]], instances: OperationInstances) -> Traffic:
    """Return who sent how much to whom, of the ranks that sent_bytes has; the instances say who arrived last."""
    ranks = tuple(sent_bytes)
    place = {rank: position for position, rank in enumerate(ranks)}
    sent = None
    if any(sent_bytes.values()) and len(ranks) <= MAX_PAIRED:
        sent = np.zeros((len(ranks), len(ranks)), np.int64)
        for source, targets in sent_bytes.items():
            for target, nbytes in targets.items():
                if target in place:
                    sent[place[source], place[target]] = nbytes
    return Traffic(ranks=ranks, sent=sent, lateness=_find_lateness(instances))


def _find_lateness(instances: OperationInstances) -> tuple[Lateness, ...]:
    found = []
    for channel, table in instances.tables.items():
        whole = (table["num_seen"] == channel.num_members) & ~table["mixed_hosts"] & (table["first_start"] < FAR)
        if channel.is_p2p or channel.num_members < 2 or not whole.any():
            continue
        spread: Column = (table["last_start"] - table["first_start"])[whole]
        late = table["last_rank"][whole][spread > TICK_NS]
        who, count = np.unique(late, return_counts=True)
        found.append(
            Lateness(
                group=channel.group.name,
                ranks=channel.group.ranks,
                last=dict(zip(who.tolist(), count.tolist(), strict=True)),
                spread_ns=tuple(int(value) for value in np.percentile(spread, QUANTILES)),
                count=int(whole.sum()),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.spread_ns[1] * one.count))


@dataclass(frozen=True, kw_only=True)
class AxisTime:
    """Communication along one axis of parallelism, mean over the ranks of the job and the used steps."""

    axis: str  # or the description of its groups, where they serve no axis that is known
    groups: int
    operations: float  # a step, of all its groups
    wait_ns: float | None  # None: not known of any of its operations
    transfer_ns: float | None
    exposed_ns: float | None


def sum_by_axis(summary: Summary) -> tuple[AxisTime, ...]:
    """Sum the table of collectives by axis, what is exposed most first; empty without used steps."""
    if summary.steps.used is None or not summary.ranks:
        return ()
    steps = summary.steps.used[1] - summary.steps.used[0] + 1
    groups = {group.name: group for group in summary.groups}
    found: dict[str, list[CollectiveResult]] = {}
    for one in summary.collectives:
        if one.duration_ns is not None:
            group = groups.get(one.group)
            axis = purpose_of(group) if group else ""
            found.setdefault(axis or f"group {one.group}", []).append(one)
    share = steps * len(summary.ranks)

    def weight(one: CollectiveResult) -> int:
        group = groups.get(one.group)
        is_message = one.op in POINT_TO_POINT
        return one.count * (1 if is_message or group is None else max(1, len(group.ranks)))

    def total(some: Sequence[CollectiveResult], name: str) -> float | None:
        known = [weight(one) * value for one in some if (value := getattr(one, name)) is not None]
        return sum(known) / share if known else None

    rows = [
        AxisTime(
            axis=axis,
            groups=len({one.group for one in some}),
            operations=sum(one.count for one in some) / steps,
            wait_ns=total(some, "wait_ns"),
            transfer_ns=total(some, "transfer_ns"),
            exposed_ns=total(some, "exposed_ns"),
        )
        for axis, some in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-(row.exposed_ns or 0), row.axis)))


def measure_overlap(summary: Summary) -> float | None:
    """Return the share of communication that is hidden, weighed by how often and on how many ranks each ran.

    None: of no operation is known how long it was in flight.
    """
    sizes = {group.name: len(group.ranks) for group in summary.groups}
    known = [
        (one.count * max(1, sizes.get(one.group, 1)), one.duration_ns, one.exposed_ns)
        for one in summary.collectives
        if one.duration_ns and one.exposed_ns is not None
    ]
    in_flight = sum(weight * duration for weight, duration, _ in known)
    exposed = sum(weight * exposed for weight, _, exposed in known)
    return max(0.0, 1 - exposed / in_flight) if in_flight else None
