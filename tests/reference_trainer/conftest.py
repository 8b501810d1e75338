"""Start jobs of the reference trainer and see to it that none outlives its test."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
JOB_MARK = "REFERENCE_TRAINER_TEST_JOB"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Follow one job, whose ranks carry `mark` in their environment."""

    process: subprocess.Popen[str]
    mark: str
    stdout_path: Path
    stderr_path: Path
    metrics_path: Path

    def wait(self, timeout_s: float = 120) -> int:
        """Return the exit status of the launcher."""
        return self.process.wait(timeout_s)

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the lines that rank 0 has written so far."""
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        """Return once rank 0 has written this step."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.read_metrics()) < step:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline_s, self.stderr
            time.sleep(0.1)

    def find_processes(self) -> list[psutil.Process]:
        """Find launcher and ranks by their mark: torchrun gives each rank a session of its own."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(JOB_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        """Kill what is left of the job."""
        for process in self.find_processes():
            process.kill()
        self.process.wait(30)
        assert self.find_processes() == []


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Give a function that starts the trainer; `num_ranks=None` means without a launcher."""
    jobs: list[Job] = []

    def start(*arguments: str, num_ranks: int | None) -> Job:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, *(launcher if num_ranks else []), "-m", "reference_trainer"]
        name = f"job{len(jobs)}"
        metrics_path = tmp_path / f"{name}.jsonl"
        mark = uuid.uuid4().hex
        stdout_path, stderr_path = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        with stdout_path.open("w") as stdout, stderr_path.open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--metrics", str(metrics_path), *arguments],
                cwd=REPOSITORY,
                env=os.environ | {JOB_MARK: mark, "OMP_NUM_THREADS": "1"},
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        job = Job(
            process=process, mark=mark, stdout_path=stdout_path, stderr_path=stderr_path, metrics_path=metrics_path
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.end()
