"""Start jobs of the reference trainer and see to it that none outlives its test."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import jobs


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """A job of the trainer and the metrics it writes."""

    metrics_path: Path

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the lines that rank 0 has written so far."""
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, step: int) -> None:
        """Return once rank 0 has written this step."""
        self.wait_until(lambda: len(self.read_metrics()) >= step)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Give a function that starts the trainer; `num_ranks=None` means without a launcher."""
    with ExitStack() as running:

        def start(*arguments: str, num_ranks: int | None) -> Job:
            metrics_path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
            program = ["-m", "reference_trainer", "--metrics", str(metrics_path), *arguments]
            command = jobs.forked(num_ranks, *program) if num_ranks else [sys.executable, *program]
            job = running.enter_context(jobs.started(command, tmp_path))
            return Job(**vars(job), metrics_path=metrics_path)

        yield start
