"""The tables of records: operations, spans and samples of the ranks, as they were recorded."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.interchange.public_tables.table import Column, Table, build_table
from dtprof.records import schema
from dtprof.records.tables import UNKNOWN_NS, RankTables

RANK = Column(name="rank", dtype="int64", meaning="global rank")
STEP = Column(name="step", dtype="int64", meaning="optimizer steps that this rank had ended before")
STATE = Column(name="state", dtype="str", meaning="how far it came: issued, returned, done, failed")
CLOCK = "on the host's monotonic clock"
OPERATIONS = (
    RANK,
    Column(name="op", dtype="str", meaning="operation: all_reduce, send, ..."),
    Column(name="kind", dtype="str", meaning="collective or p2p"),
    STATE,
    Column(name="group", dtype="str", meaning="name of the process group"),
    Column(name="seq", dtype="int64", meaning="position in the group, collectives and messages counted apart"),
    Column(name="peer", dtype="int64", meaning="root or peer as rank in the group; masked: none"),
    STEP,
    Column(name="numel", dtype="int64", meaning="elements that this rank puts in"),
    Column(name="nbytes", dtype="int64", unit="bytes", meaning="the same in bytes"),
    Column(name="issued_ns", dtype="int64", unit="ns", meaning=f"when it was issued, {CLOCK}"),
    Column(name="returned_ns", dtype="int64", unit="ns", meaning="when the call returned; masked: it has not"),
    Column(name="wait_begin_ns", dtype="int64", unit="ns", meaning="first wait for its handle; masked: none"),
    Column(name="wait_ns", dtype="int64", unit="ns", meaning="time blocked in waits for its handle"),
    Column(name="done_ns", dtype="int64", unit="ns", meaning="when it was done; masked: not known"),
    Column(name="device_ns", dtype="int64", unit="ns", meaning="how long it took on its device; masked: not known"),
    Column(name="file", dtype="str", meaning="file of the user's line that called it; empty: not known"),
    Column(name="line", dtype="int64", meaning="that line; 0: not known"),
    Column(name="api", dtype="str", meaning="what that line called"),
    Column(name="label", dtype="str", meaning="on whose behalf a framework made it, in words"),
)
SPANS = (
    RANK,
    Column(name="phase", dtype="str", meaning="phase or pipeline action"),
    STATE,
    STEP,
    Column(name="begin_ns", dtype="int64", unit="ns", meaning=f"begin, {CLOCK}"),
    Column(name="end_ns", dtype="int64", unit="ns", meaning="end; masked: still open"),
    Column(name="stage", dtype="int64", meaning="stage of the pipeline that acts; masked: none"),
    Column(name="microbatch", dtype="int64", meaning="on which microbatch; masked: no stage"),
)
SAMPLES = (
    RANK,
    Column(name="name", dtype="str", meaning="what was sampled: rss_bytes, cuda_allocated_bytes, ..."),
    STEP,
    Column(name="t_ns", dtype="int64", unit="ns", meaning=f"when, {CLOCK}"),
    Column(name="value", dtype="int64", meaning="in the unit that the name ends with"),
)
_STATES = {code: name for name, code in schema.STATE.items()}
_KINDS = {code: name for name, code in schema.KIND.items()}
Values = dict[str, npt.NDArray[Any]]


def _operations(tables: RankTables) -> Values:
    rows = tables.operations
    values: Values = {name: rows[name] for name in ("seq", "step", "numel", "nbytes", "issued_ns", "wait_ns")}
    values |= {
        name: _masked(rows[name], UNKNOWN_NS) for name in ("returned_ns", "wait_begin_ns", "done_ns", "device_ns")
    }
    return values | {
        "op": _look_up(rows["op"], dict(enumerate(tables.ops)), "?"),
        "kind": _look_up(rows["kind"], _KINDS, "?"),
        "state": _look_up(rows["state"], _STATES, "?"),
        "group": _look_up(rows["group"], {number: group.name for number, group in tables.groups.items()}, "?"),
        "peer": _masked(rows["peer"], -1),
        "file": _look_up(rows["site"], {number: site.file for number, site in tables.sites.items()}, ""),
        "line": _look_up(rows["site"], {number: site.line for number, site in tables.sites.items()}, 0),
        "api": _look_up(rows["site"], {number: site.api for number, site in tables.sites.items()}, ""),
        "label": _look_up(
            rows["site"], {number: site.label.text for number, site in tables.sites.items() if site.label}, ""
        ),
    }


def _spans(tables: RankTables) -> Values:
    rows = tables.spans
    return {
        "phase": _look_up(rows["op"], dict(enumerate(tables.ops)), "?"),
        "state": _look_up(rows["state"], _STATES, "?"),
        "step": rows["step"],
        "begin_ns": rows["begin_ns"],
        "end_ns": _masked(rows["end_ns"], UNKNOWN_NS),
        "stage": _masked(rows["stage"], -1),
        "microbatch": np.ma.array(rows["microbatch"], mask=rows["stage"] < 0),
    }


def _samples(tables: RankTables) -> Values:
    rows = tables.samples
    return {
        "name": _look_up(rows["op"], dict(enumerate(tables.ops)), "?"),
        "step": rows["step"],
        "t_ns": rows["t_ns"],
        "value": rows["value"],
    }


def _look_up(numbers: npt.NDArray[Any], names: dict[int, Any], default: object) -> npt.NDArray[Any]:
    """Return the name of each number; names are shared, not copied."""
    known, place = np.unique(numbers, return_inverse=True)
    found = np.empty(len(known), object)
    found[:] = [names.get(number, default) for number in known.tolist()]
    looked_up: npt.NDArray[Any] = found[place.reshape(-1)]
    return looked_up


def _masked(values: npt.NDArray[Any], unknown: int) -> npt.NDArray[Any]:
    return np.ma.masked_equal(values.astype(np.int64), unknown)


RECORDS: dict[str, tuple[tuple[Column, ...], Callable[[RankTables], Values]]] = {
    "operations": (OPERATIONS, _operations),
    "spans": (SPANS, _spans),
    "samples": (SAMPLES, _samples),
}


def read_records(name: str, ranks: Iterable[RankTables]) -> Table:
    """Return the records of these ranks in one table, rank by rank."""
    columns, read = RECORDS[name]
    parts = []
    for tables in ranks:
        values = read(tables)
        length = len(next(iter(values.values())))
        parts.append(values | {"rank": np.full(length, tables.rank, np.int64)})
    joined = {column.name: _join([part[column.name] for part in parts]) for column in columns}
    return build_table(name, columns, joined)


def _join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the values of all ranks, masked only where some are not known."""
    if not parts:
        return np.zeros(0)
    values = np.concatenate([np.ma.getdata(part) for part in parts])
    mask = np.concatenate([np.ma.getmaskarray(part) for part in parts])
    return np.ma.array(values, mask=mask) if mask.any() else values
