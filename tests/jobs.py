"""Start real multi-process jobs and see to it that none outlives its test."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from dtprof.launch import interpreter
from dtprof.records import paths
from dtprof.records.reader import Run, read_rank
from dtprof.records.tables import RankTables

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
DTPROF = [sys.executable, "-m", "dtprof"]
MARK = "DTPROF_TEST_JOB"
TIMEOUT_S = float(os.environ.get("TEST_JOB_TIMEOUT_S", 180))
WHOLE_LINES = {"PYTHONUNBUFFERED": ""}
"""Unbuffered, print() writes a line and its end apart, and lines of two ranks run together."""
ABORTED_AT_EXIT = "terminate called without an active exception"
"""What programs end in that hold tensors or groups when the interpreter shuts down, bare as often as recorded, if a
thread of gloo comes late (docs/explanation/measurements/stress.md, where that is counted)."""


def torchrun(num_ranks: int, program: str | Path, *arguments: str) -> list[str]:
    """Return the command that starts a program on this many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, str(program), *arguments]


def forked(num_ranks: int, program: str | Path, *arguments: str) -> list[str]:
    """Return the command that forks ranks of a program from one process, which has imported torch for all of them.

    For tests of what ranks record; a test of a launcher uses that.
    """
    return [
        sys.executable,
        str(Path(__file__).parent / "forking_launcher.py"),
        str(num_ranks),
        str(program),
        *arguments,
    ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job; all its processes, whatever their sessions, carry `mark` in their environment."""

    process: subprocess.Popen[str]
    mark: str
    stdout_path: Path
    stderr_path: Path

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit status of the command."""
        return self.process.wait(timeout_s)

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        """What it said so far."""
        return self.stderr_path.read_text()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Return once the condition holds; fail where the job ends before that."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline_s, self.stderr
            time.sleep(0.05)

    def find_processes(self) -> list[psutil.Process]:
        """Find its processes by their mark: torchrun gives each rank a session of its own."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        """Kill what is left of it."""
        left = self.find_processes()
        for process in left:
            process.kill()
        self.process.wait(30)
        psutil.wait_procs(left, 30)
        assert self.find_processes() == []


@contextmanager
def started(
    command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
) -> Iterator[Job]:
    """Start a command; whatever is left of it afterwards is killed."""
    mark = uuid.uuid4().hex
    stdout_path, stderr_path = folder / f"{mark}.out", folder / f"{mark}.err"
    with stdout_path.open("w") as stdout, stderr_path.open("w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | WHOLE_LINES | {MARK: mark, "OMP_NUM_THREADS": "1"} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    job = Job(process=process, mark=mark, stdout_path=stdout_path, stderr_path=stderr_path)
    try:
        yield job
    finally:
        job.end()


def finished(command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None) -> Job:
    """Run a command to its end."""
    with started(command, folder, env=env) as job:
        job.wait()
    return job


def recorded_alone(program: str, folder: Path, *, native: bool) -> RankTables:
    """Run a program that records itself as rank 0 of 1, by one of the two hooks, and return its records."""
    hook = interpreter.choose_hook(sys.executable, native=native, environment=dict(os.environ), say=print)
    records = folder / paths.rank_folder_name(0, 0)
    records.mkdir()
    environment = {"DTPROF_NATIVE_TAP": hook.library or "", "PYTHONPATH": str(REPOSITORY)}
    job = finished([sys.executable, str(PROGRAMS / program), str(records)], folder, env=environment)
    assert job.process.returncode == 0, job.stderr
    tables = read_rank(records, rank=0, attempt=0)
    assert tables.problems == ()
    return tables


def recorded(
    run: Path, command: Sequence[str], *options: str, env: Mapping[str, str] | None = None, status: int = 0
) -> Job:
    """Run a command under `dtprof run` to its end and check its exit status; once more where torch aborted at exit."""
    job = _recorded(run, command, options, env)
    if job.process.returncode != status and ABORTED_AT_EXIT in job.stderr:
        shutil.rmtree(run)
        job = _recorded(run, command, options, env)
    assert job.process.returncode == status, job.stderr
    return job


def _recorded(run: Path, command: Sequence[str], options: Sequence[str], env: Mapping[str, str] | None) -> Job:
    with started([*DTPROF, "run", "-o", str(run), *options, "--", *command], run.parent, env=env) as job:
        try:
            job.wait()
        except subprocess.TimeoutExpired:
            verdict = subprocess.run([*DTPROF, "diagnose", str(run)], capture_output=True, text=True, timeout=TIMEOUT_S)
            raise AssertionError(f"no end within {TIMEOUT_S} s\n{verdict.stdout}\n{job.stderr}") from None
    return job


def exit_status(run: Run, tables: RankTables) -> int | None:
    """Return how the process of a rank ended, as its parent saw it; None where nobody saw it."""
    end = run.exit_of(tables.host, tables.pid)
    return None if end is None else end.status
