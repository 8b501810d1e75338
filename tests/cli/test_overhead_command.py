"""`dtprof overhead` on real runs: finds a delay of known size, says what it cannot tell, leaves nothing behind."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import jobs

TIMEOUT_S = 500  # eight runs that import torch
pytestmark = [pytest.mark.jobs, pytest.mark.alone, pytest.mark.timeout(TIMEOUT_S + 60)]
SLOWER = str(jobs.PROGRAMS / "slower_when_recorded.py")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the person who runs the tests out of them."""
    for name in [name for name in os.environ if name.startswith("DTPROF_")]:
        monkeypatch.delenv(name)


def overhead(folder: Path, *words: str) -> jobs.Job:
    with jobs.started(
        [*jobs.DTPROF, "overhead", *words], folder, cwd=folder, env={"PYTHONPATH": str(jobs.REPOSITORY)}
    ) as job:
        job.wait(TIMEOUT_S)
    return job


def test_delay_of_known_size_is_found_in_the_steps(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    job = overhead(inside, "--pairs", "2", "--json", "--", sys.executable, SLOWER, "100", "12")
    assert job.process.returncode == 0, job.stderr
    document = json.loads(job.stdout)  # the job's own output is not among it
    assert (document["schema"], document["pairs"], document["ranks"], document["steps"]) == (1, 2, 1, 12)
    step = document["times"]["step"]
    # 20 ms bare and 120 ms recorded; sleeping longer than asked is the machine's, and hits both.
    assert 80e6 < step["difference_ns"]["median"] < 150e6
    assert step["bare_ns"] >= 20e6
    assert step["differs"]
    assert document["overlap"]["changed"], "the delay is time in which the rank is blocked"
    assert document["own_count"]["share_of_step"] < 0.05
    wall = document["times"]["wall"]["bare_ns"]
    parts = [document["times"][name]["bare_ns"] for name in ("startup", "end")]
    assert sum(parts) < wall
    left = set(inside.iterdir()) - {job.stdout_path, job.stderr_path}
    assert left == set(), "nothing is left behind"


def test_command_without_torch_is_timed_as_a_whole(tmp_path: Path) -> None:
    job = overhead(tmp_path, "--pairs", "2", "--", sys.executable, "-S", "-c", "")
    assert job.process.returncode == 0, job.stderr
    said = " ".join(job.stdout.split())
    assert "caveat step time, start-up, end: no process stepped an optimizer of torch" in said
    assert "own count none: the recorded runs hold no rank" in said
    assert "whole command" in said


def test_command_that_fails_is_not_measured(tmp_path: Path) -> None:
    job = overhead(tmp_path, "--", "sh", "-c", "echo no such data; exit 7")
    assert job.process.returncode == 2
    assert job.stdout == ""
    assert job.stderr == (
        "dtprof overhead: the command ended with status 7 when run bare; expected 0 each time it is run. "
        "It printed last: no such data\n"
    )


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 2, "no command was given; expected one after `--`"),
        (["--pairs", "1", "--", "true"], 2, "--pairs is '1'; expected a whole number of at least 2"),
        (["--pairs", "x", "--", "true"], 2, "--pairs is 'x'"),
        (["--", "no-such-command"], 127, "'no-such-command' cannot be started"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path: Path, words: list[str], status: int, sentence: str) -> None:
    job = overhead(tmp_path, *words)
    assert job.process.returncode == status
    assert job.stderr.startswith(f"dtprof overhead: {sentence}")
    assert len(job.stderr.splitlines()) == 1
