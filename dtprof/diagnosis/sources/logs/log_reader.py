"""Read logs of any size as a stream: lines, attempts, files of one job."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.sources.logs import nccl_calls, traceback_boxes
from dtprof.diagnosis.sources.logs.line_prefixes import RANK, LogLine, parse_line, rank_of_file
from dtprof.diagnosis.sources.logs.log_facts import Facts, Order
from dtprof.diagnosis.sources.logs.log_files import files_of, opened
from dtprof.diagnosis.sources.logs.log_grammar import BYTE_WORDS, NEW_ATTEMPT, NEW_JOB, read_sentences
from dtprof.diagnosis.sources.logs.logged_ranks import gather_attempt
from dtprof.diagnosis.sources.logs.tracebacks import Tracebacks
from dtprof.errors import NotARunError

CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 15
MAX_ATTEMPTS = 1000
MAX_COMPARED = 20
"""Attempts that are compared with the newest."""
LINE_ENDS = re.compile(rb"[\r\n]+")
DUMPS = "Received a dump signal due to a collective timeout"
CAUGHT = "Watchdog caught"
TORN = ("CCL(", "CollectiveFingerPrint(", DUMPS, CAUGHT)
MAX_TORN_LINES = 5
MAX_HELD = 10_000
MANY = 1_000_000
ATTENTIVE_LINES = 400
"""So many lines after one that tells something are read: tracebacks and tables of many ranks end within them."""
ATTENTIVE_BYTES = 1 << 16
"""A block of more bytes in which nothing tells anything ends that attention; less may be the rest of a traceback."""


def read_logs(paths: Iterable[Path]) -> list[JobState]:
    """Return the facts of each attempt from the logs of one job, oldest first: one file, or several of the same job.

    Raises:
        NotARunError: a file cannot be read, or there is none.
    """
    files = list(files_of(paths))
    if not files:
        raise NotARunError("no log found: give files with the output of a job, or a directory that holds them")
    attempts: list[list[Facts]] = []
    problems: list[str] = []
    for number, path in enumerate(files):
        reader = LogReader(path, number)
        attempts.append(reader.read())
        problems += reader.problems
    # The newest attempt of each file is the job's newest; earlier ones are those of the file that has most.
    newest = Facts()
    for each in attempts:
        newest.merge(each[-1])
    earlier = max(attempts, key=len)[:-1]
    return [*map(gather_attempt, earlier[-MAX_COMPARED:]), gather_attempt(newest, tuple(problems))]


class LogReader:
    """Reads one file into the facts of its attempts."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.problems: list[str] = []
        self._rank = rank_of_file(str(path))
        self._attempts = [Facts()]
        self._tracebacks = Tracebacks(self._attempts[-1])
        self._torn: dict[str, tuple[LogLine, int]] = {}
        self._newest_torn = ""
        self._line = 0
        self._attentive = 0
        self._passed = b""  # the line before, where it was passed over
        self._chunk = 0
        self._has_binary = False

    def read(self) -> list[Facts]:
        """Return the facts by attempt, oldest first."""
        try:
            with opened(self.path) as file:
                for chunk in _chunks(file):
                    self._read_chunk(chunk)
        except EOFError:
            self.problems.append(f"{self.path.name} is cut off: its end was not read")
        except OSError as error:
            raise NotARunError(f"cannot read {self.path}: {error.strerror or error}") from error
        for line, _ in list(self._torn.values()):
            self._take(line)
        if self._has_binary:
            self.problems.append(f"{self.path.name} holds bytes that are no text: they were skipped")
        if self._rank is not None:
            self._attempts[-1].name_rank(self._rank)
        return self._attempts

    def _read_chunk(self, chunk: bytes) -> None:
        self._has_binary = self._has_binary or b"\0" in chunk
        facts = self._attempts[-1]
        self._chunk += 1
        if self._chunk <= 64 or self._chunk % 16 == 0:
            for number in set(RANK_TAG.findall(chunk)):
                facts.name_rank(int(number))
        if len(chunk) > ATTENTIVE_BYTES and not any(word in chunk for word in BYTE_WORDS):
            self._line += chunk.count(b"\n")
            self._attentive = 0
            for stream in facts.last_activity:
                facts.last_activity[stream] += MANY
            return
        for raw in LINE_ENDS.split(chunk):
            self._line += 1
            if b"NCCL INFO" in raw:  # verbose logs are mostly these: never taken apart as other lines are
                if any(word in raw for word in nccl_calls.TELLING):
                    nccl_calls.read(raw[:MAX_LINE_BYTES], self._rank, self._attempts[-1].communicators)
                continue
            passed, self._passed = self._passed, b""
            if any(word in raw for word in BYTE_WORDS):
                self._attentive = ATTENTIVE_LINES
                if passed and traceback_boxes.START.encode() in raw:  # the record above it says who printed it
                    self._read_line(_decoded(passed))
            # After an exception every line counts: a program that goes on has handled it.
            elif self._attentive <= 0 and not self._attempts[-1].last_activity:
                self._passed = raw
                continue
            self._attentive -= 1
            if raw:
                self._read_line(_decoded(raw))

    def _read_line(self, text: str) -> None:
        line = parse_line(text, file_key=str(self.number), file_rank=self._rank)
        facts = self._attempts[-1]
        if line.rank is not None:
            facts.name_rank(line.rank)
            if line.pod is not None and len(facts.pods) < MANY:
                facts.pods.add((line.pod, line.rank))
        if line.task is not None and len(facts.tasks_named) < MANY:
            facts.tasks_named.add(line.task)
        # A terminal that wraps a line repeats no prefix: the rest belongs to the line before.
        begun_in = self._newest_torn if line.stream == str(self.number) and self._newest_torn else line.stream
        self._newest_torn = ""
        if begun_in in self._torn:
            started, count = self._torn.pop(begun_in)
            # A terminal breaks words, too; the sentences that are put together need no space between their words.
            line = started._replace(text=started.text.rstrip() + line.text.lstrip())
            if _is_torn(line.text) and count < MAX_TORN_LINES:
                self._hold(line, count + 1)
                return
        elif _is_torn(line.text):
            self._hold(line, 1)
            return
        self._take(line)

    def _hold(self, line: LogLine, count: int) -> None:
        if len(self._torn) >= MAX_HELD:
            self._torn.clear()
        self._torn[line.stream] = (line, count)
        self._newest_torn = line.stream

    def _take(self, line: LogLine) -> None:
        if NEW_ATTEMPT.search(line.text) or (NEW_JOB.search(line.text) and self._attempts[-1].failed):
            self._begin_attempt()
        order = Order(self.number, self._line)
        facts = self._attempts[-1]
        belonged = self._tracebacks.read(line, order)
        before = len(facts.notes)
        read_sentences(line, order, facts)
        if not belonged and len(facts.notes) == before and line.stream in facts.last_activity and line.text.strip():
            facts.last_activity[line.stream] += 1

    def _begin_attempt(self) -> None:
        if len(self._attempts) < MAX_ATTEMPTS:
            self._attempts.append(Facts())
        else:
            self._attempts[-1] = Facts()
        self._attempts[-1].ranks_named |= self._attempts[max(0, len(self._attempts) - 2)].ranks_named
        self._tracebacks = Tracebacks(self._attempts[-1])


ENDS = ("ranfor0millisecondsbeforetimingout.", "timedoutinblockingwait.")
"""How the sentence on a timeout ends, without spaces, its number 0."""
COUNTED = re.compile(r"last ?completed ?(?:NCCL ?)?work: ?-?\d+\D")
RANK_TAG = re.compile(RANK.pattern.encode())


def _decoded(raw: bytes) -> str:
    return raw[:MAX_LINE_BYTES].decode("utf-8", "replace").replace("\0", "")


def _is_torn(text: str) -> bool:
    """Say whether a sentence was broken where a terminal or a pipe wrapped the line."""
    start = max(text.rfind(words) for words in TORN)
    if start < 0:
        return False
    if text.startswith("CCL(", start):
        _, closed, rest = text[start:].replace("(ms)", "").partition(")")
        begun = re.sub(r"\d+", "0", "".join(rest.split()))
        return not closed or ("timingout" not in begun and any(end.startswith(begun) for end in ENDS))
    if text.startswith(CAUGHT, start):
        return True
    if text.startswith(DUMPS, start):
        return COUNTED.search(text, start) is None
    return "OpType=" not in text[start:]


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield blocks that end with a line; a line longer than a block is cut."""
    rest = b""
    while block := file.read(CHUNK_BYTES):
        block = rest + block
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if end == 0 and len(block) < 4 * CHUNK_BYTES:
            rest = block
            continue
        end = end or len(block)
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest
