"""Write segment files field by field, also impossible ones."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtprof.records import paths, schema

RECORD_DEFAULTS = {
    "state": schema.STATE["done"],
    "kind": schema.KIND["collective"],
    "dtype": schema.NO_CODE,
    "reduce_op": schema.NO_CODE,
    "peer": -1,
}
HEADER_DEFAULTS: dict[str, Any] = {
    "world_size": 1,
    "tap": 1,
    "host": b"host-a",
    "boot_id": b"boot-a",
    "torch_version": b"2.13.0",
    "dtprof_version": b"0.1.0",
}


def record(**values: Any) -> bytes:
    """Return one record; what is not given is zero or none."""
    chosen = RECORD_DEFAULTS | values
    return schema.RECORD_STRUCT.pack(*(chosen.get(field.name, 0) for field in schema.RECORD))


def header(**values: Any) -> bytes:
    """Return a header, padded to where the records start."""
    return schema.pack_header(**(HEADER_DEFAULTS | values)).ljust(schema.HEADER_SIZE, b"\0")


def write_rank(run: Path, records: Sequence[bytes], *, rank: int = 0, attempt: int = 0, **values: Any) -> Path:
    """Write the folder of a rank with one segment, not filled up to its full size; return the segment."""
    folder = run / paths.rank_folder_name(rank, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    number = values.get("segment", 0)
    segment = folder / paths.segment_name(number)
    segment.write_bytes(header(**{"rank": rank, "head": len(records)} | values) + b"".join(records))
    (folder / paths.STRINGS).touch()
    return segment


def fill_up(segment: Path) -> None:
    """Give a segment the size that a hook allocates."""
    with segment.open("r+b") as file:
        file.truncate(schema.SEGMENT_SIZE)


def overwrite(path: Path, field: schema.Field, value: Any) -> None:
    """Write one field of a header."""
    with path.open("r+b") as file:
        file.seek(field.offset)
        file.write(struct.pack("<" + field.code, value))
