"""The table of collectives: time and bytes, summed by group, operation and api."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.blocked_time import Blocked
from dtprof.analysis.communication.bus_bandwidth import bus_factor, total_bytes
from dtprof.analysis.communication.operation_timing import Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch
from dtprof.analysis.results import CollectiveResult, GroupResult
from dtprof.columns import begins_of, number_distinct
from dtprof.intervals import Column, Mask
from dtprof.job.api_names import Apis
from dtprof.job.axes import purpose_of_operation
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.groups import GroupId
from dtprof.job.valid_records import UNNAMED
from dtprof.records.codes import NONE
from dtprof.records.tables import UNKNOWN_NS, Array, join, select

MAX_LISTED = 1 << 16
"""Rows of the table of collectives, and groups."""
_ROWS_AT_ONCE = 1 << 16
HANDED_OVER = "send"
"""Operations that end before their message has arrived, where a backend buffers messages, as gloo does."""


class RowKey(NamedTuple):
    """The key of a row of the table of collectives."""

    group: GroupId
    op: str
    api: str


ROW_SUMS = np.dtype(
    [
        ("records", "i8"),  # operations times ranks
        ("count", "i8"),  # each operation once
        ("of_lowest", "i8"),  # records of the lowest member of the group; of messages all
        ("dropped", "i8"),  # of the records those of which only sums are left
        ("sized", "i8"),  # records whose size is known
        ("nbytes", "i8"),
        ("timed", "i8"),  # records whose duration is known
        ("duration", "i8"),
        ("split", "i8"),  # records whose wait is known
        ("wait", "i8"),
        ("transfer", "i8"),
        ("split_nbytes", "i8"),
        ("seen", "i8"),  # records whose duration and exposed time are known
        ("exposed", "i8"),
        ("in_flight", "i8"),  # duration of these
        ("in_flight_exposed", "i8"),  # exposed time of these up to completion
    ]
)


def sum_rows(
    batch: PlacedBatch, apis: Sequence[Apis], *, chosen: Mask, instances: OperationInstances, timing: Timing
) -> dict[RowKey, Array]:
    """Sum the chosen operations of all ranks by group, operation and api.

    A collective goes by the names that the lowest rank gave it, a message by those of the rank itself.
    """
    operations, matched = batch.operations, batch.matched
    inside = chosen[matched.every_row]
    if not inside.any():
        return {}
    rows, instance_rows = matched.every_row[inside], select(batch.instance_rows, inside)
    number = matched.of_each(range(len(matched.rows)))[inside]
    is_p2p = matched.of_each(channel.is_p2p for channel in matched.channels)[inside] > 0
    ranks = batch.rank_of_operation[rows]
    is_lowest = is_p2p | (matched.of_each(channel.group.ranks.lowest for channel in matched.channels)[inside] == ranks)
    counted = is_p2p | (instance_rows["first_rank"] == ranks)
    api_of_operation = np.concatenate([api.of_operation for api in apis])
    op = np.where(is_p2p, operations["op"][rows], instance_rows["op"])
    api = np.where(is_p2p, api_of_operation[rows], instance_rows["api"])
    codes, keys = number_distinct(op.astype(np.int64) << 32 | api)
    pairs, keys = number_distinct(number * len(codes) + keys)
    names = []
    for pair_of in pairs.tolist():
        at, code = divmod(pair_of, len(codes))
        channel, place = matched.channels[at], int(batch.place_of_channel[at])
        op_number, api_number = divmod(int(codes[code]), 1 << 32)
        if channel.is_p2p:
            ops = batch.ranks[place].placed.tables.ops
            name = ops[op_number] if op_number < len(ops) else UNNAMED
            names.append(RowKey(channel.group, name, apis[place].names[api_number]))
        else:
            names.append(RowKey(channel.group, instances.ops.values[op_number], instances.apis.values[api_number]))
    order = keys.astype(np.uint16 if len(pairs) < 1 << 16 else np.int64).argsort(kind="stable")  # the former by radix
    keys, rows, counted, is_lowest = keys[order], rows[order], counted[order], is_lowest[order]
    sums: dict[RowKey, Array] = {}
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        first = np.flatnonzero(begins_of(keys[some]))
        columns = _columns(operations["nbytes"][rows[some]], rows[some], timing, batch.blocked)
        columns["sized"] = operations["dtype"][rows[some]] != NONE
        columns["count"], columns["of_lowest"] = counted[some], is_lowest[some]
        table = np.zeros(len(first), ROW_SUMS)
        for name, values in columns.items():
            table[name] = np.add.reduceat(values, first, dtype=np.int64)
        for position, place in enumerate(keys[some][first].tolist()):
            key, row = names[place], table[position : position + 1]
            sums[key] = add_sums(sums[key], row) if key in sums else row
    return sums


def _columns(nbytes: Column, rows: Column, timing: Timing, blocked: Blocked) -> dict[str, Column | Mask]:
    duration, wait = timing.duration[rows], timing.wait[rows]
    timed, split = duration != UNKNOWN_NS, wait != UNKNOWN_NS
    seen = timed & blocked.exposure_known[rows]
    exposed = timing.exposed_wait[rows] + timing.exposed_transfer[rows]
    return {
        "records": np.ones(len(rows), np.int64),
        "nbytes": nbytes,
        "timed": timed,
        "duration": np.where(timed, duration, 0),
        "split": split,
        "wait": np.where(split, wait, 0),
        "transfer": np.where(split, duration - wait, 0),
        "split_nbytes": np.where(split, nbytes, 0),
        "seen": seen,
        "exposed": np.where(seen, exposed, 0),
        "in_flight": np.where(seen, duration, 0),
        "in_flight_exposed": np.where(seen, np.clip(timing.exposed_in_flight[rows], 0, np.maximum(duration, 0)), 0),
    }


def add_sums(a: Array, b: Array) -> Array:
    """Add sums to sums."""
    total: Array = (a.view(np.int64) + b.view(np.int64)).view(ROW_SUMS)
    return total


def add_rows(sums: dict[RowKey, Array], rows: Mapping[RowKey, Array]) -> None:
    """Add rows to those that are there."""
    for key, row in rows.items():
        sums[key] = add_sums(sums[key], row) if key in sums else row


def list_collectives(sums: dict[RowKey, Array]) -> tuple[CollectiveResult, ...]:
    """Turn sums into the table of collectives, largest exposed time first; of very many rows only the costliest."""
    keys, rows = list(sums), join([*sums.values(), np.zeros(0, ROW_SUMS)])  # a row a key
    present = np.flatnonzero(rows["records"])
    if len(present) > MAX_LISTED:
        cost = rows["exposed"][present] + rows["duration"][present] * 1e-9
        present = np.sort(present[np.argsort(-cost, kind="stable")[:MAX_LISTED]])
    results = [_result(keys[i], row) for i, row in zip(present.tolist(), rows[present].tolist(), strict=True)]
    return tuple(
        sorted(
            results,
            key=lambda row: (
                -(row.exposed_ns or 0) * row.count,
                -(row.duration_ns or 0) * row.count,
                -(row.bytes or 0) * row.count,
                (row.group, row.op, row.api or ""),
            ),
        )
    )


def name_axes(rows: Iterable[CollectiveResult], groups: Iterable[GroupResult]) -> tuple[CollectiveResult, ...]:
    """Return rows with the axis that each serves, by its group or the label of its operations."""
    known = {group.name: group for group in groups}
    return tuple(replace(row, axis=purpose_of_operation(known.get(row.group), row.api) or None) for row in rows)


def _result(key: RowKey, sums: tuple[int, ...]) -> CollectiveResult:
    row = dict(zip(ROW_SUMS.names or (), sums, strict=True))
    transfer = int(row["transfer"])
    algbw = busbw = None
    if row["split"] and transfer > 0:
        factor = bus_factor(key.op, key.group.size)
        if factor is not None and row["split_nbytes"]:
            algbw = total_bytes(key.op, int(row["split_nbytes"]), key.group.size) / transfer
            busbw = algbw * factor
    return CollectiveResult(
        group=key.group.name,
        op=key.op,
        api=key.api or None,
        # An operation may be dropped by one rank and kept by another: then the lowest has seen each once, too.
        count=max(int(row["of_lowest"]) if row["dropped"] else 0, int(row["count"]), 1),
        dropped_records=int(row["dropped"]),
        bytes=0 if key.op == "barrier" else _mean(row["nbytes"], row["sized"]),
        duration_ns=_mean(row["duration"], row["timed"]),
        wait_ns=_mean(row["wait"], row["split"]),
        transfer_ns=_mean(row["transfer"], row["split"]),
        exposed_ns=_mean(row["exposed"], row["seen"]),
        overlap=1 - int(row["in_flight_exposed"]) / int(row["in_flight"]) if row["in_flight"] > 0 else None,
        busbw_gb_per_s=busbw,
        algbw_gb_per_s=algbw,
    )


def _mean(total: int, number: int) -> int | None:
    return int(total) // int(number) if number else None


def find_fastest(rows: Sequence[CollectiveResult]) -> CollectiveResult:
    """Return the operation of highest bus bandwidth; a send only where nothing else is known."""
    arriving = [row for row in rows if row.op != HANDED_OVER] or rows
    return max(arriving, key=lambda row: row.busbw_gb_per_s or 0)
