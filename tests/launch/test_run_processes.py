"""The processes of a run, searched for again and again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dtprof import settings
from dtprof.launch.run_processes import REREAD_EVERY, ProcessSearch

WAITS = "import sys; print(flush=True); sys.stdin.read()"


@contextmanager
def python(run: Path | None) -> Iterator[int]:
    """Run Python, as a process of a run or of none; give its pid."""
    environment = {settings.ENV_RUN_DIR: str(run)} if run is not None else {}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it executes: before that its environment is that of its parent, or none
        yield process.pid


def test_environment_of_a_foreign_process_is_read_twice_and_then_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    environ = psutil.Process.environ
    monkeypatch.setattr(psutil.Process, "environ", lambda process: read.append(process.pid) or environ(process))
    with python(tmp_path) as own, python(None) as foreign:
        monkeypatch.setattr(psutil, "pids", lambda: [own, foreign])
        search = ProcessSearch(tmp_path)
        found = [[process.pid for process, _ in search.find()] for _ in range(REREAD_EVERY)]
        assert found == [[own]] * REREAD_EVERY
        assert (read.count(own), read.count(foreign)) == (REREAD_EVERY, 2)
        assert [process.pid for process, _ in search.find()] == [own]
        assert read.count(foreign) == 3


def test_process_that_starts_later_is_found_at_the_next_search(tmp_path: Path) -> None:
    search = ProcessSearch(tmp_path)
    assert [list(search.find()) for _ in range(3)] == [[], [], []]
    with python(tmp_path) as own:
        assert [process.pid for process, _ in search.find()] == [own]
    assert list(search.find()) == []
