"""The tables of profiler windows: the windows themselves, and their operations beside the records of these."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtprof.analysis.timeline.window_joining import match_records, recorded_duration_ns
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.window_trace import read_window
from dtprof.interchange.public_tables.record_tables import CLOCK, RANK
from dtprof.interchange.public_tables.table import Column, Table, build_table
from dtprof.records.reader import Run
from dtprof.records.tables import RankTables, Window

WINDOWS = (
    RANK,
    Column(name="number", dtype="int64", meaning="of the window on this rank, from 1"),
    Column(name="state", dtype="str", meaning="begun, written, failed"),
    Column(name="first", dtype="int64", meaning="its first step, from 1"),
    Column(name="last", dtype="int64", meaning="its last step"),
    Column(name="begin_ns", dtype="int64", unit="ns", meaning=f"when its start began, {CLOCK}; masked: it did not"),
    Column(name="end_ns", dtype="int64", unit="ns", meaning="when its last step ended; masked: not known"),
    Column(name="ready_ns", dtype="int64", unit="ns", meaning="when the rank went on; masked: not known"),
    Column(name="nbytes", dtype="int64", unit="bytes", meaning="size of its file"),
    Column(name="file", dtype="str", meaning="the trace; empty: none"),
    Column(name="reason", dtype="str", meaning="why it failed, or ended early"),
)
OPERATIONS = (
    RANK,
    Column(name="window", dtype="int64", meaning="number of the window"),
    Column(name="op", dtype="str", meaning="operation, as the trace has it"),
    Column(name="on_device", dtype="bool", meaning="it is a kernel"),
    Column(name="traced_begin_ns", dtype="int64", unit="ns", meaning=f"its call, or begin of the kernel, {CLOCK}"),
    Column(name="traced_end_ns", dtype="int64", unit="ns", meaning="its end in the trace; masked: not in it"),
    Column(name="group", dtype="str", meaning="of its record: name of the group; empty: no record was found"),
    Column(name="seq", dtype="int64", meaning="of its record: position in the group; masked: no record was found"),
    Column(name="step", dtype="int64", meaning="of its record: steps ended before; masked: no record was found"),
    Column(name="issued_ns", dtype="int64", unit="ns", meaning="of its record: when it was issued; masked: no record"),
    Column(name="recorded_ns", dtype="int64", unit="ns", meaning="its duration as recorded; masked: not known"),
)
TRACES = {"windows": WINDOWS, "traced_operations": OPERATIONS}
Values = list[dict[str, Any]]


def read_traces(name: str, run: Run, ranks: Iterable[int]) -> Table:
    """Return one of the tables of these ranks; a trace that cannot be read has no operations."""
    rows: Values = []
    for rank in ranks:
        tables = run.load(rank)
        folder = dict(run.folders[rank])[tables.attempt]
        for window in tables.windows:
            rows += [_window(rank, window, folder)] if name == "windows" else _operations(tables, window, folder)
    columns = TRACES[name]
    return build_table(name, columns, {column.name: [row[column.name] for row in rows] for column in columns})


def _window(rank: int, window: Window, folder: Path) -> dict[str, Any]:
    return {
        "rank": rank,
        "number": window.number,
        "state": window.state,
        "first": window.first,
        "last": window.last,
        "begin_ns": _known(window.begin_ns),
        "end_ns": _known(window.end_ns),
        "ready_ns": _known(window.ready_ns),
        "nbytes": window.size_bytes,
        "file": str(folder / window.file) if window.file else "",
        "reason": window.reason,
    }


def _operations(tables: RankTables, window: Window, folder: Path) -> Values:
    if window.state != "written":
        return []
    try:
        trace = read_window(folder / window.file, window)
    except NotATraceError:
        return []
    rows = []
    for row, index in zip(trace.operations, match_records(trace, tables).tolist(), strict=True):
        record = tables.operations[index : index + 1] if index >= 0 else None
        rows.append(
            {
                "rank": tables.rank,
                "window": window.number,
                "op": trace.ops[int(row["op"])],
                "on_device": bool(row["on_device"]),
                "traced_begin_ns": int(row["begin_ns" if row["on_device"] else "issued_ns"]),
                "traced_end_ns": _known(int(row["end_ns"])),
                "group": "" if record is None else tables.groups[int(record["group"][0])].name,
                "seq": None if record is None else int(record["seq"][0]),
                "step": None if record is None else int(record["step"][0]),
                "issued_ns": None if record is None else int(record["issued_ns"][0]),
                "recorded_ns": None if record is None else _known(int(recorded_duration_ns(record)[0])),
            }
        )
    return rows


def _known(t_ns: int) -> int | None:
    return t_ns if t_ns >= 0 else None
