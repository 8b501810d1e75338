"""Follow a run while it is written: the new records of each rank since the last poll.

A poll reads only what is new and what had not settled. Records are completed in place: one has settled when nothing
will be written to it any more, as far as the records show. Each is given once as settled; until then it is among the
open ones. An operation that will never be seen to complete settles once the rank has gone on to another step.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof.errors import NewerFormatError
from dtprof.records import paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.rank_log.segments import Records, refuse_newer
from dtprof.records.rank_log.short_logs import MOST_TOGETHER, ShortLog, decode_each
from dtprof.records.rank_log.strings import ENTRY_ERRORS, Strings, names_in_tables
from dtprof.records.rank_processes import header_of, newest_header
from dtprof.records.tables import DEVICE_INTERVAL, Array, RankTables, join, select

MAX_OPEN = 4096
"""Records behind the newest one that may be open; those further behind settle as they are."""
MAX_STRINGS_BYTES = 1 << 24
"""Of the strings file, read in one poll."""
_NEW, _SEEN, _SETTLED = range(3)
_DONE = schema.STATE["done"]
_COMPLETION = schema.FLAG["completion"]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The new records of one rank's log since the last poll."""

    tables: RankTables  # the rows that have settled since, in order of time; every name known so far
    newest_ns: int  # when the newest record seen for the first time was issued, settled or not; 0: there is none
    open_operations: Array  # tables.OPERATION: not settled yet
    open_spans: Array  # tables.SPAN
    lost: int  # records that were dropped before they could be read, since following began
    is_whole: bool = True  # all that was there was read
    open_device_intervals: Array = field(default_factory=lambda: np.zeros(0, DEVICE_INTERVAL))  # started, not ended


def with_open(growth: Growth) -> RankTables:
    """Return the settled operations and, of a job that has ended, those that nobody waited for."""
    left = growth.open_operations[growth.open_operations["state"] != schema.STATE["issued"]]
    return replace(growth.tables, operations=join([growth.tables.operations, left]))


class LogFollower:
    """Follows the log of one rank in one attempt."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        attempt: int,
        from_end: bool = False,
        newest: int | None = None,
        at_most: int | None = None,
    ) -> None:
        """Begin at the first record that is there, or later.

        Parameters:
            folder: of the rank.
            rank: global rank.
            attempt: restart attempt.
            from_end: leave out all but the newest segment, and of that what had settled at the first poll.
            newest: leave out records that are there at the first poll but for so many; a segment more at most is read.
            at_most: open so many segments in one poll: memory stays bounded, however late it comes.
        """
        self._at_most = at_most
        self.folder, self.rank, self.attempt = folder, rank, attempt
        self._passes_over = from_end
        self._newest = 0 if from_end else newest
        self._windows: list[_Window] = []
        self._next = self._begin = 0
        self._strings = Strings()
        self._strings_path = folder / paths.STRINGS
        self._strings_at = 0
        self._step = 0
        self._lost = self._newest_ns = 0
        self._is_whole = True
        self._header: dict[str, Any] = {}
        self._capture_ns: dict[int, int] = {}
        self._names: dict[str, Any] = {}

    def read(self) -> tuple[ShortLog, ShortLog]:
        """Read the records since the last poll, settled and open, as they are in the segments.

        Raises:
            NewerFormatError: the log was written by a newer dtprof.
        """
        settled = ShortLog()
        self._newest_ns = 0
        self._skip_to_end()
        unsettled = self._read_windows(settled)
        opened = 0
        while opened != self._at_most and self._open_next():
            unsettled = self._read_windows(settled)
            opened += 1
        self._passes_over = False
        self._is_whole = opened != self._at_most
        self._read_strings()  # after the records: an entry is written before its id is used
        return settled, unsettled

    def grow(self, settled: Records, unsettled: Records) -> Growth:
        """Return the last read, given its records."""
        operations, spans, samples, _, intervals = settled.joined()
        open_operations, open_spans, _, _, open_intervals = unsettled.joined()
        return Growth(
            tables=self._tables(operations, spans, samples, intervals),
            newest_ns=self._newest_ns,
            open_operations=open_operations,
            open_spans=open_spans,
            open_device_intervals=open_intervals,
            lost=self._lost,
            is_whole=self._is_whole,
        )

    def close(self) -> None:
        """Close the files."""
        for window in self._windows:
            window.close()
        self._windows = []

    def _skip_to_end(self) -> None:
        """Find where to begin."""
        if self._newest is None or self._windows:
            return
        headers = {number: header_of(self.folder / paths.segment_name(number)) for number in _numbers(self.folder)}
        heads = {number: header["head"] for number, header in headers.items() if header and header["head"]}
        self._next = max(heads, default=0)
        head = min(heads.get(self._next, 0), schema.SEGMENT_CAPACITY)
        if head < self._newest and self._next - 1 in headers:
            self._next, head = self._next - 1, head + schema.SEGMENT_CAPACITY
        self._begin = max(0, head - self._newest) if not self._passes_over else 0
        self._newest = None

    def _open_next(self) -> bool:
        """Open the next segment where the newest one is full; return whether there is more to read."""
        if self._windows and not self._windows[-1].full:
            return False
        window = _open_window(self.folder, self._next)
        for number in _numbers(self.folder) if window is None else ():
            if window is None and number > self._next:  # those before it are gone, or cannot be read
                self._lost += (number - self._next) * schema.SEGMENT_CAPACITY
                self._next = number
                window = _open_window(self.folder, number)
        if window is None:
            return False
        window.start, self._begin = self._begin, 0
        self._windows.append(window)
        self._next += 1
        return True

    def _read_windows(self, settled: ShortLog) -> ShortLog:
        """Add the settled records, note the newest new one; return the open ones."""
        kept, unsettled = [], ShortLog()
        for at, window in enumerate(self._windows):
            rows = window.read()
            if rows is None:  # another segment has taken its place
                self._lost += window.num_unsettled
                window.close()
                continue
            self._header = window.header
            self._capture_ns[window.header["segment"]] = window.header["capture_ns"]
            written = rows["state"] != 0
            self._step = max(self._step, int(rows["step"].max(where=written, initial=0)))
            given = window.given
            final = written & (_is_final(rows, self._step) | (np.arange(len(rows)) < window.num_old))
            if at + 2 < len(self._windows):
                final = written  # two segments on, nobody writes here any more
            if not self._passes_over:
                new = rows["issued_ns"].max(where=written & (given == _NEW), initial=0)
                self._newest_ns = max(self._newest_ns, int(new))
                _take(rows, final & (given != _SETTLED), settled)
            _take(rows, written & ~final, unsettled)
            given[written] = _SEEN
            given[final] = _SETTLED
            window.advance()
            if window.full and not window.num_unsettled:
                if window is not self._windows[-1]:
                    window.close()
                    continue
                window.close()
            kept.append(window)
        self._windows = kept
        return unsettled

    def _read_strings(self) -> None:
        try:
            file = os.open(self._strings_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            data = os.pread(file, MAX_STRINGS_BYTES, self._strings_at)
        except OSError:
            return
        finally:
            os.close(file)
        if not data:
            return
        whole = data.rfind(b"\n") + 1
        if whole:
            self._names = {}
        self._strings_at += whole
        for line in data[:whole].splitlines():
            try:
                self._strings.take(json.loads(line))
            except (*ENTRY_ERRORS, AttributeError):
                continue

    def _tables(self, operations: Array, spans: Array, samples: Array, intervals: Array) -> RankTables:
        header = self._header
        self._names = self._names or names_in_tables(self._strings)
        return RankTables(
            rank=self.rank,
            attempt=self.attempt,
            world_size=header.get("world_size", 0),
            local_rank=header.get("local_rank", -1),
            pid=header.get("pid", 0),
            host=header.get("host", ""),
            boot_id=header.get("boot_id", ""),
            hook=schema.HOOKS.get(header.get("tap", 0), ""),
            torch_version=header.get("torch_version", ""),
            **self._names,
            operations=operations,
            spans=spans,
            samples=samples,
            device_intervals=intervals,
            first_ns=header.get("opened_monotonic_ns", 0),
            monotonic_to_realtime_ns=header.get("opened_realtime_ns", 0) - header.get("opened_monotonic_ns", 0),
            capture_ns=sum(self._capture_ns.values()),
            dropped_events=header.get("dropped", 0),
            truncated=bool(header.get("marks", 0) & schema.MARK["truncated"]),
            closed=bool(header.get("marks", 0) & schema.MARK["closed"]),
        )


class RunFollower:
    """Follows the newest attempt of every rank of a run."""

    def __init__(
        self,
        run: Path,
        *,
        boot_id: str | None = None,
        from_end: bool = False,
        newest: int | None = None,
        at_most: int | None = None,
    ) -> None:
        """Follow a run directory, which may be empty still.

        Parameters:
            run: the run directory.
            boot_id: follow only ranks of the host with this boot id.
            from_end: leave out what ranks that are there at the first poll had recorded.
            newest: of what a rank has recorded when it is first seen, leave out all but so many records.
            at_most: open so many segments of a rank in one poll.
        """
        self._newest, self._at_most = newest, at_most
        self._run = run
        self._boot_id = boot_id
        self._from_end = from_end
        self._logs: dict[int, LogFollower] = {}
        self._passed: set[str] = set()  # names in the run directory that need no second visit: most of many hosts are
        self.problems: dict[int, str] = {}
        """Ranks that cannot be followed, and why."""

    def poll(self) -> dict[int, Growth]:
        """Return the new records since the last poll, by rank; a new attempt of a rank begins anew."""
        self._find_ranks()
        self._from_end = False
        growths: dict[int, Growth] = {}
        waiting: list[_Read] = []
        num_rows = 0
        for rank, log in sorted(self._logs.items()):
            if rank in self.problems:
                continue
            try:
                read = _Read(rank, log, *log.read())
            except (NewerFormatError, OSError) as error:
                self.problems[rank] = str(error)
                continue
            if num_rows + read.num_rows > MOST_TOGETHER:
                growths |= _grow(waiting)
                waiting, num_rows = [], 0
            waiting.append(read)
            num_rows += read.num_rows
        return growths | _grow(waiting)

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()
        self._logs, self._passed = {}, set()

    def _find_ranks(self) -> None:
        try:
            with os.scandir(self._run) as found:
                names = {entry.name for entry in found}
        except OSError:
            return
        for name in sorted(names - self._passed):
            parsed = paths.parse_rank_folder(name)
            if parsed is None:
                self._passed.add(name)
                continue
            (rank, attempt), folder = parsed, self._run / name
            known = self._logs.get(rank)
            if known is not None and known.attempt >= attempt:
                self._passed.add(name)
                continue
            is_ours = self._is_ours(folder)
            if is_ours is not None:
                self._passed.add(name)
            if not is_ours:
                continue
            if known is not None:
                known.close()
            self._logs[rank] = LogFollower(
                folder,
                rank=rank,
                attempt=attempt,
                from_end=self._from_end,
                newest=self._newest,
                at_most=self._at_most,
            )
            self.problems.pop(rank, None)

    def _is_ours(self, folder: Path) -> bool | None:
        """Say whether a rank is of the host that is followed; None: that is not known yet."""
        if self._boot_id is None:
            return True
        header = newest_header(folder)
        return None if header is None else bool(header["boot_id"] == self._boot_id[:39])


class _Read(NamedTuple):
    """The records read of one rank."""

    rank: int
    log: LogFollower
    settled: ShortLog
    unsettled: ShortLog

    @property
    def num_rows(self) -> int:
        return len(self.settled) + len(self.unsettled)


def _grow(read: Sequence[_Read]) -> dict[int, Growth]:
    """Return the new records of ranks; of few records each they are decoded together."""
    found = iter(decode_each([log for rank in read for log in (rank.settled, rank.unsettled)]))
    return {rank.rank: rank.log.grow(next(found), next(found)) for rank in read}


class _Window:
    """The records of one segment from the first that has not settled."""

    def __init__(self, file: int | None, data: bytes, number: int) -> None:
        self._file, self._data = file, data
        self._number = number
        self.start = 0  # the first record that has not settled
        self.header: dict[str, Any] = {}
        self.given: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)  # of the records of the last read
        self.full = False
        self.num_old = 0

    @property
    def num_unsettled(self) -> int:
        """Records claimed that have not been given as settled."""
        return int(np.count_nonzero(self.given != _SETTLED))

    def read(self) -> Array | None:
        """Return the records from the first that had not settled; None where the file is another segment now."""
        if self._file is None and self.header and not self._data:
            return np.zeros(0, RECORD_DTYPE)
        header = schema.unpack_header(self._bytes(0, schema.HEADER_SIZE))
        if header["segment"] != self._number or header["magic"] != schema.MAGIC:
            return None
        self.header = header
        refuse_newer(header["format_version"], f"segment {self._number} of rank {header['rank']}")
        end = min(header["head"], schema.SEGMENT_CAPACITY)
        self.full = end == schema.SEGMENT_CAPACITY or self._file is None
        data = self._bytes(
            schema.HEADER_SIZE + self.start * schema.RECORD_SIZE, (end - self.start) * schema.RECORD_SIZE
        )
        rows = np.frombuffer(data[: len(data) // schema.RECORD_SIZE * schema.RECORD_SIZE], RECORD_DTYPE)
        self.given = np.concatenate([self.given, np.zeros(len(rows) - len(self.given), np.uint8)])
        self.num_old = max(0, len(rows) - MAX_OPEN)
        return rows

    def advance(self) -> None:
        """Leave behind the first records as far as all have settled."""
        unsettled = np.flatnonzero(self.given != _SETTLED)
        first = int(unsettled[0]) if len(unsettled) else len(self.given)
        self.start += first
        self.given = self.given[first:]

    def close(self) -> None:
        """Close the file; nothing more can be read."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._data = None, b""

    def _bytes(self, at: int, length: int) -> bytes:
        if self._file is None:
            return self._data[at : at + length]
        return os.pread(self._file, length, at)


def _take(rows: Array, chosen: npt.NDArray[np.bool_], into: ShortLog) -> None:
    """Add some records to those taken before."""
    if chosen.any():
        into.take(select(rows, chosen))


def _is_final(rows: Array, step: int) -> npt.NDArray[np.bool_]:
    """Say which records nothing will be written to any more; `step` is the newest one of the rank."""
    state, kind = rows["state"], rows["kind"]
    over = state >= _DONE
    left = (state == schema.STATE["returned"]) & (rows["flags"] & _COMPLETION == 0)
    operation = kind <= schema.KIND["p2p"]
    waited = (rows["waits"] > 0) | (rows["step"] < step) | (state == schema.STATE["failed"])
    final: npt.NDArray[np.bool_] = np.where(operation, (over | left) & waited, over)
    return final


def _open_window(folder: Path, number: int) -> _Window | None:
    """Return a window on a segment or its archive; None where neither can be read."""
    path = folder / paths.segment_name(number)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        try:
            return _Window(None, archive.unpack(paths.archive_of(path).read_bytes()), number)
        except (OSError, ValueError):
            return None
    if os.fstat(file).st_size >= schema.HEADER_SIZE and _is_written(file):
        return _Window(file, b"", number)
    os.close(file)
    return None


def _is_written(file: int) -> bool:
    """Say whether a segment has its header: it is made before that is written."""
    return os.pread(file, len(schema.MAGIC), 0) == schema.MAGIC


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments that are there, ascending."""
    try:
        return [int(file.name.split(".")[1]) for file in paths.segment_files(folder)]
    except OSError:
        return []
