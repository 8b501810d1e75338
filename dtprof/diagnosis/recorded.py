"""From the tables of one rank to the evidence that the rules look at."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dtprof import events
from dtprof.analysis import codes
from dtprof.diagnosis.columns import sweep
from dtprof.diagnosis.evidence import (
    MESSAGE,
    Channel,
    GroupKey,
    LongPhase,
    Operation,
    PipelinePass,
    RankEvidence,
    Stack,
)
from dtprof.tables import UNKNOWN_NS, Array, Group, ProcessExit, RankTables, Site, join, select

MAX_OPERATIONS = 400_000
"""Operations of all ranks together that are looked at one by one, the newest of each: memory and time stay bounded."""
MAX_TAIL, MIN_TAIL = 4096, 256
MAX_SWEPT = 4_000_000
"""Operations of all ranks together that are compared in columns."""
LONG_NS = 5_000_000_000
PAUSE_NS = 1_000_000_000
MAX_PASSES = 64

_REFUSED_NS = 5_000_000
LONG_PHASES = (events.CHECKPOINT, events.COMPILE)


def rank_evidence(
    tables: RankTables,
    *,
    exit: ProcessExit | None,  # noqa: A002
    stack: Stack | None,
    alive: bool | None,
) -> RankEvidence:
    """Reduce the tables of one rank to what the rules need."""
    keys, groups = group_keys(tables)
    rows = without_refused(_named_ones(tables, tables.operations))
    world_size = max(1, tables.world_size)
    tail = min(MAX_TAIL, max(MIN_TAIL, MAX_OPERATIONS // world_size))
    first = max(0, len(rows) - tail)
    messages = _count_messages(rows, tables, keys, first)
    maker = _Maker(tables=_without_records(tables), keys=keys, rows=rows, nth=messages.nth)
    operations = _Tail(maker, first)
    counts: dict[tuple[GroupKey, bool], int] = {}
    is_p2p = rows["kind"] == codes.POINT_TO_POINT
    for group_id, key in keys.items():
        for p2p in (False, True):
            mine = rows["seq"][(rows["group"] == group_id) & (is_p2p == p2p)]
            if len(mine):
                counts[key, p2p] = int(mine.max()) + 1
    spans = _named_ones(tables, tables.spans)
    is_open = spans["end_ns"] == UNKNOWN_NS
    data = spans_named(tables, spans, events.DATA)
    exhausted = (data["flags"] & codes.SKIPPED) != 0
    groups_made = spans_named(tables, spans, events.NEW_GROUP)
    making = groups_made[groups_made["end_ns"] == UNKNOWN_NS]
    return RankEvidence(
        rank=tables.rank,
        attempt=tables.attempt,
        pid=tables.pid,
        host=tables.host,
        operations=operations,
        first_row=first,
        open_operations=tuple(operations[int(i)] for i in np.flatnonzero(_is_open(rows[first:]))),
        counts=counts,
        groups=groups,
        exceptions=tables.exceptions,
        exit=exit,
        ended_ns=tables.ended_ns,
        last_ns=tables.last_ns,
        last_site=_last_site(tables),
        open_phases=tuple(name for op in spans["op"][is_open].tolist() if (name := tables.ops[op]) in events.PHASES),
        steps=int(max([0, *rows["step"][-1:], *tables.spans["step"][-1:]])),
        in_init=bool(len(spans_named(tables, spans[is_open], events.INIT))),
        stack=stack,
        alive=alive,
        channels=messages.channels,
        messages=messages.newest,
        sees_questions=tables.tap == "native",
        complete=not tables.dropped_events,
        batches=int((~exhausted).sum()),
        exhausted=int(exhausted.sum()),
        newest_is_exhaustion=bool(len(data)) and bool(exhausted[-1]),
        group_sites=tuple(tables.sites.get(site) for site in groups_made["site"].tolist()),
        making_group=tables.sites.get(int(making["site"][-1])) if len(making) else None,
        passes=_passes(tables, spans),
        long_phases=tuple(_long_phases(tables, spans)),
        sweep=sweep(
            tables,
            keys,
            rows,
            maker.operation,
            limit=max(MAX_TAIL, MAX_SWEPT // world_size),
            forwards_ns=np.sort(spans_named(tables, spans, events.FORWARD)["begin_ns"]),
            steppers=np.unique(spans_named(tables, spans, events.STEP, events.OPTIMIZER)["thread"]),
        ),
    )


def _named_ones(tables: RankTables, records: Array) -> Array:
    """Return the records whose name is known: as a rule all, which are not copied then."""
    known = records["op"] < len(tables.ops)
    return records if known.all() else select(records, known)


def _without_records(tables: RankTables) -> RankTables:
    """Return what a rank says of names and lines; what holds on to it holds on to no records."""
    operations, spans, samples = (
        np.zeros(0, records.dtype) for records in (tables.operations, tables.spans, tables.samples)
    )
    return replace(tables, operations=operations, spans=spans, samples=samples)


@functools.lru_cache(maxsize=1 << 14)
def _key(name: str, ranks: tuple[int, ...], occurrence: int) -> GroupKey:
    """Return one and the same object for every rank that knows the group: comparing it costs nothing then."""
    return GroupKey(name=name, ranks=ranks, occurrence=occurrence)


def group_keys(tables: RankTables) -> tuple[dict[int, GroupKey], dict[GroupKey, Group]]:
    """Return the groups of a rank as all ranks name them, by id, and what the rank knows of each."""
    keys: dict[int, GroupKey] = {}
    groups: dict[GroupKey, Group] = {}
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    for group_id in sorted(tables.groups):
        group = tables.groups[group_id]
        name = (group.name, group.ranks)
        key = _key(group.name, group.ranks, seen.get(name, 0))
        seen[name] = key.occurrence + 1
        keys[group_id] = key
        groups[key] = group
    return keys, groups


def without_refused(rows: Array) -> Array:
    """Count positions without calls that were refused before any message was sent, where the group went on after.

    The back end does not count them either: what the rank calls next meets what its peers call now.
    """
    quick = rows["done_ns"] - rows["issued_ns"] < _REFUSED_NS
    refused = (rows["state"] == codes.FAILED) & (rows["waits"] == 0) & quick
    if not refused.any():
        return rows
    rows = rows.copy()
    p2p = rows["kind"] == codes.POINT_TO_POINT
    gone = np.zeros(len(rows), bool)
    for group in np.unique(rows["group"][refused]):
        for kind in (False, True):
            mine = (rows["group"] == group) & (p2p == kind)
            went_on = np.flatnonzero(mine & (rows["state"] == codes.DONE))
            out = mine & refused
            out[went_on[-1] if len(went_on) else 0 :] = False
            rows["seq"][mine] -= np.cumsum(out)[mine]
            gone |= out
    return rows[~gone]


@dataclass(frozen=True, kw_only=True)
class _Messages:
    nth: npt.NDArray[np.int64]  # of each operation: how many of its channel came before, -1 for collectives
    channels: dict[Channel, int] = field(default_factory=dict)  # how many there are
    newest: dict[Channel, Array] = field(default_factory=dict)


def _count_messages(rows: Array, tables: RankTables, keys: dict[int, GroupKey], tail: int) -> _Messages:
    """Count the messages of each channel, and return those from the row `tail` on in columns."""
    nth = np.full(len(rows), -1, np.int64)
    found = _Messages(nth=nth)
    messages = np.flatnonzero(rows["kind"] == codes.POINT_TO_POINT)
    if not len(messages):
        return found
    own = select(rows, messages)
    sending = [i for i, name in enumerate(tables.ops) if name == events.POINT_TO_POINT[0]]
    sends = np.isin(own["op"], sending)
    key = own["group"].astype(np.uint64) << np.uint64(48)
    key |= ((own["peer"] + 1).astype(np.uint64) & np.uint64(0x7FFF)) << np.uint64(33)
    key |= (sends.astype(np.uint64) << np.uint64(32)) | (own["tag"].astype(np.uint64) & np.uint64(0xFFFFFFFF))
    order = np.argsort(key, kind="stable")
    _, first, count = np.unique(key[order], return_index=True, return_counts=True)
    nth[messages[order]] = np.arange(len(order)) - np.repeat(first, count)
    is_newest = messages[order] >= tail
    newest = _in_columns(rows, messages[order][is_newest], nth, tables, tail)
    ends = np.append(0, np.cumsum(is_newest))[np.append(first, len(order))].tolist()
    for i, (at, number) in enumerate(zip(order[first].tolist(), count.tolist(), strict=True)):
        group, peer = keys.get(int(own["group"][at])), int(own["peer"][at])
        if group is None:
            continue
        rank = group.ranks[peer] if 0 <= peer < len(group.ranks) else -1
        channel = Channel(group, rank, int(own["tag"][at]), bool(sends[at]))
        found.channels[channel] = found.channels.get(channel, 0) + number
        if ends[i] < ends[i + 1]:
            before = found.newest.get(channel)  # only where the peer is not known: several stand for one channel then
            table = newest[ends[i] : ends[i + 1]]
            found.newest[channel] = table if before is None else join([before, table])
    return found


def _in_columns(
    rows: Array, chosen: npt.NDArray[np.int64], nth: npt.NDArray[np.int64], tables: RankTables, tail: int
) -> Array:
    own = select(rows, chosen)
    plain = [i for i, name in enumerate(tables.ops) if name in events.POINT_TO_POINT]
    table = np.empty(len(own), MESSAGE)
    table["nth"], table["at"], table["nbytes"], table["site"] = nth[chosen], chosen - tail, own["nbytes"], own["site"]
    table["plain"] = np.isin(own["op"], plain)
    table["done"] = (own["done_ns"] != UNKNOWN_NS) & (own["state"] != codes.FAILED)
    noticed = (own["waits"] > 0) | ((own["flags"] & codes.ASKED) != 0)
    table["settled"] = table["done"] | noticed | np.isin(own["state"], (codes.FAILED, codes.ISSUED))
    return table


def _is_open(rows: Array) -> npt.NDArray[np.bool_]:
    """Say of each operation what `Operation.open` says of it."""
    failed = rows["state"] == codes.FAILED
    observed = (rows["flags"] & codes.COMPLETION_SEEN) != 0
    return np.asarray(failed | (observed & (rows["done_ns"] == UNKNOWN_NS)) | (rows["state"] == codes.ISSUED), bool)


class _Tail(Sequence[Operation]):
    """The newest operations of a rank, made when they are looked at: most of them never are."""

    def __init__(self, maker: "_Maker", first: int) -> None:
        self._maker = maker
        self._first = first
        self._made: list[Operation | None] = [None] * (maker.num_rows - first)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Operation]:
        for at, found in enumerate(self._made):
            yield found or self[at]

    @overload
    def __getitem__(self, at: int) -> Operation: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Operation, ...]: ...

    def __getitem__(self, at: int | slice) -> Operation | tuple[Operation, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        found = self._made[at]
        if found is None:
            found = self._made[at] = self._maker.operation(self._first + range(len(self))[at])
        return found


class _Maker:
    """Makes operations of rows."""

    def __init__(
        self, *, tables: RankTables, keys: dict[int, GroupKey], rows: Array, nth: npt.NDArray[np.int64]
    ) -> None:
        self._tables = tables
        self._keys = keys
        self._rows = rows
        self._nth = nth
        self._names = rows.dtype.names or ()
        self._unknown = GroupKey(name="?", ranks=(), occurrence=0)
        self._one_tensor = {i for i, name in enumerate(tables.raw_ops) if name == "_allgather_base_"}

    @property
    def num_rows(self) -> int:
        """Operations there are."""
        return len(self._rows)

    def operation(self, i: int) -> Operation:
        """Return the operation of one row."""
        row: dict[str, Any] = dict(zip(self._names, self._rows[i].item(), strict=True))
        tables = self._tables
        site = tables.sites.get(row["site"])
        state = row["state"]
        flags = row["flags"]
        p2p = row["kind"] == codes.POINT_TO_POINT
        return Operation(
            group=self._keys.get(row["group"], self._unknown),
            op=tables.ops[row["op"]],
            api=site.api if site else "",
            seq=row["seq"],
            p2p=p2p,
            peer=row["peer"],
            tag=row["tag"],
            numel=row["numel"],
            dtype=row["dtype"],
            reduce_op=row["reduce_op"],
            site=site,
            step=row["step"],
            inside_call=state == codes.ISSUED,
            failed=state == codes.FAILED,
            done=row["done_ns"] != UNKNOWN_NS and state != codes.FAILED,
            issued_ns=row["issued_ns"],
            done_ns=row["done_ns"],
            observed=bool(flags & codes.COMPLETION_SEEN),
            waited=row["waits"] > 0,
            asked=bool(flags & codes.ASKED),
            nbytes=row["nbytes"],
            thread=row["thread"],
            is_async=bool(flags & codes.ASYNC),
            sizes=None if p2p else tables.sizes.get(row["tag"]),
            even_sizes=row["op"] in self._one_tensor,
            nth=int(self._nth[i]),
        )


def _last_site(tables: RankTables) -> Site | None:
    """Return the line of the newest event that has one."""
    newest = [
        (int(table[begin][-1]), int(table["site"][-1]))
        for table, begin in ((tables.operations, "issued_ns"), (tables.spans, "begin_ns"))
        if len(table)
    ]
    return tables.sites.get(max(newest)[1]) if newest else None


def spans_named(tables: RankTables, spans: Array, *names: str) -> Array:
    """Return the spans of these names."""
    ids = [i for i, name in enumerate(tables.ops) if name in names]
    if len(ids) == 1:
        return select(spans, spans["op"] == ids[0])
    return select(spans, np.isin(spans["op"], ids)) if ids else spans[:0]


def _passes(tables: RankTables, spans: Array) -> tuple[PipelinePass, ...]:
    """Return the newest training steps of pipeline schedules, in order."""
    passes = []
    forwards = spans_named(tables, spans, events.PP_FORWARD)
    for step in spans_named(tables, spans, events.PP_STEP)[-MAX_PASSES:]:
        ended = int(step["state"]) == codes.DONE
        inside = forwards[forwards["begin_ns"] >= step["begin_ns"]]
        if ended:
            inside = inside[inside["begin_ns"] <= step["end_ns"]]
        stages, numbers = np.unique(inside["stage"], return_counts=True)
        passes.append(
            PipelinePass(
                plan=tables.pipelines.get(int(step["microbatch"])),
                ended=ended,
                forwards=dict(zip(stages.tolist(), numbers.tolist(), strict=True)),
            )
        )
    return tuple(passes)


def _long_phases(tables: RankTables, spans: Array) -> Iterable[LongPhase]:
    """Give checkpoints and compilations that took long; those that follow one another at once are one."""
    for phase in LONG_PHASES:
        own = spans_named(tables, spans, phase)
        own = own[own["end_ns"] != UNKNOWN_NS]
        begin = 0
        for end in range(1, len(own) + 1):
            if end < len(own) and int(own["begin_ns"][end] - own["end_ns"][end - 1]) <= PAUSE_NS:
                continue
            first, last = own[begin], own[end - 1]
            if int(last["end_ns"] - first["begin_ns"]) >= LONG_NS:
                yield LongPhase(
                    phase=phase,
                    site=tables.sites.get(int(first["site"])),
                    begin_ns=int(first["begin_ns"]),
                    end_ns=int(last["end_ns"]),
                )
            begin = end
