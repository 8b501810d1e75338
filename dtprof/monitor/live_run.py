"""The newest steps of a run that is still written, as analysis sees a run: bounded, however long the job goes on."""

import bisect
import copy
import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.job.sound_records import is_any
from dtprof.records import paths, reader, tables
from dtprof.records.host_clocks import HostClock
from dtprof.records.run_follower import Growth, RunFollower
from dtprof.records.segments import by_time
from dtprof.records.tables import Array, Manifest, NodeMemory, ProcessExit, RankTables, join, select

MAX_STEPS = 50
"""Steps kept behind the newest one of any rank."""
MAX_ROWS = 1 << 20
"""Records kept, of all ranks together; with more than that a step less is kept."""
MIN_ROWS = 1 << 10
"""Records kept of each rank, however many ranks there are."""
_NO_OPERATIONS, _NO_SAMPLES = np.zeros(0, tables.OPERATION), np.zeros(0, tables.SAMPLE)
_BESIDE_RECORDS = (paths.EXITS, paths.PROCESSES, paths.MISMATCHES, paths.STACKS)


@dataclass(frozen=True, kw_only=True)
class RecentRecords:
    """The newest records of some ranks, as analysis reads them."""

    ranks: Mapping[int, RankTables]

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Return the records of a rank; of its last attempt alone."""
        found = self.ranks[rank]
        if attempt not in (None, found.attempt):
            raise KeyError(f"attempt {attempt} of rank {rank}: only attempt {found.attempt} is followed")
        return found

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return the records of ranks."""
        return map(self.load, ranks)


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
        """Return the rows of a step and of later ones."""
        found = _Rows()
        begin = bisect.bisect_left(self.newest, first)  # what came before holds none of these steps
        for rows in self.parts[begin:]:
            chosen = rows["step"] >= first
            found.take(rows if chosen.all() else select(rows, chosen))
        return found


class _Recent:
    """What is kept of one rank."""

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.tables: tuple[_Rows, _Rows, _Rows] = (_Rows(), _Rows(), _Rows())  # operations, spans, samples
        self.oldest_step = self.newest_step = 0

    @property
    def num_rows(self) -> int:
        return sum(rows.count for rows in self.tables)

    def take(self, growth: Growth) -> None:
        """Take in what the rank has gained."""
        self.growth = growth
        found = growth.tables
        for rows, gained in zip(self.tables, (found.operations, found.spans, found.samples), strict=True):
            rows.take(gained)
            self.newest_step = max(self.newest_step, rows.newest_step)

    def keep_from(self, step: int) -> None:
        """Drop the steps before this one."""
        self.oldest_step = step
        for rows in self.tables:
            if rows.parts:
                kept = join(rows.parts)
                rows.replace(select(kept, kept["step"] >= step))

    def halve(self) -> None:
        """Drop the older half of what there is."""
        for rows in self.tables:
            if rows.parts:
                kept = join(rows.parts)
                rows.replace(kept[(len(kept) + 1) // 2 :])

    def since(self, first: int, *, with_samples: bool) -> "_Recent":
        """Return what is kept of a step and of later ones; what this one takes in later does not change it."""
        found = _Recent(self.growth)
        found.oldest_step, found.newest_step = self.oldest_step, self.newest_step
        operations, spans, samples = self.tables
        found.tables = operations.since(first), spans.since(first), samples.since(first) if with_samples else _Rows()
        return found

    def as_rank(self) -> RankTables:
        """Return what is kept, with what is still open."""
        growth, (operations, spans, samples) = self.growth, self.tables
        return dataclasses.replace(
            growth.tables,
            operations=by_time([*operations.parts, growth.open_operations], tables.OPERATION, "issued_ns"),
            spans=by_time([*spans.parts, growth.open_spans], tables.SPAN, "begin_ns"),
            samples=by_time(samples.parts, tables.SAMPLE, "t_ns"),
        )


def _stamp(run: Path) -> tuple[tuple[int, int, int], ...]:
    """Return what changes when something is written to a run beside the records; nothing where there is no run.

    To read all that anew at every poll costs far more than to ask whether it has changed.
    """
    try:
        nodes = sorted(run.glob("node-*"))
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
    """The newest steps of a run; what an earlier poll has given may have been dropped by a later one."""

    def __init__(self, run: Path, *, max_steps: int = MAX_STEPS, max_rows: int = MAX_ROWS) -> None:
        """Follow a run directory.

        Args:
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
        """Take in what came since the last poll; return what each rank has gained.

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

    def frozen(self, *, num_steps: int | None = None) -> "LiveWindow":
        """Return what is kept as it is now, or its newest steps: it may be read while this one polls, and never polls.

        Parameters:
            num_steps: steps to keep behind the newest one that all ranks have ended, without samples; None: all.
        """
        found = copy.copy(self)
        found._loaded = {}
        is_all = num_steps is None
        first = (
            0 if num_steps is None else min((one.newest_step for one in self._recent.values()), default=0) - num_steps
        )
        found._recent = {rank: recent.since(first, with_samples=is_all) for rank, recent in self._recent.items()}
        return found

    def spans_since(self, first: int, names: Collection[str]) -> list[RankTables]:
        """Return the ended spans of some names, of a step and of later ones, and nothing else of every rank."""
        found = []
        for recent in self._recent.values():
            known = recent.growth.tables
            ids = [number for number, name in enumerate(known.ops) if name in names]
            parts = recent.tables[1].since(first).parts
            spans = [select(rows, is_any(rows["op"], ids)) for rows in parts]
            found.append(
                dataclasses.replace(
                    known, operations=_NO_OPERATIONS, spans=by_time(spans, tables.SPAN, "begin_ns"), samples=_NO_SAMPLES
                )
            )
        return found

    # ---- as analysis sees a run ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Where the run lies, as it was given."""
        return self._opened.name

    @property
    def manifest(self) -> Manifest:
        """What is known of the job as a whole."""
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
        """Calls that do not go together, as the launcher has reported them so far."""
        return self._opened.mismatches

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be read, a sentence each."""
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
        """Return the newest records of a rank, those included that are still open."""
        return self.part([rank]).load(rank, attempt)

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Return the newest records of ranks."""
        return map(self.load, ranks)

    def part(self, ranks: Sequence[int]) -> RecentRecords:
        """Return the newest records of some ranks."""
        return RecentRecords(ranks={rank: self._tables(rank) for rank in ranks})

    def _tables(self, rank: int) -> RankTables:
        if self._loaded is None:
            return self._recent[rank].as_rank()
        if rank not in self._loaded:
            self._loaded[rank] = self._recent[rank].as_rank()
        return self._loaded[rank]

    def exit_of(self, host: str, pid: int, *, since_ns: int = 0) -> ProcessExit | None:
        """Return how a process of a host ended; None where nobody saw it."""
        return self._opened.exit_of(host, pid, since_ns=since_ns)

    def node_memory(self) -> tuple[NodeMemory, ...]:
        """Return how much memory each node has, and the most that was in use."""
        return self._opened.node_memory()

    def host_clocks(self) -> dict[str, HostClock]:
        """Return the clocks that launchers measured, by host name."""
        return self._opened.host_clocks()

    # ---- bounds --------------------------------------------------------------------------------------------------

    def _room(self, num_ranks: int) -> int:
        """Return how many records are kept of each rank."""
        return max(MIN_ROWS, self._max_rows // max(1, num_ranks))

    def _drop(self) -> None:
        """Drop the oldest steps, of all ranks alike, and what is beyond the room of each rank."""
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
