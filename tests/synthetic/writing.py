"""Write a synthetic job as a run on disk: segments, strings, the manifest and the files of nodes."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dtprof.capture.group_descriptions import members_of
from dtprof.intervals import Column
from dtprof.records import events, paths, schema
from dtprof.records.rank_log import dropped_totals
from dtprof.records.rank_log.archive import RECORD_DTYPE, archive_segment
from dtprof.records.tables import Array
from tests.synthetic.job import WORLD, Event, HostClock, Job, Truth
from tests.synthetic.simulation import CALL_NS, Simulation

WALL_CLOCK_NS = 1_790_000_000_000_000_000
RAW_NAMES = {"all_reduce": "allreduce_", "send": "send", "recv": "recv_"}
FLOAT32 = [name for name, _ in schema.DTYPES].index("float32")
_FLAGS = schema.FLAG["completion"]


def generate(folder: Path, job: Job) -> Truth:
    """Let a job run and write what it would have recorded; return what really happened."""
    simulation = Simulation(job)
    truth = simulation.run()
    folder.mkdir(parents=True, exist_ok=True)
    per_stage = job.dp * job.tp
    period_ns = int(truth.end.max() - truth.begin.min())
    for stage, tape in enumerate(simulation.tapes):
        columns = _Columns(job, stage, tape)
        for place in range(per_stage):
            rank = stage * per_stage + place
            if rank not in job.lost:
                _write_rank(folder, job, rank, columns.records(job, rank, place), columns.names, period_ns=period_ns)
        simulation.tapes[stage] = []
    _write_manifest(folder, job)
    _write_clocks(folder, job, int(truth.begin.min()), int(truth.end.max()))
    return truth


class _Columns:
    """The events of a stage by column, in order of their begin on each rank."""

    def __init__(self, job: Job, stage: int, tape: Sequence[Event]) -> None:
        self.names = tuple(dict.fromkeys(event.name for event in tape))
        ids = {name: i for i, name in enumerate(self.names)}
        axes = list(job.groups_of(stage * job.dp * job.tp))
        self._begin = _stacked([event.begin for event in tape])
        self._end = _stacked([event.end for event in tape])
        self._wait_begin = _stacked([event.begin if event.wait_begin is None else event.wait_begin for event in tape])
        self._wait_end = _stacked([event.begin if event.wait_end is None else event.wait_end for event in tape])
        records = np.zeros(len(tape), RECORD_DTYPE)
        records["state"] = schema.STATE["done"]
        records["kind"] = [_kind(event) for event in tape]
        records["dtype"] = [FLOAT32 if event.nbytes else schema.NO_CODE for event in tape]
        reduces = [event.name == "all_reduce" for event in tape]
        records["reduce_op"] = np.where(reduces, 0, schema.NO_CODE)
        records["op"] = [ids[event.name] for event in tape]
        records["thread"] = 1
        records["group"] = [axes.index(event.axis) if event.axis else 0 for event in tape]
        records["flags"] = [(_FLAGS if event.axis else 0) | schema.FLAG["async"] * event.is_async for event in tape]
        records["waits"] = [event.wait_begin is not None for event in tape]
        records["peer"] = [event.stage if not event.axis else event.peer for event in tape]
        records["tag"] = [event.microbatch for event in tape]
        records["site"] = [1 + reduces[i] if event.axis else 0 for i, event in enumerate(tape)]
        records["step"] = [event.step for event in tape]
        records["numel"] = [event.value if event.value >= 0 else event.nbytes // 4 for event in tape]
        self._records = records

    def records(self, job: Job, rank: int, place: int) -> Array:
        """Return the records of one rank, times as its host shows them."""
        host = job.host_of(rank)
        rows = self._records.copy()
        begin = job.show_all(self._begin[place], host)
        rows["issued_ns"] = begin
        is_operation = rows["kind"] <= schema.KIND["p2p"]
        rows["returned_after"] = np.where(is_operation, CALL_NS, 0)
        waited = rows["waits"] > 0
        wait_begin = job.show_all(self._wait_begin[place], host)
        rows["waited_from"] = np.where(waited, wait_begin - begin, 0)
        rows["waited_for"] = np.where(waited, job.show_all(self._wait_end[place], host) - wait_begin, 0)
        rows["done_after"] = job.show_all(self._end[place], host) - begin
        rows = rows[np.argsort(rows["issued_ns"], kind="stable")]
        key = rows["group"].astype(np.int64) * 2 + (rows["kind"] == schema.KIND["p2p"])
        for value in np.unique(key[rows["kind"] <= schema.KIND["p2p"]]).tolist():
            own = (key == value) & (rows["kind"] <= schema.KIND["p2p"])
            rows["seq"][own] = np.arange(int(own.sum()))
        return rows


def _stacked(columns: Sequence[Column]) -> Column:
    """Return one row a rank."""
    return np.ascontiguousarray(np.stack(columns).T)


def _kind(event: Event) -> int:
    if event.value >= 0:
        return schema.KIND["sample"]
    if not event.axis:
        return schema.KIND["span"]
    return schema.KIND["p2p" if event.name in events.POINT_TO_POINT else "collective"]


def _repeated(records: Array, times: int, period_ns: int) -> Iterator[Array]:
    """Yield the segments of a log that has these records so many times over, one after the other in time."""
    num_steps = int(records["step"].max()) + 1
    is_operation = records["kind"] <= schema.KIND["p2p"]
    key = (records["group"].astype(np.int64) * 2 + (records["kind"] == schema.KIND["p2p"]))[is_operation]
    issued = np.bincount(key)[key]
    waiting = records[:0]
    for _ in range(times):
        waiting = np.concatenate((waiting, records))
        while len(waiting) >= schema.SEGMENT_CAPACITY:
            yield waiting[: schema.SEGMENT_CAPACITY]
            waiting = waiting[schema.SEGMENT_CAPACITY :]
        records = records.copy()
        records["issued_ns"] += period_ns
        records["step"] += num_steps
        records["seq"][is_operation] += issued.astype(records["seq"].dtype)
    if len(waiting):
        yield waiting


def _write_rank(run: Path, job: Job, rank: int, records: Array, names: Sequence[str], *, period_ns: int) -> None:
    kept = records[: job.killed.get(rank, len(records))]
    folder = run / paths.rank_folder_name(rank, 0)
    folder.mkdir()
    first_lost, first_kept = job.dropped.get(rank, (len(kept), len(kept)))
    lost = kept[first_lost:first_kept]
    segments: Iterable[tuple[int, Array, int]]
    if job.repeats > 1:
        last = -(-len(records) * job.repeats // schema.SEGMENT_CAPACITY) - 1
        segments = ((number, own, 0) for number, own in enumerate(_repeated(records, job.repeats, period_ns)))
    else:
        segments = [(number, own, 0) for number, own in enumerate(_segments(kept[:first_lost]))]
        if first_kept < len(kept):
            after = enumerate(_segments(kept[first_kept:]), start=len(segments) + 1)
            segments += [(number, own, len(lost)) for number, own in after]
        last = segments[-1][0]
    for number, own, dropped in segments:
        file = folder / paths.segment_name(number)
        is_last = number == last
        with file.open("wb") as segment:
            segment.write(_header(job, rank, number, len(own), is_last=is_last, dropped=dropped))
            own.tofile(segment)
            segment.truncate(job.cut[rank] if is_last and rank in job.cut else schema.SEGMENT_SIZE)
        if job.archived and not is_last:
            archive_segment(file)
    if rank in job.dropped:
        _write_dropped(folder / paths.DROPPED, lost)
    with (folder / paths.STRINGS).open("w", encoding="utf-8") as strings:
        strings.writelines(json.dumps(entry) + "\n" for entry in _strings(job, rank, names, kept))


def _segments(records: Array) -> list[Array]:
    """Return the records by segment; one at least."""
    capacity = schema.SEGMENT_CAPACITY
    return [records[begin : begin + capacity] for begin in range(0, max(1, len(records)), capacity)]


def _write_dropped(file: Path, lost: Array) -> None:
    sums: dict[tuple[int, int, int, int, int], tuple[int, int, int, int, int]] = {}
    dropped_totals.add(sums, bytes(schema.HEADER_SIZE) + lost.tobytes())
    rows = [[*key, *values] for key, values in sorted(sums.items())]
    file.write_text(json.dumps({"events": len(lost), "totals": rows}), encoding="utf-8")


def _header(job: Job, rank: int, segment: int, head: int, *, is_last: bool, dropped: int) -> bytes:
    host = job.host_of(rank)
    opened = job.show(999_000_000, host)
    marks = schema.MARK["closed"] * (is_last and rank not in job.killed) | schema.MARK["sealed"] * (not is_last)
    packed = schema.pack_header(
        segment=segment,
        rank=rank,
        local_rank=rank % job.ranks_per_host if job.ranks_per_host else rank,
        world_size=job.world_size,
        pid=10_000 + rank,
        hook=1,
        opened_monotonic_ns=opened,
        opened_realtime_ns=WALL_CLOCK_NS,
        head=head,
        capture_ns=500 * head,
        dropped=dropped,
        marks=marks,
        host=_host_name(host).encode(),
        boot_id=f"boot-{host}".encode(),
        torch_version=b"2.13.0",
        dtprof_version=b"0.1.0",
    )
    return packed.ljust(schema.HEADER_SIZE, b"\0")


def _host_name(host: int) -> str:
    return f"host-{host}"


def _strings(job: Job, rank: int, names: Sequence[str], records: Array) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = [{"k": "process", "rank": rank, "pid": 10_000 + rank, "python": "3.11.7"}]
    entries += [{"k": "op", "id": i, "name": RAW_NAMES.get(name, name)} for i, name in enumerate(names)]
    for number, api in enumerate(("batch_isend_irecv", "all_reduce"), start=1):
        entries.append(
            {"k": "site", "id": number, "file": "/job/train.py", "line": number, "function": "step", "api": api}
        )
    for number, (axis, (name, ranks)) in enumerate(job.groups_of(rank).items()):
        entries.append(
            {
                "k": "group",
                "id": number,
                "name": name,
                "description": "default_pg" if axis == WORLD else f"mesh_{axis}",
                "size": len(ranks),
                "rank": ranks.index(rank),
                **members_of(ranks),
                "backend": "gloo",
                "timeout_s": 1800.0,
            }
        )
    if job.pp > 1:
        entries.append(
            {
                "k": "pipeline",
                "id": 1,
                "schedule": "Schedule1F1B" if job.interleave_backward else "ScheduleGPipe",
                "num_stages": job.pp,
                "stages": [job.stage_of(rank)],
                "microbatches": job.microbatches,
                "group": job.groups_of(rank)["pp"][0],
                "group_rank": job.stage_of(rank),
                "group_size": job.pp,
                "order": None,
            }
        )
    entries += [{"k": "thread", "id": 1, "name": "MainThread", "native_id": 1}]
    entries += [{"k": "feature", "name": "backend:gloo"}]
    if rank not in job.killed and len(records):
        entries.append({"k": "exit", "t_ns": int(records["issued_ns"][-1]), "how": "interpreter", "code": None})
    return entries


def _write_manifest(run: Path, job: Job) -> None:
    hosts = sorted({job.host_of(rank) for rank in range(job.world_size)})
    document = {
        "format_version": schema.FORMAT_VERSION,
        "command": ["torchrun", "train.py"],
        "started_realtime_ns": WALL_CLOCK_NS,
        "ended_realtime_ns": WALL_CLOCK_NS + 1,
        "exit_status": 0,
        "hosts": [_host_name(host) for host in hosts],
    }
    (run / paths.MANIFEST).write_text(json.dumps(document), encoding="utf-8")


def _write_clocks(run: Path, job: Job, begin: int, end: int) -> None:
    """Write what the launchers measured: at the begin, the end and twice between, within the error that they state."""
    random = np.random.default_rng(job.seed + 1)
    for host in sorted({job.host_of(rank) for rank in range(job.world_size)}):
        clock = job.clocks.get(host, HostClock())
        node = run / paths.node_folder_name(_host_name(host))
        node.mkdir(exist_ok=True)
        owner = {"host": _host_name(host), "boot_id": f"boot-{host}", "is_reference": host == 0}
        lines = [owner]
        for moment in np.linspace(begin, end, 4).astype(np.int64).tolist() if host and clock.measured else ():
            own = job.show(moment, host)
            reference = job.show(moment, 0)
            off = int(random.uniform(-0.9, 0.9) * clock.error_ns)
            lines.append(
                {
                    "t_ns": own,
                    "offset_ns": reference - own + off,
                    "error_ns": clock.error_ns,
                    "round_trip_ns": 2 * clock.error_ns,
                    "rounds": 8,
                }
            )
        (node / paths.CLOCK).write_text("".join(json.dumps(line) + os.linesep for line in lines), encoding="utf-8")
