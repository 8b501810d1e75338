"""What a program sees of its own errors and warnings is what it sees without dtprof."""

import re
import sys
from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.jobs
COMMAND = [sys.executable, str(jobs.PROGRAMS / "raising.py")]
ENVIRONMENT = {
    "PYTHONWARNINGS": "always",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def said(job: jobs.Job) -> list[str]:
    """Return what the program wrote on stderr, without times and process ids; lines of dtprof begin with its name."""
    lines = (line for line in job.stderr.splitlines() if not line.startswith("dtprof: "))
    return [re.sub(r"\S+ \d\d:\d\d:\d\d\S*|\b\d{3,}:?\b", "N", line) for line in lines]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """Run the program alone."""
    job = jobs.finished(COMMAND, tmp_path_factory.mktemp("bare"), env=ENVIRONMENT)
    assert job.process.returncode == 1
    assert job.stdout.count("Traceback") >= 20
    return job.stdout, said(job)


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--no-native",), marks=pytest.mark.thorough)], ids=["native", "python"]
)
def test_tracebacks_and_warnings_are_as_without_dtprof(
    tmp_path: Path, bare: tuple[str, list[str]], options: tuple[str, ...]
) -> None:
    job = jobs.recorded(tmp_path / "run", COMMAND, *options, env=ENVIRONMENT, status=1)
    assert (job.stdout, said(job)) == bare
