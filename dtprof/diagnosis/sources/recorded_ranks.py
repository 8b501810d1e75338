"""From the tables of one rank to the evidence that rules read."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.analysis.memory.memory_growth import find_growth
from dtprof.columns import distinct
from dtprof.diagnosis.job_state import LongPhase, PipelinePass, RankState, Stack
from dtprof.diagnosis.sources.blocked_share import find_blocked_share
from dtprof.diagnosis.stop_detection import longest_gap_ns, newest_moments
from dtprof.job.group_collectives import Begins, index_collectives
from dtprof.job.groups import UNKNOWN_GROUP, GroupId, identify_groups, message_tags
from dtprof.job.issued_operations import MESSAGE, ChannelEnd, LazyOperations, Operation
from dtprof.job.rank_executor import Executor, map_tasks, share_out
from dtprof.job.stalls import INTERVAL_NS, MAX_PAUSES
from dtprof.records import codes, events, schema
from dtprof.records.reader import MIN_OF_EACH, Run
from dtprof.records.sites import Site
from dtprof.records.tables import OPERATION, UNKNOWN_NS, Array, Past, ProcessExit, RankTables, ids_named, join, select

MAX_OPERATIONS = 400_000
"""Operations of all ranks together that rules read one by one, the newest of each: memory and time stay bounded."""
MAX_TAIL, MIN_TAIL = 4096, 256
MAX_OUTSIDE = 64
"""Calls on groups that a rank is no member of that rules read, the newest."""
MAX_EXHAUSTIONS = 64
"""Ends of data loaders that rules read, the newest."""
MAX_COLLECTIVES, MIN_COLLECTIVES = 1_500_000, MIN_OF_EACH
"""Operations of all ranks together that are compared in columns, 190 bytes each; and of each rank, at least."""
LONG_NS = 5_000_000_000
PAUSE_NS = 1_000_000_000

_REFUSED_NS = 5_000_000
LONG_PHASES = (events.CHECKPOINT, events.COMPILE)
NO_PAST = Past(
    counts={},
    messages={},
    batches=0,
    exhausted=0,
    newest_is_exhaustion=False,
    forwards=0,
    updates=0,
    longest_gap_ns=0,
)


@dataclass(frozen=True, kw_only=True)
class RankRead:
    """The evidence in the files of one rank."""

    evidence: RankState
    world_size: int  # as it declares
    boot_id: str
    first_ns: int
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Task:
    records: Run
    ranks: Sequence[int]
    attempt: int | None
    newest: int
    stopped: tuple[str, int] | None  # the boot id of the host whose dtprof stopped the hung job, and when


def read_ranks(
    run: Run, ranks: Sequence[int], executor: Executor, *, attempt: int | None = None, newest: int | None = None
) -> Iterator[RankRead]:
    """Read ranks, and give the evidence of each, in order.

    Parameters:
        attempt: the one to read; None for the last of each.
        newest: operations of all ranks together that are compared; None for MAX_COLLECTIVES.
    """
    of_all = MAX_COLLECTIVES if newest is None else newest
    stopped = _stop_of(run)
    tasks = (
        _Task(records=run.part(part), ranks=part, attempt=attempt, newest=of_all, stopped=stopped)
        for part in share_out(ranks, executor)
    )
    for part in map_tasks(executor, _read_part, tasks):
        yield from part


def _read_part(task: _Task) -> list[RankRead]:
    load = functools.partial(task.records.load_newest, of_all=task.newest, of_each=MIN_COLLECTIVES)
    return [_read(_as_hung(load(rank, task.attempt), task.stopped)) for rank in task.ranks]


def _stop_of(run: Run) -> tuple[str, int] | None:
    stopped_ns = run.manifest.stopped_on_hang_ns
    return (run.manifest.boot_id, stopped_ns) if stopped_ns is not None else None


def _as_hung(tables: RankTables, stopped: tuple[str, int] | None) -> RankTables:
    """Return the records of a rank as they were when its job was found hung and stopped.

    The ranks that end first free those that waited for them, which go on until their own signal comes.
    """
    if stopped is None or stopped[0] != tables.boot_id:
        return tables
    stopped_ns = stopped[1]
    operations = _as_of(tables.operations, "issued_ns", ("returned_ns", "done_ns"), stopped_ns)
    spans = _as_of(tables.spans, "begin_ns", ("end_ns",), stopped_ns)
    intervals = _as_of(tables.device_intervals, "begin_ns", ("end_ns",), stopped_ns)
    before = replace(
        tables,
        operations=operations,
        spans=spans,
        thread_exceptions=tuple(error for error in tables.thread_exceptions if error.t_ns <= stopped_ns),
        device_intervals=select(intervals, intervals["row"] < len(operations)),
    )
    if len(operations) == len(tables.operations) and len(spans) == len(tables.spans):
        return before
    # Where its signal found a rank that had gone on is not where it hung.
    errors = tuple(error for error in tables.exceptions if error.t_ns <= stopped_ns)
    return replace(before, exceptions=errors, crash=None)


def _as_of(rows: Array, begin: str, ends: Sequence[str], t_ns: int) -> Array:
    """Return the rows that had begun by a time; what ended later is open. What failed later counts as open as it is."""
    had_begun = rows[begin] <= t_ns
    rows = rows if had_begun.all() else select(rows, had_begun)
    later = np.logical_or.reduce([rows[end] > t_ns for end in ends]) & (rows["state"] != codes.FAILED)
    if not later.any():
        return rows
    rows = rows.copy()
    for end in ends:
        rows[end][later & (rows[end] > t_ns)] = UNKNOWN_NS
    rows["state"][later] = np.where(rows[ends[0]][later] == UNKNOWN_NS, codes.ISSUED, codes.RETURNED)
    return rows


def _read(tables: RankTables) -> RankRead:
    return RankRead(
        evidence=rank_state(tables, exit=None, stack=None, alive=None),
        world_size=tables.world_size,
        boot_id=tables.boot_id,
        first_ns=tables.first_ns,
        problems=tables.problems,
    )


def _versions(tables: RankTables) -> tuple[tuple[str, str], ...]:
    return ("torch", tables.torch_version), ("Python", tables.python_version)


def rank_state(
    tables: RankTables,
    *,
    exit: ProcessExit | None,  # noqa: A002
    stack: Stack | None,
    alive: bool | None,
) -> RankState:
    """Reduce the tables of one rank to its evidence."""
    keys = identify_groups(tables.groups)
    past = tables.past or NO_PAST
    tables, started = _with_device_progress(tables)
    rows = without_refused(_named_ones(tables, tables.operations))
    world_size = max(1, tables.world_size)
    tail = min(MAX_TAIL, max(MIN_TAIL, MAX_OPERATIONS // world_size))
    first = max(0, len(rows) - tail)
    swept = max(0, len(rows) - max(MIN_COLLECTIVES, MAX_COLLECTIVES // world_size))
    messages = _count_messages(rows, tables, keys, first, past)
    maker = _Maker(
        tables=_without_records(tables),
        keys=keys,
        rows=rows,
        nth=messages.nth,
        first=min(first, swept),
        started=started,
    )
    operations = LazyOperations(maker.operation, first=first, end=len(rows))
    spans = _named_ones(tables, tables.spans)
    is_open = spans["end_ns"] == UNKNOWN_NS
    data = spans_named(tables, spans, events.DATA)
    exhausted = (data["flags"] & codes.SKIPPED) != 0
    groups_made = spans_named(tables, spans, events.NEW_GROUP)
    outside = spans_named(tables, spans, events.OUTSIDE_GROUP)[-MAX_OUTSIDE:]
    making = groups_made[groups_made["end_ns"] == UNKNOWN_NS]
    growth = find_growth(tables, first=2)
    gap_ns = longest_gap_ns(rows[-MAX_TAIL:] if tables.dropped_events else rows, until_ns=_first_error(tables))
    return RankState(
        rank=tables.rank,
        attempt=tables.attempt,
        pid=tables.pid,
        host=tables.host,
        call_sites=tuple(tables.sites.values()),
        operations=operations,
        first_row=first,
        open_operations=tuple(operations[int(i)] for i in np.flatnonzero(_is_open(rows[first:]))),
        counts=_count_operations(rows, keys, past),
        groups={key: tables.groups[number] for number, key in keys.items()},
        exceptions=tables.exceptions,
        thread_exceptions=tables.thread_exceptions,
        out_of_memory=tables.out_of_memory,
        snapshots=tables.snapshots,
        early_uses=tables.early_uses,
        wrapped_parameters=tables.wrapped_parameters,
        optimizer_ages=tables.optimizer_ages,
        crash=tables.crash,
        exit=exit,
        ended_ns=tables.ended_ns,
        last_ns=tables.last_ns,
        moments=newest_moments(rows, spans),
        longest_gap_ns=max(gap_ns, 0 if tables.dropped_events else past.longest_gap_ns),
        active_intervals=_active_intervals(rows, spans),
        last_site=_last_site(tables),
        left_at=_last_site(tables) if _has_ended_itself(tables) else None,
        open_phases=tuple(name for op in spans["op"][is_open].tolist() if (name := tables.ops[op]) in events.PHASES),
        steps=int(max([0, *rows["step"][-1:], *tables.spans["step"][-1:]])),
        in_init=bool(len(spans_named(tables, spans[is_open], events.INIT))),
        stack=stack,
        alive=alive,
        channels=messages.channels,
        messages=messages.newest,
        sees_questions=tables.hook == "native",
        complete=not tables.dropped_events,
        batches=past.batches + int((~exhausted).sum()),
        exhausted=past.exhausted + int(exhausted.sum()),
        exhaustions=tuple(np.sort(data["begin_ns"][exhausted])[-MAX_EXHAUSTIONS:].tolist()),
        newest_is_exhaustion=bool(exhausted[-1]) if len(data) else past.newest_is_exhaustion,
        group_sites=tuple(tables.sites.get(site) for site in groups_made["site"].tolist()),
        group_members=tuple(groups_made["microbatch"].tolist()),
        outside_calls=tuple(
            (begin_ns, site)
            for begin_ns, number in zip(outside["begin_ns"].tolist(), outside["site"].tolist(), strict=True)
            if (site := tables.sites.get(number)) is not None
        ),
        making_group=tables.sites.get(int(making["site"][-1])) if len(making) else None,
        device_phases=_device_phases(tables),
        passes=_passes(tables, spans),
        only_pipeline=next(iter(tables.pipelines.values())) if len(tables.pipelines) == 1 else None,
        steps_ended=_steps_ended(spans_named(tables, spans, events.OPTIMIZER)),
        blocked_share=find_blocked_share(rows, tables),
        leak=growth if growth is not None and growth.leaks else None,
        versions={name: text for name, text in _versions(tables) if text},
        long_phases=(*_long_phases(tables, spans), *_long_gaps(rows[first:])),
        collectives=index_collectives(
            tables,
            keys,
            rows,
            maker.operation,
            first=swept,
            forwards=Begins(past.forwards, _rounds_ns(tables, spans)),
            updates=Begins(past.updates, _begins_ns(spans_named(tables, spans, events.OPTIMIZER))),
            steppers=distinct(spans_named(tables, spans, events.STEP, events.OPTIMIZER)["thread"]),
        ),
    )


def _steps_ended(optimizer: Array) -> int | None:
    """Return how many steps have ended by the newest optimizer span that has."""
    ended = optimizer["step"][optimizer["end_ns"] != UNKNOWN_NS]
    return int(ended.max()) + 1 if len(ended) else None


def _with_device_progress(tables: RankTables) -> tuple[RankTables, frozenset[int]]:
    """Return the tables with operations as far as devices have come with them, and when those were issued that run.

    Of an operation whose device is followed, completion is observed: there. The program waits for it where its stream
    does, as it does in one that was issued without a handle, or in a batch.
    """
    followed = (tables.operations["flags"] & (codes.DEVICE | codes.FOLLOWED)) == codes.DEVICE | codes.FOLLOWED
    if not followed.any():
        return tables, frozenset()
    rows = tables.operations.copy()
    rows["flags"][followed] |= codes.COMPLETION_SEEN
    rows["waits"][followed & ((rows["flags"] & codes.NO_WORK) != 0)] |= 1
    intervals = tables.device_intervals
    intervals = intervals[(intervals["kind"] == codes.DEVICE_OPERATION) & (intervals["row"] >= 0)]
    intervals = intervals[followed[intervals["row"]]]  # of others nothing more would have been learnt
    ended = intervals[intervals["end_ns"] != UNKNOWN_NS]
    rows["done_ns"][ended["row"]], rows["state"][ended["row"]] = ended["end_ns"], ended["state"]
    running = intervals[intervals["end_ns"] == UNKNOWN_NS]
    for batch in _open_batches(running, rows["group"]):
        rows["waits"][batch] |= (rows["waits"][batch] > 0).any()
    return replace(tables, operations=rows), frozenset(rows["issued_ns"][running["row"]].tolist())


def _open_batches(running: Array, groups: npt.NDArray[np.integer[Any]]) -> list[npt.NDArray[np.int64]]:
    """Return the rows of operations that a device works off as one: who waits for one of them waits for all."""
    batched = distinct(running["row"][running["flags"] & schema.DEVICE_FLAG["several"] != 0])
    if not len(batched):
        return []
    return np.split(batched, np.flatnonzero((np.diff(batched) != 1) | (np.diff(groups[batched]) != 0)) + 1)


def _device_phases(tables: RankTables) -> tuple[str, ...]:
    """Return the phases that are open on the device, by their begin."""
    intervals = tables.device_intervals
    is_open = (intervals["end_ns"] == UNKNOWN_NS) & (intervals["state"] == codes.ISSUED)
    phases = intervals["op"][is_open & (intervals["kind"] == codes.DEVICE_PHASE)].tolist()
    return tuple(tables.ops[op] for op in phases if op < len(tables.ops))


def _first_error(tables: RankTables) -> int:
    """Return when the first exception left the program; operations after it belong to its exit."""
    return min((error.t_ns for error in tables.exceptions), default=UNKNOWN_NS)


def _named_ones(tables: RankTables, records: Array) -> Array:
    """Return the records whose name is known: as a rule all, which are not copied then."""
    known = records["op"] < len(tables.ops)
    return records if known.all() else select(records, known)


def _without_records(tables: RankTables) -> RankTables:
    """Return the names and lines of a rank, without a reference to its records."""
    operations, spans, samples = (
        np.zeros(0, records.dtype) for records in (tables.operations, tables.spans, tables.samples)
    )
    return replace(tables, operations=operations, spans=spans, samples=samples)


def _active_intervals(rows: Array, spans: Array) -> tuple[int, ...]:
    """Return the newest intervals in which the rank began an operation or a phase; both tables are in that order."""
    begun = [column[-MAX_TAIL:] // INTERVAL_NS for column in (rows["issued_ns"], spans["begin_ns"])]
    intervals = distinct(np.concatenate([column[np.flatnonzero(np.diff(column, prepend=-1))] for column in begun]))
    return tuple(intervals[-MAX_PAUSES - 1 :].tolist())


def without_refused(rows: Array) -> Array:
    """Count positions without calls that were refused before any message was sent, where the group went on after.

    The backend does not count them either: what the rank calls next meets what its peers call now.
    """
    quick = rows["done_ns"] - rows["issued_ns"] < _REFUSED_NS
    refused = (rows["state"] == codes.FAILED) & (rows["waits"] == 0) & quick
    if not refused.any():
        return rows
    rows = rows.copy()
    p2p = rows["kind"] == codes.POINT_TO_POINT
    gone = np.zeros(len(rows), bool)
    for group in distinct(rows["group"][refused]):
        for kind in (False, True):
            mine = (rows["group"] == group) & (p2p == kind)
            went_on = np.flatnonzero(mine & (rows["state"] == codes.DONE))
            out = mine & refused
            out[went_on[-1] if len(went_on) else 0 :] = False
            rows["seq"][mine] -= np.cumsum(out)[mine]
            gone |= out
    return rows[~gone]


def _count_operations(rows: Array, keys: dict[int, GroupId], past: Past) -> dict[tuple[GroupId, bool], int]:
    """Return how many operations a rank issued, by group and whether they are point to point."""
    kinds = rows["group"].astype(np.int64) * 2 + (rows["kind"] == codes.POINT_TO_POINT)
    newest = np.full(2 * max([0, *keys]) + 2, -1, np.int64)
    known = kinds < len(newest)
    np.maximum.at(newest, kinds[known], rows["seq"][known])
    return {
        (key, p2p): count
        for group_id, key in keys.items()
        for p2p in (False, True)
        if (count := int(newest[2 * group_id + p2p]) + 1 or past.counts.get((group_id, p2p), 0))
    }


@dataclass(frozen=True, kw_only=True)
class _Messages:
    nth: npt.NDArray[np.int64]  # of each operation: how many of its channel came before, -1 for collectives
    channels: dict[ChannelEnd, int] = field(default_factory=dict)  # how many there are
    newest: dict[ChannelEnd, Array] = field(default_factory=dict)


def _count_messages(rows: Array, tables: RankTables, keys: dict[int, GroupId], tail: int, past: Past) -> _Messages:
    """Count the messages of each channel, and return those from the row `tail` on in columns."""
    nth = np.full(len(rows), -1, np.int64)
    counted = _Messages(nth=nth)
    messages = np.flatnonzero(rows["kind"] == codes.POINT_TO_POINT)
    past_columns = np.array([*past.messages], np.int64).reshape(-1, 4)
    past_sends = ids_named(tables.ops, events.POINT_TO_POINT[:1])[past_columns[:, 1]]
    # Whether those went between devices is not counted: in a group that ignores tags, all of them count as such.
    ignoring = [number for number, group in tables.groups.items() if group.is_nccl]
    past_columns[np.isin(past_columns[:, 0], ignoring), 3] = 0
    past_keys = _channel_keys(past_columns[:, 0], past_columns[:, 2], past_sends, past_columns[:, 3])
    before: Counter[int] = Counter()
    past_rows = zip(past_columns.tolist(), past.messages.values(), strict=True)
    for i, ((group_id, op, peer, tag), number) in enumerate(past_rows):
        before[int(past_keys[i])] += number
        if op < len(tables.ops) and group_id in keys:
            sent = bool(past_sends[i])
            channel = _channel(keys[group_id], peer, tag, sent)
            counted.channels[channel] = counted.channels.get(channel, 0) + number
    if not len(messages):
        return counted
    message_rows = select(rows, messages)
    sends = are_named(tables, message_rows, events.POINT_TO_POINT[0])
    tags = message_tags(message_rows, tables.groups)
    key = _channel_keys(message_rows["group"], message_rows["peer"], sends, tags)
    order = np.argsort(key, kind="stable")
    _, first, count = np.unique(key[order], return_index=True, return_counts=True)
    earlier = np.array([before[channel_key] for channel_key in key[order][first].tolist()], np.int64)
    nth[messages[order]] = np.arange(len(order)) - np.repeat(first - earlier, count)
    is_newest = messages[order] >= tail
    newest = _in_columns(rows, messages[order][is_newest], nth, tables, tail)
    ends = np.append(0, np.cumsum(is_newest))[np.append(first, len(order))].tolist()
    for i, (at, number) in enumerate(zip(order[first].tolist(), count.tolist(), strict=True)):
        group = keys.get(int(message_rows["group"][at]))
        if group is None:
            continue
        channel = _channel(group, int(message_rows["peer"][at]), int(tags[at]), bool(sends[at]))
        counted.channels[channel] = counted.channels.get(channel, 0) + number
        if ends[i] < ends[i + 1]:
            known = counted.newest.get(channel)  # only where the peer is not known: several stand for one channel then
            table = newest[ends[i] : ends[i + 1]]
            counted.newest[channel] = table if known is None else join([known, table])
    return counted


def _channel(group: GroupId, peer: int, tag: int, sends: bool) -> ChannelEnd:
    return ChannelEnd(group, group.ranks[peer] if 0 <= peer < len(group.ranks) else -1, tag, sends)


def _channel_keys(
    groups: npt.NDArray[np.integer],
    peers: npt.NDArray[np.integer],
    sends: npt.NDArray[np.bool_],
    tags: npt.NDArray[np.integer],
) -> npt.NDArray[np.uint64]:
    """Return a number for the channel of each message where all messages of a rank are counted."""
    key: npt.NDArray[np.uint64] = groups.astype(np.uint64) << np.uint64(48)
    key |= ((peers + 1).astype(np.uint64) & np.uint64(0x7FFF)) << np.uint64(33)
    key |= (sends.astype(np.uint64) << np.uint64(32)) | (tags.astype(np.uint64) & np.uint64(0xFFFFFFFF))
    return key


def _in_columns(
    rows: Array, chosen: npt.NDArray[np.int64], nth: npt.NDArray[np.int64], tables: RankTables, tail: int
) -> Array:
    message_rows = select(rows, chosen)
    table = np.empty(len(message_rows), MESSAGE)
    table["nth"], table["at"], table["nbytes"], table["site"] = (
        nth[chosen],
        chosen - tail,
        message_rows["nbytes"],
        message_rows["site"],
    )
    table["plain"] = are_named(tables, message_rows, *events.POINT_TO_POINT)
    table["done"] = (message_rows["done_ns"] != UNKNOWN_NS) & (message_rows["state"] != codes.FAILED)
    noticed = (message_rows["waits"] > 0) | ((message_rows["flags"] & codes.ASKED) != 0)
    table["settled"] = (
        table["done"] | noticed | (message_rows["state"] == codes.FAILED) | (message_rows["state"] == codes.ISSUED)
    )
    return table


def are_named(tables: RankTables, rows: Array, *names: str) -> npt.NDArray[np.bool_]:
    """Say which records have one of these names; those whose name is lost have none."""
    return np.asarray(ids_named(tables.ops, names)[rows["op"]], np.bool_)


def _is_open(rows: Array) -> npt.NDArray[np.bool_]:
    """Return `Operation.open` of each operation as a column."""
    failed = rows["state"] == codes.FAILED
    observed = (rows["flags"] & codes.COMPLETION_SEEN) != 0
    return np.asarray(failed | (observed & (rows["done_ns"] == UNKNOWN_NS)) | (rows["state"] == codes.ISSUED), bool)


_KEPT = np.dtype(
    [
        *((name, OPERATION[name]) for name in ("group", "op", "site", "thread", "peer", "tag", "numel", "nbytes")),
        *((name, "u4") for name in ("seq", "step")),  # as recorded
        *((name, OPERATION[name]) for name in ("kind", "dtype", "reduce_op", "state", "flags", "waits")),
        *((name, OPERATION[name]) for name in ("issued_ns", "done_ns")),
        ("nth", "i4"),
    ]
)


class _Maker:
    """Makes operations of rows, from the row `first` on: of those it holds on to what operations show, half as much."""

    def __init__(
        self,
        *,
        tables: RankTables,
        keys: dict[int, GroupId],
        rows: Array,
        nth: npt.NDArray[np.int64],
        first: int,
        started: frozenset[int],
    ) -> None:
        self._first = first
        self._started = started
        self._tables = tables
        self._keys = keys
        self._rows = np.empty(len(rows) - first, _KEPT)
        self._names = _KEPT.names or ()
        for name in self._names[:-1]:
            self._rows[name] = rows[name][first:]
        self._rows["nth"] = nth[first:]
        self._ignoring_tags = {number for number, group in tables.groups.items() if group.is_nccl}

    def operation(self, i: int) -> Operation:
        """Return the operation of one row."""
        at = i - self._first
        row: dict[str, Any] = dict(zip(self._names, self._rows[at].item(), strict=True))
        tables = self._tables
        site = tables.sites.get(row["site"])
        state = row["state"]
        flags = row["flags"]
        p2p = row["kind"] == codes.POINT_TO_POINT
        return Operation(
            group=self._keys.get(row["group"], UNKNOWN_GROUP),
            op=tables.ops[row["op"]],
            seq=row["seq"],
            p2p=p2p,
            peer=row["peer"],
            tag=0 if flags & codes.DEVICE and row["group"] in self._ignoring_tags else row["tag"],
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
            started=row["issued_ns"] in self._started if flags & codes.DEVICE and flags & codes.FOLLOWED else None,
            waited=row["waits"] > 0,
            nbytes=row["nbytes"],
            thread=row["thread"],
            sizes=None if p2p else tables.sizes.get(row["tag"]),
            on_device=bool(flags & codes.DEVICE),
            nth=row["nth"],
        )


def _last_site(tables: RankTables) -> Site | None:
    """Return the line of the newest event that has one."""
    newest = [
        (int(table[begin][-1]), int(table["site"][-1]))
        for table, begin in ((tables.operations, "issued_ns"), (tables.spans, "begin_ns"))
        if len(table)
    ]
    return tables.sites.get(max(newest)[1]) if newest else None


def _has_ended_itself(tables: RankTables) -> bool:
    """Say whether the newest event is the call that ended the process."""
    if not len(tables.spans):
        return False
    begun, newest = tables.spans["begin_ns"], int(tables.spans["begin_ns"].argmax())
    later = len(tables.operations) and tables.operations["issued_ns"][-1] > begun[newest]
    return not later and bool(are_named(tables, tables.spans[newest : newest + 1], events.LEAVING)[0])


def spans_named(tables: RankTables, spans: Array, *names: str) -> Array:
    """Return the spans of these names."""
    return select(spans, are_named(tables, spans, *names)) if len(spans) else spans


def _passes(tables: RankTables, spans: Array) -> tuple[PipelinePass, ...]:
    """Return the newest training step of a pipeline schedule, and before it the newest that has ended."""
    steps = spans_named(tables, spans, events.PP_STEP)
    forwards = spans_named(tables, spans, events.PP_FORWARD) if len(steps) else spans[:0]
    ended = steps["state"] == codes.DONE
    passes = []
    for at in sorted({*np.flatnonzero(ended)[-1:].tolist(), *range(len(steps))[-1:]}):
        inside = forwards["begin_ns"] >= steps["begin_ns"][at]
        if ended[at]:
            inside &= forwards["begin_ns"] <= steps["end_ns"][at]
        stages, numbers = np.unique(forwards["stage"][inside], return_counts=True)
        passes.append(
            PipelinePass(
                plan=tables.pipelines.get(int(steps["microbatch"][at])),
                ended=bool(ended[at]),
                forwards=dict(zip(stages.tolist(), numbers.tolist(), strict=True)),
                number=at if tables.past is None and not tables.dropped_events else -1,
            )
        )
    return tuple(passes)


def _rounds_ns(tables: RankTables, spans: Array) -> npt.NDArray[np.int64]:
    """Return when forward passes began; backward passes where none were seen, as of a single layer that is called."""
    forwards = spans_named(tables, spans, events.FORWARD)
    if not len(forwards) and tables.past is None:  # backward passes of segments that are not read are not counted
        forwards = spans_named(tables, spans, events.BACKWARD)
    return _begins_ns(forwards)


def _begins_ns(spans: Array) -> npt.NDArray[np.int64]:
    return np.asarray(np.sort(spans["begin_ns"]), np.int64)


def _long_phases(tables: RankTables, spans: Array) -> Iterable[LongPhase]:
    """Give checkpoints and compilations that took long; those that follow one another at once are one."""
    for phase in LONG_PHASES:
        ended = spans_named(tables, spans, phase)
        ended = ended[ended["end_ns"] != UNKNOWN_NS]
        begin = 0
        for end in range(1, len(ended) + 1):
            if end < len(ended) and int(ended["begin_ns"][end] - ended["end_ns"][end - 1]) <= PAUSE_NS:
                continue
            first, last = ended[begin], ended[end - 1]
            if int(last["end_ns"] - first["begin_ns"]) >= LONG_NS:
                yield LongPhase(
                    phase=phase,
                    site=tables.sites.get(int(first["site"])),
                    begin_ns=int(first["begin_ns"]),
                    end_ns=int(last["end_ns"]),
                )
            begin = end


def _long_gaps(rows: Array) -> Iterable[LongPhase]:
    """Give the times between operations that took long; where a device ends operations, the host shows none."""
    if (rows["flags"] & codes.DEVICE).any():
        return
    ended = np.maximum.accumulate(np.where(rows["done_ns"] == UNKNOWN_NS, rows["issued_ns"], rows["done_ns"]))
    for at in np.flatnonzero(rows["issued_ns"][1:] - ended[:-1] >= LONG_NS).tolist():
        yield LongPhase(phase="", site=None, begin_ns=int(ended[at]), end_ns=int(rows["issued_ns"][at + 1]))
