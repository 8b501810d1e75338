"""Build runs in a few lines, in memory and on disk, for the tests of analysis, diagnosis, reports and commands.

Times are ns after START_NS. `RankBuilder.tables` gives the tables of a rank, `MemoryRun` a run of several, `write_run`
the same on disk as real segment files of the current format:

    ranks = [RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)]
    for rank, late in zip(ranks, (0, 50), strict=True):
        rank.span("backward", 100, 200)
        rank.op("all_reduce", 110 + late, 180, nbytes=64)
        rank.span("optimizer", 200, 210)
    summary = summarise(MemoryRun(ranks))
    folder = write_run(tmp_path / "run", ranks)
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.records import events, paths, schema, tables
from dtprof.records.axis_names import axis_of
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.host_clocks import HostClock
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.rank_log import device_durations
from dtprof.records.sites import Label, Site
from dtprof.records.tables import UNKNOWN_NS, ExceptionRecord, Group, ProcessExit, RankTables, ThreadException

START_NS = 1_000_000_000
WALL_CLOCK_NS = 1_790_000_000_000_000_000
FLAG, STATE, KIND = schema.FLAG, schema.STATE, schema.KIND
ISSUED = [column.name for column in schema.RECORD].index("issued_ns")
RAW_NAMES = {
    "all_reduce": "allreduce_",
    "all_gather": "allgather_",
    "reduce_scatter": "reduce_scatter_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_base_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_",
}


@dataclass
class RankBuilder:
    """The records of one rank, added in any order. Group 0 is the default group of all ranks."""

    rank: int
    world_size: int
    attempt: int = 0
    host: str = "host-a"
    boot_id: str = "boot-a"
    hook: str = "native"
    torch_version: str = "2.13.0+cpu"
    dropped_events: int = 0
    truncated: bool = False
    closed: bool = True
    exceptions: list[ExceptionRecord] = field(default_factory=list)
    thread_exceptions: list[ThreadException] = field(default_factory=list)
    problems: tuple[str, ...] = ()
    groups: dict[int, Group] = field(default_factory=dict)
    sites: dict[int, Site] = field(default_factory=dict)
    sizes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    pipelines: dict[int, tables.Pipeline] = field(default_factory=dict)
    windows: tuple[tables.Window, ...] = ()
    shardings: tuple[tables.Sharding, ...] = ()
    bucket_layouts: tuple[tables.BucketLayout, ...] = ()
    device_uuid: str = ""
    features: tuple[str, ...] = ()
    started_later_s: int = -1  # by the wall clock; -1: an hour after the attempt before, which was not active any more

    def __post_init__(self) -> None:
        """Declare the default group."""
        self.pid = 10_000 + self.rank
        if self.started_later_s < 0:
            self.started_later_s = 3600 * self.attempt
        self._ops: list[str] = []
        self._operations: list[dict[str, Any]] = []
        self._spans: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._device_intervals: list[dict[str, Any]] = []
        self._seqs: Counter[tuple[int, bool]] = Counter()
        self._step = 0
        self._backward_since_step = False
        if not self.groups:
            self.group("0", range(self.world_size), "default_pg")

    def group(
        self, name: str, ranks: Sequence[int], description: str = "", *, known: bool = True, backend: str = "gloo"
    ) -> int:
        """Declare a group and return its id; `known=False` leaves its members out."""
        number = len(self.groups)
        self.groups[number] = Group(
            name=name,
            description=description,
            size=len(ranks),
            ranks=tuple(ranks) if known else (),
            backend=backend,
            timeout_s=1800.0,
            axis=axis_of(description),
        )
        return number

    def site(
        self,
        api: str = "",
        *,
        file: str = "/home/me/train.py",
        line: int = 1,
        function: str = "main",
        label: Label | None = None,
        callers: tuple[tuple[str, int], ...] = (),
    ) -> int:
        """Declare a line of the user's code, called from lines of functions of that file, and return its id."""
        around = tuple(Site(file=file, line=at, function=name) for name, at in callers)
        site = Site(file=file, line=line, function=function, api=api, label=label, callers=around)
        for number, known in self.sites.items():
            if known == site and known.callers == around:
                return number
        self.sites[len(self.sites) + 1] = site
        return len(self.sites)

    def op(
        self,
        name: str,
        issued: int,
        done: int | None = None,
        *,
        returned: int | None = None,
        waits: tuple[int, int] | None = None,
        is_async: bool = False,
        api: str | None = None,
        site: int | None = None,
        group: int = 0,
        seq: int | None = None,
        nbytes: int = 0,
        peer: int = -1,
        tag: int = 0,
        thread: int = 1,
        step: int | None = None,
        flags: int = FLAG["completion"],
        device: int | None = None,
        state: str | None = None,
        dtype: str = "uint8",
        reduce_op: str | None = None,
    ) -> None:
        """Add an operation.

        A synchronous one with `done` returns at once and is waited for from issue to done; without `done` it is
        inside the call. With `is_async` it returns at once and nobody waits unless `waits` says so.
        """
        is_p2p = name in events.POINT_TO_POINT
        if seq is None:
            seq = self._seqs[group, is_p2p]
        self._seqs[group, is_p2p] = seq + 1
        if returned is None and (done is not None or is_async):
            returned = issued
        if waits is None and done is not None and not is_async:
            waits = (returned if returned is not None else issued, done)
        if state is None:
            state = "done" if done is not None else "returned" if returned is not None else "issued"
        self._operations.append(
            {
                "op": self._op_id(name),
                "kind": KIND["p2p" if is_p2p else "collective"],
                "state": STATE[state],
                "flags": flags | FLAG["async"] * is_async,
                "waits": int(waits is not None),
                "dtype": [known for known, _ in schema.DTYPES].index(dtype),
                "reduce_op": schema.NO_CODE if reduce_op is None else schema.REDUCE_OPS.index(reduce_op),
                "thread": thread,
                "group": group,
                "seq": seq,
                "peer": peer,
                "tag": tag,
                "site": site if site is not None else self.site(api) if api is not None else 0,
                "step": self._step if step is None else step,
                "numel": nbytes // dict(schema.DTYPES)[dtype],
                "nbytes": nbytes,
                "issued_ns": START_NS + issued,
                "returned_ns": _absolute(returned),
                "wait_begin_ns": _absolute(waits and waits[0]),
                "wait_ns": waits[1] - waits[0] if waits else 0,
                "done_ns": _absolute(done),
                "device_ns": UNKNOWN_NS if device is None else device,
            }
        )

    def span(
        self,
        phase: str,
        begin: int,
        end: int | None = None,
        *,
        thread: int = 1,
        step: int | None = None,
        state: str | None = None,
        flags: int = 0,
        site: int = 0,
        stage: int = -1,
        microbatch: int = 0,
    ) -> None:
        """Add a phase; without an end it is still open. Steps are counted as capture does."""
        self._backward_since_step |= phase == events.BACKWARD
        self._spans.append(
            {
                "op": self._op_id(phase),
                "state": STATE[state or ("issued" if end is None else "done")],
                "flags": flags,
                "thread": thread,
                "stage": stage,
                "microbatch": microbatch,
                "site": site,
                "step": self._step if step is None else step,
                "begin_ns": START_NS + begin,
                "end_ns": _absolute(end),
            }
        )
        if phase == events.OPTIMIZER and end is not None and self._backward_since_step:
            self._step += 1
            self._backward_since_step = False

    def sample(self, name: str, t: int, value: int) -> None:
        """Add a sample."""
        self._samples.append({"op": self._op_id(name), "step": self._step, "t_ns": START_NS + t, "value": value})

    def device_interval(
        self,
        kind: str,
        name: str,
        begin: int,
        end: int | None = None,
        *,
        host: tuple[int, int] = (0, 0),
        group: int = 0,
        seq: int = 0,
        stream: int = 1,
        error: int = 0,
        flags: int = 0,
        reached: int | None = None,
    ) -> None:
        """Add what a device did: an operation, a wait or a phase.

        `host` is when the host was at its begin and end, `reached` when the caller's stream came to an operation.
        """
        self._device_intervals.append(
            {
                "kind": KIND[f"device_{kind}"],
                "state": STATE["issued" if end is None else "done"],
                "op": self._op_id(name),
                "group": group,
                "seq": seq,
                "flags": flags,
                "site": 0,
                "stream": stream,
                "step": self._step,
                "begin_ns": START_NS + begin,
                "end_ns": _absolute(end),
                "error_ns": error,
                "reached_ns": START_NS + (begin if reached is None else reached),
                "host_begin_ns": START_NS + host[0],
                "host_end_ns": UNKNOWN_NS if end is None or kind == "operation" else START_NS + host[1],
                "row": -1,
            }
        )

    def exception(
        self, t: int, kind: str = "RuntimeError", message: str = "boom", *, line: int = 1, library: str = ""
    ) -> None:
        """Add an exception that left the program, raised in this file of a library, else in its own code."""
        frame = f'  File "{library}", line 1, in _raise\n' if library else ""
        self.exceptions.append(
            ExceptionRecord(
                t_ns=START_NS + t,
                type=kind,
                message=message,
                traceback=f"Traceback (most recent call last):\n{frame}{kind}: {message}\n",
                frame=Site(file="/home/me/train.py", line=line, function="main"),
            )
        )

    def tables(self) -> RankTables:
        """Return the tables of this rank."""
        operations = _table(self._operations, tables.OPERATION, "issued_ns")
        spans = _table(self._spans, tables.SPAN, "begin_ns")
        samples = _table(self._samples, tables.SAMPLE, "t_ns")
        intervals = _table(self._device_intervals, tables.DEVICE_INTERVAL, "begin_ns")
        device_durations.find_operations(operations, intervals)
        times = [START_NS, *(error.t_ns for error in self.exceptions)]
        for table in (operations, spans, samples, intervals):
            times += [int(table[name].max()) for name in table.dtype.names or () if len(table) and name[-3:] == "_ns"]
        return RankTables(
            rank=self.rank,
            attempt=self.attempt,
            world_size=self.world_size,
            local_rank=self.rank,
            pid=self.pid,
            host=self.host,
            boot_id=self.boot_id,
            hook=self.hook,
            torch_version=self.torch_version,
            python_version="3.12.0",
            ops=tuple(self._ops),
            raw_ops=tuple(RAW_NAMES.get(name, name) for name in self._ops),
            sites=self.sites,
            groups=self.groups,
            threads={1: "MainThread"},
            sizes=self.sizes,
            pipelines=self.pipelines,
            windows=self.windows,
            shardings=self.shardings,
            bucket_layouts=self.bucket_layouts,
            features=("backend:gloo", *(["ddp"] if events.FORWARD in self._ops else []), *self.features),
            operations=operations,
            spans=spans,
            samples=samples,
            device_intervals=intervals,
            streams={1: "cuda:0 stream 0", 2: "cuda:0 stream 7"} if len(intervals) else {},
            exceptions=tuple(self.exceptions),
            thread_exceptions=tuple(self.thread_exceptions),
            ended_ns=max(times) if self.closed else UNKNOWN_NS,
            first_ns=START_NS,
            last_ns=max(times),
            monotonic_to_realtime_ns=WALL_CLOCK_NS - START_NS + self.started_later_s * 1_000_000_000,
            dropped_events=self.dropped_events,
            truncated=self.truncated,
            closed=self.closed,
            device_uuid=self.device_uuid,
            problems=self.problems,
        )

    def _op_id(self, name: str) -> int:
        if name not in self._ops:
            self._ops.append(name)
        return self._ops.index(name)


@dataclass
class MemoryRun:
    """A run of ranks that are RankBuilders or RankTables, as analysis sees one."""

    ranks: Sequence[RankBuilder | RankTables]
    path: Path = Path("a-run")
    manifest: Manifest = field(default_factory=Manifest)
    exits: dict[int, ProcessExit] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    clocks: dict[str, HostClock] = field(default_factory=dict)
    memory: tuple[tables.NodeMemory, ...] = ()
    samples: dict[str, NodeSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort by rank and attempt."""
        self._tables = {(t.rank, t.attempt): t for t in map(_as_tables, self.ranks)}
        self.folders: dict[int, list[tuple[int, Path]]] = {}
        for rank, attempt in sorted(self._tables):
            self.folders.setdefault(rank, []).append((attempt, Path(paths.rank_folder_name(rank, attempt))))

    @property
    def name(self) -> str:
        """Where it lies."""
        return str(self.path)

    def exit_of(self, _: str, pid: int) -> ProcessExit | None:
        """Return how a process ended."""
        return self.exits.get(pid)

    def node_memory(self) -> tuple[tables.NodeMemory, ...]:
        """Return the memories of the nodes."""
        return self.memory

    def node_samples(self, *, max_samples: int | None = None) -> dict[str, NodeSamples]:  # noqa: ARG002
        """Return the samples of the nodes."""
        return self.samples

    def host_clocks(self) -> dict[str, HostClock]:
        """Return the clocks measured, by host."""
        return self.clocks

    def on_disk(self) -> None:
        """Return None: it lies in memory."""

    def part(self, ranks: Sequence[int]) -> "MemoryRun":
        """Return the run with some of its ranks."""
        return MemoryRun([self._tables[rank, attempt] for rank in ranks for attempt, _ in self.folders[rank]])

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Return the tables of one rank."""
        return self._tables[rank, self.folders[rank][-1][0] if attempt is None else attempt]

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return the tables of ranks."""
        return map(self.load, ranks)


def write_run(
    folder: Path,
    ranks: Sequence[RankBuilder],
    *,
    command: Sequence[str] | None = ("torchrun", "train.py"),
    exit_status: int = 0,
    exits: Sequence[ProcessExit] = (),
    started_realtime_ns: int = WALL_CLOCK_NS,
) -> Path:
    """Write a run that has ended; `command=None` leaves run.json out."""
    folder.mkdir(parents=True, exist_ok=True)
    if command is not None:
        manifest = {
            "format_version": schema.FORMAT_VERSION,
            "command": list(command),
            "started_realtime_ns": started_realtime_ns,
            "ended_realtime_ns": started_realtime_ns + 1,
            "exit_status": exit_status,
            "hosts": sorted({rank.host for rank in ranks}),
        }
        (folder / paths.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for rank in ranks:
        write_rank(folder, rank)
        node = folder / paths.node_folder_name(rank.host)
        node.mkdir(exist_ok=True)
        rows = [{"pid": e.pid, "status": e.status, "t_ns": e.t_ns} for e in exits if e.pid == rank.pid]
        with (node / paths.EXITS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def write_rank(run: Path, builder: RankBuilder) -> Path:
    """Write the folder of one rank: full-sized segments and the strings file."""
    rank = builder.tables()
    folder = run / paths.rank_folder_name(rank.rank, rank.attempt)
    folder.mkdir(parents=True)
    records = sorted(
        [*_operation_records(rank), *_span_records(rank), *_sample_records(rank), *_device_records(rank)],
        key=lambda row: int(row[ISSUED]),
    )
    for number in range(max(1, -(-len(records) // schema.SEGMENT_CAPACITY))):
        own = records[number * schema.SEGMENT_CAPACITY : (number + 1) * schema.SEGMENT_CAPACITY]
        body = b"".join(schema.RECORD_STRUCT.pack(*row) for row in own)
        data = _header(rank, number, len(own)).ljust(schema.HEADER_SIZE, b"\0") + body
        (folder / paths.segment_name(number)).write_bytes(data.ljust(schema.SEGMENT_SIZE, b"\0"))
    lines = "".join(json.dumps(entry) + "\n" for entry in _strings(rank))
    (folder / paths.STRINGS).write_text(lines, encoding="utf-8")
    return folder


def _absolute(t: int | None) -> int:
    return UNKNOWN_NS if t is None else START_NS + t


def _as_tables(rank: RankBuilder | RankTables) -> RankTables:
    return rank.tables() if isinstance(rank, RankBuilder) else rank


def _table(rows: list[dict[str, Any]], dtype: np.dtype[Any], order: str) -> tables.Array:
    table = np.zeros(len(rows), dtype)
    for name in dtype.names or ():
        table[name] = [row[name] for row in rows]
    return table[np.argsort(table[order], kind="stable")]


def _header(rank: RankTables, segment: int, head: int) -> bytes:
    return schema.pack_header(
        segment=segment,
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        attempt=rank.attempt,
        pid=rank.pid,
        tap={name: code for code, name in schema.HOOKS.items()}[rank.hook],
        opened_monotonic_ns=rank.first_ns,
        opened_realtime_ns=rank.first_ns + rank.monotonic_to_realtime_ns,
        head=head,
        dropped=rank.dropped_events,
        marks=schema.MARK["closed"] * rank.closed | schema.MARK["truncated"] * rank.truncated,
        host=rank.host.encode(),
        boot_id=rank.boot_id.encode(),
        torch_version=rank.torch_version.encode(),
        dtprof_version=b"0.1.0",
    )


def _strings(rank: RankTables) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        {"k": "process", "rank": rank.rank, "pid": rank.pid, "host": rank.host, "python": rank.python_version}
    ]
    entries += [{"k": "op", "id": i, "name": name} for i, name in enumerate(rank.raw_ops)]
    entries += [
        {"k": "site", "id": i, "file": s.file, "line": s.line, "function": s.function, "api": s.api}
        for i, s in rank.sites.items()
    ]
    for i, group in rank.groups.items():
        entry = {"k": "group", "id": i, "name": group.name, "description": group.description, "size": group.size}
        if group.ranks:
            entry |= {"ranks": list(group.ranks), "backend": group.backend, "timeout_s": group.timeout_s}
        entries.append(entry)
    entries += [{"k": "thread", "id": i, "name": name, "native_id": i} for i, name in rank.threads.items()]
    entries += [{"k": "sizes", "id": i, "inputs": ins, "outputs": outs} for i, (ins, outs) in rank.sizes.items()]
    entries += [{"k": "feature", "name": name} for name in rank.features]
    entries += [
        {
            "k": "ddp",
            "t_ns": layout.t_ns,
            "id": layout.reducer,
            "group": layout.group,
            "buckets": list(layout.sizes),
            "parameters": layout.num_parameters,
        }
        for layout in rank.bucket_layouts
    ]
    for error in (*rank.exceptions, *rank.thread_exceptions):
        of_thread = {"thread": error.thread} if isinstance(error, ThreadException) else {}
        frame = error.frame and {"file": error.frame.file, "line": error.frame.line, "function": error.frame.function}
        entries.append(
            {
                "k": "thread_exception" if of_thread else "exception",
                **of_thread,
                "t_ns": error.t_ns,
                "type": error.type,
                "message": error.message,
                "traceback": error.traceback,
                "frame": frame,
            }
        )
    if rank.ended_ns != UNKNOWN_NS:
        entries.append({"k": "exit", "t_ns": rank.ended_ns, "how": "interpreter", "code": None})
    return entries


def _operation_records(rank: RankTables) -> list[tuple[Any, ...]]:
    names = ("state", "kind", "dtype", "reduce_op", "op", "thread", "group", "flags", "waits", "seq", "peer", "tag")
    records = []
    for row in rank.operations:
        issued = int(row["issued_ns"])
        offsets = [_offset(int(row[name]), issued) for name in ("returned_ns", "wait_begin_ns")]
        records.append(
            (
                *(int(row[name]) for name in (*names, "site", "step", "issued_ns", "numel")),
                *offsets,
                float(row["wait_ns"]),
                _offset(int(row["done_ns"]), issued),
            )
        )
    return records


def _span_records(rank: RankTables) -> list[tuple[Any, ...]]:
    none = schema.NO_CODE
    return [
        (
            *(int(row["state"]), KIND["span"], none, none, int(row["op"]), int(row["thread"]), 0, int(row["flags"])),
            *(
                0,
                0,
                int(row["stage"]),
                int(row["microbatch"]),
                int(row["site"]),
                int(row["step"]),
                int(row["begin_ns"]),
                0,
                0.0,
                0.0,
                0.0,
            ),
            _offset(int(row["end_ns"]), int(row["begin_ns"])),
        )
        for row in rank.spans
    ]


def _sample_records(rank: RankTables) -> list[tuple[Any, ...]]:
    none = schema.NO_CODE
    return [
        (
            *(STATE["done"], KIND["sample"], none, none, int(row["op"]), 1, 0, 0, 0, 0, -1, 0, 0, int(row["step"])),
            *(int(row["t_ns"]), int(row["value"]), 0.0, 0.0, 0.0, 0.0),
        )
        for row in rank.samples
    ]


def _device_records(rank: RankTables) -> list[tuple[Any, ...]]:
    names = ("begin_ns", "host_begin_ns")
    return [
        (
            *(int(row["state"]), int(row["kind"]), schema.NO_CODE, schema.NO_CODE, int(row["op"]), int(row["stream"])),
            *(int(row["group"]), int(row["flags"]), 0, int(row["seq"]), -1, int(row["error_ns"]), 0, int(row["step"])),
            *(int(row[name]) for name in names),
            float(row["begin_ns"] - row["reached_ns"])
            if row["kind"] == schema.KIND["device_operation"]
            else _offset(int(row["host_end_ns"]), int(row["host_begin_ns"])),
            *(0.0, 0.0, _offset(int(row["end_ns"]), int(row["begin_ns"]))),
        )
        for row in rank.device_intervals
    ]


def _offset(t: int, issued: int) -> float:
    return 0.0 if t == UNKNOWN_NS else float(t - issued)
