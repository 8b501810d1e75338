"""Which process is which rank of a run, from the newest header of each rank's log alone. Standard library only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtprof.run_format import paths, schema


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The process of one rank, of its last attempt."""

    rank: int
    attempt: int
    pid: int
    host: str
    boot_id: str


def find_processes(folders: Mapping[int, Iterable[tuple[int, Path]]]) -> list[RankProcess]:
    """Return the processes of the ranks whose log can be read; `folders` is `Run.folders`: attempts by rank."""
    found = []
    for rank, attempts in sorted(folders.items()):
        attempt, folder = max(attempts)
        header = _newest_header(folder)
        if header is not None:
            pid, host, boot_id = header
            found.append(RankProcess(rank=rank, attempt=attempt, pid=pid, host=host, boot_id=boot_id))
    return found


def _newest_header(folder: Path) -> tuple[int, str, str] | None:
    for segment in reversed(paths.segment_files(folder)):
        if paths.is_archive(segment):
            continue
        try:
            with segment.open("rb") as file:
                header = file.read(schema.HEADER_STRUCT.size)
        except OSError:
            continue
        if len(header) == schema.HEADER_STRUCT.size and header.startswith(schema.MAGIC):
            values = schema.HEADER_STRUCT.unpack(header)
            fields = dict(zip((field.name for field in schema.HEADER), values, strict=True))
            return int(fields["pid"]), _text(fields["host"]), _text(fields["boot_id"])
    return None


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("utf-8", "replace")
