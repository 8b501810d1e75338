"""The table of collectives summed over the groups of each axis of parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtprof.analysis.results import CollectiveResult, Summary
from dtprof.job.axes import OF_LABELS, purpose_of
from dtprof.records.events import POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class AxisTime:
    """Communication along one axis of parallelism, mean over the ranks of the job and the measured steps."""

    axis: str  # or the description of its groups, where they serve no axis that is known
    groups: int
    operations: float  # a step, of all its groups
    wait_ns: float | None  # None: not known of any of its operations
    transfer_ns: float | None
    exposed_ns: float | None


def sum_by_axis(summary: Summary) -> tuple[AxisTime, ...]:
    """Sum the table of collectives by axis, largest exposed time first; empty without measured steps."""
    if summary.steps.used is None or not summary.ranks:
        return ()
    steps = summary.steps.used[1] - summary.steps.used[0] + 1
    groups = _GroupsByName(summary)
    by_axis: dict[str, list[CollectiveResult]] = {}
    for row in summary.collectives:
        if row.duration_ns is not None:
            by_axis.setdefault(groups.axis_of(row), []).append(row)
    share = steps * len(summary.ranks)

    def total(rows: Sequence[CollectiveResult], name: str) -> float | None:
        known = [groups.records_of(row) * value for row in rows if (value := getattr(row, name)) is not None]
        return sum(known) / share if known else None

    times = [
        AxisTime(
            axis=axis,
            groups=groups.count(axis, rows),
            operations=sum(row.count for row in rows) / steps,
            wait_ns=total(rows, "wait_ns"),
            transfer_ns=total(rows, "transfer_ns"),
            exposed_ns=total(rows, "exposed_ns"),
        )
        for axis, rows in by_axis.items()
    ]
    return tuple(sorted(times, key=lambda row: (-(row.exposed_ns or 0), row.axis)))


@dataclass(frozen=True, kw_only=True)
class AxisCollectives:
    """One operation of one api over all groups of an axis: means per operation and rank, as in CollectiveResult."""

    axis: str  # or the description of its groups, where they serve no axis that is known
    groups: int
    op: str
    api: str | None
    count: int  # operations of all groups
    bytes: int | None
    duration_ns: float | None
    wait_ns: float | None
    exposed_ns: float | None
    overlap: float | None
    busbw_gb_per_s: float | None


def collectives_by_axis(summary: Summary) -> tuple[AxisCollectives, ...]:
    """Merge the rows of the table of collectives that differ in the group of an axis only, costliest first."""
    groups = _GroupsByName(summary)
    alike: dict[tuple[str, str, str | None], list[CollectiveResult]] = {}
    for row in summary.collectives:
        alike.setdefault((groups.axis_of(row), row.op, row.api), []).append(row)
    merged = []
    for (axis, op, api), rows in alike.items():
        records = [groups.records_of(row) for row in rows]
        # A bandwidth is bytes over time, so rows weigh in by their time in transfer.
        transfers = [number * (row.transfer_ns or 0) for number, row in zip(records, rows, strict=True)]
        size = _weighted_mean([row.bytes for row in rows], records)
        durations = [number * (row.duration_ns or 0) for number, row in zip(records, rows, strict=True)]
        merged.append(
            AxisCollectives(
                axis=axis,
                groups=groups.count(axis, rows),
                op=op,
                api=api,
                count=sum(row.count for row in rows),
                bytes=round(size) if size is not None else None,
                duration_ns=_weighted_mean([row.duration_ns for row in rows], records),
                wait_ns=_weighted_mean([row.wait_ns for row in rows], records),
                exposed_ns=_weighted_mean([row.exposed_ns for row in rows], records),
                overlap=_weighted_mean([row.overlap for row in rows], durations),
                busbw_gb_per_s=_weighted_mean([row.busbw_gb_per_s for row in rows], transfers),
            )
        )
    return tuple(
        sorted(merged, key=lambda row: (-(row.exposed_ns or 0) * row.count, -(row.duration_ns or 0) * row.count))
    )


def name_rows(summary: Summary, names: Mapping[str, str]) -> list[str]:
    """Return where the operations of each row run, for people: `pp over world` where only labels tell the axis.

    Parameters:
        names: of groups, for people.
    """
    purposes = {group.name: purpose_of(group) for group in summary.groups}
    named = [names.get(row.group, row.group) for row in summary.collectives]
    return [
        name if row.axis is None or row.axis == purposes.get(row.group) else f"{row.axis} over {name}"
        for row, name in zip(summary.collectives, named, strict=True)
    ]


def name_operations(summary: Summary, names: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return where operations run, as `name_rows` does, by group and operation; none whose rows differ."""
    called: dict[tuple[str, str], set[str]] = {}
    for row, name in zip(summary.collectives, name_rows(summary, names), strict=True):
        called.setdefault((row.group, row.op), set()).add(name)
    return {key: next(iter(some)) for key, some in called.items() if len(some) == 1}


class _GroupsByName:
    """The groups of a summary: how many serve an axis, and how many records the operations of each left."""

    def __init__(self, summary: Summary) -> None:
        """Index the groups."""
        self._groups = {group.name: group for group in summary.groups}
        self._purposes = {group.name: purpose_of(group) for group in summary.groups}

    def axis_of(self, row: CollectiveResult) -> str:
        """Return the axis that a row serves, else the description of its group, else its name."""
        return row.axis or self._purposes.get(row.group) or f"group {row.group}"

    def count(self, axis: str, rows: Sequence[CollectiveResult]) -> int:
        """Return how many groups of an axis these rows sum; messages over the default group are of any group of it."""
        used = {row.group for row in rows}
        of_axis = {name for name, purpose in self._purposes.items() if purpose == axis}
        return len(used & of_axis) or (len(of_axis) if axis in OF_LABELS else 0) or len(used)

    def records_of(self, row: CollectiveResult) -> int:
        """Return how many records the operations of a row left: one a member, of a send or a receive one."""
        group = self._groups.get(row.group)
        return row.count * (1 if row.op in POINT_TO_POINT or group is None else max(1, len(group.ranks)))


def _weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the mean of the known values; None where none is known or all weigh nothing."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
