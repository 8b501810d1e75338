"""`dtprof demo`: record the built-in example, draw it, sum it up, diagnose it."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from dtprof.errors import MissingDependencyError
from dtprof.records.paths import MANIFEST

RANKS = 4
JOB = [
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
    *("-m", "reference_trainer", "--preset", "tiny"),
]
EPILOG = """\
example:
  dtprof demo -o dtprof-runs/demo
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="record the built-in example, then report and diagnose it",
        description=f"Train a small language model on {RANKS} ranks on the CPU, recorded; then report and diagnose it.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("dtprof-runs/demo"),
        metavar="DIR",
        help="run directory (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace any run there, not only that of an earlier demo")


def run(arguments: argparse.Namespace) -> int:
    """Run the example; return its exit status."""
    from dtprof.cli.main import main

    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the example trains a model and torch is not installed: pip install 'dtprof[train]'"
        )
    output = os.fspath(arguments.output)
    force = ["--force"] if arguments.force or _is_a_demo(arguments.output) else []
    shown = " ".join(["dtprof", "run", "-o", output, *force, "--", "torchrun", *JOB[2:]])
    print(f"dtprof: running `{shown}`", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    status = main(["run", "-o", output, *force, "--", sys.executable, *JOB])
    if status != 0:
        return status
    for following in (["report", output], ["summary", output], ["diagnose", output]):
        print(f"\n$ dtprof {' '.join(following)}", flush=True)
        status = main(following) or status
    return status


def _is_a_demo(path: Path) -> bool:
    """Say whether a directory holds the run of an earlier demo, which nobody misses."""
    try:
        command = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return isinstance(command, list) and command[1:] == JOB
