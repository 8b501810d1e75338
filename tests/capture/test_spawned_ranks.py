"""Ranks that a program starts itself are known by the group they join, and their ends by their parent."""

import sys
from pathlib import Path

import pytest

from dtprof.records.reader import Run, open_run
from tests import jobs

pytestmark = pytest.mark.jobs
ABORTED = -6
"""How torch itself, now and then, ends a process that leaves a gloo group behind (with and without dtprof)."""
PROGRAM = jobs.PROGRAMS / "spawned.py"


@pytest.fixture(
    scope="module",
    params=[
        "spawn",
        "fork",
        pytest.param("forkserver", marks=pytest.mark.thorough),
        pytest.param("process", marks=pytest.mark.thorough),
    ],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, jobs.Job]:
    """Run two ranks of which rank 1 raises while rank 0 waits for it."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, str(PROGRAM), request.param, str(folder), "--fail"]
    ended = jobs.recorded(folder / "run", command, status=1)
    return open_run(folder / "run"), ended


def test_only_the_ranks_are_ranks(job: tuple[Run, jobs.Job]) -> None:
    run, _ = job
    assert {rank: [attempt for attempt, _ in folders] for rank, folders in run.folders.items()} == {0: [0], 1: [0]}
    for tables in run.load_all():
        assert (tables.world_size, tables.problems, tables.errors) == (2, (), 0)
        phases = [tables.ops[row["op"]] for row in tables.spans]
        assert [name for name in phases if name != "garbage_collection"][:2] == ["init_process_group", "forward"]
        assert tables.operations["step"].max() == 3


def test_exception_names_the_users_line(job: tuple[Run, jobs.Job]) -> None:
    run, ended = job
    (error,) = run.load(1).exceptions
    assert (error.type, error.message) == ("ValueError", "planned")
    assert error.frame is not None
    assert (Path(error.frame.file), error.frame.function) == (PROGRAM, "fail")
    assert "dtprof: Rank 1 raised ValueError: planned at" in ended.stderr


def test_parent_tells_how_the_ranks_ended(job: tuple[Run, jobs.Job]) -> None:
    run, _ = job
    statuses = [jobs.exit_status(run, tables) for tables in run.load_all()]
    assert statuses[1] in (1, ABORTED)
    assert statuses[0] in (1, -15, ABORTED)  # stopped by torch, or by the loss of its peer
