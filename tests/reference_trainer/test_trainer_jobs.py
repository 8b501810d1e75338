"""Real jobs on gloo: the same loss on every layout, refusals, and faults."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Job

from tests import jobs

pytestmark = pytest.mark.jobs

SMALL_STEPS = ("--batch-size", "8", "--sequence-length", "32", "--steps", "8")


@pytest.mark.thorough
def test_loss_and_gradient_norm_are_the_same_however_it_is_launched(start_job: Callable[..., Job]) -> None:
    def measure(num_ranks: int | None, *layout: str) -> list[dict[str, float]]:
        job = start_job(*SMALL_STEPS, "--precision", "fp64", *layout, num_ranks=num_ranks)
        assert job.wait() == 0, job.stderr
        return job.read_metrics()

    expected = measure(None)
    assert len(expected) == 8
    for num_ranks, *layout in ((1, "--dp-mode", "fsdp"), (2, "--accumulate", "2")):
        measured = measure(num_ranks, *layout)
        for name in ("step", "loss", "grad_norm", "lr"):
            # In float64 only the order of sums differs.
            assert [line[name] for line in measured] == pytest.approx([line[name] for line in expected], rel=1e-9)


def test_tiny_preset_learns_and_says_nothing_unexpected(start_job: Callable[..., Job]) -> None:
    job = start_job("--preset", "tiny", "--steps", "20", num_ranks=2)
    assert job.wait() == 0, job.stderr
    metrics = job.read_metrics()
    assert metrics[0]["loss"] > 5.4
    assert metrics[-1]["loss"] < 3.3
    assert re.fullmatch(r"trained 20 steps in .* s: loss 5\.\d+ -> [23]\.\d+, [\d,]+ tokens/s\n", job.stdout)
    unexpected = [line for line in job.stderr.splitlines() if not re.match(r"(model|corpus|layout|step) ", line)]
    assert unexpected == []


def test_threads_of_groups_end_before_the_interpreter_does(tmp_path: Path) -> None:
    # The stages of a pipeline are cycles of objects; a thread left to the end of the interpreter may abort it.
    program = jobs.PROGRAMS / "trained.py"
    job = jobs.finished(jobs.forked(2, str(program), *SMALL_STEPS, "--pp", "2", "--steps", "2"), tmp_path)
    assert job.process.returncode == 0, job.stderr
    assert [line for line in job.stdout.splitlines() if line.startswith("left:")] == ["left:", "left:"]


def test_bf16_learns(start_job: Callable[..., Job]) -> None:
    job = start_job(*SMALL_STEPS, "--precision", "bf16", "--learning-rate", "3e-3", num_ranks=None)
    assert job.wait() == 0, job.stderr
    metrics = job.read_metrics()
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


def test_one_process_needs_no_launcher_and_refuses_with_status_two(
    start_job: Callable[..., Job], tmp_path: Path
) -> None:
    refused = {"--corpus": str(tmp_path / "nowhere")}
    if not torch.cuda.is_available():
        refused["--preset"] = "7b"  # whose text, of a gigabyte, is not even looked at
    for option, value in refused.items():
        job = start_job(option, value, num_ranks=None)
        assert job.wait() == 2
        assert job.stderr.startswith(f"reference_trainer: {option} {value}")
        assert len(job.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fault", "gremlins"),
        pytest.param(("--corpus", "/bin/sh"), marks=pytest.mark.thorough),
        ("--learning-rate", "1e30", *SMALL_STEPS),
        pytest.param(("--microbatches", "1", "--pp", "2"), marks=pytest.mark.thorough),
    ],
)
def test_refusal_ends_every_rank_without_a_traceback_of_ours(
    start_job: Callable[..., Job], arguments: tuple[str, ...]
) -> None:
    job = start_job(*arguments, num_ranks=2)
    assert job.wait() == 1  # the launcher's own, whatever the status of its ranks
    assert re.search(r"\[rank [01]\] reference_trainer: .*" + re.escape(arguments[0]), job.stderr)
    assert re.findall(r"failed with exit status (\S+)", job.stderr) == ["2"]
    assert "reference_trainer/" not in job.stderr.replace(str(Path(__file__).parent), "")


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        pytest.param(
            "exception",
            r"\[rank1\]: RuntimeError: injected by --fault exception on rank 1 at step 4",
            marks=pytest.mark.thorough,
        ),
        ("kill", r"rank 1 \(pid \d+\) failed with exit status -9"),
        pytest.param("exit", r"rank 0 \(pid \d+\) failed with exit status 1", marks=pytest.mark.thorough),
    ],
)
def test_rank_that_ends_early_ends_the_job(start_job: Callable[..., Job], name: str, sign: str) -> None:
    job = start_job(*SMALL_STEPS, "--fault", f"{name}:rank=1,step=4", num_ranks=2)
    assert job.wait() == 1
    assert re.search(sign, job.stderr), job.stderr
    assert len(job.read_metrics()) == 3


@pytest.mark.thorough
def test_skipped_collective_hangs_with_every_rank_alive(start_job: Callable[..., Job]) -> None:
    job = start_job(*SMALL_STEPS, "--fault", "skip-collective:rank=1,step=4", num_ranks=2)
    job.wait_for_step(3)
    time.sleep(3)
    assert len(job.read_metrics()) == 3
    assert job.process.poll() is None
    assert len(job.find_processes()) == 3  # torchrun and two ranks
