"""What was issued is in the log, whatever ends the job; and what ends the log does not end the job."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.records import paths, schema
from dtprof.records.manifest import read_document
from dtprof.records.reader import open_run
from dtprof.session.run_diagnosis import diagnose_run
from tests import jobs

pytestmark = pytest.mark.jobs
NUM_TRIALS = 20
SEED = 20_261_121


def count_calls(data: bytes) -> tuple[int, int]:
    """Return how many operations were about to be issued, and how many of their calls had returned."""
    return data.count(b"<"), data.count(b">")


def test_kill_at_any_moment_loses_no_operation(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    command = [sys.executable, str(jobs.PROGRAMS / "killed.py"), str(tmp_path), str(NUM_TRIALS), str(SEED)]
    jobs.recorded(run_folder, command)
    run = open_run(run_folder)
    assert run.problems == ()
    issued_in_all = 0
    for rank in (0, 1):
        assert [attempt for attempt, _ in run.folders[rank]] == list(range(NUM_TRIALS))
        for trial in range(NUM_TRIALS):
            tables = run.load(rank, trial)
            started, returned = count_calls((tmp_path / f"calls-{trial}-{rank}").read_bytes())
            assert tables.problems == ()
            assert not tables.closed
            assert returned <= len(tables.operations) <= started, (rank, trial)
            assert tables.operations["seq"].tolist() == list(range(len(tables.operations)))
            seen_to_return = (tables.operations["state"] >= schema.STATE["returned"]).sum()
            assert seen_to_return >= returned, (rank, trial)
            assert jobs.exit_status(run, tables) == -9
            issued_in_all += started
    assert issued_in_all > 50 * NUM_TRIALS
    assert diagnose_run(run_folder).findings[0].kind == "rank-killed"
    assert summarise(run).world_size == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system with room for one segment and a half."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--no-native"], marks=pytest.mark.thorough)], ids=["native", "python"]
)
def test_full_disk_ends_the_recording_and_not_the_job(small_disk: Path, tmp_path: Path, options: list[str]) -> None:
    count = schema.SEGMENT_CAPACITY + 3000
    program = [sys.executable, str(jobs.PROGRAMS / "many_operations.py"), str(count)]
    run_folder = small_disk / "run"
    job = jobs.finished([*jobs.DTPROF, "run", "-o", str(run_folder), *options, "--", *program], tmp_path)
    assert job.process.returncode == 0, job.stderr
    assert job.stdout == f"computed {count}\n"
    warnings = [line for line in job.stderr.splitlines() if "truncated" in line]
    assert len(warnings) == 1, job.stderr
    run = open_run(run_folder)
    tables = run.load(0)
    assert tables.truncated
    assert tables.problems == ()
    assert len(tables.operations) + len(tables.spans) == schema.SEGMENT_CAPACITY
    assert read_document(run.path / paths.MANIFEST)["truncated"] is True
    assert any("truncated" in line or "disk" in line for line in summarise(run).cannot_tell)


def test_job_on_a_disk_that_is_full_from_the_start_runs_unrecorded(small_disk: Path, tmp_path: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while file.write(b"\0" * 65_536):
            continue
    program = [sys.executable, str(jobs.PROGRAMS / "many_operations.py"), "10"]
    job = jobs.finished([*jobs.DTPROF, "run", "-o", str(small_disk / "run"), "--", *program], tmp_path)
    assert (job.process.returncode, job.stdout) == (0, "computed 10\n")
    assert len(job.stderr.splitlines()) == 1
    assert "(No space left on device)" in job.stderr
    assert "nothing is recorded, the job runs uninstrumented" in job.stderr
