"""Where a measurement runs its ranks: several on one GPU with NCCL, or in a rehearsal on the CPU with gloo."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

REHEARSED = "DTPROF_GPU_REHEARSED"
KEPT = "DTPROF_GPU_KEPT"
"""Names a folder in which everything stays that was recorded."""
JOB_S = 240.0
REHEARSAL_TIMES = 4
"""A rehearsal may take this many times as long: it tries the scripts, on fewer cores and beside other work."""


def rehearsed() -> bool:
    """Say whether there is no GPU, and the scripts are tried only."""
    return bool(os.environ.get(REHEARSED))


def patience(limit_s: float) -> float:
    """Return how long something may take that takes at most this long on a GPU."""
    return limit_s * REHEARSAL_TIMES if rehearsed() else limit_s


def backend() -> str:
    """Return the back end of process groups."""
    return "gloo" if rehearsed() else "nccl"


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """Return the command that starts a program on this many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, *program]


def trainer(num_ranks: int, *arguments: str) -> list[str]:
    """Return the command of the reference trainer, its ranks on one device."""
    shared = () if rehearsed() else ("--share-devices",)
    return torchrun(num_ranks, "-m", "reference_trainer", *shared, *arguments)


def recorded(run: Path, command: Sequence[str], *options: str) -> list[str]:
    """Return the command that records another one."""
    return [sys.executable, "-m", "dtprof", "run", "-o", str(run), *options, "--", *command]


def run_job(command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float = JOB_S) -> str:
    """Run a job to its end and return what it printed.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    timeout_s = patience(timeout_s)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1"} | os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            end_tree(process)
        for stream in (stdout, stderr):
            stream.seek(0)
        said = stderr.read()
        print(said, file=sys.stderr, flush=True)
        if status is None:
            raise RuntimeError(f"no end within {timeout_s:g} s: {' '.join(command)}: {said[-1500:]}")
        if status:
            raise RuntimeError(f"exit status {status} of {' '.join(command)}: {said[-1500:]}")
        return stdout.read()


def end_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill a process with all that descends from it: torchrun gives each rank a session of its own."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


@contextmanager
def scratch() -> Iterator[Path]:
    """Return a folder for what a measurement records."""
    if kept := os.environ.get(KEPT):
        yield Path(tempfile.mkdtemp(prefix="dtprof-gpu-", dir=kept))
        return
    with tempfile.TemporaryDirectory(prefix="dtprof-gpu-") as folder:
        yield Path(folder)
