"""Processes that were started as ranks of a run and have left no record."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dtprof import settings
from dtprof.launch.unjoined_processes import find_starting


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """End what is started in a test."""
    with ExitStack() as stack:
        yield stack


def start(processes: ExitStack, run: Path, rank: str, command: str = sys.executable) -> int:
    """Start a process that stands still as a rank of a run; return its pid."""
    waits = ["-c", "import sys; print(flush=True); sys.stdin.read()"]
    process = processes.enter_context(
        subprocess.Popen(
            [command, *waits] if command == sys.executable else [command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {settings.ENV_RUN_DIR: str(run), "RANK": rank},
        )
    )
    processes.callback(process.kill)
    if command == sys.executable:
        assert process.stdout is not None
        process.stdout.readline()
    return process.pid


def test_ranks_of_this_run_without_a_record_are_found(processes: ExitStack, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rank_0 = start(processes, run, "0")
    start(processes, run, "0")  # a worker of it
    rank_2 = start(processes, run, "2")
    start(processes, run, "1")  # has left a record: this is a worker
    start(processes, run, "")
    start(processes, tmp_path / "other", "3")
    start(processes, run, "4", command="cat")  # what a launcher runs around Python
    assert find_starting(run, recorded={1}) == {rank_0: 0, rank_2: 2}


def test_launcher_that_has_the_number_of_its_node_is_no_rank(processes: ExitStack, tmp_path: Path) -> None:
    run = tmp_path / "run"
    starts = """
import os, subprocess, sys
waits = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
rank = subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"LOCAL_RANK": "0"})
rank.stdout.readline()
print(rank.pid, flush=True)
sys.stdin.read()
rank.kill()
rank.wait()
"""
    launcher = processes.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", starts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {settings.ENV_RUN_DIR: str(run), "RANK": "1"},
        )
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert find_starting(run, recorded=()) == {rank: 1}
    assert find_starting(run, recorded=(1,)) == {}
