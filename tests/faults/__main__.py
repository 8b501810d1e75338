"""Run programs of the corpus: `python -m tests.faults [--json] [--keep DIR] [NAME...]`; all where none is named.

Exit status 1 where a verdict is wrong.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from dtprof.capture.native import build
from dtprof.records import schema
from tests.faults import forked_jobs, programs
from tests.faults.corpus import PROGRAMS
from tests.faults.forked_jobs import run

AT_ONCE = 3
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.optim", "torch.utils.data")
"""What training imports after it has begun."""


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--json", action="store_true", help="print {name: [mistake, ...]}")
    parser.add_argument("--keep", type=Path, help="keep runs and outputs in this directory")
    parser.add_argument("--hang-after", type=float, default=forked_jobs.HANG_AFTER_S)
    parser.add_argument("--no-native", action="store_true", help="record with the recorder in Python")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; default: all")
    arguments = parser.parse_args()
    forked_jobs.HANG_AFTER_S = arguments.hang_after
    programs.load()
    for module in LATE_IMPORTS:
        importlib.import_module(module)  # once, for all ranks

    library = "" if arguments.no_native else build.ensure(schema.cpp_header(), timeout_s=300)["library"] or ""
    chosen = arguments.names or list(PROGRAMS)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        results = run_all(chosen, folder, library)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)
    wrong = {name: mistakes for name, (mistakes, _) in results.items() if mistakes}
    if arguments.json:
        print(json.dumps({name: mistakes for name, (mistakes, _) in results.items()}))
    else:
        for name, (mistakes, took_s) in results.items():
            print(f"{'WRONG' if mistakes else 'right'} {name} ({took_s:.1f} s) {'; '.join(mistakes)}")
        print("\n".join(summary_lines({name: mistakes for name, (mistakes, _) in results.items()})))
    return 1 if wrong else 0


def summary_lines(results: dict[str, list[str]]) -> list[str]:
    """Return how often kind and culprits, and the line, are right, by kind and in all."""
    lines = ["| kind | programs | kind and culprits right | with a line | line right |", "|---|---|---|---|---|"]
    kinds = sorted({kind for name in results if (kind := PROGRAMS[name].kind) is not None})
    for kind in [*kinds, "all"]:
        chosen = [name for name in results if PROGRAMS[name].kind in ((kind,) if kind in kinds else kinds)]
        located = [name for name in chosen if PROGRAMS[name].lines]
        named = sum(all(mistake.startswith("lines") for mistake in results[name]) for name in chosen)
        at_line = sum(not results[name] for name in located)
        lines.append(f"| {kind} | {len(chosen)} | {named} | {len(located)} | {at_line} |")
    sound = [name for name in results if PROGRAMS[name].kind is None]
    lines.append(f"{sum(not results[name] for name in sound)} of {len(sound)} sound programs without a finding")
    return lines


def run_all(names: list[str], folder: Path, library: str) -> dict[str, tuple[list[str], float]]:
    """Run programs a few at a time, each supervised by a process of its own."""
    results: dict[str, tuple[list[str], float]] = {}
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[supervise(name, folder, library)] = (name, time.monotonic())
        pid, _ = os.wait()
        name, begun_s = running.pop(pid)
        file = folder / f"{name}.json"
        mistakes = json.loads(file.read_text()) if file.exists() else ["the supervisor failed: see stderr"]
        results[name] = (mistakes, time.monotonic() - begun_s)
    return {name: results[name] for name in names}


def supervise(name: str, folder: Path, library: str) -> int:
    """Run one program in a forked process, which leaves its mistakes in a file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        program = PROGRAMS[name]
        verdict = run(program, folder / name, library=library)
        (folder / f"{name}.json").write_text(json.dumps(program.mistakes(verdict)))
    except BaseException as error:  # noqa: BLE001  # of a forked process: said, then it ends
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


sys.exit(main())
