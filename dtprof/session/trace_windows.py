"""The windows of torch.profiler that ranks took: list them, joined to the records, or have a running job take them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtprof import settings
from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.analysis.timeline.window_joining import (
    JoinedWindow,
    RankWindows,
    explain_missing,
    join_window,
    without_trace,
)
from dtprof.errors import NotATraceError, NothingToShowError, UsageError
from dtprof.formatting import plural
from dtprof.interchange.importers.window_trace import read_window
from dtprof.job.rank_executor import map_tasks
from dtprof.job.world_size import read_world_size
from dtprof.records import remote
from dtprof.records.rank_log.strings import read_strings
from dtprof.records.reader import Run
from dtprof.records.tables import RankTables, Window
from dtprof.session.engines import IN_THIS_PROCESS, Engine, executor_for, open_run
from dtprof.session.trace_on_demand import take_now

RANKS = settings.Setting(option="--ranks", env="DTPROF_RANKS", default="", metavar="LIST", help="")


@dataclass(frozen=True, kw_only=True)
class RunWindows:
    """The windows and snapshots of some ranks of a run."""

    run: str
    ranks: list[RankWindows]
    missing: list[str]  # why planned windows were not taken, a sentence each
    failures: tuple[str, ...] = ()  # of ranks that were asked to take one now, a sentence each

    def require_any(self) -> None:
        """Refuse to go on without any window.

        Raises:
            NothingToShowError: there is none.
        """
        if any(rank.windows or rank.snapshots for rank in self.ranks):
            return
        why = f" ({'; '.join(self.missing)})" if self.missing else ""
        raise NothingToShowError(
            f"{self.run} holds no profiler window{why}; `dtprof run --trace-steps A:B` takes one, and `dtprof trace "
            "RUN --now` while the job runs"
        )


def list_windows(path: Path, engine: Engine, *, ranks: str = "") -> RunWindows:
    """Read the windows of a run; `ranks` is a list such as 0-3,8, empty for all.

    Raises:
        NotARunError: the path holds no run that can be read.
        UsageError: a rank is not in the run.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    run = open_run(path, engine)
    ranks_windows = _read_all(run, _choose(run, ranks), engine, request=None)
    return RunWindows(run=run.name, ranks=ranks_windows, missing=missing_windows(run, ranks_windows))


def take_windows(
    path: Path, engine: Engine, *, ranks: str = "", steps: int, memory: bool, timeout_s: float
) -> RunWindows:
    """Have the ranks of a running job on this host take a window of `steps`, or a snapshot, and read it.

    Raises:
        UsageError: the path is a URL, or none of the ranks runs on this host.
        OutputError: their folders cannot be written to.
        NotARunError, MissingDependencyError, SchedulerError, WorkerLostError: as `list_windows`.
    """
    run = open_run(remote.folder_here(path, purpose="--now asks ranks by way of their folders"), IN_THIS_PROCESS)
    chosen = _choose(run, ranks)
    taken = take_now(run, chosen, steps=steps, memory=memory, timeout_s=timeout_s)
    return RunWindows(
        run=run.name, ranks=_read_all(run, chosen, engine, request=taken.request), missing=[], failures=taken.failures
    )


def _read_all(run: Run, ranks: Sequence[int], engine: Engine, *, request: str | None) -> list[RankWindows]:
    with executor_for(engine, run) as executor:
        tasks = [_WindowsTask(run=run.part([rank]), rank=rank, request=request) for rank in ranks]
        return [
            replace(windows, folder=str(run.path / Path(windows.folder).name))  # as the run was named
            for windows in map_tasks(executor, _read_windows, tasks)
        ]


def _choose(opened: Run, text: str) -> list[int]:
    """Return the ranks of a list that are in the run.

    Raises:
        UsageError: one is not.
    """
    ranges = settings.parse_traced_ranks(text, setting=RANKS)
    if not ranges:
        return opened.ranks
    known = set(opened.ranks)
    for first, last in ranges:
        missing = next((rank for rank in (first, last) if rank not in known), None)
        if missing is not None:
            raise UsageError(f"--ranks is {text!r}, and rank {missing} left no log; expected ranks of {_ranks(opened)}")
    return [rank for rank in opened.ranks if any(first <= rank <= last for first, last in ranges)]


def _ranks(opened: Run) -> str:
    ranks = opened.ranks
    return f"{ranks[0]} to {ranks[-1]}" if ranks else "a run in which ranks have started"


@dataclass(frozen=True, kw_only=True)
class _WindowsTask:
    """A rank whose windows to read; of one request, or all."""

    run: Run
    rank: int
    request: str | None


def _read_windows(task: _WindowsTask) -> RankWindows:
    tables = task.run.load(task.rank)
    folder = dict(task.run.folders[task.rank])[tables.attempt]
    taken = (window for window in tables.windows if task.request in (None, window.request))
    return RankWindows(
        rank=task.rank,
        folder=str(folder),
        windows=tuple(_join(folder / window.file, window, tables) for window in taken),
        snapshots=tuple(shot for shot in tables.snapshots if task.request in (None, shot.request)),
        steps=find_steps_of(tables).count,
    )


def _join(file: Path, window: Window, tables: RankTables) -> JoinedWindow:
    if window.state != "written":
        return without_trace(window, tables.rank)
    try:
        return join_window(read_window(file, window), tables)
    except NotATraceError as error:
        return without_trace(window, tables.rank, str(error))


def closing_note(opened: Run, first: RankTables, shown: str) -> list[str]:
    """Return the lines of `dtprof run` on planned windows at its end; `first` are the records of one rank."""
    steps = find_steps_of(first).count
    ranks_windows = []
    for rank in opened.ranks:
        folder = opened.folders[rank][-1][1]
        windows = tuple(without_trace(window, rank) for window in read_strings(folder, []).windows.values())
        ranks_windows.append(RankWindows(rank=rank, folder=str(folder), windows=windows, snapshots=(), steps=steps))
    written = sum(any(joined.window.state == "written" for joined in rank.windows) for rank in ranks_windows)
    omitted = missing_windows(opened, ranks_windows)
    return [*omitted, f"windows of {plural(written, 'rank')}: dtprof trace {shown}"] if written else omitted


def missing_windows(opened: Run, ranks_windows: list[RankWindows]) -> list[str]:
    """Return the planned windows that were not taken, one sentence each."""
    planned = opened.manifest.settings
    try:
        steps = settings.parse_traced_steps(planned["trace_steps"]) if planned.get("trace_steps") else None
        chosen = settings.parse_traced_ranks(planned.get("trace_ranks", ""))
    except UsageError:
        return []  # nothing that `dtprof run` wrote
    return explain_missing(ranks_windows, planned=steps, chosen=chosen, world_size=read_world_size(opened.folders))
