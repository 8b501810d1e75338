"""What importers make of foreign files, whatever their format: the records of each rank, written as a run on disk."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof import __version__, events
from dtprof.errors import OutputError
from dtprof.run_format import paths, schema
from dtprof.run_format.archive import RECORD_DTYPE
from dtprof.run_format.writer import write_json
from dtprof.tables import Array

MAX_WORLD_SIZE = 1 << 20
MAX_OPS = 1000
MAIN_THREAD = 1
COLLECTIVE, POINT_TO_POINT = schema.KIND["collective"], schema.KIND["p2p"]
FIRST_NS = 1_000_000_000
"""Where the clock of an imported run begins: host times are never 0."""
LAST_NS = 1 << 62

Column = npt.NDArray[np.int64]
DTYPE_CODES = {name: code for code, (name, _) in enumerate(schema.DTYPES)}


@dataclass(frozen=True, kw_only=True)
class ImportedRank:
    """The records of one rank. Times count in ns from any moment that all ranks of the run share."""

    rank: int
    world_size: int
    ops: tuple[str, ...]  # what `op` of a record stands for
    records: Array  # RECORD_DTYPE; their steps are filled in when they are written
    groups: tuple[Mapping[str, Any], ...] = ()  # name, ranks or size, description, backend; ids are positions
    entries: tuple[Mapping[str, Any], ...] = ()  # further lines of the strings file
    notes: tuple[str, ...] = ()
    host: str = ""
    clock: str = ""  # ranks with the same one share a clock
    pid: int = 0
    local_rank: int = -1
    torch_version: str = ""
    ended: bool = True  # the process is not known to have gone on, or to have hung
    first_step: int | None = None  # what the format calls the first step that is marked


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """All ranks, and what can be said of them together."""

    format: str
    files: tuple[str, ...]
    ranks: tuple[ImportedRank, ...]
    cannot_tell: tuple[str, ...] = ()  # the figure, a colon, why it is not known
    starts_at_epoch: bool = False  # times count from 1970


@dataclass
class RecordBuilder:
    """Collects the records of one rank, column by column."""

    ops: list[str] = field(default_factory=lambda: ["unknown"])
    parts: list[Array] = field(default_factory=list)

    def op(self, name: str) -> int:
        """Return the id of an operation or phase."""
        if name not in self.ops:
            if len(self.ops) >= MAX_OPS:
                return self.op("unknown")
            self.ops.append(name)
        return self.ops.index(name)

    def operations(
        self,
        op: Column,
        kind: Column | int,
        begin: Column,
        end: Column,
        *,
        observed: bool,
        device: bool = False,
        returned_after: Column | int = 0,
        **fields: Column | int,
    ) -> None:
        """Add operations; an end before the begin is not known.

        Parameters:
            observed: the end is that of the operation itself, so that it is known when it kept the rank from working.
        """
        rows = np.zeros(len(begin), RECORD_DTYPE)
        done = end >= begin
        rows["state"] = np.where(done, schema.STATE["done"], schema.STATE["returned"])
        rows["kind"], rows["op"], rows["issued_ns"], rows["thread"] = kind, op, begin, MAIN_THREAD
        rows["flags"] = np.where(done & observed, schema.FLAG["completion"], 0) | device * schema.FLAG["device"]
        rows["dtype"] = rows["reduce_op"] = schema.NO_CODE
        rows["peer"] = -1
        rows["returned_after"] = returned_after
        rows["done_after"] = np.where(done, end - begin, 0)
        for name, values in fields.items():
            rows[name] = values
        self.parts.append(rows)

    def spans(
        self, name: str, begin: Column, end: Column, *, stage: Column | int = -1, microbatch: Column | int = 0
    ) -> None:
        """Add spans of one phase."""
        rows = np.zeros(len(begin), RECORD_DTYPE)
        rows["state"], rows["kind"], rows["thread"] = schema.STATE["done"], schema.KIND["span"], MAIN_THREAD
        rows["dtype"] = rows["reduce_op"] = schema.NO_CODE
        rows["op"], rows["issued_ns"], rows["done_after"] = self.op(name), begin, np.maximum(end - begin, 0)
        rows["peer"], rows["tag"] = stage, microbatch
        self.parts.append(rows)

    def marks(self, ends: Column) -> None:
        """Add the ends of steps."""
        self.spans(events.STEP, ends, ends)

    def samples(self, name: str, times: Column, values: Column) -> None:
        """Add samples of one quantity."""
        rows = np.zeros(len(times), RECORD_DTYPE)
        rows["state"], rows["kind"], rows["thread"] = schema.STATE["done"], schema.KIND["sample"], MAIN_THREAD
        rows["dtype"] = rows["reduce_op"] = schema.NO_CODE
        rows["op"], rows["issued_ns"], rows["numel"], rows["peer"] = self.op(name), times, values, -1
        self.parts.append(rows)

    def records(self) -> Array:
        """Return all records in order of time; of one moment the end of a step first."""
        rows: Array = np.concatenate(self.parts) if self.parts else np.zeros(0, RECORD_DTYPE)
        is_mark = (rows["kind"] == schema.KIND["span"]) & (rows["op"] == self.op(events.STEP))
        return rows[np.lexsort((~is_mark, rows["issued_ns"]))]


def number_in_group(group: Column, kind: Column) -> Column:
    """Return the position of each operation in its group, collectives and messages apart; they are given in order."""
    key = group.astype(np.int64) << 8 | kind
    order = np.argsort(key, kind="stable")
    first = np.r_[True, np.diff(key[order]) != 0] if len(key) else np.zeros(0, np.bool_)
    place = np.arange(len(key)) - np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    numbers = np.zeros(len(key), np.int64)
    numbers[order] = place
    return numbers


def merge_intervals(begin: Column, end: Column) -> tuple[Column, Column]:
    """Return begin and end of the times that any of the intervals covers."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    if not len(begin):
        return begin, end
    first = np.flatnonzero(np.r_[True, begin[1:] > end[:-1]])
    found_begin, found_end = begin[first], end[np.r_[first[1:] - 1, len(end) - 1]]
    covers = found_end > found_begin
    return found_begin[covers], found_end[covers]


def write_imported(run: ImportedRun, output: Path) -> None:
    """Write the run.

    Raises:
        OutputError: it cannot be written.
    """
    ranks = sorted(run.ranks, key=lambda rank: rank.rank)
    first = min((int(rank.records["issued_ns"][0]) for rank in ranks if len(rank.records)), default=FIRST_NS)
    shift = FIRST_NS - first
    last = max((int(rank.records["issued_ns"][-1]) for rank in ranks if len(rank.records)), default=first)
    epoch = -shift if run.starts_at_epoch else 0
    try:
        output.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            _write_rank(output, rank, shift, epoch)
        hosts = sorted({rank.host for rank in ranks if rank.host})
        write_json(
            output / paths.MANIFEST,
            {
                "format_version": schema.FORMAT_VERSION,
                "dtprof_version": __version__,
                "command": [],
                "hosts": hosts,
                "started_realtime_ns": FIRST_NS + epoch,
                "ended_realtime_ns": last + shift + epoch,
                "exit_status": None,
                "imported": {"format": run.format, "files": list(run.files)},
                "cannot_tell": list(run.cannot_tell),
                "notes": [],
            },
        )
    except OSError as error:
        raise OutputError(
            f"the run cannot be written to {output} ({error.strerror}). Name a directory with room that you may write "
            "to: -o DIR"
        ) from error


def _write_rank(run: Path, rank: ImportedRank, shift: int, epoch: int) -> None:
    folder = run / paths.rank_folder_name(rank.rank, 0)
    folder.mkdir()
    records = rank.records.copy()
    issued = records["issued_ns"].view(np.int64) + shift
    records["issued_ns"] = issued
    steps = [i for i, name in enumerate(rank.ops) if name == events.STEP]
    is_mark = (records["kind"] == schema.KIND["span"]) & np.isin(records["op"], steps)
    records["step"] = np.cumsum(is_mark) - is_mark
    for number in range(max(1, -(-len(records) // schema.SEGMENT_CAPACITY))):
        own = records[number * schema.SEGMENT_CAPACITY : (number + 1) * schema.SEGMENT_CAPACITY]
        with (folder / paths.segment_name(number)).open("wb") as file:
            file.write(_header(rank, number, len(own), int(issued[0]) if len(issued) else FIRST_NS, epoch))
            file.seek(schema.HEADER_SIZE)
            file.write(own.tobytes())
            file.truncate(schema.SEGMENT_SIZE)
    last = int(issued[-1]) if len(issued) else FIRST_NS
    entries: list[Mapping[str, Any]] = [
        {"k": "process", "rank": rank.rank, "pid": rank.pid, "host": rank.host, "world_size": rank.world_size},
        *({"k": "op", "id": i, "name": name} for i, name in enumerate(rank.ops)),
        {"k": "thread", "id": MAIN_THREAD, "name": "imported", "native_id": 0},
        *({"k": "group", "id": i, **group} for i, group in enumerate(rank.groups)),
        *rank.entries,
        *({"k": "note", "t_ns": last, "text": note} for note in rank.notes),
        *([{"k": "exit", "t_ns": last, "how": "imported", "code": None}] if rank.ended else []),
    ]
    lines = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)
    (folder / paths.STRINGS).write_text(lines, encoding="utf-8")


def _header(rank: ImportedRank, segment: int, count: int, opened_ns: int, epoch: int) -> bytes:
    values = {
        "magic": schema.MAGIC,
        "format_version": schema.FORMAT_VERSION,
        "byte_order": schema.BYTE_ORDER_MARK,
        "header_size": schema.HEADER_SIZE,
        "record_size": schema.RECORD_SIZE,
        "capacity": schema.SEGMENT_CAPACITY,
        "segment": segment,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "world_size": rank.world_size,
        "pid": rank.pid,
        "opened_monotonic_ns": opened_ns,
        "opened_realtime_ns": opened_ns + epoch,
        "head": count,
        "marks": schema.MARK["closed"] * rank.ended | schema.MARK["sealed"],
        "host": rank.host.encode("utf-8", "replace")[:63],
        "boot_id": hashlib.sha256(rank.clock.encode("utf-8", "replace")).hexdigest()[:36].encode(),
        "torch_version": rank.torch_version.encode()[:31],
        "dtprof_version": __version__.encode()[:31],
    }
    return schema.HEADER_STRUCT.pack(*(values.get(field.name, 0) for field in schema.HEADER))


def align_steps(ranks: Sequence[ImportedRank]) -> list[ImportedRank]:
    """Let all ranks begin with the same step, where steps are marked on all of them.

    What was recorded before differs from rank to rank, and so does the position of operations in their groups: they are
    left out, and positions count from the first step that all have.
    """
    first = [rank.first_step for rank in ranks]
    if not ranks or None in first:
        return list(ranks)
    latest = max(step for step in first if step is not None)
    return [_from_step(rank, latest) for rank in ranks]


def _from_step(rank: ImportedRank, step: int) -> ImportedRank:
    records = rank.records
    is_mark = (records["kind"] == schema.KIND["span"]) & (records["op"] == rank.ops.index(events.STEP))
    marks = np.flatnonzero(is_mark)
    surplus = step - (rank.first_step or 0)
    if surplus >= len(marks):
        return replace(rank, records=np.delete(records, marks))
    begin = records["issued_ns"][marks[surplus]]
    is_operation = (records["kind"] == COLLECTIVE) | (records["kind"] == POINT_TO_POINT)
    early = is_operation & (records["issued_ns"] < begin)
    known = [number for number, group in enumerate(rank.groups) if group.get("ranks")]
    records = records.copy()
    for number in known:
        for kind in (COLLECTIVE, POINT_TO_POINT):
            own = (records["group"] == number) & (records["kind"] == kind)
            records["seq"][own & ~early] -= np.uint32((own & early).sum())
    gone = early.copy()
    gone[marks[:surplus]] = True
    return replace(rank, records=records[~gone], first_step=step)


def check_output(output: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse a directory that holds something, unless it is a run that is to be written over.

    Raises:
        OutputError: it holds something, or what is to be imported.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{output} is a file; expected a directory to write the run to. Name another: -o DIR")
    held = next(output.iterdir(), None)
    if held is None:
        return
    if not (force and (output / paths.MANIFEST).exists()):
        over = "--force writes over a run" + ("" if (output / paths.MANIFEST).exists() else ", and this is none")
        raise OutputError(f"{output} is not empty: it holds {held.name}. Name another directory with -o; {over}.")
    whole = output.resolve()
    for path in inputs:
        if path.resolve().is_relative_to(whole):
            raise OutputError(f"{path} lies in {output}, which is to be written over. Name another directory with -o.")


def clear_output(output: Path) -> None:
    """Remove what a directory holds.

    Raises:
        OutputError: something cannot be removed.
    """
    try:
        for child in output.iterdir() if output.exists() else ():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
    except OSError as error:
        raise OutputError(
            f"{error.filename} cannot be removed ({error.strerror}). Name another directory with -o."
        ) from error
