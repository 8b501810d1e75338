"""Record a few jobs under this Python and this torch, and print as JSON what came of it.

Every call of torch.distributed under both hooks is compared with gloo's own counts, torch's frameworks train,
tracebacks and warnings are compared with those of a bare run, a hung job is diagnosed and stopped. What this torch
refuses is listed, and counted all the same.
"""

import difflib
import json
import platform
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import dtprof
from dtprof.capture.native import build
from dtprof.records import schema
from dtprof.records.reader import open_run
from tests import jobs, raised_errors
from tests.completeness.comparison import differences
from tests.completeness.recordings import record_calls

HOOKS = {"native": (), "python": ("--no-native",)}
HERE = Path(__file__).parent
COMPILER_TIMEOUT_S = 1800.0
"""Machines that try versions have other work: the compiler's time is not that of a job."""


def calls(folder: Path, hook: str) -> dict[str, Any]:
    """Make every call under a hook; return how many were counted as gloo counts them, and what torch refused."""
    ranks = record_calls(folder, *HOOKS[hook])
    wrong, refused = [], set()
    for rank in ranks:
        for found in differences(rank.tables, rank.measurements, rank.whole):
            made = found.get("measured")
            recorded, failed = found["recorded"], found.get("failed")
            counted = made is not None and recorded <= Counter(made.gloo) <= recorded + failed
            if counted and made.error:
                refused.add(made.name)
            elif counted and made.refused is not None and not failed:
                continue  # this torch makes a call that another refuses
            else:
                wrong.append(made.name if made is not None else "outside of all calls")
    tables = ranks[0].tables
    return {
        "hook": tables.hook,
        "calls": len(ranks[0].measurements),
        "operations": sum(len(rank.tables.operations) for rank in ranks),
        "wrong": sorted(set(wrong)),
        "refused by torch": sorted(refused),
        "problems": sorted({text for rank in ranks for text in (*rank.tables.problems, *rank.tables.notes)}),
        "errors": sum(rank.tables.errors for rank in ranks),
    }


def frameworks(folder: Path) -> dict[str, Any]:
    """Train with each framework; return the axes that were found, the steps, and what was noted."""
    job = jobs.recorded(folder / "run", jobs.forked(2, HERE / "frameworks.py"))
    refused = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("{")))
    run = open_run(folder / "run")
    tables = [run.load(rank) for rank in range(2)]
    summary = dtprof.open_run(folder / "run").summary()
    return {
        "refused by torch": refused,
        "steps": summary.steps.count,
        "axes": sorted({group.axis for group in summary.groups if group.axis}),
        "schedule": None if summary.pipeline is None else summary.pipeline.schedule,
        "problems": sorted({text for table in tables for text in (*table.problems, *table.notes)}),
        "errors": sum(table.errors for table in tables),
    }


def hang(folder: Path) -> dict[str, Any]:
    """Let a job hang, and stop it; return what was found."""
    run = folder / "run"
    options = ("--hang-after", "3", "--on-hang", "stop")
    command = [*jobs.DTPROF, "run", "-o", str(run), *options, "--", *jobs.torchrun(3, HERE / "skipped.py")]
    with jobs.started(command, folder) as job:
        status = job.wait()
    told = subprocess.run([*jobs.DTPROF, "diagnose", "--json", str(run)], capture_output=True, text=True, check=False)
    verdict = json.loads(told.stdout)
    first = verdict["findings"][0]
    lines = {rank: site["line"] for rank, site in first["culprit_call_sites"].items()}
    return {"status": status, "kind": first["kind"], "culprits": first["culprit_ranks"], "lines": lines}


def errors(folder: Path) -> dict[str, Any]:
    """Raise and warn in many places; return the lines that either hook changes in what the program prints of it."""
    bare = raised_errors.raise_bare(folder)
    changed = set()
    for hook, options in HOOKS.items():
        for line in difflib.ndiff(bare, raised_errors.raise_recorded(folder / hook, *options)):
            if line.startswith(("- ", "+ ")):
                changed.add(line)
    return {"lines": len(bare), "changed": sorted(changed)}


def main() -> None:
    """Print all as one JSON object."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    # Beforehand, where no hook of the wheel fits: the time limits below are those of jobs.
    found["no hook"] = build.ensure(schema.cpp_header(), timeout_s=COMPILER_TIMEOUT_S)["reason"]
    with tempfile.TemporaryDirectory() as name:
        for hook in HOOKS:
            (Path(name) / hook).mkdir()
            found[f"calls, {hook} hook"] = calls(Path(name) / hook, hook)
        for part in (frameworks, errors, hang):
            (Path(name) / part.__name__).mkdir()
            found[part.__name__] = part(Path(name) / part.__name__)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
