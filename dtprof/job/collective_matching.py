"""Match operations across ranks: an instance is one collective, or one message, as all who take part record it.

An instance is identified by its channel and its sequence number in it. Each rank gives one row an operation; rows of
the same instance are combined. Combining is associative and commutative and a row of _NEUTRAL adds nothing, so that
ranks may be merged in any order, anywhere.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dtprof.columns import distinct
from dtprof.interning import Interned
from dtprof.intervals import Column
from dtprof.job.api_names import Apis
from dtprof.job.device_timeline import is_placed, start_of
from dtprof.job.groups import Channel, GroupId, identify_groups, message_tags
from dtprof.job.rank_batches import RankBatch
from dtprof.job.valid_records import UNNAMED
from dtprof.records import codes
from dtprof.records.events import POINT_TO_POINT
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, join, select

INSTANCE = np.dtype(
    [
        ("seq", "i8"),  # sequence number in the channel
        ("num_seen", "i4"),  # members that recorded it
        ("first_start", "i8"),
        ("last_start", "i8"),
        ("last_rank", "i4"),  # who arrived last; the lowest of several
        ("root_start", "i8"),  # -1: no root, or its record is missing
        ("root_rank", "i4"),
        ("min_duration", "i8"),  # of those that completed; FAR where none did
        ("first_rank", "i4"),  # lowest rank that recorded it
        ("op", "i4"),  # interned; as that rank called it
        ("api", "i4"),
        ("mixed_ops", "?"),
        ("host", "i4"),
        ("mixed_hosts", "?"),
    ],
    align=True,
)
FAR = np.iinfo(np.int64).max
NOBODY = np.iinfo(np.int32).max
MAX_OF_STEP = 1 << 12
"""Messages of a channel and tag in one step that are matched, where messages count by step."""
_STEPS = (1 << 32) // MAX_OF_STEP
_WHOLE = f"V{INSTANCE.itemsize}"
_ROWS_AT_ONCE = 2048
_NEUTRAL = np.zeros(1, INSTANCE)
for _column, _value in {
    "first_start": FAR,
    "last_start": -1,
    "last_rank": NOBODY,
    "root_start": -1,
    "root_rank": -1,
    "min_duration": FAR,
    "first_rank": NOBODY,
    "op": -1,
    "api": -1,
    "host": -1,
}.items():
    _NEUTRAL[_column] = _value


@dataclass(kw_only=True)
class MatchedOperations:
    """The channels of operations, and for each channel the rows of its operations in the order of the channel.

    Of several ranks side by side, those of one rank follow those of another: a channel is there once a rank.
    """

    channels: list[Channel] = field(default_factory=list)
    rows: list[Column] = field(default_factory=list)
    seqs: list[Column] = field(default_factory=list)
    unmatched: int = 0  # operations without a channel

    def add(self, channel: Channel, rows: Column, seqs: Column) -> None:
        """Add the operations of one more channel."""
        self.channels.append(channel)
        self.rows.append(rows)
        self.seqs.append(seqs)

    @functools.cached_property
    def every_row(self) -> Column:
        """All rows, channel by channel."""
        return np.concatenate([*self.rows, np.zeros(0, np.int64)])

    def of_each(self, values: Iterable[int]) -> Column:
        """Return for each of these rows the value of its channel, given one a channel."""
        lengths = [len(rows) for rows in self.rows]
        return np.repeat(np.fromiter(values, np.int64, len(lengths)), lengths)

    def matched_in(self, instances: "OperationInstances") -> "MatchedOperations":
        """Return the same without operations newer than these instances: a job may be running."""
        kept = []
        for channel, rows, seqs in zip(self.channels, self.rows, self.seqs, strict=True):
            table = instances.tables.get(channel)
            last = int(table["seq"][-1]) if table is not None and len(table) else -1
            # Positions ascend.
            count = len(seqs) if len(seqs) and seqs[-1] <= last else int(np.searchsorted(seqs, last, "right"))
            kept.append((channel, rows[:count], seqs[:count]))
        if all(len(rows) == len(own) for (_, rows, _), own in zip(kept, self.rows, strict=True)):
            return self
        kept = [one for one in kept if len(one[1])]
        return MatchedOperations(
            channels=[channel for channel, _, _ in kept],
            rows=[rows for _, rows, _ in kept],
            seqs=[seqs for _, _, seqs in kept],
            unmatched=self.unmatched,
        )

    def find_instances(self, instances: "OperationInstances") -> Array:
        """Return the instance of each of these rows."""
        if not self.rows:
            return np.zeros(0, INSTANCE)
        tables = [instances.tables[channel] for channel in self.channels]
        instance_rows = join(tables)
        seqs = np.concatenate(self.seqs)
        if np.array_equal(instance_rows["seq"], seqs):
            return instance_rows
        parts = zip(tables, self.seqs, strict=True)
        return join([select(table, np.searchsorted(table["seq"], own)) for table, own in parts])


@dataclass(frozen=True, kw_only=True)
class RankInstances:
    """The operations of one rank: rows of INSTANCE whose `op`, `api` and `host` are positions in its own names."""

    clocks: tuple[str, str]  # columns of start times; the second for operations on a device that was not followed
    ops: tuple[str, ...]
    apis: tuple[str, ...]
    rows: dict[Channel, Array]


@dataclass(kw_only=True)
class OperationInstances:
    """All operation instances of a run by channel, each table by sequence number."""

    tables: dict[Channel, Array] = field(default_factory=dict)
    ops: Interned[str] = field(default_factory=Interned)
    apis: Interned[str] = field(default_factory=Interned)
    hosts: Interned[str] = field(default_factory=Interned)

    def add(self, rank: RankInstances) -> None:
        """Take in one more rank."""
        self._take(rank.rows, rank.ops, rank.apis, rank.clocks)

    def join(self, others: "OperationInstances") -> None:
        """Take in the instances of other ranks."""
        self._take(others.tables, others.ops.values, others.apis.values, others.hosts.values)

    def of(self, channels: Iterable[Channel]) -> "OperationInstances":
        """Return the instances of some channels."""
        return replace(self, tables={channel: self.tables[channel] for channel in channels})

    def _take(
        self, tables: Mapping[Channel, Array], ops: Sequence[str], apis: Sequence[str], hosts: Sequence[str]
    ) -> None:
        """Take in rows whose `op`, `api` and `host` are positions in these names."""
        numbers = {
            column: np.array([own.number(name) for name in names], np.int32)
            for column, own, names in (("op", self.ops, ops), ("api", self.apis, apis), ("host", self.hosts, hosts))
        }
        others = {
            column: number for column, number in numbers.items() if not np.array_equal(number, np.arange(len(number)))
        }
        if others and tables:
            rows = join([*tables.values(), np.zeros(0, INSTANCE)])
            for column, number in others.items():
                rows[column] = number[rows[column]]
            tables = split(rows, tables, tables.values())
        self._merge(tables)

    def _merge(self, theirs: Mapping[Channel, Array]) -> None:
        """Take in rows; those of small channels whose instances are the same so far in one go."""
        alike = [
            channel
            for channel, rows in theirs.items()
            if len(rows) < _ROWS_AT_ONCE and len(self.tables.get(channel, ())) == len(rows)
        ]
        if alike:
            known, new = (join([tables[channel] for channel in alike]) for tables in (self.tables, theirs))
            if np.array_equal(known["seq"], new["seq"]):
                self.tables.update(split(_combine(known, new), alike, [theirs[channel] for channel in alike]))
                merged = set(alike)
                theirs = {channel: rows for channel, rows in theirs.items() if channel not in merged}
        for channel, rows in theirs.items():
            before = self.tables.get(channel)
            self.tables[channel] = rows if before is None else merge(before, rows)


def split(rows: Array, channels: Iterable[Channel], like: Iterable[Array | Column]) -> dict[Channel, Array]:
    """Return the rows of each channel, which follow one another and are as many as those of `like`."""
    ends = list(itertools.accumulate(map(len, like)))
    return {channel: rows[begin:end] for channel, begin, end in zip(channels, [0, *ends], ends, strict=False)}


def match_operations(batch: RankBatch) -> list[MatchedOperations]:
    """Place every operation of each rank in its channel; rows are counted from the first operation of the rank."""
    operations = batch.operations
    groups = np.ascontiguousarray(operations.table["group"])
    is_p2p = operations.table["kind"] == codes.POINT_TO_POINT
    seqs_seen = np.ascontiguousarray(operations.table["seq"])
    # The columns of a single long rank are sorted by fewer keys: 39,000 operations take 2.1 ms, not 3.8 ms.
    several = len(batch.tables) > 1
    key = is_p2p.astype(np.int32) << 16 | groups
    if several:
        key = operations.place << 17 | key
    # Positions ascend with time but in damaged records: then radix sorts of columns of 16 bits are all there is to do.
    order = groups.argsort(kind="stable")
    order = np.concatenate((order[~is_p2p[order]], order[is_p2p[order]]))
    if several:
        order = order[operations.place.astype(np.uint16)[order].argsort(kind="stable")]
    keys, seqs = key[order], seqs_seen[order]
    same = keys[1:] == keys[:-1]
    if ((seqs[1:] < seqs[:-1]) & same).any():
        order = np.lexsort((seqs_seen, key))
        seqs = seqs_seen[order]  # of equal keys still equal ones
    bounds = _bounds(keys)
    chosen = [_Key.unpack(number) for number in keys[bounds[:-1]].tolist()]
    rows = order - np.array(operations.bounds)[operations.place[order]] if several else order
    repeated = same & (seqs[1:] == seqs[:-1])  # a position twice: damaged records
    groups_of = _groups_of(batch.tables, chosen)
    found = [MatchedOperations() for _ in batch.tables]
    messages: list[_Messages] = []
    for key, begin, end in zip(chosen, bounds, bounds[1:], strict=False):
        group = groups_of[key.place].get(key.group)
        if group is None:
            found[key.place].unmatched += end - begin
        elif key.is_p2p:
            messages.append(_Messages(place=key.place, group=group, rows=rows[begin:end]))
        else:
            own, own_seqs = rows[begin:end], seqs[begin:end]
            if repeated[begin : end - 1].any():
                only = np.concatenate(([True], ~repeated[begin : end - 1]))
                found[key.place].unmatched += end - begin - int(np.count_nonzero(only))
                own, own_seqs = own[only], own_seqs[only]
            found[key.place].add(Channel(group), own, own_seqs)
    _match_messages(batch, messages, found)
    return found


class _Key(NamedTuple):
    """The properties that operations of one group and kind share on one rank."""

    place: int
    is_p2p: bool
    group: int

    @classmethod
    def unpack(cls, number: int) -> "_Key":
        """Return the key that is packed in a number."""
        return cls(number >> 17, bool(number >> 16 & 1), number & 0xFFFF)


class _Messages(NamedTuple):
    """The messages of one rank in one group."""

    place: int  # of the rank
    group: GroupId
    rows: Column


def _groups_of(tables: Sequence[RankTables], chosen: Iterable[_Key]) -> list[dict[int, GroupId]]:
    """Identify the groups of each rank that have operations, by their number in its records."""
    occur: list[set[int]] = [set() for _ in tables]
    for key in chosen:
        occur[key.place].add(key.group)
    return [identify_groups(own.groups, groups) for own, groups in zip(tables, occur, strict=True)]


def _bounds(sorted_values: Column) -> list[int]:
    """Return where each run of equal values begins, and the end of the last."""
    if not len(sorted_values):
        return [0]
    changes = np.flatnonzero(sorted_values[1:] != sorted_values[:-1]) + 1
    return [0, *changes.tolist(), len(sorted_values)]


def _match_messages(batch: RankBatch, every: Sequence[_Messages], found: Sequence[MatchedOperations]) -> None:
    """Place sends and receives by pair of ranks, tag and order; in logs without their beginning by order in each step.

    The older messages of such a log are not counted, and each rank lacks others: both ends count anew in each step.
    """
    placed: list[_Messages] = []
    members: list[int] = []
    for messages in every:
        tables = batch.tables[messages.place]
        own = messages.group.ranks.place_of(tables.rank)
        if own < 0 or tables.dropped_events:  # without all earlier messages the order is not known
            found[messages.place].unmatched += len(messages.rows)
        else:
            placed.append(messages)
            members.append(own)
    if not placed:
        return
    lengths = [len(messages.rows) for messages in placed]
    which = np.repeat(np.arange(len(placed)), lengths)
    rows = np.concatenate([messages.rows for messages in placed])
    in_table = rows + np.repeat([batch.operations.bounds[messages.place] for messages in placed], lengths)
    operations = batch.operations.table
    is_send = batch.operations.is_named(POINT_TO_POINT[:1])[in_table]
    peer = operations["peer"][in_table].astype(np.int64)
    messages_of = (
        (select(batch.operations.of(messages.place), messages.rows), batch.tables[messages.place].groups)
        for messages in placed
    )
    tag = np.concatenate([message_tags(messages, groups) for messages, groups in messages_of])
    sizes = np.repeat([messages.group.size for messages in placed], lengths)
    known = (peer >= 0) & (peer < sizes) & (peer != np.repeat(members, lengths))
    first_steps = [batch.tables[messages.place].first_whole_step for messages in placed]
    by_step = np.repeat([step is not None for step in first_steps], lengths)
    step = np.where(by_step, operations["step"][in_table].astype(np.int64), 0)
    known &= step >= np.repeat([first or 0 for first in first_steps], lengths)
    step %= _STEPS
    for messages, unknown in zip(placed, np.bincount(which[~known], minlength=len(placed)).tolist(), strict=True):
        found[messages.place].unmatched += unknown
    pair_key = which << 33 | is_send.astype(np.int64) << 32 | peer
    order = np.lexsort((rows, step, tag, pair_key) if by_step.any() else (rows, tag, pair_key))
    order = order[known[order]]
    pair_key, tag, step, rows, by_step = (column[order] for column in (pair_key, tag, step, rows, by_step))
    place = np.arange(len(order))
    differ = (pair_key[1:] != pair_key[:-1]) | (tag[1:] != tag[:-1]) | (step[1:] != step[:-1])
    begins = np.flatnonzero(differ) + 1
    first = np.zeros(len(order), np.int64)
    first[begins] = begins
    nth = place - np.maximum.accumulate(first)
    seqs = tag << 32 | step * MAX_OF_STEP + nth
    fits = ~by_step | (nth < MAX_OF_STEP)
    if not fits.all():
        for messages, beyond in zip(
            placed, np.bincount(pair_key[~fits] >> 33, minlength=len(placed)).tolist(), strict=True
        ):
            found[messages.place].unmatched += beyond
        pair_key, rows, seqs = pair_key[fits], rows[fits], seqs[fits]
    bounds = _bounds(pair_key)
    for number, begin, end in zip(pair_key[bounds[:-1]].tolist(), bounds, bounds[1:], strict=False):
        messages, own, other = placed[number >> 33], members[number >> 33], number & 0xFFFFFFFF
        sender, receiver = (own, other) if number >> 32 & 1 else (other, own)
        found[messages.place].add(Channel(messages.group, sender, receiver), rows[begin:end], seqs[begin:end])


def duration_of(operations: Array) -> Column:
    """Return how long operations took: on their device where that was measured; UNKNOWN_NS where not known."""
    done, device = np.ascontiguousarray(operations["done_ns"]), np.ascontiguousarray(operations["device_ns"])
    known = done != UNKNOWN_NS
    duration: Column = done - operations["issued_ns"]
    if not known.all():
        duration[~known] = UNKNOWN_NS
    on_device = device >= 0
    if on_device.any():
        np.copyto(duration, device, where=on_device & known)
    return duration


def describe_operations(
    batch: RankBatch, apis: Sequence[Apis], matched: Sequence[MatchedOperations]
) -> list[RankInstances]:
    """Describe the operations of each rank as instances that only it has recorded."""
    operations, tables = batch.operations.table, batch.tables
    lengths = [len(result.every_row) for result in matched]
    of_each = functools.partial(np.repeat, repeats=lengths)
    some = np.concatenate([result.every_row for result in matched]) + of_each(batch.operations.bounds[:-1])
    ranks = of_each([table.rank for table in tables])
    duration = duration_of(operations)
    duration[operations["done_ns"] == UNKNOWN_NS] = FAR
    start = start_of(operations)[some]
    by_host = ((operations["flags"] & codes.DEVICE) != 0) & ~is_placed(operations)
    columns = {
        "seq": np.concatenate([seqs for result in matched for seqs in result.seqs] or [np.zeros(0, np.int64)]),
        "first_start": start,
        "last_start": start,
        "min_duration": duration[some],
        "op": np.minimum(operations["op"][some], of_each([len(table.ops) for table in tables])),
        "api": np.concatenate([labels.of_operation for labels in apis])[some],
        "first_rank": ranks,
        "last_rank": ranks,
        "host": by_host[some],
    }
    neutral = _NEUTRAL.copy()
    neutral["num_seen"] = 1
    rows = np.empty(len(some), INSTANCE)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[begin : begin + _ROWS_AT_ONCE]
        part.view(_WHOLE)[:] = neutral.view(_WHOLE)
        for name, column in columns.items():
            part[name] = column[begin : begin + _ROWS_AT_ONCE]
    has_root = operations["peer"][some] >= 0
    described = []
    ends = itertools.accumulate(lengths)
    for i, (table, own, end) in enumerate(zip(tables, matched, ends, strict=True)):
        begin = end - lengths[i]
        by_channel = split(rows[begin:end], own.channels, own.rows)
        is_p2p = own.of_each(channel.is_p2p for channel in own.channels) > 0
        if (has_root[begin:end] & ~is_p2p).any():
            _describe_roots(table.rank, batch.operations.of(i), own, by_channel)
        described.append(
            RankInstances(
                clocks=(table.boot_id, f"{table.boot_id}, by the host"),
                ops=(*table.ops, UNNAMED),
                apis=apis[i].names,
                rows=by_channel,
            )
        )
    return described


def _describe_roots(
    rank: int, operations: Array, matched: MatchedOperations, by_channel: Mapping[Channel, Array]
) -> None:
    """Fill in the roots of collectives."""
    for (channel, rows), own in zip(by_channel.items(), matched.rows, strict=True):
        root = operations["peer"][own]
        has_root = (root >= 0) & (root < len(channel.group.ranks))
        if not channel.is_p2p and has_root.any():
            rows["root_rank"][has_root] = channel.group.ranks.array[root[has_root]]
            rows["root_start"] = np.where(rows["root_rank"] == rank, rows["first_start"], -1)


def merge(a: Array, b: Array) -> Array:
    """Return the instances of both tables, each sorted by sequence number without repeats."""
    if len(a) == len(b) and np.array_equal(a["seq"], b["seq"]):
        return _combine(a, b)
    seqs = distinct(np.concatenate((a["seq"], b["seq"])))
    return _combine(_expand(a, seqs), _expand(b, seqs))


def _expand(rows: Array, seqs: Column) -> Array:
    table = np.repeat(_NEUTRAL, len(seqs))
    table["seq"] = seqs
    table.view(_WHOLE)[np.searchsorted(seqs, rows["seq"])] = rows.view(_WHOLE)
    return table


def _combine(a: Array, b: Array) -> Array:
    """Combine row by row, as many at once as stay in the processor's cache."""
    out = np.empty(len(a), INSTANCE)
    for begin in range(0, len(a), _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        _combine_into(out[some], a[some], b[some])
    return out


def _combine_into(out: Array, a: Array, b: Array) -> None:
    """Write what both say of each row; where one says nothing (-1) the other counts."""
    out.view(_WHOLE)[:] = a.view(_WHOLE)
    out["num_seen"] += b["num_seen"]
    np.minimum(a["first_start"], b["first_start"], out=out["first_start"])
    last, other_last = a["last_start"].copy(), b["last_start"].copy()
    later = (other_last > last) | ((other_last == last) & (b["last_rank"] < a["last_rank"]))
    out["last_start"] = np.maximum(last, other_last)
    np.copyto(out["last_rank"], b["last_rank"], where=later)
    if (b["root_rank"] >= 0).any():
        for column in ("root_start", "root_rank"):
            np.maximum(a[column], b[column], out=out[column])
    np.minimum(a["min_duration"], b["min_duration"], out=out["min_duration"])
    for column, mixed in (("op", "mixed_ops"), ("host", "mixed_hosts")):
        own, other = a[column].copy(), b[column].copy()
        out[mixed] |= b[mixed] | ((own != other) & (own >= 0) & (other >= 0))
    np.maximum(a["host"], b["host"], out=out["host"])
    lower = b["first_rank"] < a["first_rank"]
    if lower.any():
        for column in ("first_rank", "op", "api"):
            np.copyto(out[column], b[column], where=lower)
