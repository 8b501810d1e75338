"""One process without torch.distributed is rank 0 of 1: phases, steps, workers, the end."""

import sys
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.records import schema
from dtprof.records.reader import Run, open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs
PROGRAM = jobs.PROGRAMS / "single_process.py"
HIDDEN = "import os, pathlib; pathlib.Path(os.environ['WITNESS'], str(os.getpid())).touch()"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, jobs.Job, Path]:
    """Run the program where a sitecustomize of the user's own stands on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "mine").mkdir()
    (folder / "witness").mkdir()
    (folder / "mine" / "sitecustomize.py").write_text(HIDDEN)
    env = {"PYTHONPATH": str(folder / "mine"), "WITNESS": str(folder / "witness")}
    ended = jobs.recorded(folder / "run", [sys.executable, str(PROGRAM)], env=env, status=1)
    return open_run(folder / "run"), ended, folder


@pytest.fixture(scope="module")
def tables(job: tuple[Run, jobs.Job, Path]) -> RankTables:
    return job[0].load(0)


def spans(tables: RankTables, phase: str) -> list[int]:
    """Return the step of every span of a phase."""
    return [int(row["step"]) for row in tables.spans if tables.ops[row["op"]] == phase]


def test_a_single_process_is_rank_0_of_1_and_its_workers_are_no_ranks(
    job: tuple[Run, jobs.Job, Path], tables: RankTables
) -> None:
    run = job[0]
    assert run.folders.keys() == {0}
    assert [attempt for attempt, _ in run.folders[0]] == [0]
    assert (tables.world_size, tables.rank, tables.problems, tables.errors) == (1, 0, (), 0)
    assert len(tables.operations) == 0


def test_phases_are_recorded_and_all_of_them_end(tables: RankTables) -> None:
    assert set(tables.spans["state"].tolist()) == {schema.STATE["done"]}
    assert spans(tables, "data")[-1] == 9  # after spawned workers
    assert spans(tables, "data")[:3] == [1, 2, 3]  # what comes before the first backward pass is nobody's yet
    sites = {tables.sites[int(row["site"])].file for row in tables.spans if tables.ops[row["op"]] == "backward"}
    assert sites == {str(PROGRAM)}


def test_every_optimizer_step_is_one_step_however_many_backward_passes_it_has(tables: RankTables) -> None:
    assert spans(tables, "backward") == [0, 1, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9]


def test_optimizers_in_a_burst_share_one_step(job: tuple[Run, jobs.Job, Path], tables: RankTables) -> None:
    assert spans(tables, "optimizer") == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 9]  # the second of a burst: already the next
    assert summarise(job[0]).steps.count == 10


def test_step_skipped_by_the_scaler_is_counted_and_marked(tables: RankTables) -> None:
    optimizer = tables.spans[[tables.ops[row["op"]] == "optimizer" for row in tables.spans]]
    skipped = optimizer[(optimizer["flags"] & schema.FLAG["skipped"]) != 0]
    assert skipped["step"].tolist() == [7]
    assert len(optimizer) == 12


def test_memory_is_sampled_at_every_step(tables: RankTables) -> None:
    names = [tables.ops[row["op"]] for row in tables.samples]
    resident = [name for name in names if name in ("rss_bytes", "peak_rss_bytes")]
    assert resident == ["rss_bytes", "peak_rss_bytes"] * 10
    assert min(row["value"] for row, name in zip(tables.samples, names, strict=True) if name in resident) > 50e6


def test_exception_is_recorded_with_the_users_line(job: tuple[Run, jobs.Job, Path], tables: RankTables) -> None:
    (error,) = tables.exceptions
    assert (error.type, error.message) == ("ValueError", "planned")
    assert error.frame is not None
    assert (error.frame.file, error.frame.function) == (str(PROGRAM), "fail")
    assert "planned" in PROGRAM.read_text().splitlines()[error.frame.line - 1]
    assert tables.closed
    assert error.t_ns <= tables.ended_ns
    assert "dtprof: Rank 0 raised ValueError: planned at" in job[1].stderr


def test_traceback_on_stderr_is_the_users_alone(job: tuple[Run, jobs.Job, Path]) -> None:
    assert "dtprof/capture" not in job[1].stderr
    assert "site-packages" not in job[1].stderr


def test_users_own_sitecustomize_still_runs_in_every_process(job: tuple[Run, jobs.Job, Path]) -> None:
    run, _, folder = job
    witnesses = {int(path.name) for path in (folder / "witness").iterdir()}
    assert {row["pid"] for row in run.processes} <= witnesses
    assert len(run.processes) == 3  # the program and two spawned workers; forked ones import nothing
