"""The argument that names a run; without it, a command takes the newest run of this folder's `dtprof-runs`."""

import argparse
import sys
from pathlib import Path

from dtprof import settings
from dtprof.errors import UsageError

DEFAULT_WORDS = f"(default: the newest in {settings.RUNS})"


def add_run(parser: argparse.ArgumentParser, *, words: str = "run directory") -> None:
    """Add RUN to a command, which finds it in `run_directory`."""
    parser.add_argument("run_directory", type=Path, nargs="?", metavar="RUN", help=f"{words} {DEFAULT_WORDS}")
    parser.set_defaults(runs_in="run_directory")


def add_paths(parser: argparse.ArgumentParser, *, words: str) -> None:
    """Add PATHs, of which one may be a run, to a command, which finds them in `paths`."""
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH", help=f"{words} {DEFAULT_WORDS}")
    parser.set_defaults(runs_in="paths")


def fill_in(arguments: argparse.Namespace) -> None:
    """Name the newest run where a command that takes one was given none, and say so on stderr.

    Raises:
        UsageError: there is none.
    """
    name = getattr(arguments, "runs_in", None)
    if name is None or getattr(arguments, name):
        return
    newest = _newest(Path(settings.RUNS))
    if newest is None:
        raise no_run_error(arguments.command)
    print(f"dtprof: the newest run, {newest}", file=sys.stderr)
    setattr(arguments, name, [newest] if name == "paths" else newest)


def no_run_error(command: str) -> UsageError:
    """Return the error of a command that was given no run, in a folder that has none."""
    return UsageError(
        f"no run was named, and {settings.RUNS}/ of this folder holds none; expected the directory of a run: "
        f"dtprof {command} RUN, or record one with dtprof run -- COMMAND"
    )


def _newest(store: Path) -> Path | None:
    from dtprof.session.run_index import RunFilter
    from dtprof.session.stored_runs import list_runs

    runs = list_runs(store, RunFilter()) if store.is_dir() else []
    return store / runs[0].name if runs else None
