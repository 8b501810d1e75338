"""Names of the files and folders of a run. Standard library only."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MANIFEST = "run.json"
VERDICT = ".verdict.json"
CLOCK_ADDRESS = ".clock.json"
SENT = ".sent.json"
COLLECTED = ".collect.json"
STRINGS = "strings.jsonl"
WINDOWS = "window-*.json.gz"
EXITS = "exits.jsonl"
PROCESSES = "processes.jsonl"
SAMPLES = "samples.jsonl"
CLOCK = "clock.jsonl"
STACKS = "stacks.json"
PROGRAM = "program.json.gz"
MISMATCHES = "mismatches.jsonl"
CRASH = "crash.txt"
LATENESS = "lateness.jsonl"
HOT_LINES = "hot-lines.jsonl"
DROPPED = "dropped.json"
TRACE_REQUEST = "trace-request.json"

_NODE = "node-"
_RANK_FOLDER = re.compile(r"rank-(\d{5,})\.(\d+)")
_SEGMENT = re.compile(r"events\.(\d{5,})(\.z)?")


def rank_folder_name(rank: int, attempt: int) -> str:
    """Return the name of the folder of one rank in one attempt."""
    return f"rank-{rank:05d}.{attempt}"


def parse_rank_folder(name: str) -> tuple[int, int] | None:
    """Return (rank, attempt) of a rank folder's name, or None for another name."""
    match = _RANK_FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def numbered(name: str) -> Iterator[str]:
    """Yield a name, then the name with 2, 3 and so on: the first of these that is free is taken."""
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"


def node_name(host: str) -> str:
    """Return the name of a node: that of its host, safe for a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)


def node_folder_name(host: str) -> str:
    """Return the name of the folder of one node."""
    return _NODE + node_name(host)


def is_node_folder(name: str) -> bool:
    """Say whether a folder of this name is that of a node."""
    return name.startswith(_NODE)


def node_of(folder_name: str) -> str:
    """Return the name of the node that a folder is of."""
    return folder_name.removeprefix(_NODE)


def node_folders(run: Path) -> list[Path]:
    """Return the folders of all nodes of a run, by name."""
    return sorted(run.glob(f"{_NODE}*"))


def node_files(run: Path, name: str) -> list[Path]:
    """Return the files of this name, or pattern, of all nodes of a run, by node."""
    return sorted(run.glob(f"{_NODE}*/{name}"))


def window_name(first: int, last: int) -> str:
    """Return the file name of a window of torch.profiler over some steps; other tools know its suffix."""
    return f"window-{first}-{last}.pt.trace.json.gz"


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"events.{number:05d}"


def archive_of(segment: Path) -> Path:
    """Return the archive of a segment."""
    return segment.with_name(f"{segment.name}.z")


def is_archive(file: Path) -> bool:
    """Say whether a segment file is an archive."""
    return file.suffix == ".z"


def segment_files(rank_folder: Path) -> list[Path]:
    """Return the segment files of a rank folder in order; where both exist, the plain file and not its archive."""
    return [rank_folder / name for name in segment_names(path.name for path in rank_folder.iterdir())]


def segment_names(names: Iterable[str]) -> list[str]:
    """Return the names of segment files in order; where both exist, the plain file and not its archive."""
    names_by_number: dict[int, str] = {}
    for name in names:
        match = _SEGMENT.fullmatch(name)
        if match and not (match[2] and int(match[1]) in names_by_number):
            names_by_number[int(match[1])] = name
    return [names_by_number[number] for number in sorted(names_by_number)]
