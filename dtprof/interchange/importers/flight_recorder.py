"""Flight Recorder dumps as a run: the operations that each rank's ring still holds, with the times in it.

Dumps say when an operation was issued and how long it took on its device where torch measured that; completion is
known as late as the watchdog saw it, and when the program was blocked is not known.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.diagnosis.sources.flight_recorder.dump_fields import (
    MAX_TEXT,
    dtype_code,
    first_text,
    integer,
    numel,
    parse_name,
    text,
)
from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
from dtprof.diagnosis.sources.flight_recorder.dump_reader import looks_like_dump, read_document
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable, Dump
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_records import (
    COLLECTIVE,
    POINT_TO_POINT,
    ImportedRank,
    ImportedRun,
    Importer,
    RecordBuilder,
    number_in_group,
)
from dtprof.job.world_size import MAX_WORLD_SIZE
from dtprof.records import events, schema
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.user_files import is_user_file

FORMAT = "Flight Recorder"
MAX_SITES = 60_000
LACKS = (
    "exposed_ns: dumps do not tell when the program was blocked, nor what it computed",
    "partition: nor what the steps were made of",
    "memory: not in dumps",
    "overhead: not in dumps",
)


def import_dumps(files: Sequence[Path]) -> ImportedRun:
    """Read the dumps of one job.

    Raises:
        NotADumpError: none can be read, or two are of one rank.
    """
    dumps, problems, _ = read_dumps(files, ArgumentTable())
    members = [rank for dump in dumps for group in dump.groups.values() for rank in group.ranks]
    size = max([*members, *(dump.rank for dump in dumps)]) + 1
    ranks = [_rank(dump, min(size, MAX_WORLD_SIZE)) for dump in dumps]
    if not any(len(rank.records) for rank in ranks):
        raise NotATraceError(f"{files[0]} holds no operation with a time; expected dumps with entries.")
    lacks = (
        *LACKS,
        *(f"run: {problem}" for problem in problems[:5]),
        *(["run: the rings had overwritten the oldest operations"] if any(not dump.whole for dump in dumps) else []),
    )
    return ImportedRun(
        format=FORMAT, files=tuple(map(str, files)), ranks=tuple(ranks), cannot_tell=lacks, starts_at_epoch=True
    )


def _rank(dump: Dump, size: int) -> ImportedRank:
    path = Path(dump.path)
    document = read_document(path, path.read_bytes())
    builder = RecordBuilder()
    groups: dict[str, int] = {}
    sites: dict[tuple[str, int, str], int] = {}
    entries = (entry for entry in document["entries"] if type(entry) is dict)
    found = (_row(entry, builder, groups, sites) for entry in entries)
    rows = [row for row in found if row is not None]
    table = np.array(sorted(rows, key=lambda row: row[0]), np.int64).reshape(-1, 11)
    issued, done, op, kind, group, seq, elements, dtype, site, duration, peer = table.T
    order = number_in_group(group, kind)
    builder.operations(
        op,
        kind,
        issued,
        done,
        observed=False,
        device=dump.backend == "nccl",
        group=group,
        # Collectives count from 1 in their group; several issued together share a number, and only one can meet.
        seq=np.where((kind == COLLECTIVE) & (seq > 0), seq - 1, order) & 0xFFFFFFFF,
        numel=elements,
        dtype=dtype,
        site=site,
        peer=peer,
    )
    _add_durations(builder, issued, done, group, duration)
    return ImportedRank(
        rank=dump.rank,
        world_size=size,
        ops=tuple(builder.ops),
        records=builder.records(),
        groups=tuple(_group(name, dump, size) for name in groups),
        entries=(
            *({"k": "site", "id": i, "file": f, "line": n, "function": name} for (f, n, name), i in sites.items()),
            {"k": "feature", "name": f"backend:{dump.backend or 'unknown'}"},
        ),
        notes=dump.problems,
        ended=False,
        clock=f"rank {dump.rank}",  # dumps do not name hosts
    )


def _row(
    entry: dict[str, Any], builder: RecordBuilder, groups: dict[str, int], sites: dict[tuple[str, int, str], int]
) -> tuple[int, ...] | None:
    name, held = entry.get("profiling_name"), entry.get("process_group")
    issued = integer(entry.get("time_created_ns"))
    if type(name) is not str or issued <= 0:
        return None
    _, (op, _, peers) = parse_name(name[:MAX_TEXT])
    op = op.strip("_") or "unknown"
    group = text(held[0]) if isinstance(held, tuple | list) and held else text(entry.get("pg_name")) or "0"
    is_message = bool(entry.get("is_p2p")) or op in events.POINT_TO_POINT or op == "coalesced"
    seq = integer(entry.get("collective_seq_id"), -1)
    seq = integer(entry.get("seq_id"), -1) if seq < 0 else seq
    ended = integer(entry.get("time_discovered_completed_ns"))
    length_ms = entry.get("duration_ms")
    duration = round(length_ms * 1e6) if isinstance(length_ms, int | float) and 0 <= length_ms < 1e9 else -1
    sizes = numel(entry.get("input_sizes"))
    dtype = first_text(entry.get("input_dtypes"))
    peer = -1
    if peers is not None:
        peer = peers[1] if op == "send" else peers[0]
    return (
        issued,
        ended if ended >= issued else -1,
        builder.op(op),
        POINT_TO_POINT if is_message else COLLECTIVE,
        groups.setdefault(group, min(len(groups), schema.MAX_TABLE_ENTRIES)),
        seq,
        max(0, sizes),
        dtype_code(dtype),
        _site(entry.get("frames"), sites),
        duration,
        peer,
    )


def _site(frames: object, sites: dict[tuple[str, int, str], int]) -> int:
    """Return the id of the innermost line of the user's code; 0 where there is none."""
    for frame in frames if type(frames) is list else ():
        file = frame.get("filename") if isinstance(frame, dict) else None
        if type(file) is str and is_user_file(file[:MAX_TEXT]):
            key = (file[:MAX_TEXT], integer(frame.get("line")), text(frame.get("name")) or "?")
            return sites.setdefault(key, len(sites) + 1) if len(sites) < MAX_SITES else sites.get(key, 0)
    return 0


def _group(name: str, dump: Dump, size: int) -> dict[str, Any]:
    known = dump.groups.get(name)
    ranks = list(known.ranks) if known is not None else []
    entry: dict[str, Any] = {
        "name": name,
        "description": known.description if known is not None else "",
        "size": len(ranks) or size,
        "backend": dump.backend or None,
    }
    return entry | ({"ranks": ranks} if ranks else {})


def _add_durations(builder: RecordBuilder, issued: Any, done: Any, group: Any, duration: Any) -> None:
    """Add how long operations took on their device."""
    known = duration >= 0
    rows = np.zeros(int(known.sum()), RECORD_DTYPE)
    rows["state"], rows["kind"] = schema.STATE["done"], schema.KIND["device_time"]
    rows["issued_ns"], rows["numel"], rows["group"] = issued[known], duration[known], group[known]
    rows["done_after"] = np.maximum(
        np.where(done[known] >= issued[known], done[known] - issued[known], 0), duration[known]
    )
    builder.parts.append(rows)


IMPORTER = Importer(
    name="Flight Recorder dumps",
    recognises=looks_like_dump,
    read=import_dumps,
)
