"""Imported runs on disk: the same files as those of recorded runs."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtprof import __version__
from dtprof.errors import OutputError
from dtprof.interchange.importers.imported_records import MAIN_THREAD, ImportedRank, ImportedRun, begins
from dtprof.records import events, paths, schema
from dtprof.records.writer import write_json

FIRST_NS = 1_000_000_000
"""Where the clock of an imported run begins: host times are never 0."""


def write_imported(run: ImportedRun, output: Path) -> None:
    """Write the run.

    Raises:
        OutputError: it cannot be written.
    """
    ranks = sorted(run.ranks, key=lambda rank: rank.rank)
    first = min((int(begins(rank.records)[0]) for rank in ranks if len(rank.records)), default=FIRST_NS)
    shift = FIRST_NS - first
    last = max((int(begins(rank.records)[-1]) for rank in ranks if len(rank.records)), default=first)
    epoch = -shift if run.starts_at_epoch and first >= 0 else 0  # nothing was recorded before 1970
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
    records["issued_ns"] = issued = begins(records) + shift
    steps = [i for i, name in enumerate(rank.ops) if name == events.STEP]
    is_mark = (records["kind"] == schema.KIND["span"]) & np.isin(records["op"], steps)
    records["step"] = np.cumsum(is_mark) - is_mark
    for number in range(max(1, -(-len(records) // schema.SEGMENT_CAPACITY))):
        part = records[number * schema.SEGMENT_CAPACITY : (number + 1) * schema.SEGMENT_CAPACITY]
        with (folder / paths.segment_name(number)).open("wb") as file:
            file.write(_header(rank, number, len(part), int(issued[0]) if len(issued) else FIRST_NS, epoch))
            file.seek(schema.HEADER_SIZE)
            file.write(part.tobytes())
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
    return schema.pack_header(
        segment=segment,
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        pid=rank.pid,
        opened_monotonic_ns=opened_ns,
        opened_realtime_ns=opened_ns + epoch,
        head=count,
        marks=schema.MARK["closed"] * rank.ended | schema.MARK["sealed"],
        host=rank.host,
        boot_id=hashlib.sha256(rank.clock.encode("utf-8", "replace")).hexdigest()[:36],
        torch_version=rank.torch_version,
        dtprof_version=__version__,
    )


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
    """Empty a directory.

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
