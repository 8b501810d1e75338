"""The tables of records: operations, spans and samples of the ranks, as they were recorded."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.interchange.public_tables.table import Column, Table, build_table
from dtprof.records import schema, tables
from dtprof.records.tables import Array, RankTables, TableColumn

RANK = Column(name="rank", dtype="int64", meaning="global rank")
CLOCK = "on the host's monotonic clock"
_LOOKED_UP = ("op", "kind", "state", "group")
"""Columns that are ids or codes, and texts in exported tables."""


def _columns(columns: Sequence[TableColumn], *first: str) -> tuple[Column, ...]:
    """Return the exported columns, some before the others."""
    exported = {
        column.name: Column(
            name=column.exported_as or column.name,
            dtype="str" if column.name in _LOOKED_UP else "int64",
            unit=column.unit if column.unit in ("ns", "bytes") else "",
            meaning=column.exported,
        )
        for column in columns
        if column.exported
    }
    return tuple(exported[name] for name in dict.fromkeys((*first, *exported)))


OPERATIONS = (
    RANK,
    *_columns(tables.OPERATIONS, "op", "kind", "state", "group", "seq", "peer", "step", "numel", "nbytes"),
    Column(name="file", dtype="str", meaning="file of the user's line that called it; empty: not known"),
    Column(name="line", dtype="int64", meaning="that line; 0: not known"),
    Column(name="api", dtype="str", meaning="what that line called"),
    Column(name="label", dtype="str", meaning="the framework component that issued it, in words"),
)
SPANS = (RANK, *_columns(tables.SPANS))
SAMPLES = (RANK, *_columns(tables.SAMPLES))
_STATES = {code: name for name, code in schema.STATE.items()}
_KINDS = {code: name for name, code in schema.KIND.items()}
Values = dict[str, npt.NDArray[Any]]


def _values(rows: Array, columns: Sequence[TableColumn], rank: RankTables) -> Values:
    """Return the exported columns of a table: names for ids and codes, masks for numbers that mean unknown."""
    names: dict[str, dict[int, Any]] = {
        "op": dict(enumerate(rank.ops)),
        "kind": _KINDS,
        "state": _STATES,
        "group": {number: group.name for number, group in rank.groups.items()},
    }
    values: Values = {}
    for column in columns:
        if column.exported:
            numbers = rows[column.name]
            if column.name in names:
                numbers = _look_up(numbers, names[column.name], "?")
            elif column.unknown is not None:
                numbers = np.ma.masked_equal(numbers.astype(np.int64), column.unknown)
            values[column.exported_as or column.name] = numbers
    return values


def _operations(rank: RankTables) -> Values:
    site, sites = rank.operations["site"], rank.sites
    return _values(rank.operations, tables.OPERATIONS, rank) | {
        "file": _look_up(site, {number: site.file for number, site in sites.items()}, ""),
        "line": _look_up(site, {number: site.line for number, site in sites.items()}, 0),
        "api": _look_up(site, {number: site.api for number, site in sites.items()}, ""),
        "label": _look_up(site, {number: site.label.text for number, site in sites.items() if site.label}, ""),
    }


def _spans(rank: RankTables) -> Values:
    rows = rank.spans
    values = _values(rows, tables.SPANS, rank)
    return values | {"microbatch": np.ma.array(rows["microbatch"], mask=rows["stage"] < 0)}


def _samples(rank: RankTables) -> Values:
    return _values(rank.samples, tables.SAMPLES, rank)


def _look_up(numbers: npt.NDArray[Any], names: dict[int, Any], default: object) -> npt.NDArray[Any]:
    """Return the name of each number; names are shared, not copied."""
    known, place = np.unique(numbers, return_inverse=True)
    texts = np.empty(len(known), object)
    texts[:] = [names.get(number, default) for number in known.tolist()]
    looked_up: npt.NDArray[Any] = texts[place.reshape(-1)]
    return looked_up


RECORDS: dict[str, tuple[tuple[Column, ...], Callable[[RankTables], Values]]] = {
    "operations": (OPERATIONS, _operations),
    "spans": (SPANS, _spans),
    "samples": (SAMPLES, _samples),
}


def read_records(name: str, ranks: Iterable[RankTables]) -> Table:
    """Return the records of these ranks in one table, rank by rank."""
    columns, read = RECORDS[name]
    parts = []
    for rank in ranks:
        values = read(rank)
        length = len(next(iter(values.values())))
        parts.append(values | {"rank": np.full(length, rank.rank, np.int64)})
    joined = {column.name: _join([part[column.name] for part in parts]) for column in columns}
    return build_table(name, columns, joined)


def _join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the values of all ranks, masked only where some are not known."""
    if not parts:
        return np.zeros(0)
    values = np.concatenate([np.ma.getdata(part) for part in parts])
    mask = np.concatenate([np.ma.getmaskarray(part) for part in parts])
    return np.ma.array(values, mask=mask) if mask.any() else values
