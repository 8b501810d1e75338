"""Faults of the trainer in real jobs: what dtprof finds is what the fault states, and the culprit is its rank."""

import json
import subprocess
from pathlib import Path

import pytest

from reference_trainer.faults import FAULTS
from tests import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(600)]

SHAPE = ("--preset", "tiny", "--batch-size", "6", "--sequence-length", "32", "--steps", "6")


@pytest.mark.parametrize(
    "name",
    [
        "unused-parameters",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("swap-collectives", "wrong-root", "rank0-barrier", "stop", "loader-hang")
        ),
    ],
)
def test_fault_leads_to_its_finding(tmp_path: Path, name: str) -> None:
    culprit = 0 if FAULTS[name].default_rank == 0 else 1
    run = tmp_path / "run"
    command = jobs.forked(3, "-m", "reference_trainer", *SHAPE, "--fault", f"{name}:rank={culprit},step=3")
    options = ["-o", str(run), "--hang-after", "10", "--on-hang", "stop"]
    with jobs.started([*jobs.DTPROF, "run", *options, "--", *command], tmp_path) as job:
        assert job.wait(400) == 3, job.stderr
    result = subprocess.run(
        [*jobs.DTPROF, "diagnose", "--json", str(run)], capture_output=True, text=True, check=False, timeout=120
    )
    finding = json.loads(result.stdout)["findings"][0]
    assert (finding["kind"], finding["culprit_ranks"]) == (FAULTS[name].finding, [culprit])
