"""`dtprof demo`: record the built-in example, draw it, sum it up, diagnose it."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from dtprof.errors import MissingDependencyError

RANKS = 4
EPILOG = """\
example:
  dtprof demo -o dtprof-runs/demo
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="record the built-in example and show what comes out",
        description=f"Train a small language model on {RANKS} ranks on the CPU, recorded; then report and diagnose it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("dtprof-runs/demo"), metavar="DIR", help="run directory"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the example; return its exit status."""
    from dtprof.cli.main import main

    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the example trains a model and torch is not installed: pip install 'dtprof[train]'"
        )
    output = os.fspath(arguments.output)
    trainer = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "reference_trainer"]
    command = [sys.executable, *trainer, "--preset", "tiny"]
    shown = " ".join(["torchrun", *trainer[2:], "--preset", "tiny"])
    print(f"dtprof: running `dtprof run -o {output} --force -- {shown}`", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    status = main(["run", "-o", output, "--force", "--", *command])
    if status != 0:
        return status
    for following in (["report", output], ["summary", output], ["diagnose", output]):
        print(f"\n$ dtprof {' '.join(following)}", flush=True)
        status = main(following) or status
    return status
