"""All layouts train alike, recorded or not: here the set that covers each kind, for six steps.

`make test` trains the decoder, `make test-all` BART as well. The whole list of layouts, for twenty steps:
`python -m reference_trainer.parity`.
"""

import json
import sys
from pathlib import Path

import pytest

from dtprof.records.reader import open_run
from reference_trainer.parity import Curve, compare
from tests import jobs

PREAMBLE = (
    "import sys\nfrom reference_trainer import parity\nfrom reference_trainer.parity_layouts import ParityLayout\n"
)
COMMAND = "if __name__ == '__main__':\n    sys.exit(parity.main(['--model', 'gpt', '--steps', '3']))\n"


RECORDED_STEPS = 3


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


def parity(folder: Path, *options: str) -> list[str]:
    """Return the command that trains the covering layouts and keeps their metrics."""
    return [sys.executable, "-m", "reference_trainer.parity", "--covering", "--metrics", str(folder), *options]


def losses(folder: Path, model: str, *, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return losses and gradient norms of the first steps, by layout."""
    found = {}
    for file in sorted(folder.glob(f"{model}-*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()[:num_steps]]
        found[file.name] = [(row["loss"], row["grad_norm"]) for row in rows]
    return found


@pytest.fixture(scope="module", params=["gpt", pytest.param("bart", marks=pytest.mark.thorough)])
def model(request: pytest.FixtureRequest) -> str:
    """Give the model that is trained."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bare(model: str, tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """Train the model on every covering layout without dtprof; the metrics lie in `metrics` beside the output."""
    folder = tmp_path_factory.mktemp("bare")
    with jobs.started(parity(folder / "metrics", "--model", model, "--steps", "6"), folder) as job:
        job.wait(840)
    return job


@pytest.mark.jobs
@pytest.mark.timeout(900)
def test_covering_layouts_train_like_one_process(model: str, bare: jobs.Job) -> None:
    assert bare.process.returncode == 0, bare.stdout + bare.stderr
    lines = bare.stdout.splitlines()
    assert lines[-1] == "every layout is inside its bound"
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert sum(line.split()[1] == model for line in lines[:-1]) > 12


@pytest.mark.jobs
@pytest.mark.timeout(900)
def test_losses_are_bit_identical_with_and_without_recording(model: str, bare: jobs.Job, tmp_path: Path) -> None:
    # Steps of the warm-up do not depend on how many follow. Each model is recorded by another recorder.
    options = ["--no-native"] if model == "bart" else []
    jobs.recorded(
        tmp_path / "run", parity(tmp_path / "metrics", "--model", model, "--steps", str(RECORDED_STEPS)), *options
    )
    expected = losses(bare.stdout_path.parent / "metrics", model, num_steps=RECORDED_STEPS)
    assert len(expected) > 12
    assert all(len(curve) == RECORDED_STEPS for curve in expected.values())
    assert losses(tmp_path / "metrics", model, num_steps=RECORDED_STEPS) == expected
    run = open_run(tmp_path / "run")
    assert run.ranks == [0, 1, 2, 3]
    assert min(tables.num_events for tables in run.load_all()) > 1000


@pytest.mark.jobs
def test_targets_that_do_not_count_leave_the_mean_right_on_uneven_ranks(tmp_path: Path) -> None:
    # Half of the first row's targets, and a third of the others': each rank and each microbatch has another number.
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
def test_a_layout_that_fails_is_reported_and_fails_the_command(tmp_path: Path) -> None:
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
