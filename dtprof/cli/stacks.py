"""`dtprof stacks`: what every rank of a job is doing now, merged: who differs from the rest, and from which line on."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dtprof.cli.next_command import say_next
from dtprof.errors import UsageError

EPILOG = """\
examples:
  dtprof stacks dtprof-runs/20261121-101500-train
  dtprof stacks dtprof-runs/20261121-101500-train --native --all-threads
  dtprof stacks dtprof-runs/20261121-101500-train --json | jq '.groups[0].ranks'

Each process is stopped for some milliseconds while its stack is read; the job goes on. Where the job has ended, the
stacks are those that `dtprof run` kept when the job last made no progress.
exit status: 0; 2 no stack can be had
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "stacks",
        help="merge the stacks of all ranks: which ranks differ, from which line on",
        description="Sample the Python stacks of all ranks of a running job on this host, and merge equal ones: "
        "the ranks that differ from the rest come first, with the line from which they differ.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--native", action="store_true", help="include frames of C and C++ code (takes longer)")
    parser.add_argument("--all-threads", action="store_true", help="include the other threads of each rank")
    parser.add_argument(
        "--kept", action="store_true", help="print the stacks stored in the run, even while the job runs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the stacks."""
    from dtprof.diagnosis.stack_groups import read_stacks
    from dtprof.records.rank_processes import find_processes
    from dtprof.records.reader import open_run
    from dtprof.report.documents.stacks_json import stacks_json
    from dtprof.report.text.stacks_text import stacks_text

    opened = open_run(arguments.run_directory)
    processes = find_processes(opened.folders)
    alive = {} if arguments.kept else {p.pid: p.rank for p in processes if _is_here(p.pid, p.boot_id, opened.path)}
    if alive:
        from dtprof.launch.stack_sampler import sample

        document, taken = sample(alive, None, native=arguments.native), "now"
        stacks = read_stacks(document, alive)
    else:
        document, taken = opened.endings.all_stacks(), "kept"
        stacks = [stack for p in processes for stack in read_stacks(opened.endings.stacks_of(p.host), {p.pid: p.rank})]
    if not stacks:
        raise UsageError(_nothing(opened.name, len(processes), kept=arguments.kept))
    missing = sorted({process.rank for process in processes} - {stack.rank for stack in stacks})
    notes = _notes(missing, taken, arguments.run_directory)
    if arguments.json:
        t_ns = document.get("t_ns")
        print(json.dumps(stacks_json(stacks, taken=taken, t_ns=t_ns, notes=notes), indent=1))
    else:
        print(stacks_text(stacks, all_threads=arguments.all_threads, notes=notes))
        say_next("diagnose", arguments.run_directory)
    return 0


def _is_here(pid: int, boot_id: str, run_path: Path) -> bool:
    from dtprof.records import writer
    from dtprof.session.process_liveness import is_alive

    return boot_id == writer.boot_id() and is_alive(pid, run_path)


def _nothing(name: str, num_ranks: int, *, kept: bool) -> str:
    if not num_ranks:
        return f"{name} holds no log of any rank; expected a run in which ranks have started"
    where = "no stacks were kept in it" if kept else "no rank of it runs on this host, and no stacks were kept in it"
    return (
        f"{name}: {where}; `dtprof run --hang-after SECONDS` keeps them where a job makes no progress, and "
        "`dtprof stacks` takes them while the job runs"
    )


def _notes(missing: Sequence[int], taken: str, path: Path) -> list[str]:
    from dtprof.diagnosis.findings import capitalised

    notes = []
    if taken == "kept":
        notes.append("These stacks were kept when the job last made no progress.")
    if missing:
        notes.append(
            f"{capitalised(list(missing))}: ended, or on another host; there, `dtprof stacks {path}` shows them."
        )
    return notes
