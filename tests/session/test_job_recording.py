"""What the launcher is told of a job that makes no progress."""

from pathlib import Path

import pytest

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
