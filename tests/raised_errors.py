"""Run tests/programs/raising.py bare and recorded: what a program prints of its own errors and warnings."""

import re
import sys
from pathlib import Path

from tests import jobs

COMMAND = [sys.executable, str(jobs.PROGRAMS / "raising.py")]
ENVIRONMENT = {
    "PYTHONWARNINGS": "always",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def raise_bare(folder: Path) -> list[str]:
    """Run the program alone; return its tracebacks and what it wrote on stderr."""
    job = jobs.finished(COMMAND, folder, env=ENVIRONMENT)
    assert job.process.returncode == 1
    assert job.stdout.count("Traceback") >= 20
    return _printed(job)


def raise_recorded(run: Path, *options: str) -> list[str]:
    """Run the program under `dtprof run`; return the same."""
    return _printed(jobs.recorded(run, COMMAND, *options, env=ENVIRONMENT, status=1))


def _printed(job: jobs.Job) -> list[str]:
    """Return stdout as it is, and stderr without times, process ids and the lines that begin with dtprof's name."""
    lines = (line for line in job.stderr.splitlines() if not line.startswith("dtprof: "))
    return [*job.stdout.splitlines(), *(re.sub(r"\S+ \d\d:\d\d:\d\d\S*|\b\d{3,}:?\b", "N", line) for line in lines)]
