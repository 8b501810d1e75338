"""Record the programs of the suite, and read what came of it together with what gloo counted."""

import sys
from dataclasses import dataclass
from pathlib import Path

from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs
from tests.completeness.comparison import Measurement, read_oracle

PROGRAMS = "tests.completeness.programs"
FAMILIES = ("data_parallel", "sharded", "tensor_parallel", "pipelines", "compiled", "surroundings")
"""Modules of scenarios, in the order in which one job runs them."""
SIZES = (2, 4)
WAYS = ("spawn", "fork", "forkserver", "elastic")
"""How processes of a job may come to be."""
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rank: what dtprof recorded, and what gloo counted."""

    tables: RankTables
    measurements: list[Measurement]
    whole: Measurement


def observe(run: Path, folder: Path, num_ranks: int, attempt: int | None = None) -> list[Observation]:
    """Read both for all ranks of a job."""
    opened = open_run(run)
    found = []
    for rank in range(num_ranks):
        measurements, whole = read_oracle(folder, rank)
        found.append(Observation(tables=opened.load(rank, attempt), measurements=measurements, whole=whole))
    return found


def record_calls(folder: Path, *options: str) -> list[Observation]:
    """Make every call on two ranks."""
    command = jobs.forked(2, "-m", f"{PROGRAMS}.every_call", str(folder))
    jobs.recorded(folder / "run", command, *options)
    return observe(folder / "run", folder, 2)


def record_scenarios(folder: Path, num_ranks: int, *options: str) -> list[Observation]:
    """Run every scenario that is for this number of ranks."""
    command = jobs.forked(num_ranks, "-m", f"{PROGRAMS}.scenarios", str(folder), *FAMILIES)
    jobs.recorded(folder / "run", command, *options, env=ENVIRONMENT)
    return observe(folder / "run", folder, num_ranks)


def record_workers(folder: Path, way: str, *options: str) -> list[list[Observation]]:
    """Train in processes that are started in this way; return the attempts."""
    program, restarts = ["-m", f"{PROGRAMS}.workers", str(folder), way], ["--max-restarts", "1"]
    if way == "elastic":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, *restarts, "--monitor-interval", "0.1", *program]
    else:
        command = [sys.executable, *program]
    jobs.recorded(folder / "run", command, *options)
    attempts = range(2 if way == "elastic" else 1)
    return [observe(folder / "run", folder / str(attempt), 2, attempt) for attempt in attempts]
