"""The process of each rank of a run, from the newest header of its log. Standard library only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.records import paths, schema


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The process of a rank in its last attempt."""

    rank: int
    pid: int
    host: str
    boot_id: str


def find_processes(folders: Mapping[int, Iterable[tuple[int, Path]]]) -> list[RankProcess]:
    """Return the processes of the ranks whose log can be read; `folders` is `Run.folders`: attempts by rank."""
    newest = ((rank, max(attempts)[1]) for rank, attempts in sorted(folders.items()))
    return [process for rank, folder in newest if (process := _find_process(rank, folder)) is not None]


def _find_process(rank: int, folder: Path) -> RankProcess | None:
    header = newest_header(folder)
    return None if header is None else _process(rank, header)


def _process(rank: int, header: Mapping[str, Any]) -> RankProcess:
    return RankProcess(rank=rank, pid=header["pid"], host=header["host"], boot_id=header["boot_id"])


def newest_header(rank_folder: Path) -> dict[str, Any] | None:
    """Return the header of the newest segment that has one; an archive begins with that of its segment."""
    headers = map(header_of, reversed(paths.segment_files(rank_folder)))
    return next((header for header in headers if header is not None), None)


def header_of(segment: Path) -> dict[str, Any] | None:
    """Return the header of a segment or its archive; None where it has none yet, or cannot be read."""
    try:
        with segment.open("rb") as file:
            head = file.read(schema.HEADER_STRUCT.size)
    except OSError:
        return None
    return (
        schema.unpack_header(head) if len(head) == schema.HEADER_STRUCT.size and head.startswith(schema.MAGIC) else None
    )
