"""NCCL on a real GPU: operations are recorded once, marked as the device's, and the losses do not change."""

from pathlib import Path

import pytest

from dtprof.records import schema
from dtprof.records.reader import open_run
from tests import jobs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[[], ["--no-native"]], ids=["native", "python"])
def run_and_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Job]:
    folder = tmp_path_factory.mktemp("nccl")
    run = folder / "run"
    return run, jobs.recorded(run, jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"), *request.param)


def test_device_operations_are_recorded_alike_on_both_ranks(run_and_job: tuple[Path, jobs.Job]) -> None:
    run, _ = run_and_job
    names = []
    for tables in open_run(run).load_all():
        assert tables.errors == 0
        on_device = tables.operations[(tables.operations["flags"] & schema.FLAG["device"]) != 0]
        # 5 gradients and 5 losses at least; nothing claims a completion that was not seen
        assert (on_device["flags"] & schema.FLAG["completion"] == 0).all()
        names.append([tables.ops[row["op"]] for row in on_device])
        assert names[-1].count("all_reduce") >= 10
        assert {"cuda_allocated_bytes", "cuda_peak_allocated_bytes"} <= set(tables.ops)
    assert names[0] == names[1]


def test_losses_are_the_same_with_and_without_recording(run_and_job: tuple[Path, jobs.Job], tmp_path: Path) -> None:
    _, recorded = run_and_job
    bare = jobs.finished(jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"), tmp_path)
    assert bare.process.returncode == 0, bare.stderr
    assert sorted(bare.stdout.splitlines()) == sorted(recorded.stdout.splitlines())
