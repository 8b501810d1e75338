"""Open a run, whatever state it is in: finished, running, killed, truncated, half written.

What cannot be read becomes a sentence in `problems`; only a path that holds no run at all is an error.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.errors import NotARunError
from dtprof.records import paths, remote, schema, tables
from dtprof.records.manifest import Manifest, parse_manifest
from dtprof.records.nodes.exit_records import ExitRecords
from dtprof.records.nodes.host_clocks import HostClock, host_clocks
from dtprof.records.nodes.node_memory import read_node_memory
from dtprof.records.nodes.node_reader import NodeSamples, read_node_samples
from dtprof.records.rank_log import device_durations, dropped_totals
from dtprof.records.rank_log.counted_segments import KnownCounts, count_past, find_newest, read_heads
from dtprof.records.rank_log.ddp_buckets import label_buckets
from dtprof.records.rank_log.segments import (
    ITEM_SIZES,
    OperationRows,
    Records,
    Taker,
    by_time,
    count_at_most,
    last_time,
    read_segment,
    refuse_newer,
)
from dtprof.records.rank_log.short_logs import MOST_SHORT, MOST_TOGETHER, ShortLog, decode_logs
from dtprof.records.rank_log.step_index import StepIndex, StepRange, index_log, read_range
from dtprof.records.rank_log.strings import Strings, int_or_0, json_lines, names_in_tables, read_strings
from dtprof.records.rank_log.thread_origins import place_threads
from dtprof.records.replicas import ReplicaProcess, describe_replicas, separate_replicas
from dtprof.records.run_cache import MOST_BYTES, RankCache
from dtprof.records.tables import Array, NodeMemory, Past, ProcessExit, RankTables

MIN_OF_EACH = 1024
"""Operations of each rank to read, at least, where only the newest are read."""
_NOTHING_DROPPED = np.zeros(0, tables.DROPPED)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on disk. Ranks are read on demand."""

    path: Path
    manifest: Manifest
    folders: dict[int, list[tuple[int, Path]]]  # rank -> (attempt, folder), ascending
    processes: tuple[dict[str, Any], ...]  # one document for each interpreter that imported torch
    exit_records: ExitRecords  # exits and stacks of processes
    mismatches: tuple[dict[str, Any], ...] = ()  # reported while the job ran
    problems: tuple[str, ...] = ()
    job_problem: str = ""  # the problem that made run.json unreadable
    origin: str = ""  # the URL that `path` is a copy of
    lacking: remote.RemoteFiles | None = None  # files of the copy that are fetched as ranks are read
    cache: RankCache | None = None  # of the newest attempts; None: ranks are read each time
    newest: int | None = None  # operations of all ranks together to read, where the program counts steps; None: all
    newest_of_each: int = MIN_OF_EACH  # of each rank then, at least
    ranges: Mapping[int, StepRange] | None = None  # by rank: the steps to read alone; None: all
    counts: KnownCounts | None = None  # of older records, from one reading of a running job to the next

    @property
    def name(self) -> str:
        """The path or URL of the run, as given."""
        return self.origin or str(self.path)

    @property
    def ranks(self) -> list[int]:
        """Global ranks that left a log, ascending."""
        return sorted(self.folders)

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Read one rank; its last attempt unless another is named."""
        if attempt is not None:
            return read_rank(self._folder(rank, attempt)[1], rank=rank, attempt=attempt)
        return next(self.load_each([rank]))

    def load_each(self, ranks: Iterable[int]) -> Iterator[RankTables]:
        """Read the last attempts of ranks, in this order; of those with short logs several at a time."""
        if self.ranges is not None:
            for rank in ranks:
                yield dataclasses.replace(self.load_steps(rank, self.ranges[rank]), own_steps=None)
            return
        if self.newest is not None:
            for rank in ranks:
                newest, is_cut = self._load_newest_steps(rank, self.newest)
                first = int(_events_of(newest)["step"][0]) + 1 if is_cut else 0
                yield dataclasses.replace(newest, first_whole_step=first)
            return
        kept = self.cache.tables if self.cache is not None else {}
        for is_kept, some in itertools.groupby(ranks, kept.__contains__):
            if is_kept:
                yield from map(kept.__getitem__, some)
                continue
            for loaded in read_ranks((rank, *self._folder(rank, None)) for rank in some):
                if self.cache is not None:
                    self.cache.put(loaded)
                yield loaded

    def load_newest(self, rank: int, attempt: int | None = None, *, of_all: int, of_each: int) -> RankTables:
        """Read one rank, of a long log only the newest operations; `RankTables.past` counts the rest.

        Parameters:
            of_all: operations to read of all ranks together.
            of_each: operations to read of this rank, at least.
        """
        if attempt is None and self.cache is not None and rank in self.cache.tables:
            return self.cache.tables[rank]
        number, folder = self._folder(rank, attempt)
        newest = read_newest(folder, rank=rank, attempt=number, of_all=of_all, of_each=of_each, counts=self.counts)
        if newest is None:
            return self.load(rank, attempt)
        if attempt is None and self.cache is not None and newest.counts_steps:
            self.cache.put_newest(newest.tables, of_all=of_all, of_each=of_each)
        return newest.with_past()

    def index_steps(self, rank: int, *, held: Collection[str], samples: Collection[str]) -> StepIndex | None:
        """Go through the log of a rank's last attempt once, to read it by steps from then on.

        Parameters:
            rank: whose log.
            held: names of samples to keep whose values hold until the next one.
            samples: names of other samples to keep.

        Returns:
            None where it cannot be read by steps: records are not numbered alike throughout, or some carry no step.

        Raises:
            NewerFormatError: a segment was written by a newer dtprof.
        """
        _, folder = self._folder(rank, None)
        files, ops = paths.segment_files(folder), read_strings(folder, []).canonical_ops()
        return index_log(files, ops=ops, held=held, samples=samples)

    def load_steps(self, rank: int, steps: StepRange) -> RankTables:
        """Read those records of a rank's last attempt that tell of a range of steps.

        Parameters:
            rank: whose records.
            steps: where they lie, by the index of its log.
        """
        attempt, folder = self._folder(rank, None)
        problems, headers = list(steps.problems), list(steps.headers)
        _note_gaps(folder, headers, problems)
        records, strings = read_range(folder, steps), read_strings(folder, problems)
        read = _tables(folder, records, headers, strings, problems, rank=rank, attempt=attempt)
        return dataclasses.replace(read, own_steps=(steps.first, steps.last), first_whole_step=steps.low)

    def longest_log(self) -> int:
        """Return at most how many events the newest attempt of any rank holds."""
        newest = (folders[-1][1] for folders in self.folders.values())
        return max(map(_count_here, newest), default=0)

    def _load_newest_steps(self, rank: int, of_all: int) -> tuple[RankTables, bool]:
        """Read the newest operations of a rank; say whether there are older ones."""
        of_each = self.newest_of_each
        kept = None if self.cache is None else self.cache.newest(rank, of_all=of_all, of_each=of_each)
        if kept is not None:
            return kept, True
        number, folder = self._folder(rank, None)
        newest = read_newest(folder, rank=rank, attempt=number, of_all=of_all, of_each=of_each, counts_rest=False)
        # Steps that the program does not count are counted from the first record that is read.
        if newest is None or not newest.counts_steps:
            return read_rank(folder, rank=rank, attempt=number), False
        if self.cache is not None:
            self.cache.put_newest(newest.tables, of_all=of_all, of_each=of_each)
        return newest.tables, True

    def _folder(self, rank: int, attempt: int | None) -> tuple[int, Path]:
        attempts = dict(self.folders[rank])
        chosen = max(attempts) if attempt is None else attempt
        folder = attempts[chosen]
        if self.lacking is not None:
            folder = self.lacking.of([folder.name]).fetch() / folder.name
        return chosen, folder

    def node_samples(self, *, max_samples: int | None = None) -> dict[str, NodeSamples]:
        """Read the samples of each node by its name; of each at most `max_samples`, at even distances."""
        return read_node_samples(self.path, max_samples=max_samples)

    def exit_of(self, host: str, pid: int, *, since_ns: int = 0) -> ProcessExit | None:
        """Return how a process of a host ended, since a time of that host; None where its exit was not recorded."""
        return self.exit_records.exit_of(host, pid, since_ns=since_ns)

    def node_memory(self) -> tuple[NodeMemory, ...]:
        """Read the memory size of each node and the peak in use."""
        return read_node_memory(self.path)

    def host_clocks(self) -> dict[str, HostClock]:
        """Read the known mappings of host clocks to that of the reference host."""
        return host_clocks(self.path)

    def on_disk(self) -> "Run | None":
        """Return the run where any range of its steps can be read; None where only the newest are."""
        return self if self.newest is None else None

    def part(self, ranks: Iterable[int]) -> "Run":
        """Return the run with only the records of some ranks, to send to another process."""
        folders = {rank: [(number, path.absolute()) for number, path in self.folders[rank]] for rank in ranks}
        lacking = self.lacking and self.lacking.of(path.name for attempts in folders.values() for _, path in attempts)
        ranges = self.ranges and {rank: self.ranges[rank] for rank in folders}
        nothing: dict[str, Any] = {"exit_records": ExitRecords(), "processes": (), "problems": ()}
        return dataclasses.replace(self, folders=folders, lacking=lacking, ranges=ranges, **nothing)

    def only_steps(self, ranges: Mapping[int, StepRange]) -> "Run":
        """Return the run as one of which some steps are read, by rank, and those around them that tell of these."""
        return dataclasses.replace(self, ranges=ranges)

    def only_newest(self, operations: int, *, of_each: int = MIN_OF_EACH) -> "Run":
        """Return the run as one of which the newest operations are read, so many of all ranks; itself if it has fewer.

        Of each rank at least `of_each` are read. What else happened since the first of them is read, too. Older records
        are as good as not recorded.
        """
        if self.count_events() <= operations:
            return self
        return dataclasses.replace(self, newest=operations, newest_of_each=of_each)

    def count_events(self) -> int:
        """Return at most how many events the newest attempts of all ranks hold."""
        attempts = (path for folders in self.folders.values() for _, path in folders[-1:])
        return sum(map(_count_here, attempts))

    def kept(self, processes: int = 1) -> "Run":
        """Return the run as one that keeps the ranks it has read, as far as there is room for all processes."""
        return dataclasses.replace(self, cache=RankCache(most_bytes=MOST_BYTES // processes))

    def load_all(self) -> Iterator[RankTables]:
        """Read the last attempt of every rank, one after the other."""
        for rank in self.ranks:
            yield self.load(rank)


def _count_here(folder: Path) -> int:
    """Return at most how many events a rank folder holds; none where it is not here, or not yet: workers fetch it."""
    try:
        return count_at_most(paths.segment_files(folder))
    except OSError:
        return 0


def open_run(path: Path) -> Run:
    """Open a run directory, or a copy of the one at the URL that is given in its place.

    Raises:
        NotARunError: the path does not exist, is not a directory, or holds nothing that dtprof wrote.
        NewerFormatError: it was written by a newer dtprof.
        MissingDependencyError: a package that the URL needs is not installed.
    """
    url = remote.url_of(path)
    if url is None:
        return _open(remote.plain(path))
    files = _find_files(url)
    return _open(files.fetch(), origin=remote.shown(url))


def open_piecemeal(path: Path) -> Run:
    """Open a run as `open_run` does; of one at a URL each rank is fetched by the process that reads it.

    Raises:
        NotARunError, NewerFormatError, MissingDependencyError: as there.
    """
    url = remote.url_of(path)
    if url is None:
        return _open(remote.plain(path))
    files = _find_files(url)
    lacking = files.of_ranks(are_wanted=True)
    place = files.of_ranks(are_wanted=False).fetch()
    return dataclasses.replace(_open(place, lacking.files, origin=remote.shown(url)), lacking=lacking)


def _find_files(url: str) -> remote.RemoteFiles:
    files = remote.find_files(url)
    if files.is_file:
        raise _not_a_folder(remote.shown(url))
    return files


def _open(path: Path, rank_folders: Iterable[str] | None = None, *, origin: str = "") -> Run:
    """Open a run directory; names of the folders of ranks where they are not there yet."""
    # Before all else: it refuses a path that is no run.
    attempts = _find_rank_folders(path) if rank_folders is None else _by_rank(path / name for name in rank_folders)
    of_processes: list[str] = []
    nodes = paths.node_folders(path)
    processes = [row for node in nodes for row in json_lines(node / paths.PROCESSES, of_processes)]
    folders, replicas = (
        separate_replicas(attempts, functools.partial(_read_process, _started(processes)))
        if rank_folders is None
        else (attempts, 1)
    )
    problems: list[str] = []
    document = _read_document(path / paths.MANIFEST, problems)
    if document is None and not folders:
        raise NotARunError(
            f"{origin or path} holds no run: neither {paths.MANIFEST} nor a folder rank-NNNNN.N is in it; "
            "start one with `dtprof run -o DIR -- COMMAND`"
        )
    if document is None:
        problems.append(f"{paths.MANIFEST} is missing: the command, the start and the exit status are not known")
    job_problem = "".join(problems)
    problems += of_processes
    exits: dict[str, dict[int, tuple[ProcessExit, ...]]] = {}
    stacks: dict[str, dict[str, Any]] = {}
    mismatches: list[dict[str, Any]] = []
    for node in nodes:
        of_node = exits.setdefault(node.name, {})
        for row in json_lines(node / paths.EXITS, problems):
            if isinstance(row.get("pid"), int) and isinstance(row.get("status"), int):
                process_exit = ProcessExit(pid=row["pid"], status=row["status"], t_ns=int_or_0(row.get("t_ns")))
                of_node[process_exit.pid] = (*of_node.get(process_exit.pid, ()), process_exit)
        mismatches += json_lines(node / paths.MISMATCHES, problems)
        stacks[node.name] = _read_document(node / paths.STACKS, problems) or {}
    manifest = parse_manifest(document or {})
    if replicas > 1:
        cannot_tell = (*manifest.cannot_tell, describe_replicas(replicas, folders))
        manifest = dataclasses.replace(manifest, cannot_tell=cannot_tell, replicas=replicas)
    return Run(
        path=path,
        manifest=manifest,
        folders=folders,
        processes=tuple(processes),
        exit_records=ExitRecords(exits=exits, stacks=stacks),
        mismatches=tuple(mismatches),
        problems=tuple(problems),
        origin=origin,
        job_problem=job_problem,
    )


def _not_a_folder(name: str) -> NotARunError:
    return NotARunError(f"{name} is a file; expected a run directory, which holds {paths.MANIFEST} and rank folders")


def _find_rank_folders(path: Path) -> dict[int, list[tuple[int, Path]]]:
    """Return the folders of every rank, by attempt."""
    try:
        return _by_rank(child for child in path.iterdir() if child.is_dir())
    except FileNotFoundError as error:
        raise NotARunError(f"{path} does not exist; expected the run directory that `dtprof run` printed") from error
    except NotADirectoryError as error:
        raise _not_a_folder(str(path)) from error
    except OSError as error:
        raise NotARunError(f"{path} cannot be read ({error.strerror}); expected a run directory") from error


def _by_rank(children: Iterable[Path]) -> dict[int, list[tuple[int, Path]]]:
    folders: dict[int, list[tuple[int, Path]]] = {}
    for child in children:
        if parsed := paths.parse_rank_folder(child.name):
            folders.setdefault(parsed[0], []).append((parsed[1], child))
    for attempts in folders.values():
        attempts.sort()
    return folders


def _started(processes: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], list[int]]:
    """Return when processes began to import torch, ns since 1970, by host and pid."""
    started: dict[tuple[str, int], list[int]] = {}
    for row in processes:
        key = str(row.get("host")), int_or_0(row.get("pid"))
        started.setdefault(key, []).append(int_or_0(row.get("realtime_ns")))
    return started


def _read_process(
    started: Mapping[tuple[str, int], Sequence[int]], rank: int, attempt: int, folder: Path
) -> ReplicaProcess | None:
    """Describe a process of a rank that has several; None where its log cannot be read.

    It is active from its import of torch on: programs that start together may take their steps one after the other.
    """
    problems: list[str] = []
    loaded, process = read_rank(folder, rank=rank, attempt=attempt), read_strings(folder, problems).process
    times = [(loaded.operations["issued_ns"], loaded.operations["done_ns"])]
    times.append((loaded.spans["begin_ns"], loaded.spans["end_ns"]))
    last_ns = [int(column.max()) for columns in times for column in columns if len(column)]
    if not loaded.first_ns or not process:
        return None
    parent = int_or_0(process.get("ppid"))
    opened_ns = loaded.first_ns + loaded.monotonic_to_realtime_ns
    return ReplicaProcess(
        rank=rank,
        attempt=attempt,
        folder=folder,
        pid=loaded.pid,
        parent=parent,
        rendezvous=str(process.get("meeting") or f"{loaded.host} {parent}"),
        begin_ns=max(
            (at for at in started.get((loaded.host, loaded.pid), ()) if 0 < at < opened_ns), default=opened_ns
        ),
        end_ns=max(last_ns, default=loaded.first_ns) + loaded.monotonic_to_realtime_ns,
    )


def _read_document(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return a JSON object; None where there is no file, an empty one where it cannot be read."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{file} cannot be read ({error})")
        return {}
    if not isinstance(document, dict):
        problems.append(f"{file} holds {type(document).__name__}, not an object")
        return {}
    refuse_newer(document.get("format_version"), file)
    return document


def read_rank(folder: Path, *, rank: int, attempt: int) -> RankTables:
    """Read one rank folder.

    Raises:
        NewerFormatError: a segment was written by a newer dtprof.
    """
    problems: list[str] = []
    records, headers = _read_segments(paths.segment_files(folder), problems)
    _note_gaps(folder, headers, problems)
    return _tables(folder, records, headers, read_strings(folder, problems), problems, rank=rank, attempt=attempt)


def read_ranks(folders: Iterable[tuple[int, int, Path]]) -> Iterator[RankTables]:
    """Read rank folders, each given as rank, attempt and path, in this order; short logs several at a time.

    Raises:
        NewerFormatError: a segment was written by a newer dtprof.
    """
    waiting: list[_Waiting] = []
    num_records = 0
    for rank, attempt, folder in folders:
        files = paths.segment_files(folder)
        count = count_at_most(files)
        if waiting and (count > MOST_SHORT or num_records + count > MOST_TOGETHER):
            yield from _read_together(waiting)
            waiting, num_records = [], 0
        if count > MOST_SHORT:
            yield read_rank(folder, rank=rank, attempt=attempt)
        else:
            waiting.append(_Waiting(rank=rank, attempt=attempt, folder=folder, files=files))
            num_records += count
    yield from _read_together(waiting)


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A rank folder with a short log."""

    rank: int
    attempt: int
    folder: Path
    files: list[Path]


def _read_together(ranks: Sequence[_Waiting]) -> Iterator[RankTables]:
    logs = [ShortLog() for _ in ranks]
    problems: list[list[str]] = [[] for _ in ranks]
    headers = [_read_headers(rank.files, log, texts) for rank, log, texts in zip(ranks, logs, problems, strict=True)]
    decoded = decode_logs(logs)
    if decoded is None:
        for waiting in ranks:
            yield read_rank(waiting.folder, rank=waiting.rank, attempt=waiting.attempt)
        return
    for waiting, records, of_rank, texts in zip(ranks, decoded, headers, problems, strict=True):
        _note_gaps(waiting.folder, of_rank, texts)
        strings = read_strings(waiting.folder, texts)
        yield _tables(waiting.folder, records, of_rank, strings, texts, rank=waiting.rank, attempt=waiting.attempt)


def _events_of(read: RankTables) -> Array:
    """Return the operations of a rank; of one that issues none its spans."""
    return read.operations if len(read.operations) else read.spans


@dataclass(frozen=True, kw_only=True)
class NewestOperations:
    """The newest operations of a rank, and what is known of its older records."""

    tables: RankTables  # as if nothing older had been recorded
    older_spans: Sequence[Array] = ()  # those that matter, in tables of SPAN
    past: Past | None = None  # None: the older records were not counted

    @property
    def counts_steps(self) -> bool:
        """Say whether the program counts steps, so that the first step here is not taken for the first of the run."""
        return bool(_events_of(self.tables)["step"][-1:].any())

    def with_past(self) -> RankTables:
        """Return the tables with what is known of older records."""
        if self.past is None:
            return self.tables
        spans = by_time([*self.older_spans, self.tables.spans], self.tables.spans.dtype, "begin_ns")
        return dataclasses.replace(self.tables, spans=spans, past=self.past)


def read_newest(
    folder: Path,
    *,
    rank: int,
    attempt: int,
    of_all: int,
    of_each: int,
    counts_rest: bool = True,
    counts: KnownCounts | None = None,
) -> NewestOperations | None:
    """Read the newest operations of a rank folder with a long log, and count the rest.

    Parameters:
        counts_rest: False where what came before is as good as not recorded: then there is no `past`.
        counts: what was counted before, of this log among others; None: all is counted.

    Returns:
        None where the log is short, or older segments hold damage or failed operations: then read it whole.

    Raises:
        NewerFormatError: a segment was written by a newer dtprof.
    """
    files = paths.segment_files(folder)
    cut = find_newest(files, of_all=of_all, of_each=of_each)
    if cut is None:
        return None
    problems = list(cut.problems)
    expected = len(cut.rows) - cut.row + count_at_most(files[cut.segment + 1 :])
    records = Records(operations=OperationRows(expected))
    cut.load(records)
    headers = [cut.header, *_read_headers(files[cut.segment + 1 :], records, problems)]
    strings = read_strings(folder, problems)
    newest = by_time(records.operations.parts(), tables.OPERATION, "issued_ns")
    past: Past | None = None
    spans: list[Array] = []
    if not counts_rest:
        older = list(read_heads(files[: cut.segment]))
    else:
        counted = count_past(files[: cut.segment], cut, newest, strings.canonical_ops(), counts)
        if counted is None:
            return None
        past, spans, older = counted
    headers = [*older, *headers]
    _note_gaps(folder, headers, problems)
    read = _tables(folder, records, headers, strings, problems, rank=rank, attempt=attempt)
    return NewestOperations(tables=read, older_spans=spans, past=past)


def _read_segments(files: Sequence[Path], problems: list[str]) -> tuple[Records, list[dict[str, Any]]]:
    """Return the records of segments, and the headers of those that have one."""
    records = Records(operations=OperationRows(count_at_most(files)))
    return records, _read_headers(files, records, problems)


def _read_headers(files: Iterable[Path], taker: Taker, problems: list[str]) -> list[dict[str, Any]]:
    """Pass the records of segments to a taker; return the headers of those that have one."""
    headers = (read_segment(file, taker, problems) for file in files)
    return [header for header in headers if header is not None]


def _tables(
    folder: Path,
    records: Records,
    headers: list[dict[str, Any]],
    strings: Strings,
    problems: list[str],
    *,
    rank: int,
    attempt: int,
) -> RankTables:
    newest = headers[-1] if headers else {}
    oldest = headers[0] if headers else {}
    process = strings.process
    # Ranks of a replica are numbered on from those of the replicas before it: so are the members of its groups.
    strings.first_rank = rank - int_or_0(newest.get("rank", rank))
    operations, spans, samples, measured, intervals = records.joined()
    last_ns = records.last_ns
    if len(measured) and len(operations):
        device_durations.join(operations, measured)
        last_ns.append(last_time(operations))
    device_durations.find_operations(operations, intervals)
    fields = names_in_tables(strings)
    place_threads(strings, operations, spans)
    last_op = max(int(rows["op"].max(initial=0)) for rows in (operations, spans, samples))
    if 0 < len(strings.ops) <= last_op:
        problems.append(f"{folder.name}/{paths.STRINGS} is cut: {last_op + 1 - len(strings.ops)} names are lost")
    label_buckets(
        operations, spans, ops=fields["ops"], groups=strings.groups, sites=strings.sites, layouts=strings.bucket_layouts
    )
    return RankTables(
        rank=rank,
        attempt=attempt,
        world_size=int_or_0(newest.get("world_size") or process.get("world_size")),
        local_rank=int_or_0(newest.get("local_rank", -1)),
        pid=int_or_0(newest.get("pid") or process.get("pid")),
        host=str(newest.get("host") or process.get("host", "")),
        boot_id=str(newest.get("boot_id") or process.get("boot_id", "")),
        hook=schema.HOOKS.get(int_or_0(newest.get("tap")), ""),
        torch_version=str(newest.get("torch_version") or process.get("torch", "")),
        python_version=str(process.get("python", "")),
        **fields,
        operations=operations,
        spans=spans,
        samples=samples,
        device_intervals=intervals,
        first_ns=int_or_0(oldest.get("opened_monotonic_ns")),
        last_ns=max([*last_ns, strings.last_ns, int_or_0(newest.get("opened_monotonic_ns"))]),
        monotonic_to_realtime_ns=int_or_0(oldest.get("opened_realtime_ns"))
        - int_or_0(oldest.get("opened_monotonic_ns")),
        capture_ns=sum(int_or_0(header["capture_ns"]) for header in headers),
        dropped_events=int_or_0(newest.get("dropped")),
        dropped=_dropped(folder / paths.DROPPED, problems) if (folder / paths.DROPPED).exists() else _NOTHING_DROPPED,
        errors=sum(int_or_0(header["errors"]) for header in headers),
        truncated=any(int_or_0(header["marks"]) & schema.MARK["truncated"] for header in headers),
        closed=any(int_or_0(header["marks"]) & schema.MARK["closed"] for header in headers),
        problems=tuple(problems),
    )


def _dropped(file: Path, problems: list[str]) -> Array:
    """Return the sums of events dropped to stay within the size limit."""
    columns = (*dropped_totals.KEY, *dropped_totals.SUMS)
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["totals"]
        table = np.zeros(len(rows), tables.DROPPED)
        for name, column in zip(columns, zip(*rows, strict=True), strict=bool(rows)):
            table[name] = column
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        problems.append(
            f"{file.parent.name}/{file.name} cannot be read ({error}): sums of dropped events are not known"
        )
        return _NOTHING_DROPPED
    operation = np.isin(table["kind"], (schema.KIND["collective"], schema.KIND["p2p"]))
    table["nbytes"] = np.where(operation, table["numel"] * ITEM_SIZES[table["dtype"]], 0)
    return table


def _note_gaps(folder: Path, headers: list[dict[str, Any]], problems: list[str]) -> None:
    if not headers:
        problems.append(f"{folder.name} has no readable segment: nothing this rank did is known")
    numbers = [int(header["segment"]) for header in headers]
    gaps = sum(b - a - 1 for a, b in itertools.pairwise(numbers) if b > a + 1)
    dropped = int_or_0(headers[-1]["dropped"]) if headers else 0
    if gaps and not dropped:
        problems.append(f"{folder.name} lacks {gaps} segment files between the first and the last")
