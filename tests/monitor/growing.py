"""Runs whose records appear little by little, as those of a running job do."""

import struct
from collections.abc import Iterator
from pathlib import Path

from dtprof.records import paths, schema


def grow(run: Path, polls: int) -> Iterator[None]:
    """Let the records of all ranks appear, a part more at each turn."""
    segments = [segment for folder in run.glob("rank-*") for segment in paths.segment_files(folder)]
    heads = {}
    for segment in segments:
        with segment.open("rb") as file:
            heads[segment] = schema.unpack_header(file.read(schema.HEADER_SIZE))["head"]
    for part in range(1, polls + 1):
        for segment, head in heads.items():
            with segment.open("r+b") as file:
                file.seek(schema.HEADER_OFFSET["head"])
                file.write(struct.pack("<Q", head * part // polls))
        yield
