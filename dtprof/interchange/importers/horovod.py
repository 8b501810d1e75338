"""The timeline that rank 0 of a Horovod job writes: per tensor the negotiation, with the moment every rank was ready,
and the operation.

An operation of a rank begins when rank 0 heard that the rank was ready, and ends when it ended on rank 0.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dtprof.diagnosis.sources.flight_recorder.dump_fields import dtype_code
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_records import (
    LAST_NS,
    ImportedOperation,
    ImportedRank,
    ImportedRun,
    Importer,
    RecordBuilder,
    begins,
)
from dtprof.interchange.importers.trace_stream import TraceFile, is_json
from dtprof.job.world_size import MAX_WORLD_SIZE

FORMAT = "Horovod"
_MARKS = (b"start_time_since_epoch_in_micros", b"NEGOTIATE_")
NEGOTIATION = "NEGOTIATE_"
NAMES = {
    "ALLREDUCE": "all_reduce",
    "ADASUM": "all_reduce",
    "ALLGATHER": "all_gather",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all",
    "REDUCESCATTER": "reduce_scatter",
    "BARRIER": "barrier",
}
LACKS = (
    "exposed_ns: the timeline does not show when a program was blocked, nor what it computed",
    "partition: nor what the steps were made of",
    "memory: not in the timeline",
    "overhead: not in the timeline",
    "wait_ns: a rank has arrived when rank 0 heard of it, up to a cycle (HOROVOD_CYCLE_TIME) later; an operation ends "
    "when it ended on rank 0",
)
_EXTENT = re.compile(r"\d{1,12}")


class HorovodEvent(msgspec.Struct, gc=False):
    """One event of the timeline; its tensor is its process."""

    ph: str = ""
    name: str = ""
    ts: float = 0.0
    pid: int | str | None = None
    args: Any = None


@dataclass(kw_only=True)
class _Tensor:
    """The state of one tensor while its events pass by."""

    ready: dict[int, int] = field(default_factory=dict)  # by rank, us
    negotiating: bool = False
    depth: int = 0
    op: str = ""
    begin: int = 0


@dataclass(frozen=True, kw_only=True)
class _Done:
    """One operation that has ended."""

    op: str
    begin: int
    end: int
    ready: dict[int, int]
    elements: int
    dtype: int


def import_horovod(files: Sequence[Path]) -> ImportedRun:
    """Read one timeline.

    Raises:
        NotATraceError: it holds something else, or there are several.
    """
    if len(files) > 1:
        raise NotATraceError(
            f"{files[0]} and {files[1]} are timelines of one job each: rank 0 writes one for all. Import each into a "
            "run of its own."
        )
    timeline = _Timeline()
    file = TraceFile(files[0], HorovodEvent)
    for events in file.events():
        for event in events:
            timeline.take(event)
    if not timeline.done:
        raise NotATraceError(
            f"{files[0]} holds no operation that ended ({file.count:,} events); expected the timeline that rank 0 of a "
            "Horovod job writes (HOROVOD_TIMELINE)."
        )
    ready = {rank for done in timeline.done for rank in done.ready}
    size = max(ready, default=0) + 1
    lacks: tuple[str, ...] = LACKS
    if not ready:
        lacks = (*lacks, "ranks: the timeline does not show when ranks were ready; it is that of rank 0 alone")
    ranks = [_rank(rank, size, timeline.done, file.problems) for rank in range(size)]
    return ImportedRun(
        format=FORMAT,
        files=(str(files[0]),),
        ranks=tuple(_moved(rank, timeline.base_ns) for rank in ranks),
        cannot_tell=lacks,
        starts_at_epoch=timeline.base_ns > 0,
    )


class _Timeline:
    """Follows the tensors."""

    def __init__(self) -> None:
        self.done: list[_Done] = []
        self.base_ns = 0
        self._tensors: dict[object, _Tensor] = {}

    def take(self, event: HorovodEvent) -> None:
        if event.ph == "M":
            base = event.args.get("start_time_since_epoch_in_micros") if isinstance(event.args, dict) else None
            if type(base) is int and 0 < base < LAST_NS // 1000:
                self.base_ns = base * 1000
            return
        if not isinstance(event.pid, int | str) or not -1e15 < event.ts < 1e15:
            return
        tensor = self._tensors.setdefault(event.pid, _Tensor())
        at = round(event.ts * 1000)
        if event.ph == "X" and tensor.negotiating and event.name.isdecimal() and len(event.name) < 8:
            if int(event.name) < MAX_WORLD_SIZE:
                tensor.ready[int(event.name)] = at
        elif event.ph == "B":
            if event.name.startswith(NEGOTIATION):
                tensor.negotiating, tensor.ready = True, {}
            elif tensor.depth or event.name in NAMES:
                tensor.depth += 1
                if tensor.depth == 1:
                    tensor.op, tensor.begin = NAMES[event.name], at
        elif event.ph == "E":
            if tensor.negotiating:
                tensor.negotiating = False
            elif tensor.depth:
                tensor.depth -= 1
                if not tensor.depth:
                    self._finish(tensor, at, event.args)

    def _finish(self, tensor: _Tensor, at: int, arguments: object) -> None:
        details = arguments if isinstance(arguments, dict) else {}
        shape = details.get("shape")
        elements = 0
        if isinstance(shape, str) and len(shape) < 1000:
            elements = int(np.prod([float(extent) for extent in _EXTENT.findall(shape)]))
        self.done.append(
            _Done(
                op=tensor.op,
                begin=tensor.begin,
                end=max(at, tensor.begin),
                ready=tensor.ready,
                elements=elements if 0 <= elements < LAST_NS else 0,
                dtype=dtype_code(details.get("dtype")),
            )
        )
        tensor.ready = {}


def _rank(rank: int, size: int, operations: Sequence[_Done], problems: Sequence[str]) -> ImportedRank:
    ordered = sorted(operations, key=lambda done: (done.begin, done.end))
    builder = RecordBuilder()
    # Without a negotiation nothing tells when the ranks came: that is group 1, whose operations match none.
    builder.add(
        [
            ImportedOperation(
                op=done.op,
                begin=done.ready.get(rank, done.begin),
                end=done.end,
                group=int(len(done.ready) != size),
                numel=done.elements,
                dtype=done.dtype,
            )
            for done in ordered
        ],
        rank=rank,
        world_size=size,
        unknown_groups=(1,),
        observed=False,
    )
    groups: list[dict[str, Any]] = [
        {"name": "0", "description": "global", "ranks": list(range(size)), "size": size},
        {"name": "?", "description": "when ranks were ready is not recorded", "size": size},
    ]
    return ImportedRank(
        rank=rank,
        world_size=size,
        ops=tuple(builder.ops),
        records=builder.records(),
        groups=tuple(groups),
        entries=({"k": "feature", "name": "backend:horovod"},),
        notes=tuple(problems),
        clock="rank 0",
    )


def _moved(rank: ImportedRank, base_ns: int) -> ImportedRank:
    """Return a rank with times since 1970."""
    rank.records["issued_ns"] = begins(rank.records) + base_ns
    return rank


IMPORTER = Importer(
    name="a Horovod timeline",
    recognises=lambda head: is_json(head) and any(mark in head for mark in _MARKS),
    read=import_horovod,
)
