"""All layouts train alike: here the set that covers each kind, for ten steps.

The whole list, for twenty: `python -m reference_trainer.parity`.
"""

import sys
from pathlib import Path

import pytest

from reference_trainer.parity import Curve, compare
from reference_trainer.parity_layouts import MODELS
from tests import jobs

PREAMBLE = (
    "import sys\nfrom reference_trainer import parity\nfrom reference_trainer.parity_layouts import ParityLayout\n"
)
COMMAND = "if __name__ == '__main__':\n    sys.exit(parity.main(['--model', 'gpt', '--steps', '3']))\n"


def curve(*losses: float) -> Curve:
    return [{"loss": loss, "grad_norm": 2 * loss} for loss in losses]


def test_the_largest_difference_of_any_step_counts() -> None:
    # 4.0 against 4.4: 0.4 / 4 = 10 %.
    outcome = compare(curve(5.0, 4.4, 3.0), curve(5.0, 4.0, 3.0))
    assert (outcome.loss, outcome.grad_norm) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_missing_step_is_no_parity() -> None:
    outcome = compare(curve(5.0), curve(5.0, 4.0))
    assert outcome.error == "1 steps, but 2 expected"
    assert outcome.loss == float("inf")


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_covering_layouts_train_like_one_process(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reference_trainer.parity", "--model", model, "--covering", "--steps", "6"]
    with jobs.started(command, tmp_path) as job:
        status = job.wait(840)
    assert status == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    assert lines[-1] == "every layout is inside its bound"
    assert len(lines) > 12
    assert all(line.startswith("ok ") for line in lines[:-1])


@pytest.mark.jobs
def test_targets_that_do_not_count_leave_the_mean_right_on_uneven_ranks(tmp_path: Path) -> None:
    # Half of the first row's targets, and a third of the others': each rank and each micro-batch has another number.
    program = (
        f"{PREAMBLE}from reference_trainer.batches import RowsOfRank\n"
        "whole = RowsOfRank.__getitem__\n"
        "def damaged(self, first_sample):\n"
        "    batch = whole(self, first_sample)\n"
        "    targets = batch['targets'].clone()\n"
        "    targets[targets % 3 == 0] = -100\n"
        "    if self.first_row == 0:\n"
        "        targets[0, ::2] = -100\n"
        "    return {**batch, 'targets': targets}\n"
        "RowsOfRank.__getitem__ = damaged\n"
        "parity.LAYOUTS[:] = [ParityLayout(num_ranks=ranks, arguments=arguments) for ranks, arguments in"
        " ((2, '--dp 2 --accumulate 2'), (2, '--cp 2'), (2, '--dp-mode fsdp'), (2, '--pp 2'))]\n"
        f"{COMMAND}"
    )
    path = tmp_path / "uneven.py"
    path.write_text(program)
    job = jobs.finished([sys.executable, str(path)], tmp_path, env={"PYTHONPATH": str(jobs.REPOSITORY)})
    assert job.process.returncode == 0, job.stdout + job.stderr
    assert job.stdout.splitlines()[-1] == "every layout is inside its bound"


@pytest.mark.jobs
def test_a_layout_that_fails_is_told_and_fails_the_command(tmp_path: Path) -> None:
    # Three ranks do not divide the 16 sequences: there is such a layout only for this test.
    program = (
        f"{PREAMBLE}parity.LAYOUTS[:] = [ParityLayout(num_ranks=2, arguments='--seed 1'),"
        " ParityLayout(num_ranks=3, arguments='')]\n"
        f"{COMMAND}"
    )
    path = tmp_path / "two_layouts.py"
    path.write_text(program)
    job = jobs.finished([sys.executable, str(path)], tmp_path, env={"PYTHONPATH": str(jobs.REPOSITORY)})
    assert job.process.returncode == 1, job.stderr
    other_seed, indivisible, total = job.stdout.splitlines()
    assert other_seed.startswith("FAIL gpt  2 ranks  loss ")
    assert "UsageError: --batch-size 16 does not divide by --dp 3" in indivisible
    assert total == "2 outside of their bounds"
