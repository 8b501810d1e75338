"""The processes of a run, searched for again and again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dtprof import settings
from dtprof.launch.run_processes import REREAD_EVERY, ProcessSearch, end_leftovers, is_of_run

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


@pytest.mark.parametrize(
    ("given", "is_it"), [("run", True), ("../place/run", True), ("link", True), ("ru", False), ("gone", False)]
)
def test_a_process_is_of_the_run_that_its_environment_names_by_any_path(
    tmp_path: Path, given: str, is_it: bool
) -> None:
    place = tmp_path / "place"
    for name in ("run", "ru"):
        (place / name).mkdir(parents=True)
    (place / "link").symlink_to("run")
    assert is_of_run(place / "run", {settings.ENV_RUN_DIR: str(place / given)}) is is_it
    assert is_of_run(place / given, {settings.ENV_RUN_DIR: str(place / "run")}) is is_it
    assert not is_of_run(place / given, {})


def test_only_leftovers_of_the_run_are_killed(tmp_path: Path) -> None:
    with python(tmp_path / "run") as own, python(tmp_path / "other") as foreign:
        end_leftovers(tmp_path / "run", [own, foreign])
        assert psutil.Process(own).wait(10) in (-9, None)
        assert psutil.Process(foreign).is_running()
