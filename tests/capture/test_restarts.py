"""torchrun's restarts, and ranks that the injection does not reach."""

import signal
import sys
from pathlib import Path

import pytest

from dtprof.records import schema
from dtprof.records.reader import open_run
from tests import jobs

pytestmark = pytest.mark.jobs
ABORTED = -6
"""How torch itself, now and then, ends a process that leaves a gloo group behind (with and without dtprof)."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_restarted_job_has_two_attempts(tmp_path: Path) -> None:
    program = jobs.PROGRAMS / "restarted.py"
    options = ["--max-restarts", "1", "--monitor-interval", "0.1"]
    job = jobs.recorded(tmp_path / "run", [*TORCHRUN, *options, str(program), str(tmp_path)])
    run = open_run(tmp_path / "run")
    assert {rank: [attempt for attempt, _ in folders] for rank, folders in run.folders.items()} == {
        0: [0, 1],
        1: [0, 1],
    }
    assert [error.message for error in run.load(1, 0).exceptions] == ["planned"]
    assert run.load(1).exceptions == ()
    assert [run.load(rank).operations["op"].size for rank in (0, 1)] == [2, 2]
    statuses = [jobs.exit_status(run, run.load(rank, attempt)) for attempt in (0, 1) for rank in (0, 1)]
    # Where rank 0 fails of the lost connection before rank 1 has ended, torchrun ends rank 1.
    assert statuses[1] in (1, ABORTED, -signal.SIGTERM)
    assert statuses[2:] == [0, 0]
    assert "next: dtprof summary" in job.stderr


@pytest.mark.parametrize("hook", ["native", pytest.param("python", marks=pytest.mark.thorough)])
def test_what_a_rank_starts_is_no_restart_of_that_rank(tmp_path: Path, hook: str) -> None:
    options = ["--no-native"] if hook == "python" else []
    job = jobs.recorded(tmp_path / "run", [*TORCHRUN, str(jobs.PROGRAMS / "nested.py")], *options)
    run = open_run(tmp_path / "run")
    assert {rank: [attempt for attempt, _ in folders] for rank, folders in run.folders.items()} == {0: [0], 1: [0]}
    for rank in (0, 1):
        tables = run.load(rank)
        reduced = tables.ops.index("all_reduce")
        assert (tables.operations["op"] == reduced).sum() == 5, "one bucket in each of five steps"
        assert tables.operations["state"].tolist() == [schema.STATE["done"]] * len(tables.operations)
    assert job.stderr.count("a process that a rank started trains or joins a process group") == 1


def test_rank_that_was_never_reached_is_named(tmp_path: Path) -> None:
    wrapper = tmp_path / "rank.sh"
    wrapper.write_text('#!/bin/sh\n[ "$RANK" = 1 ] && set -- -E "$@"\nexec "$PYTHON" "$@"\n')
    wrapper.chmod(0o755)
    program = str(jobs.PROGRAMS / "restarted.py")
    command = [*TORCHRUN, "--no-python", str(wrapper), program, str(tmp_path)]
    env = {"PYTHON": sys.executable}
    job = jobs.recorded(tmp_path / "run", command, env=env, status=1)
    assert (
        "dtprof: these ranks of 2 left no record: 1 (they run on other hosts, ended before they joined, "
        "or run Python with -E, -I, -S or a cleared environment)"
    ) in job.stderr
    assert open_run(tmp_path / "run").ranks == [0]
