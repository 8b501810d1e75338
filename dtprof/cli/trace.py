"""`dtprof trace`: the windows of torch.profiler that a run holds, joined to its records; take one now."""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import settings
from dtprof.errors import NotATraceError, NothingToShowError, UsageError
from dtprof.session import engines

if TYPE_CHECKING:
    from dtprof.analysis.timeline.window_joining import JoinedWindow, RankWindows
    from dtprof.records.reader import Run
    from dtprof.records.tables import RankTables, Window

DEFAULT_STEPS = 3
DEFAULT_TOP = 10
DEFAULT_TIMEOUT_S = 300.0
RANKS = settings.Setting(option="--ranks", env="DTPROF_RANKS", default="", metavar="LIST", help="")
EPILOG = """\
examples:
  dtprof run --trace-steps 10:13 --trace-ranks 0,5 -- torchrun --nproc-per-node 8 train.py
  dtprof trace dtprof-runs/20261121-101500-train
  dtprof trace dtprof-runs/20261121-101500-train --now --steps 2 --ranks 0
  dtprof trace dtprof-runs/20261121-101500-train --now --memory

With --now each rank begins at the end of the step at hand; the trace opens in https://ui.perfetto.dev, the memory of a
GPU in https://pytorch.org/memory_viz.
exit status: 0; 1 some rank did not take it; 2 there is none, or no rank can be asked
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "trace",
        help="list profiler windows joined to the records, or take one now",
        description="List the windows of torch.profiler that ranks took, which recorded operations are in them, and "
        "what took the time; with --now, let the ranks of a running job on this host take one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--ranks", default="", metavar="LIST", help="ranks such as 0,5 or 0-3,8 (default: all)")
    parser.add_argument(
        "--top", type=_count, default=DEFAULT_TOP, metavar="N", help="operators and kernels to list (default: 10)"
    )
    parser.add_argument("--now", action="store_true", help="take a window of the next steps of the running job")
    parser.add_argument("--steps", type=_count, metavar="N", help="with --now: steps it takes (default: 3)")
    parser.add_argument(
        "--memory", action="store_true", help="with --now: a snapshot of memory; a window only with --steps"
    )
    parser.add_argument(
        "--timeout",
        default=f"{DEFAULT_TIMEOUT_S:g}",
        metavar="S",
        help="with --now: seconds to wait for the ranks (default: 300)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engines.add_options(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= settings.MOST_TRACED_STEPS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {settings.MOST_TRACED_STEPS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--timeout is {text!r}; expected a number of seconds above 0, for example --timeout 60")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Print the windows, after taking one where that is asked for."""
    from dtprof.job.rank_executor import map_tasks
    from dtprof.records import remote
    from dtprof.records.reader import open_run

    if not arguments.now and (arguments.steps or arguments.memory):
        given = "--steps" if arguments.steps else "--memory"
        raise UsageError(f"{given} says what to take of a running job; expected --now as well")
    timeout_s = _seconds(arguments.timeout)
    engine = engines.chosen_engine(arguments)
    if arguments.now:
        opened = open_run(
            remote.folder_here(arguments.run_directory, purpose="--now asks ranks by way of their folders")
        )
    else:
        opened = engines.open_run(arguments.run_directory, engine)
    chosen = _choose(opened, arguments.ranks)
    status = 0
    if arguments.now:
        from dtprof.session.trace_on_demand import take_now

        steps = arguments.steps or (0 if arguments.memory else DEFAULT_STEPS)
        taken = take_now(opened, chosen, steps=steps, memory=arguments.memory, timeout_s=timeout_s)
        for told in taken.told:
            print(f"dtprof trace: {told}", file=sys.stderr)
        status, request = int(not taken.complete), taken.request
    else:
        request = None
    with engines.executor_for(engine, opened) as executor:
        tasks = [WindowsTask(run=opened.part([one]), rank=one, request=request) for one in chosen]
        found = [
            replace(one, folder=str(opened.path / Path(one.folder).name))  # as the run was named
            for one in map_tasks(executor, read_part, tasks)
        ]
    _print(opened, found, arguments, request)
    return status


def _choose(opened: "Run", text: str) -> list[int]:
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


def _ranks(opened: "Run") -> str:
    ranks = opened.ranks
    return f"{ranks[0]} to {ranks[-1]}" if ranks else "a run in which ranks have started"


def _print(opened: "Run", found: "list[RankWindows]", arguments: argparse.Namespace, request: str | None) -> None:
    from dtprof.report.documents.trace_json import trace_json
    from dtprof.report.text.trace_text import trace_text

    told = missing_windows(opened, found) if request is None else []
    if not any(rank.windows or rank.snapshots for rank in found):
        why = f" ({'; '.join(told)})" if told else ""
        raise NothingToShowError(
            f"{opened.name} holds no profiler window{why}; `dtprof run --trace-steps A:B` takes one, and `dtprof trace "
            "RUN --now` while the job runs"
        )
    if arguments.json:
        print(json.dumps(trace_json(found, top=arguments.top, cannot_tell=told), indent=1))
    else:
        print(trace_text(found, top=arguments.top, cannot_tell=told))


@dataclass(frozen=True, kw_only=True)
class WindowsTask:
    """A rank whose windows are to be read; the request that they are of, None: all."""

    run: "Run"
    rank: int
    request: str | None


def read_part(task: WindowsTask) -> "RankWindows":
    """Return the windows and snapshots of one rank, as an executor asks for them."""
    return read_windows(task.run, task.rank, request=task.request)


def read_windows(opened: "Run", rank: int, *, request: str | None = None) -> "RankWindows":
    """Return the windows and snapshots of a rank, or those of one request only."""
    from dtprof.analysis.steps.step_boundaries import find_steps_of
    from dtprof.analysis.timeline.window_joining import RankWindows

    tables = opened.load(rank)
    folder = dict(opened.folders[rank])[tables.attempt]
    return RankWindows(
        rank=rank,
        folder=str(folder),
        windows=tuple(
            _join(folder / window.file, window, tables)
            for window in tables.windows
            if request is None or window.request == request
        ),
        snapshots=tuple(one for one in tables.snapshots if request is None or one.request == request),
        steps=find_steps_of(tables).count,
    )


def _join(file: Path, window: "Window", tables: "RankTables") -> "JoinedWindow":
    from dtprof.analysis.timeline.window_joining import join_window, without_trace
    from dtprof.interchange.importers.window_trace import read_window

    if window.state != "written":
        return without_trace(window, tables.rank)
    try:
        return join_window(read_window(file, window), tables)
    except NotATraceError as error:
        return without_trace(window, tables.rank, str(error))


def closing_note(opened: "Run", first: "RankTables", shown: str) -> list[str]:
    """Return what `dtprof run` says at its end of the windows planned; `first` are the records of one rank."""
    from dtprof.analysis.steps.step_boundaries import find_steps_of
    from dtprof.analysis.timeline.window_joining import RankWindows, without_trace
    from dtprof.records.strings import read_strings

    steps = find_steps_of(first).count
    found = []
    for rank in opened.ranks:
        folder = opened.folders[rank][-1][1]
        windows = tuple(without_trace(window, rank) for window in read_strings(folder, []).windows.values())
        found.append(RankWindows(rank=rank, folder=str(folder), windows=windows, snapshots=(), steps=steps))
    written = sum(any(one.window.state == "written" for one in rank.windows) for rank in found)
    told = missing_windows(opened, found)
    return [*told, f"windows of {written} rank{'s' if written != 1 else ''}: dtprof trace {shown}"] if written else told


def missing_windows(opened: "Run", found: "list[RankWindows]") -> list[str]:
    """Return what of the windows planned was not taken, a sentence each."""
    from dtprof.analysis.timeline.window_joining import explain_missing
    from dtprof.job.world_size import read_world_size

    planned = opened.manifest.settings
    try:
        steps = settings.parse_traced_steps(planned["trace_steps"]) if planned.get("trace_steps") else None
        chosen = settings.parse_traced_ranks(planned.get("trace_ranks", ""))
    except UsageError:
        return []  # nothing that `dtprof run` wrote
    return explain_missing(found, planned=steps, chosen=chosen, world_size=read_world_size(opened.folders))
