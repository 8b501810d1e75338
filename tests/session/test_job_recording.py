"""What the launcher is told of a job that makes no progress."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtprof.cli.main import main
from dtprof.session.job_recording import diagnose_stalled
from tests.builders import write_run
from tests.diagnosis.judging import gradients, ranks_in_step


@pytest.mark.parametrize("raises", [True, False])
def test_ranks_that_wait_for_one_that_raised_and_lives_on_hang(tmp_path: Path, *, raises: bool) -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        if rank.rank == 1 and raises:
            rank.exception(2100, "ValueError", "learning rate is nan")
        else:
            gradients(rank, 2000, done=not raises)
    verdict = diagnose_stalled(write_run(tmp_path / "run", ranks, exit_status=1))
    assert verdict.is_hang == raises
    assert ("Rank 1 raised ValueError" in verdict.headline) == raises


@pytest.mark.parametrize(
    ("free", "said"), [(600 << 10, "has 600 KiB left, and a rank takes 4.00 MiB"), (1 << 30, "no process joined")]
)
def test_ranks_without_room_for_a_log_are_not_said_to_have_joined_no_group(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    status = main(["run", "-o", str(tmp_path / "run"), "--no-native", "--", sys.executable, "-c", "import torch"])
    assert (status, said in capfd.readouterr().err) == (0, True)
