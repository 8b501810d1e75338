"""The newest steps of a run that is still written, as analysis sees a run: bounded, however long the job goes on."""

import bisect
import copy
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.records import codes, events, paths, reader, tables
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.host_clocks import HostClock
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.rank_log.segments import by_time, last_time
from dtprof.records.run_follower import Growth, RunFollower
from dtprof.records.tables import Array, NodeMemory, ProcessExit, RankTables, ids_named, join, select

MAX_STEPS = 50
"""Steps kept behind the newest one of any rank."""
MAX_ROWS = 1 << 20
"""Records kept, of all ranks together; with more than that a step less is kept."""
MIN_ROWS = 1 << 10
"""Records kept of each rank, however many ranks there are."""
MAX_CONSUMED = 1 << 10
"""Samples of the consumption of a rank that are kept beside those of its newest steps."""
LEFT_BEHIND = 2
"""Steps after which an operation that has not completed is assumed to be unwaited."""
_NO_OPERATIONS, _NO_SPANS = np.zeros(0, tables.OPERATION), np.zeros(0, tables.SPAN)
_NO_SAMPLES = np.zeros(0, tables.SAMPLE)
_BESIDE_RECORDS = (paths.EXITS, paths.PROCESSES, paths.MISMATCHES, paths.LATENESS, paths.HOT_LINES, paths.STACKS)


class _Rows:
    """Rows of one table, in the parts in which they came."""

    def __init__(self) -> None:
        self.parts: list[Array] = []
        self.newest: list[int] = []  # the newest step in each part and all before it
        self.count = 0

    def take(self, rows: Array) -> None:
        """Take in rows that have come."""
        if len(rows):
            self.parts.append(rows)
            self.newest.append(max(int(rows["step"].max()), self.newest_step))
            self.count += len(rows)

    @property
    def newest_step(self) -> int:
        """The newest step of any row; 0 where there is none."""
        return self.newest[-1] if self.newest else 0

    def replace(self, rows: Array) -> None:
        """Keep these rows instead."""
        self.parts, self.newest, self.count = [], [], 0
        self.take(rows)

    def since(self, first: int) -> "_Rows":
        """Return the rows of a step and of later ones; later additions do not change them."""
        found = _Rows()
        begin = bisect.bisect_left(self.newest, first)  # what came before holds none of these steps
        for rows in self.parts[begin:]:
            chosen = rows["step"] >= first
            found.take(rows if chosen.all() else select(rows, chosen))
        return found

    def copy(self) -> "_Rows":
        """Return the same rows; later additions do not change them."""
        found = _Rows()
        found.parts, found.newest, found.count = [*self.parts], [*self.newest], self.count
        return found


class _Recent:
    """The kept records of one rank."""

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.tables: tuple[_Rows, _Rows, _Rows] = (_Rows(), _Rows(), _Rows())  # operations, spans, samples
        self.oldest_step = self.newest_step = 0
        self.num_events = self.last_ns = 0
        self.consumed = _NO_SAMPLES  # the newest: sampled where it changes, so that those before a step tell of it

    @property
    def num_rows(self) -> int:
        return sum(rows.count for rows in self.tables)

    def take(self, growth: Growth) -> None:
        """Add the new records of the rank."""
        self.growth = growth
        found = growth.tables
        for rows, gained in zip(self.tables, (found.operations, found.spans, found.samples), strict=True):
            rows.take(gained)
            self.newest_step = max(self.newest_step, rows.newest_step)
            self.num_events += len(gained)
            self.last_ns = max(self.last_ns, last_time(gained) if len(gained) else 0)
        if len(found.samples):
            consumed = select(found.samples, ids_named(found.ops, events.CONSUMED)[found.samples["op"]])
            self.consumed = join([self.consumed, consumed])[-MAX_CONSUMED:]

    def keep_from(self, step: int) -> None:
        """Drop the steps before this one."""
        self.oldest_step = step
        for rows in self.tables:
            if rows.parts:
                kept = join(rows.parts)
                rows.replace(select(kept, kept["step"] >= step))

    def halve(self) -> None:
        """Drop the older half of the rows."""
        for rows in self.tables:
            if rows.parts:
                kept = join(rows.parts)
                rows.replace(kept[(len(kept) + 1) // 2 :])

    @property
    def pending_since_ns(self) -> int | None:
        """When the first operation was issued that is still to complete; those long left behind will not."""
        rows = self.growth.open_operations
        sees_end = (rows["state"] == codes.ISSUED) | (
            (rows["state"] == codes.RETURNED) & ((rows["flags"] & codes.COMPLETION_SEEN) != 0)
        )
        pending = rows["issued_ns"][sees_end & (rows["step"] + LEFT_BEHIND >= self.newest_step)]
        return int(pending.min()) if len(pending) else None

    def frozen(self, first: int | None) -> "_Recent":
        """Return the kept records, or those from a step on; later additions do not change them."""
        found = copy.copy(self)
        if first is None:
            operations, spans, samples = (rows.copy() for rows in self.tables)
        else:
            operations, spans, samples = (rows.since(first) for rows in self.tables)
            samples.take(select(self.consumed, self.consumed["step"] < first))
        found.tables = operations, spans, samples
        return found

    def as_rank(self) -> RankTables:
        """Return the kept records, with the open ones."""
        growth, (operations, spans, samples) = self.growth, self.tables
        return dataclasses.replace(
            growth.tables,
            operations=by_time([*operations.parts, growth.open_operations], tables.OPERATION, "issued_ns"),
            spans=by_time([*spans.parts, growth.open_spans], tables.SPAN, "begin_ns"),
            samples=by_time(samples.parts, tables.SAMPLE, "t_ns"),
            last_ns=self.last_ns,
        )


def _stamp(run: Path) -> tuple[tuple[int, int, int], ...]:
    """Return the state of a run beside its records, which changes with each write; nothing where there is no run.

    To read all that anew at every poll costs far more than to ask whether it has changed.
    """
    try:
        nodes = paths.node_folders(run)
    except OSError:
        return ()
    files = [run / paths.MANIFEST, *(node / name for node in nodes for name in _BESIDE_RECORDS)]
    return tuple(map(_state, [run, *files]))


def _state(path: Path) -> tuple[int, int, int]:
    """Return which file lies there, how long it is and when it was written; opened, as a network file system asks."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0, 0
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


class LiveWindow:
    """The newest steps of a run; a poll may drop records of an earlier one."""

    def __init__(self, run: Path, *, max_steps: int = MAX_STEPS, max_rows: int = MAX_ROWS) -> None:
        """Follow a run directory.

        Parameters:
            run: the run directory.
            max_steps: steps to keep.
            max_rows: records to keep, all ranks together.

        Raises:
            NotARunError: there is no run.
            NewerFormatError: it was written by a newer dtprof.
        """
        self.path = run
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._written = _stamp(run)
        self._opened = reader.open_run(run)
        self._follower = RunFollower(run, newest=self._room(len(self._opened.folders)))
        self._recent: dict[int, _Recent] = {}
        self._loaded: dict[int, RankTables] | None = None  # of a window that does not change: read more than once

    def poll(self) -> dict[int, Growth]:
        """Add the records since the last poll; return the new ones of each rank.

        Raises:
            NotARunError: the run has been moved or deleted.
        """
        written = _stamp(self.path)
        if written != self._written or not written:
            self._written, self._opened = written, reader.open_run(self.path)
        growths = self._follower.poll()
        for rank, growth in growths.items():
            recent = self._recent.get(rank)
            if recent is None or recent.growth.tables.attempt != growth.tables.attempt:
                recent = self._recent[rank] = _Recent(growth)
            recent.take(growth)
        self._drop()
        return growths

    def close(self) -> None:
        """Close the files."""
        self._follower.close()

    def frozen(self, *, first: int | None = None) -> "LiveWindow":
        """Return the records as they are now: readable while this run polls; the copy never polls.

        Parameters:
            first: the step from which on records are kept; None: all.
        """
        found = copy.copy(self)
        found._loaded = {}
        found._recent = {rank: recent.frozen(first) for rank, recent in self._recent.items()}
        return found

    def pending_since_ns(self, rank: int) -> int | None:
        """Return when the first operation of a rank was issued that is still to complete; None where there is none."""
        return self._recent[rank].pending_since_ns

    def count_events(self, rank: int) -> int:
        """Return how many events a rank has recorded since it is followed."""
        recent = self._recent[rank]
        return recent.num_events + len(recent.growth.open_operations) + len(recent.growth.open_spans)

    def load_samples(self, rank: int) -> RankTables:
        """Return the newest samples of a rank, and none of its other records."""
        recent = self._recent[rank]
        samples = by_time(recent.tables[2].parts, tables.SAMPLE, "t_ns")
        return dataclasses.replace(recent.growth.tables, operations=_NO_OPERATIONS, spans=_NO_SPANS, samples=samples)

    @property
    def oldest_step(self) -> int:
        """The first step of which all records are kept."""
        return max((recent.oldest_step for recent in self._recent.values()), default=0)

    @property
    def name(self) -> str:
        """Where the run lies, as it was given."""
        return self._opened.name

    @property
    def manifest(self) -> Manifest:
        """The known facts of the job as a whole."""
        return self._opened.manifest

    @property
    def num_ranks(self) -> int:
        """Ranks that had a log when the run was opened, or last changed."""
        return len(self._opened.folders)

    @property
    def job_problem(self) -> str:
        """Why nothing is known of the job as a whole; empty where its run.json was read."""
        return self._opened.job_problem

    @property
    def mismatches(self) -> tuple[dict[str, Any], ...]:
        """Mismatched operations, as the launcher has reported them so far."""
        return self._opened.mismatches

    @property
    def problems(self) -> tuple[str, ...]:
        """Unreadable parts of the run, one sentence each."""
        return (*self._opened.problems, *self._follower.problems.values())

    @property
    def folders(self) -> dict[int, list[tuple[int, Path]]]:
        """(attempt, folder) of every rank that is followed."""
        attempts = {rank: recent.growth.tables.attempt for rank, recent in sorted(self._recent.items())}
        return {
            rank: [(attempt, self.path / paths.rank_folder_name(rank, attempt))] for rank, attempt in attempts.items()
        }

    @property
    def first_step(self) -> int:
        """The first step of which records are kept."""
        return max(0, max((recent.newest_step for recent in self._recent.values()), default=0) - self._max_steps)

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Return the newest records of a rank, those included that are still open; of its last attempt alone."""
        recent = self._recent[rank]
        if attempt not in (None, recent.growth.tables.attempt):
            raise KeyError(f"attempt {attempt} of rank {rank}: only attempt {recent.growth.tables.attempt} is followed")
        if self._loaded is None:
            return recent.as_rank()
        if rank not in self._loaded:
            self._loaded[rank] = recent.as_rank()
        return self._loaded[rank]

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return the newest records of ranks."""
        return map(self.load, ranks)

    def on_disk(self) -> None:
        """Return None: only the newest steps are at hand."""

    def part(self, _ranks: Sequence[int], /) -> "LiveWindow":
        """Return the records of some ranks: all are at hand."""
        return self

    def exit_of(self, host: str, pid: int, *, since_ns: int = 0) -> ProcessExit | None:
        """Return how a process of a host ended; None without an exit record."""
        return self._opened.exit_of(host, pid, since_ns=since_ns)

    def node_samples(self, *, max_samples: int | None = None) -> dict[str, NodeSamples]:
        """Return the samples of each node by its name; of each at most `max_samples`, at even distances."""
        return self._opened.node_samples(max_samples=max_samples)

    def node_memory(self) -> tuple[NodeMemory, ...]:
        """Return how much memory each node has, and the most that was in use."""
        return self._opened.node_memory()

    def host_clocks(self) -> dict[str, HostClock]:
        """Return the clocks that launchers measured, by host name."""
        return self._opened.host_clocks()

    def _room(self, num_ranks: int) -> int:
        """Return how many records are kept of each rank."""
        return max(MIN_ROWS, self._max_rows // max(1, num_ranks))

    def _drop(self) -> None:
        """Drop the oldest steps, of all ranks alike, and records beyond the room of each rank."""
        first = self.first_step
        room = self._room(len(self._recent))
        for recent in self._recent.values():
            if recent.oldest_step < first - self._max_steps // 4 or recent.num_rows > room:
                recent.keep_from(first)
            while recent.num_rows > room:
                if recent.oldest_step < recent.newest_step:
                    recent.keep_from(recent.oldest_step + 1)
                else:
                    recent.halve()
