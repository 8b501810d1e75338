"""Traces of ByteDance's StragglerAnalysis: one parquet table, a row an operation of a pipeline-parallel job.

The times of each step begin anew, and steps are samples of a longer job: here they follow one another without a pause.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.columns import distinct
from dtprof.errors import MissingDependencyError, NotATraceError
from dtprof.interchange.importers.imported_records import (
    COLLECTIVE,
    POINT_TO_POINT,
    ImportedRank,
    ImportedRun,
    Importer,
    RecordBuilder,
    number_in_group,
)
from dtprof.intervals import Column, cover
from dtprof.job.world_size import MAX_WORLD_SIZE
from dtprof.records import events

FORMAT = "StragglerAnalysis"
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "gmc", "mb_id")
CHUNK = "mc"  # of the stages of a rank the one that an operation is of; not in every table
MAX_SECONDS = 1e8
MAX_NUMBER = 1e9
COMPUTE = {"forward-compute": events.PP_FORWARD, "backward-compute": events.PP_BACKWARD}
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = ("optimizer", CLIP)
PAUSE = "gc"
CLIP_PHASE = "clip_gradients"
"""Mark of the program where an optimizer clips gradients: it waits for the norms of all other ranks there."""
MESSAGES = {
    "forward-send": ("send", 1, 0),
    "forward-recv": ("recv", -1, 0),
    "backward-send": ("send", -1, 1),
    "backward-recv": ("recv", 1, 1),
}
"""Operation, the stage of the peer from here, and a tag for the direction."""
COLLECTIVES = {
    "params-all-gather": ("all_gather", "dp"),
    "grads-reduce-scatter": ("reduce_scatter", "dp"),
    "separate-grads-all-reduce": ("all_reduce", "dp"),
    "embedding-grads-all-reduce": ("all_reduce", "embedding"),
    "layernorm-grads-all-reduce": ("all_reduce", "tp"),
}
LACKS = (
    "bytes: the table has no sizes; bandwidths are not known, either",
    "idle: neither computation nor communication of the rank is in the table",
    "memory: the table has none",
    "overhead: the table does not show what its tracer cost",
    "clock_error_ns: the table does not show how well the clocks of the hosts were aligned; they are taken to be one",
    "steps: sampled from a longer job, and joined without the time between; those in the table count from 2",
)
Rows = dict[str, Any]


def import_straggler_analysis(files: Sequence[Path]) -> ImportedRun:
    """Read the table of one job.

    Raises:
        NotATraceError: it holds something else.
        MissingDependencyError: pyarrow is not installed.
    """
    if len(files) > 1:
        raise NotATraceError(
            f"{files[0]} and {files[1]} are tables of one job each; expected one. Import each into a run of its own."
        )
    rows = _read(files[0])
    size, tp_size = _layout(files[0], rows)
    lengths = _step_lengths(rows)
    ranks = [_rank(rows, int(rank), lengths, size, tp_size) for rank in distinct(rows["rank"])]
    known = {*COMPUTE, *OPTIMIZER, PAUSE, *MESSAGES, *COLLECTIVES}
    other = sorted({str(name) for name in rows["optype"]} - known)
    lacks = (*LACKS, *([f"collectives: operations of type {', '.join(other[:5])} are left out"] if other else []))
    return ImportedRun(format=FORMAT, files=(str(files[0]),), ranks=tuple(ranks), cannot_tell=lacks)


def _read(path: Path) -> Rows:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise MissingDependencyError(
            "a parquet file is read with pyarrow, which is not installed: pip install 'dtprof[parquet]'"
        ) from None
    try:
        names = parquet.read_schema(path).names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise NotATraceError(
                f"{path} is a parquet table without {', '.join(missing)} (it has {', '.join(names[:8])}); expected the "
                "trace-NAME.parquet of StragglerAnalysis."
            )
        table = parquet.read_table(path, columns=[*COLUMNS, *(name for name in (CHUNK,) if name in names)])
        rows = {
            name: np.asarray(
                table[name].cast(arrow.string()).to_pylist() if name == "optype" else table[name].to_numpy()
            )
            for name in table.column_names
        }
    except (OSError, ValueError, TypeError, arrow.ArrowException) as error:
        reason = str(error).splitlines()[0][:120].rstrip(".") if str(error) else type(error).__name__
        raise NotATraceError(
            f"{path} cannot be read: {reason}. Expected a whole parquet table; copy it again."
        ) from None
    return _checked(path, rows)


def _checked(path: Path, rows: Rows) -> Rows:
    """Return the rows in order of time, with begin and end in ns.

    Raises:
        NotATraceError: a value cannot be.
    """
    if not len(rows["rank"]):
        raise NotATraceError(f"{path} holds no row; expected a row for each operation. Copy it again.")
    for name in COLUMNS:
        if name != "optype" and rows[name].dtype.kind not in "iuf":
            raise NotATraceError(f"{path}: column {name} holds {rows[name].dtype}, expected numbers. Copy it again.")
        if name != "optype" and not (np.abs(rows[name].astype(np.float64)) < MAX_NUMBER).all():
            raise NotATraceError(f"{path}: column {name} holds an empty or impossible value. Copy it again.")
    # The end of an operation in the precision of the table: it began, and others arrived, at times of that precision.
    ends = (rows["start_ts"] + rows["duration"]).astype(np.float64)
    for name in ("start_ts", "duration"):
        seconds = rows[name].astype(np.float64)
        if not np.isfinite(seconds).all() or (np.abs(seconds) > MAX_SECONDS).any() or (seconds < 0).any():
            raise NotATraceError(
                f"{path}: {name} holds a value that is no time in seconds; expected 0 or more. Copy it."
            )
        rows[name] = np.round(seconds * 1e9).astype(np.int64)
    rows["end_ts"] = np.round(ends * 1e9).astype(np.int64)
    for name, most in (("rank", MAX_WORLD_SIZE), ("stage", MAX_WORLD_SIZE), ("dp_rank", MAX_WORLD_SIZE)):
        if (rows[name] < 0).any() or (rows[name] >= most).any():
            raise NotATraceError(
                f"{path}: {name} holds {int(rows[name].min())} to {int(rows[name].max())}; expected ranks."
            )
        rows[name] = rows[name].astype(np.int64)
    chunks = rows.get(CHUNK)
    if chunks is None or chunks.dtype.kind not in "iu":
        rows[CHUNK] = np.zeros(len(rows["rank"]), np.int64)
    for name in ("step", "seq_id", "gmc", "mb_id", CHUNK):
        rows[name] = rows[name].astype(np.int64)
    order = np.lexsort((rows["start_ts"], rows["step"], rows["rank"]))
    return {name: column[order] for name, column in rows.items()}


def _layout(path: Path, rows: Rows) -> tuple[int, int]:
    """Return the size of the world and of tensor parallelism; from the meta file beside the table, if it is there."""
    seen = int(rows["rank"].max()) + 1
    meta = path.with_name(path.name.replace("trace-", "meta-", 1)).with_suffix(".yaml")
    try:
        text = meta.read_text(encoding="utf-8", errors="replace")[:10_000] if meta != path else ""
    except OSError:
        text = ""
    sizes = {name: int(value) for name, value in re.findall(r"^(\w+): *(\d{1,7})\s*$", text, re.MULTILINE)}
    size = sizes.get("world_size", seen)
    return (size if seen <= size <= MAX_WORLD_SIZE else seen), max(1, sizes.get("tp_size", 1))


def _step_lengths(rows: Rows) -> tuple[Column, Column, Column]:
    """Return the steps in the table, where each begins in the run, and its first time in the table."""
    steps, first, last = _extents(
        rows["step"], rows["start_ts"], np.maximum(rows["end_ts"], rows["start_ts"] + rows["duration"])
    )
    return steps, np.r_[0, np.cumsum(last - first)], first


def _extents(keys: Column, begin: Column, end: Column) -> tuple[Column, Column, Column]:
    """Return the keys, and of each the first begin and the last end."""
    known, place = np.unique(keys, return_inverse=True)
    first = np.full(len(known), np.iinfo(np.int64).max)
    last = np.zeros(len(known), np.int64)
    np.minimum.at(first, place, begin)
    np.maximum.at(last, place, end)
    return known, first, last


def _rank(rows: Rows, rank: int, lengths: tuple[Column, Column, Column], size: int, tp_size: int) -> ImportedRank:
    steps, starts, first = lengths
    own = {name: column[rows["rank"] == rank] for name, column in rows.items()}
    place = np.searchsorted(steps, own["step"])
    begin = own["start_ts"] - first[place] + starts[place]
    end, rounded = begin + own["duration"], begin + own["end_ts"] - own["start_ts"]
    stage, replica = int(own["stage"][0]), int(own["dp_rank"][0])
    groups = _groups(rows, rank, stage, replica, tp_size)
    builder = RecordBuilder()
    builder.marks(starts)
    optypes = own["optype"]
    for optype, name in COMPUTE.items():
        chosen = optypes == optype
        builder.spans(
            name, begin[chosen], end[chosen], stage=np.maximum(own["gmc"][chosen], 0), microbatch=own["mb_id"][chosen]
        )
    for name, wanted in ((events.OPTIMIZER, OPTIMIZER), (events.GARBAGE_COLLECTION, (PAUSE,))):
        chosen = np.isin(optypes, wanted)
        builder.spans(name, begin[chosen], np.where(optypes == CLIP, rounded, end)[chosen])
    clips = optypes == CLIP
    if clips.any():
        builder.spans(events.USER_PHASE + CLIP_PHASE, begin[clips], rounded[clips])
    busy = np.isin(optypes, (*COMPUTE, *OPTIMIZER))
    builder.spans(events.DEVICE_BUSY, *cover(begin[busy], end[busy]).T)
    acts = np.isin(optypes, list(COMPUTE))
    builder.spans(events.PP_STEP, *_extents(place[acts], begin[acts], end[acts])[1:], microbatch=1)
    _add_communication(builder, own, begin, rounded, groups, stage)
    chunks = sorted({int(chunk) for chunk in own["gmc"] if chunk >= 0})
    microbatches = int(own["mb_id"].max()) + 1
    return ImportedRank(
        rank=rank,
        world_size=size,
        ops=tuple(builder.ops),
        records=builder.records(),
        groups=tuple(groups),
        entries=(
            {"k": "axis", "group": f"dp{stage}", "axis": "dp", "by": FORMAT},
            {"k": "axis", "group": f"pp{replica}", "axis": "pp", "by": FORMAT},
            {
                "k": "pipeline",
                "id": 1,
                "schedule": _schedule(own, stage, groups[1]["size"], len(chunks), microbatches),
                "num_stages": int(rows["gmc"].max()) + 1,
                "stages": chunks,
                "microbatches": microbatches,
                "group": f"pp{replica}",
                "group_rank": stage,
                "group_size": groups[1]["size"],
                "order": None,
            },
        ),
        clock="table",
        host="",
    )


def _groups(rows: Rows, rank: int, stage: int, replica: int, tp_size: int) -> list[dict[str, Any]]:
    """Return the groups of data parallelism, of the pipeline, of the embedding and of tensor parallelism."""

    def members(chosen: Any) -> list[int]:
        by_stage = dict(zip(rows["stage"][chosen].tolist(), rows["rank"][chosen].tolist(), strict=True))
        return [by_stage[key] for key in sorted(by_stage)]

    replicas = sorted({int(other) for other in rows["rank"][rows["stage"] == stage]})
    pipeline = members(rows["dp_rank"] == replica)
    ends = [pipeline[0], pipeline[-1]] if len(pipeline) > 1 else [rank]
    listed = [
        {"name": f"dp{stage}", "description": "data parallel", "ranks": replicas, "size": len(replicas)},
        {"name": f"pp{replica}", "description": "pipeline", "ranks": pipeline, "size": len(pipeline)},
        {"name": f"embedding{replica}", "description": "first and last stage", "ranks": ends, "size": len(ends)},
    ]
    # Of each tensor-parallel group the table has one rank.
    alone = {"name": f"tp{rank}", "description": "tensor parallel", "size": tp_size}
    return [*listed, alone | ({"ranks": [rank]} if tp_size == 1 else {})]


def _add_communication(
    builder: RecordBuilder, rank_rows: Rows, begin: Column, end: Column, groups: Sequence[dict[str, Any]], stage: int
) -> None:
    rows: list[tuple[int, int, int, int, int, int]] = []
    size = groups[1]["size"]
    number = {"dp": 0, "pp": 1, "embedding": 2, "tp": 3}
    for i, optype in enumerate(rank_rows["optype"].tolist()):
        if optype in MESSAGES:
            name, step, direction = MESSAGES[optype]
            rows.append((i, builder.op(name), POINT_TO_POINT, 1, (stage + step) % size, direction))
        elif optype in COLLECTIVES:
            name, among = COLLECTIVES[optype]
            rows.append((i, builder.op(name), COLLECTIVE, number[among], -1, max(0, int(rank_rows[CHUNK][i]))))
    if not rows:
        return
    table = np.array(rows, np.int64)
    at, op, kind, group, peer, tag = table[np.argsort(begin[table[:, 0]], kind="stable")].T
    builder.operations(
        op,
        kind,
        begin[at],
        end[at],
        observed=True,
        device=True,
        group=group,
        seq=number_in_group(group, kind),
        peer=peer,
        tag=tag,
    )


def _schedule(rank_rows: Rows, stage: int, stages: int, chunks: int, microbatches: int) -> str:
    """Return the schedule that the order of computation in the first step is that of; else "unknown"."""
    computes = (rank_rows["step"] == rank_rows["step"][0]) & np.isin(rank_rows["optype"], list(COMPUTE))
    order = [name[0] for name in rank_rows["optype"][computes].tolist()]
    if chunks != 1 or not order:
        return "ScheduleInterleaved1F1B" if chunks > 1 else "unknown"
    ahead = min(stages - stage, microbatches)
    one_by_one = "f" * ahead + "bf" * (microbatches - ahead) + "b" * ahead
    if "".join(order) == one_by_one:
        return "Schedule1F1B"
    return "ScheduleGPipe" if "".join(order) == "f" * microbatches + "b" * microbatches else "unknown"


IMPORTER = Importer(
    name="StragglerAnalysis parquet",
    recognises=lambda head: head[:4] == b"PAR1",
    read=import_straggler_analysis,
)
