"""Real jobs on gloo that go on from checkpoints: on other layouts, after kills, and from those that a server cannot."""

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reference_trainer.parity import Ranks
from tests import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]

DEEP = ("--preset", "deep", "--batch-size", "16", "--sequence-length", "16", "--steps", "8", "--precision", "fp64")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TIMEOUT_S = 400
Curve = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Give ranks that are forked from one process, which has loaded torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ranks = Ranks()
        yield ranks
        ranks.end()


def train(ranks: Ranks, metrics: Path, *arguments: str, num_ranks: int) -> Curve:
    """Train to the end in processes of its own; return the metrics by step, each of which has to be there once."""
    assert ranks.train(arguments, num_ranks, metrics, timeout_s=TIMEOUT_S) == ""
    ranks.end()
    return by_step(metrics)


def by_step(metrics: Path) -> Curve:
    """Return the lines by step, each of which has to be there once."""
    lines = read_lines(metrics)
    found = {line["step"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def assert_same_curve(resumed: Curve, expected: Curve) -> None:
    for step, line in resumed.items():
        for name in ("loss", "grad_norm", "lr"):
            assert line[name] == pytest.approx(expected[step][name], rel=1e-9), (step, name)


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param("gpt", "--dp 4", "--tp 2 --pp 2", marks=pytest.mark.thorough),
        ("gpt", "--tp 2 --pp 2 --checkpoint-mode async", "--dp 4 --dp-mode zero1"),
        # The tied embedding lies twice on rank 0, and twice in the pipeline.
        pytest.param(
            "bart",
            "--dp 2 --tp 2 --dp-mode fsdp",
            "--dp 2 --pp 2 --schedule zbv",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_run_goes_on_alike_on_another_layout(ranks: Ranks, tmp_path: Path, model: str, before: str, after: str) -> None:
    common = ("--model", model, *DEEP)
    first = tmp_path / "first"
    saving = ("--checkpoint", str(first), "--checkpoint-every", "4")
    expected = train(ranks, tmp_path / "expected.jsonl", *common, *before.split(), *saving, num_ranks=4)
    assert sorted(path.name for path in first.iterdir()) == ["latest", "step-4", "step-8"]

    (first / "latest").write_text("step-4\n")
    shutil.rmtree(first / "step-8")
    resumed = train(
        ranks, tmp_path / "resumed.jsonl", *common, *after.split(), "--checkpoint", str(first), "--resume", num_ranks=4
    )
    assert sorted(resumed) == [5, 6, 7, 8]
    assert_same_curve(resumed, expected)


@pytest.mark.parametrize("kill", ["kill:rank=1,step=6", pytest.param("kill:rank=0,step=2", marks=pytest.mark.thorough)])
def test_killed_rank_is_restarted_and_no_sample_is_lost_or_repeated(ranks: Ranks, tmp_path: Path, kill: str) -> None:
    expected = train(ranks, tmp_path / "expected.jsonl", *DEEP, num_ranks=2)
    launcher = [*LAUNCHER, "2", "--max-restarts", "1", "--monitor-interval", "0.1", "-m", "reference_trainer"]
    saving = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2", "--fault", kill)
    metrics = tmp_path / "survived.jsonl"
    with jobs.started([*launcher, "--metrics", str(metrics), *DEEP, *saving], tmp_path) as job:
        assert job.wait(TIMEOUT_S) == 0, job.stderr
    survived = by_step(metrics)
    assert sorted(survived) == list(range(1, 9))
    assert_same_curve(survived, expected)


def test_parameter_server_in_step_gives_the_loss_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    common = (*DEEP[:-4], "--steps", "4", "--precision", "fp64")
    expected = train(ranks, tmp_path / "expected.jsonl", *common, num_ranks=1)
    server = (*common, "--dp-mode", "ps")
    assert_same_curve(train(ranks, tmp_path / "in_step.jsonl", *server, num_ranks=3), expected)
    stale = train(ranks, tmp_path / "stale.jsonl", *server, "--staleness", "1", num_ranks=3)
    assert stale[1]["loss"] == pytest.approx(expected[1]["loss"], rel=0.01)
    assert stale[4]["loss"] < stale[1]["loss"]


@pytest.mark.thorough
def test_kills_at_any_moment_lose_no_sample(ranks: Ranks, tmp_path: Path) -> None:
    survive_kills(ranks, tmp_path, num_kills=2, seed=0)


def survive_kills(ranks: Ranks, folder: Path, *, num_kills: int, seed: int) -> None:
    """Kill a rank so many times, at moments that are drawn: while it starts, trains, or saves."""
    options = (*DEEP[:-4], "--steps", "40", "--precision", "fp64")
    expected = train(ranks, folder / "expected.jsonl", *options, num_ranks=2)
    metrics = folder / "survived.jsonl"
    saving = ("--checkpoint", str(folder / "saved"), "--checkpoint-every", "2", "--checkpoint-mode", "async")
    launcher = [*LAUNCHER, "2", "--max-restarts", str(num_kills), "--monitor-interval", "0.1", "-m"]
    command = [*launcher, "reference_trainer", "--metrics", str(metrics), *options, *saving]
    draw = random.Random(seed)
    with jobs.started(command, folder) as job:
        for attempt in range(num_kills):
            job.wait_until(lambda attempt=attempt: len(find_ranks(job, attempt)) == 2, TIMEOUT_S)
            # A third of the moments lie in the start, which takes some seconds; a step takes a fraction of one.
            last = max((line["step"] for line in read_lines(metrics)), default=0)
            aim = draw.choice([0, last + draw.randint(1, 6), last + draw.randint(1, 6)])
            job.wait_until(
                lambda aim=aim: max((line["step"] for line in read_lines(metrics)), default=0) >= min(aim, 38),
                TIMEOUT_S,
            )
            time.sleep(draw.uniform(0, 0.2))
            draw.choice(find_ranks(job, attempt)).kill()
        assert job.wait(TIMEOUT_S) == 0, job.stderr
    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert_same_curve({line["step"]: line for line in lines}, expected)


def find_ranks(job: jobs.Job, attempt: int) -> list[psutil.Process]:
    """Return the ranks of one attempt that have begun to run."""
    found = []
    for process in job.find_processes():
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get("TORCHELASTIC_RESTART_COUNT") == str(attempt) and "RANK" in environment:
            found.append(process)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines that are there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
