"""Records of each rank from foreign files, whatever their format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.intervals import Column
from dtprof.records import events, schema
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.tables import Array

MAX_OPS = 1000
MAIN_THREAD = 1
COLLECTIVE, POINT_TO_POINT = schema.KIND["collective"], schema.KIND["p2p"]
LAST_NS = 1 << 62


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
    """All ranks, and the facts they share."""

    format: str
    files: tuple[str, ...]
    ranks: tuple[ImportedRank, ...]
    cannot_tell: tuple[str, ...] = ()  # the figure, a colon, why it is not known
    starts_at_epoch: bool = False  # times count from 1970


@dataclass(frozen=True, kw_only=True)
class Importer:
    """A format that can be imported; each module of an importer declares one as IMPORTER."""

    name: str  # as messages call its files
    recognises: Callable[[bytes], bool]  # given the first bytes of a file, unpacked
    read: Callable[[Sequence[Path]], ImportedRun]


@dataclass(frozen=True, kw_only=True)
class ImportedOperation:
    """One operation of a rank; fields not named here are those of its record."""

    op: str
    begin: int
    end: int  # before `begin`: not known
    group: int
    numel: int = 0
    dtype: int = schema.NO_CODE
    reduce_op: int = schema.NO_CODE
    peer: int = -1
    tag: int = 0
    returned_after: int = 0

    @property
    def is_message(self) -> bool:
        """Say whether it is a send or receive."""
        return self.op in events.POINT_TO_POINT or self.op in ("sendrecv", "coalesced")


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

    def add(
        self,
        operations: Sequence[ImportedOperation],
        *,
        rank: int,
        world_size: int,
        unknown_groups: Sequence[int] = (),
        observed: bool = True,
        device: bool = False,
        base_ns: int = 0,
    ) -> None:
        """Add operations, given in the order in which they were issued; each counts in its group.

        Parameters:
            rank, world_size: number operations of `unknown_groups`, of which no two ranks shall seem to meet.
            observed: see `operations`.
            base_ns: where their times count from.
        """
        if not operations:
            return
        columns = {
            name: np.array([getattr(operation, name) for operation in operations], np.int64)
            for name in ("begin", "end", "group", "numel", "dtype", "reduce_op", "peer", "tag", "returned_after")
        }
        begin, end, group = (columns.pop(name) for name in ("begin", "end", "group"))
        kind = np.array([POINT_TO_POINT if operation.is_message else COLLECTIVE for operation in operations], np.int64)
        seq = number_in_group(group, kind)
        seq = np.where(np.isin(group, unknown_groups), seq * world_size + rank, seq)
        self.operations(
            np.array([self.op(operation.op) for operation in operations], np.int64),
            kind,
            begin + base_ns,
            np.where(end >= begin, end + base_ns, -1),
            observed=observed,
            device=device,
            group=group,
            seq=seq & 0xFFFFFFFF,
            **columns,
        )

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
        rows = self._append(kind, op, begin)
        done = end >= begin
        rows["state"] = np.where(done, schema.STATE["done"], schema.STATE["returned"])
        rows["flags"] = np.where(done & observed, schema.FLAG["completion"], 0) | device * schema.FLAG["device"]
        rows["returned_after"] = returned_after
        rows["done_after"] = np.where(done, end - begin, 0)
        for name, values in fields.items():
            rows[name] = values
        rows["dtype"][rows["numel"] == 0] = schema.NO_CODE  # the file does not tell the size: it is unknown, not 0

    def spans(
        self, name: str, begin: Column, end: Column, *, stage: Column | int = -1, microbatch: Column | int = 0
    ) -> None:
        """Add spans of one phase."""
        rows = self._append(schema.KIND["span"], self.op(name), begin)
        rows["done_after"], rows["peer"], rows["tag"] = np.maximum(end - begin, 0), stage, microbatch

    def marks(self, ends: Column) -> None:
        """Add the ends of steps."""
        self.spans(events.STEP, ends, ends)

    def samples(self, name: str, times: Column, values: Column) -> None:
        """Add samples of one quantity."""
        self._append(schema.KIND["sample"], self.op(name), times)["numel"] = values

    def _append(self, kind: Column | int, op: Column | int, begin: Column) -> Array:
        """Add records, and return them to be filled in further."""
        rows: Array = np.zeros(len(begin), RECORD_DTYPE)
        rows["state"], rows["thread"], rows["peer"] = schema.STATE["done"], MAIN_THREAD, -1
        rows["kind"], rows["op"], rows["issued_ns"] = kind, op, begin
        rows["dtype"] = rows["reduce_op"] = schema.NO_CODE
        self.parts.append(rows)
        return rows

    def records(self) -> Array:
        """Return all records in order of time; of one moment the end of a step first."""
        rows: Array = np.concatenate(self.parts) if self.parts else np.zeros(0, RECORD_DTYPE)
        is_mark = (rows["kind"] == schema.KIND["span"]) & (rows["op"] == self.op(events.STEP))
        return rows[np.lexsort((~is_mark, begins(rows)))]


def begins(records: Array) -> Column:
    """Return when each record begins; before it is written, a run may count its time from any moment inside it."""
    times: Column = records["issued_ns"].view(np.int64)
    return times


def number_in_group(group: Column, kind: Column) -> Column:
    """Return the position of each operation in its group, collectives and messages apart; they are given in order."""
    key = group.astype(np.int64) << 8 | kind
    order = np.argsort(key, kind="stable")
    first = np.r_[True, np.diff(key[order]) != 0] if len(key) else np.zeros(0, np.bool_)
    place = np.arange(len(key)) - np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    numbers = np.zeros(len(key), np.int64)
    numbers[order] = place
    return numbers


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
    begin = begins(records)[marks[surplus]]
    is_operation = (records["kind"] == COLLECTIVE) | (records["kind"] == POINT_TO_POINT)
    early = is_operation & (begins(records) < begin)
    known = [number for number, group in enumerate(rank.groups) if group.get("ranks")]
    records = records.copy()
    for number in known:
        for kind in (COLLECTIVE, POINT_TO_POINT):
            of_kind = (records["group"] == number) & (records["kind"] == kind)
            records["seq"][of_kind & ~early] -= np.uint32((of_kind & early).sum())
    gone = early.copy()
    gone[marks[:surplus]] = True
    return replace(rank, records=records[~gone], first_step=step)
