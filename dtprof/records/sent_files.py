"""Which files of a run a launcher sends to a collector, and how each of them grows.

The collector writes no other name: what a sender asks for beyond these is refused.
"""

import re
from enum import Enum, auto


class FileKind(Enum):
    """How a file comes to be."""

    WHOLE = auto()  # written at once, or replaced by a new version
    LINES = auto()  # lines are appended
    SEGMENT = auto()  # fixed records in a mapping, completed in place
    ARCHIVE = auto()  # a segment that nothing is written to any more, compressed


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Of a run."""
_RANK = re.compile(r"rank-\d{5,7}\.\d{1,4}")
_NODE = re.compile(r"node-[A-Za-z0-9._-]{1,200}")
_OF_RANKS = {
    FileKind.SEGMENT: r"events\.\d{5,8}",
    FileKind.ARCHIVE: r"events\.\d{5,8}\.z",
    FileKind.LINES: r"strings\.jsonl",
    FileKind.WHOLE: r"dropped\.json|crash\.txt|window-\d{1,15}-\d{1,15}\.pt\.trace\.json\.gz"
    r"|memory-\d{1,9}\.(json\.gz|pickle)",
}
_OF_NODES = {
    FileKind.LINES: r"(processes|exits|samples|clock|mismatches|lateness)\.jsonl",
    FileKind.WHOLE: r"stacks\.json|launcher-\d{1,10}\.json",
}


def growth_of(folder: str, file: str) -> FileKind | None:
    """Return how a file of a run grows; None for a name that is not sent."""
    if _RANK.fullmatch(folder):
        names = _OF_RANKS
    elif _NODE.fullmatch(folder):
        names = _OF_NODES
    else:
        return None
    return next((growth for growth, pattern in names.items() if re.fullmatch(pattern, file)), None)
