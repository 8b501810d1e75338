"""The files of a run: where each lies, who writes it, how it grows, and whether a launcher sends it to a collector.

The reference of the format, what a collector takes, and what `--force` replaces follow from this table.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

from dtprof.records import paths

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MARK = re.compile(r"\.launcher|\.(told|warned)-\w+|\.{1,2}collect-[0-9a-f]{32}\.json(\.\d+)?")
"""A launcher has claimed the run; a line was said; a launcher has sent its part."""


class Place(Enum):
    """The folder that a file lies in."""

    RUN = ""
    RANK = "rank-RRRRR.A/"
    NODE = "node-HOST/"


class FileKind(Enum):
    """How a file that is sent comes to be."""

    WHOLE = auto()  # written at once, or replaced by a new version
    LINES = auto()  # lines are appended
    SEGMENT = auto()  # fixed records in a mapping, completed in place
    ARCHIVE = auto()  # a segment that nothing is written to any more, compressed


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A file of a run, or several whose names differ in a number."""

    place: Place
    name: str  # capital letters stand for a number: N for one digit at least
    writer: str
    holds: str
    kind: FileKind | None = None  # None: it is not sent

    def matches(self, name: str) -> bool:
        """Say whether a file of this place is one of these."""
        return re.fullmatch(self._pattern, name) is not None

    def matches_draft(self, name: str) -> bool:
        """Say whether it is one of these, or one that is being written."""
        return re.fullmatch(rf"\.?{self._pattern}(\.\d+)?", name) is not None

    @property
    def _pattern(self) -> str:
        return re.sub("[A-Z]+", lambda number: rf"\d{{{number[0].count('N') or 1},15}}", re.escape(self.name))


def _of_run(name: str, writer: str, holds: str) -> RunFile:
    return RunFile(place=Place.RUN, name=name, writer=writer, holds=holds)


def _of_rank(name: str, writer: str, holds: str, kind: FileKind | None = FileKind.WHOLE) -> RunFile:
    return RunFile(place=Place.RANK, name=name, writer=writer, holds=holds, kind=kind)


def _of_node(name: str, writer: str, holds: str, kind: FileKind = FileKind.LINES) -> RunFile:
    return RunFile(place=Place.NODE, name=name, writer=writer, holds=holds, kind=kind)


RANK, LAUNCHER = "each rank", "`dtprof run`"
FILES = (
    _of_run(paths.MANIFEST, LAUNCHER, "the job as a whole: a JSON object, replaced whole at the start and at the end"),
    _of_rank("events.NNNNN", RANK, "segments: fixed-size records of events", FileKind.SEGMENT),
    _of_rank(
        "events.NNNNN.z", LAUNCHER, "archives: what takes the place of segments that are sealed", FileKind.ARCHIVE
    ),
    _of_rank(paths.CRASH, RANK, "the Python stack that a fatal signal hit, as faulthandler prints it"),
    _of_rank(paths.DROPPED, RANK, "sums of the events that were dropped for want of room: a JSON object"),
    _of_rank(paths.STRINGS, RANK, "what ids in records stand for, exceptions, the end; JSON lines", FileKind.LINES),
    _of_rank("window-FIRST-LAST.pt.trace.json.gz", RANK, "a window of torch.profiler over these steps"),
    _of_rank("memory-COUNT.pickle", RANK, "a snapshot of the memory of its device, as torch writes it"),
    _of_rank("memory-COUNT.json.gz", RANK, "a snapshot of its memory on the host"),
    _of_rank(
        paths.TRACE_REQUEST, "`dtprof trace`", "a request for a window or a snapshot, until the rank takes it", None
    ),
    _of_node(paths.PROCESSES, "each process", "Python processes of the job that imported torch; JSON lines"),
    _of_node(paths.EXITS, "parents of processes", "how child processes ended; JSON lines"),
    _of_node(paths.SAMPLES, LAUNCHER, "the node about once a second: host, cores, GPUs, ranks; JSON lines"),
    _of_node(paths.CLOCK, LAUNCHER, "the host's clock against that of the host that created the run; JSON lines"),
    _of_node(
        "launcher-PID.json", LAUNCHER, "a launcher that joined a run which another one had created", FileKind.WHOLE
    ),
    _of_node(paths.MISMATCHES, LAUNCHER, "mismatches that were seen while the job ran, one JSON object a line"),
    _of_node(paths.LATENESS, LAUNCHER, "where late ranks were sampled while the job ran, one JSON object a line"),
    _of_node(paths.HOT_LINES, LAUNCHER, "where a rank spends host time, sampled while the job ran; JSON lines"),
    _of_node(
        paths.STACKS,
        LAUNCHER,
        "processes and their Python stacks when the job last made no progress",
        FileKind.WHOLE,
    ),
    _of_node(
        paths.PROGRAM,
        LAUNCHER,
        "the structure of the program's source, where the job hung or failed",
        FileKind.WHOLE,
    ),
    _of_run("report.html", "`dtprof report`", "the page, unless it was written elsewhere"),
    _of_run(paths.VERDICT, "`dtprof diagnose`", "the outcome, for lists of runs"),
    _of_run(paths.CLOCK_ADDRESS, LAUNCHER, "where the clock of the host that created the run answers"),
    _of_run(paths.SENT, LAUNCHER, "where the run was sent"),
    _of_run(paths.COLLECTED, "`dtprof collect`", "what was sent"),
)


def kind_of(folder: str, file: str) -> FileKind | None:
    """Return how a file of a run grows, by its folder and its name; None for a name that is not sent."""
    if re.fullmatch(r"rank-\d{5,7}\.\d{1,4}", folder):
        place = Place.RANK
    elif re.fullmatch(r"node-[A-Za-z0-9._-]{1,200}", folder):
        place = Place.NODE
    else:
        return None
    return next((row.kind for row in FILES if row.place is place and row.matches(file)), None)


def is_written_by_dtprof(place: Place, name: str) -> bool:
    """Say whether dtprof writes files of this name into a place of a run, drafts and marks among them."""
    return _MARK.fullmatch(name) is not None or any(row.place is place and row.matches_draft(name) for row in FILES)
