"""`import dtprof.auto`: ranks that no `dtprof run` has started meet in one run; under it, nothing changes."""

import os
import sys
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.launch import interpreter
from dtprof.records.reader import open_run
from tests import jobs
from tests.launch.test_always_on import mounted

pytestmark = pytest.mark.jobs
PROGRAM = str(jobs.PROGRAMS / "records_itself.py")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the person who runs the tests out of them."""
    for name in [name for name in os.environ if name.startswith("DTPROF_")]:
        monkeypatch.delenv(name)


def run_in(folder: Path, command: list[str], **env: str) -> jobs.Job:
    with jobs.started(command, folder, cwd=folder, env={"PYTHONPATH": str(jobs.REPOSITORY), **env}) as job:
        assert job.wait() == 0, job.stderr
    return job


def test_ranks_of_torchrun_meet_in_one_run_and_two_jobs_in_two(tmp_path: Path) -> None:
    interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    job = run_in(tmp_path, jobs.torchrun(2, PROGRAM))
    (run,) = (tmp_path / "dtprof-runs").iterdir()
    assert run.name.endswith("-records_itself")
    said = [line for line in job.stderr.splitlines() if line.startswith("dtprof: ")]
    assert said == [f"dtprof: recording into dtprof-runs/{run.name}"], "once, not once a rank"
    opened = open_run(run)
    assert (opened.ranks, opened.problems) == ([0, 1], ())
    for tables in opened.load_all():
        assert [tables.ops[op] for op in tables.operations["op"]] == ["all_reduce"]
        assert tables.closed
        assert tables.hook == "native", "the compiled hook of an earlier dtprof run is found"
    assert opened.manifest.notes[0].startswith("recorded by `import dtprof.auto`: no launcher")
    summary = summarise(opened)
    assert (summary.world_size, summary.missing_ranks) == (2, ())
    second = run_in(tmp_path, jobs.torchrun(1, PROGRAM), DTPROF_OUTPUT=str(run))
    assert f"recording into dtprof-runs/{run.name}-2" in second.stderr
    assert open_run(run).ranks == [0, 1], "the run that was there is left alone"
    assert open_run(run.with_name(f"{run.name}-2")).ranks == [0]


def test_a_full_disk_is_one_line_with_its_folder_for_all_ranks(tmp_path: Path) -> None:
    with mounted(tmp_path / "store", "-o", "size=64k") as store:
        with pytest.raises(OSError, match="No space left"):
            (store / "others").write_bytes(bytes(1 << 20))
        job = run_in(tmp_path, jobs.torchrun(2, PROGRAM), DTPROF_OUTPUT=str(store / "run"))
        assert [path.name for path in store.iterdir()] == ["others"]
    assert [line for line in job.stderr.splitlines() if "dtprof: " in line] == [
        f"dtprof: this job is not recorded: {store} cannot be written to (No space left on device); give another in "
        "DTPROF_OUTPUT"
    ]


def test_spawned_ranks_join_the_run_of_their_parent(tmp_path: Path) -> None:
    run_in(tmp_path, [sys.executable, PROGRAM, str(tmp_path / "store")], DTPROF_OUTPUT=str(tmp_path / "run"))
    opened = open_run(tmp_path / "run")
    assert opened.ranks == [0, 1]
    assert [jobs.exit_status(opened, tables) for tables in opened.load_all()] == [0, 0]


def test_under_dtprof_run_it_changes_nothing(tmp_path: Path) -> None:
    job = jobs.recorded(tmp_path / "run", jobs.torchrun(1, PROGRAM))
    assert "recording into" not in job.stderr
    tables = open_run(tmp_path / "run").load(0)
    assert len(tables.operations) == 1, "hooked once"


def test_off_is_off(tmp_path: Path) -> None:
    program = "import dtprof.auto, sys; assert not [f for f in sys.meta_path if 'AfterTorch' in repr(f)]"
    job = run_in(tmp_path, [sys.executable, "-c", program], DTPROF_OFF="1")
    assert job.stderr == ""
    assert not (tmp_path / "dtprof-runs").exists()


def test_place_that_cannot_be_written_is_one_line_and_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = run_in(tmp_path, [sys.executable, "-c", "import dtprof.auto; print('ran')"], DTPROF_OUTPUT="file/run")
    assert job.stdout == "ran\n"
    assert job.stderr.startswith(f"dtprof: this job is not recorded: {tmp_path / 'file'} cannot be written to")
    assert len(job.stderr.splitlines()) == 1
