"""Collectives issued one after the other although nothing was computed between them: they could run side by side.

Two neighbours of a thread belong to a row if both are the same operation on the same group and type, the first one was
done, and its wait over, before the second was issued in the same phase, and the program did next to nothing between. An
operation over what the same operation has just given makes no sense, so that the second need not have waited for the
first. Gathered or exchanged integers may be the sizes of what the second carries: it has to wait.

Operations that a device timed are left out: those of a group run on one stream, one after the other in any case.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.bucket_reductions import DDP
from dtprof.analysis.communication.communication_sites import phases_of_operations
from dtprof.analysis.communication.operation_timing import Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch
from dtprof.analysis.results import CallLine, GroupResult, SerialisedCollectives
from dtprof.columns import number_alike
from dtprof.intervals import Column, Mask
from dtprof.job.api_names import Apis
from dtprof.job.axes import purpose_of_operation
from dtprof.job.device_timeline import is_placed
from dtprof.job.valid_records import UNNAMED
from dtprof.records import codes
from dtprof.records.tables import Array

MAX_GAP_NS, MAX_GAP = 50_000, 0.1
"""Between the end of one and the issue of the next: so much, or this share of the time that the first one blocked."""
MIN_GAIN = 0.01
"""Of the step."""
MIN_ROWS = 0.5
"""Rows a step: what happens once in many steps, such as metrics after an epoch, makes no step shorter."""


class SerialKey(NamedTuple):
    """Name the serialised operation."""

    group: str
    op: str
    api: str
    line: CallLine | None = None  # of the program, that issues the first of a row


class SerialSums(NamedTuple):
    """Rows of serialised collectives of one rank over the measured steps."""

    rows: int
    operations: int
    nbytes: int
    exposed_ns: int  # transfers that blocked the program
    gain_ns: int  # of these, all but the longest of each row


def find_rows(
    batch: PlacedBatch, apis: Sequence[Apis], *, chosen: Mask, timing: Timing
) -> list[dict[SerialKey, SerialSums]]:
    """Return the rows of serialised collectives of each rank, summed."""
    operations, blocked = batch.operations, batch.blocked
    sums_by_rank: list[dict[SerialKey, SerialSums]] = [{} for _ in batch.ranks]
    every = np.flatnonzero(chosen & blocked.known & blocked.counts & ~is_placed(operations))
    if len(every) < 2:
        return sums_by_rank
    order = _by_thread(every, operations, batch.place)
    end = np.maximum(blocked.call[:, 1], blocked.wait[:, 1])[order]
    issued, place, exposed = operations["issued_ns"][order], batch.place[order], timing.exposed_transfer[order]
    gap, blocks = issued[1:] - end[:-1], (end - issued)[:-1]
    linked = (gap >= 0) & (blocks > 0) & (gap <= np.maximum(MAX_GAP_NS, MAX_GAP * blocks)) & (place[1:] == place[:-1])
    at = np.flatnonzero(linked)
    at = at[operations["kind"][order[at]] == codes.COLLECTIVE]
    for column in ("thread", "kind", "group", "op", "dtype", "reduce_op", "peer", "step"):
        at = at[operations[column][order[at]] == operations[column][order[at + 1]]]
    at = at[phases_of_operations(batch, order[at]) == phases_of_operations(batch, order[at + 1])]
    taken = operations[order[at]]
    at = at[~(np.isin(taken["dtype"], codes.SIZES) & (taken["reduce_op"] == codes.NONE))]
    begin = np.ones(len(order), np.bool_)
    begin[at + 1] = False
    begins = np.flatnonzero(begin)
    lengths = np.diff(np.append(begins, len(order)))
    several = lengths > 1
    if not several.any():
        return sums_by_rank
    total, longest = np.add.reduceat(exposed, begins), np.maximum.reduceat(exposed, begins)
    nbytes = np.add.reduceat(operations["nbytes"][order], begins)
    columns = np.stack([np.ones_like(lengths), lengths, nbytes, total, total - longest], axis=1)[several]
    first = begins[several]
    api_of_operation = np.concatenate([api.of_operation for api in apis])
    rows = order[first]
    kinds = [place[first], *(operations[name][rows] for name in ("group", "op", "site")), api_of_operation[rows]]
    number_of, one = number_alike(*kinds)
    sums = np.zeros((len(one), columns.shape[1]), np.int64)
    np.add.at(sums, number_of, columns)
    keys = zip(*(kind[one].tolist() for kind in kinds), strict=True)
    for (at, number, op, site_id, api), row in zip(keys, sums.tolist(), strict=True):
        tables = batch.ranks[at].placed.tables
        group = tables.groups.get(number)
        if group is not None and group.size > 1:
            line = CallLine.of(tables.sites.get(site_id))
            key = SerialKey(group.name, tables.ops[op] if op < len(tables.ops) else UNNAMED, apis[at].names[api], line)
            sums_by_rank[at][key] = _add(sums_by_rank[at].get(key), SerialSums(*row))
    return sums_by_rank


def _add(known: SerialSums | None, more: SerialSums) -> SerialSums:
    return more if known is None else SerialSums(*(a + b for a, b in zip(known, more, strict=True)))


def _by_thread(rows: Column, operations: Array, place: Column) -> Column:
    """Return rows, which follow one another in time on each rank, by rank and thread."""
    threads, places = operations["thread"][rows], place[rows]
    issued = operations["issued_ns"][rows]
    if (threads == threads[0]).all() and not ((issued[1:] < issued[:-1]) & (places[1:] == places[:-1])).any():
        return rows
    return rows[np.lexsort((issued, threads, places))]


def find_serialised(
    ranks: Sequence[Mapping[SerialKey, SerialSums]],
    groups: Sequence[GroupResult],
    *,
    num_steps: int,
    step_ns: int | None,
) -> tuple[SerialisedCollectives, ...]:
    """Return the operations that would gain most from running side by side, one row per axis, operation and api."""
    if not num_steps or not step_ns:
        return ()
    known = {group.name: group for group in groups}
    members: dict[SerialKey, list[SerialSums]] = defaultdict(list)
    gains: dict[SerialKey, Counter[CallLine | None]] = defaultdict(Counter)
    for rank in ranks:
        joined: dict[SerialKey, SerialSums] = {}
        for key, sums in rank.items():
            operation = key._replace(line=None)
            joined[operation] = _add(joined.get(operation), sums)
            gains[operation][key.line] += sums.gain_ns
        for operation, sums in joined.items():
            members[operation].append(sums)
    alike: dict[tuple[str, str, str], list[SerialisedCollectives]] = defaultdict(list)
    for key, own in members.items():
        n = len(own) * num_steps
        gain_ns = sum(sums.gain_ns for sums in own) // n
        if key.api == DDP:
            continue  # it issues buckets as they fill: neighbours are of two backward passes
        if gain_ns >= MIN_GAIN * step_ns and sum(sums.rows for sums in own) >= MIN_ROWS * n:
            axis = purpose_of_operation(known.get(key.group), key.api) or key.group
            alike[axis, key.op, key.api].append(
                SerialisedCollectives(
                    axis=axis,
                    op=key.op,
                    api=key.api or None,
                    groups=1,
                    rows_per_step=sum(sums.rows for sums in own) / n,
                    count_per_step=sum(sums.operations for sums in own) / n,
                    bytes=sum(sums.nbytes for sums in own) // sum(sums.operations for sums in own),
                    exposed_ns_per_step=sum(sums.exposed_ns for sums in own) // n,
                    gain_ns_per_step=gain_ns,
                    line=gains[key].most_common(1)[0][0],
                )
            )
    worst = [replace(max(rows, key=lambda row: row.gain_ns_per_step), groups=len(rows)) for rows in alike.values()]
    return tuple(sorted(worst, key=lambda row: (-row.gain_ns_per_step, row.axis, row.op, row.api or "")))
