"""A rank that a fatal signal ends leaves its Python stack, as far as the hook can read frames."""

import signal
import sys
from pathlib import Path

import pytest

from dtprof.records.reader import open_run
from tests import jobs

pytestmark = pytest.mark.jobs
PROGRAM = jobs.PROGRAMS / "aborting.py"
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_stack_of_an_abort_is_that_of_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM)]
    jobs.recorded(tmp_path / "run", command, env=ENVIRONMENT, status=-signal.SIGABRT)
    crash = open_run(tmp_path / "run").load(0).crash
    assert crash is not None
    assert (crash.signal, crash.thread) == (signal.SIGABRT, "main")
    assert [(Path(site.file).name, site.line, site.function) for site in crash.frames] == [
        ("<string>", 2, "gr\\xf6sse"),
        ("aborting.py", 14, "step"),
        ("aborting.py", 20, "main"),
        ("aborting.py", 23, "<module>"),
    ]
