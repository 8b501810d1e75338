"""Hung NCCL jobs on a real GPU are found while they run, named and stopped, as on the simulated accelerator."""

import json
import subprocess
from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.gpu

PROGRAM = jobs.PROGRAMS / "nccl_faults.py"


@pytest.mark.parametrize("name", ["stays_away", "runs_a_kernel_that_never_ends"])
def test_rank_that_holds_the_others_up_is_named_and_the_job_stopped(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["-o", str(run), "--hang-after", "5", "--on-hang", "stop"]
    job = jobs.finished([*jobs.DTPROF, "run", *options, "--", *jobs.torchrun(2, PROGRAM, name)], tmp_path)
    assert json.loads((run / "run.json").read_text())["stopped_on_hang"], job.stderr
    said = subprocess.run([*jobs.DTPROF, "diagnose", "--json", str(run)], capture_output=True, text=True)
    verdict = json.loads(said.stdout)
    finding = verdict["findings"][0]
    assert (verdict["outcome"], finding["kind"], finding["culprit_ranks"]) == ("hang", "rank-stuck", [1])
