"""`dtprof stacks` on ranks that stand still."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.jobs


def stacks(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*jobs.DTPROF, "stacks", str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_who_stands_elsewhere_comes_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*jobs.DTPROF, "run", "-o", str(run), "--no-native", "--", sys.executable]
    with jobs.started([*command, str(jobs.PROGRAMS / "standing.py")], tmp_path) as job:
        job.wait_until(lambda: job.stdout.count("stands") == 3)
        taken = stacks(run, "--json")
        text = stacks(run, "--all-threads")
        kept = stacks(run, "--kept")
        native = stacks(run, "--json", "--native")
        assert job.process.poll() is None  # they go on
    assert taken.returncode == 0, taken.stderr
    document = json.loads(taken.stdout)
    assert document["taken"] == "now"
    assert [group["ranks"] for group in document["groups"]] == [[1], [0, 2]]
    apart, together = (group["frames"][0]["function"] for group in document["groups"])
    assert (apart, together) == ("stands_elsewhere", "waits_for_its_peers")
    assert document["groups"][0]["shared"] >= 1
    assert "3 ranks, 2 different stacks" in text.stdout
    assert "<- other than ranks 0, 2" in text.stdout
    assert [group["ranks"] for group in json.loads(native.stdout)["groups"]] == [[1], [0, 2]]
    assert kept.returncode == 2
    assert "no stacks were kept in it" in kept.stderr
    assert not list(run.glob("node-*/stacks.json"))  # looking changes nothing of the run
    gone = stacks(run)
    assert gone.returncode == 2
    assert "no rank of it runs on this host" in gone.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    refused = stacks(tmp_path)
    assert refused.returncode == 2
    assert "holds no run" in refused.stderr
