"""Prefixes of log lines from launchers, schedulers and containers, and the facts in them."""

import json
import re
from typing import NamedTuple

from dtprof.diagnosis.sources.logs.log_facts import TENSOR


class LogLine(NamedTuple):
    """One line of a log without its prefix."""

    text: str
    rank: int | None
    """Global rank, where the carrier names it."""
    task: int | None
    """Task, local rank or pod: the rank only where nothing better is known."""
    stream: str
    """Key of the process whose output the line is: lines of one traceback share it."""
    from_torch: bool
    """Whether torch itself named the rank: its hook for uncaught exceptions, its C++ log."""
    pod: int | None = None
    """Number of the pod, container or service, where its name ends with one."""


MAX_LAYERS = 6
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RANK = re.compile(r"\[rank(\d{1,7})\]: ?")
ROLE = re.compile(r"\[[A-Za-z_][\w-]*?(\d{1,6})\]: ?")
RAY = re.compile(r"\((?:[\w.<>:-]+)(?:\[rank=(\d{1,7})\])? ?pid=(\d+)(?:, ip=([\w.:-]+))?[^)]{0,80}\) ?")
MPI = re.compile(r"\[(?:\d{1,7},)?(\d{1,7})\]<(?:stdout|stderr|stdin)>:? ?")
# The rank before Horovod's names of tensors is the one it reports, and no prefix.
TASK = re.compile(rf" {{0,6}}(\d{{1,6}}): ?(?!\[{TENSOR})(?=\S| {{2}}|$)")
POD = re.compile(r"\[?pod/([\w.-]+)(?:/([\w.-]+))?\]?:? ")
REPLICA = re.compile(
    r"\[?([a-z0-9][a-z0-9-]*-(?:worker|master|launcher|trainer|node|pod)-?(\d{1,6}))\]?(?::| [a-z0-9-]+| \|)? "
)
COMPOSE = re.compile(r"([a-z0-9][\w.-]{0,60})\s+\| ")
HOST = re.compile(r"([a-z][a-z0-9.-]*\d[a-z0-9.-]*): (?=\S| {2})")
TIME = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])? "
)
LOGGER = re.compile(
    r"[-|: ]{0,3}[\w.-]{1,80} ?[-|:] ?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) ?[-|:] ?(?=\[rank\d{1,7}\]:)"
)
"""A record of logging that holds a line of a rank: a program that starts torchrun and logs its output."""
NUMBERED = re.compile(r"-(\d{1,6})$")
FILE_RANK = re.compile(r"(?:^|[^a-z])(?:global_?)?rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
ELASTIC_FILE = re.compile(r"attempt_\d+/(\d+)/(?:stdout|stderr)\.log$")


def parse_line(raw: str, *, file_key: str, file_rank: int | None) -> LogLine:
    """Return the line without its carriers, from the outermost to the innermost."""
    text = ESCAPES.sub("", raw) if "\x1b" in raw else raw
    rank: int | None = file_rank
    task: int | None = None
    from_torch = False
    pod: int | None = None
    stream = file_key
    for _ in range(MAX_LAYERS):
        if text.startswith('{"'):
            text, named = _unwrap_json(text)
            rank = named if named is not None else rank
            if text.startswith('{"'):
                break
        if match := RANK.match(text):
            rank, from_torch = int(match[1]), True
            stream = f"{file_key} rank{rank}"
        elif match := RAY.match(text):
            rank = int(match[1]) if match[1] else rank
            stream += f" {match[2]}@{match[3] or ''}"
        elif match := MPI.match(text):
            rank = int(match[1])
            stream += f" mpi{rank}"
        elif match := ROLE.match(text):
            task = int(match[1]) if task is None else -1  # a task of several processes: neither number is the rank
            stream += f" {match[0].rstrip()}"
        elif match := TIME.match(text) or LOGGER.match(text):
            pass
        elif match := POD.match(text) or REPLICA.match(text) or COMPOSE.match(text) or HOST.match(text):
            stream += f" {match[1]}"
            number = NUMBERED.search(match[1])
            pod = int(number[1]) if number else pod
        elif match := TASK.match(text):
            task = int(match[1]) if task is None else -1
            stream += f" task{match[1]}"
        else:
            break
        text = text[match.end() :]
    return LogLine(text, rank, None if task == -1 else task, stream, from_torch, pod)


def rank_of_file(path: str) -> int | None:
    """Return the rank that a file's name tells: `rank3.log`, `attempt_0/3/stderr.log`."""
    match = FILE_RANK.search(path.rpartition("/")[2]) or ELASTIC_FILE.search(path)
    if match is None and (parents := path.split("/")[-3:-1]):
        match = next((named for part in reversed(parents) if (named := FILE_RANK.fullmatch(part))), None)
    return int(match[1]) if match else None


def rank_before(text: str, position: int) -> int | None:
    """Return the rank of the last `[rankN]:` before a position: a progress bar may precede it."""
    start = text.rfind("[rank", 0, position)
    match = RANK.match(text, start) if start >= 0 else None
    return int(match[1]) if match else None


def _unwrap_json(text: str) -> tuple[str, int | None]:
    """Return the message of a line in JSON, as container runtimes and structured loggers write it."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    message = next((record[key] for key in ("log", "message", "msg") if isinstance(record.get(key), str)), None)
    rank = record.get("rank")
    named = rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 10**7 else None
    return (text if message is None else message.rstrip("\n")), named
