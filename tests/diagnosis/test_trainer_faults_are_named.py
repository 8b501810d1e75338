"""Faults in real jobs on gloo: live where the job hangs, afterwards where it ends; and a job without any."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import jobs

pytestmark = pytest.mark.jobs

SHAPE = ["--preset", "tiny", "--batch-size", "3", "--sequence-length", "32", "--steps", "8"]
CULPRIT = 1


def run_trainer(folder: Path, *options: str, fault: str | None, status: int) -> tuple[jobs.Job, Path]:
    """Run the trainer on three ranks, recorded."""
    run = folder / "run"
    arguments = ["--fault", f"{fault}:rank={CULPRIT},step=4"] if fault else []
    command = jobs.forked(3, "-m", "reference_trainer", *SHAPE, *arguments)
    return jobs.recorded(run, command, *options, status=status), run


def diagnose(run: Path, *, status: int) -> dict[str, Any]:
    """Return the JSON verdict and check the exit status."""
    result = subprocess.run(
        [*jobs.DTPROF, "diagnose", "--json", str(run)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == status, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--no-native"], marks=pytest.mark.thorough)], ids=["native", "python"]
)
def test_a_job_without_fault_is_healthy(tmp_path: Path, options: list[str]) -> None:
    _, run = run_trainer(tmp_path, *options, fault=None, status=0)
    verdict = diagnose(run, status=0)
    assert (verdict["outcome"], verdict["findings"]) == ("healthy", [])
    assert verdict["ranks_seen"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("exception", "rank-crashed"),
        pytest.param("kill", "rank-killed", marks=pytest.mark.thorough),
        pytest.param("exit", "rank-exited", marks=pytest.mark.thorough),
    ],
)
def test_the_rank_that_ended_is_named(tmp_path: Path, fault: str, kind: str) -> None:
    job, run = run_trainer(tmp_path, fault=fault, status=1)
    finding = diagnose(run, status=1)["findings"][0]
    assert (finding["kind"], finding["culprit_ranks"]) == (kind, [CULPRIT])
    assert set(finding["waiting_ranks"]) <= {0, 2}
    assert finding["waiting_ranks"]
    assert "reference_trainer" in Path(finding["culprit_call_sites"][str(CULPRIT)]["file"]).parts
    assert f"ank {CULPRIT}" in job.stderr.split("run kept in")[0].splitlines()[-2]


def test_a_hang_is_reported_while_it_lasts_and_the_job_is_stopped(tmp_path: Path) -> None:
    options = ["--hang-after", "4", "--on-hang", "stop"]
    job, run = run_trainer(tmp_path, *options, fault="skip-collective", status=3)
    assert "rank-skipped-collective" in job.stderr
    assert job.stderr.count("verdict: hang") == 1
    verdict = diagnose(run, status=1)
    finding = verdict["findings"][0]
    assert (verdict["outcome"], finding["kind"]) == ("hang", "rank-skipped-collective")
    assert (finding["culprit_ranks"], finding["waiting_ranks"]) == ([CULPRIT], [0, 2])
    assert finding["group"]["description"] == "loss"
    waiting = {site["function"] for site in finding["call_sites"].values()}
    assert waiting == {"average_loss"}
