"""Create the directory of a run, or join the run that another launcher of the same job has created.

A job of several hosts has a `dtprof run` on each. In a shared directory, the first creates the run. The others join it
where their environment shows that they are of one job, or with --join.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtprof import launchers
from dtprof.errors import OutputError, UsageError
from dtprof.launch import clock_probes, run_directory
from dtprof.records import paths, writer
from dtprof.records.manifest import Manifest, read_manifest

CLAIM = ".launcher"
SAME_JOB = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("MASTER_ADDR", "MASTER_PORT"))
"""Variables that are equal on all hosts of a job; schedulers and Open MPI set them for launchers."""
OF_RENDEZVOUS = "rendezvous="
"""Begin of a key from a command: hosts may know one endpoint by several names, so keys that differ say nothing."""
MANIFEST_WAIT_S = 30.0
ANSWER_WAIT_S = 5.0
"""How long the launcher of a new run may take to answer."""
NEW_RUN_S = 60.0
POLL_EVERY_S = 0.1


def job_key(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key of a launcher's job, equal on all its hosts; None where nothing says that there are others.

    The environment comes first, then the rendezvous that the command of torchrun or accelerate names.
    """
    for names in SAME_JOB:
        if all(environment.get(name) for name in names):
            return ",".join(f"{name}={environment[name]}" for name in names)
    if launchers.has_rendezvous(command):
        given = launchers.read_rendezvous(command, environment)
        if given["most_nodes"] > 1 and given["endpoint"]:
            return f"{OF_RENDEZVOUS}{given['endpoint']},id={given['id']}"
    return None


def enter(path: Path, *, force: bool, join: bool, job: str | None) -> bool:
    """Create the run, or join the running one of this job; return whether this launcher created it.

    Parameters:
        job: the key of this launcher's job.

    Raises:
        OutputError: the directory holds anything but a running run of this job, or cannot be written to; with --force
            it holds a running run of another job.
        UsageError: --join and --force together.
    """
    if join and force:
        raise UsageError("--join and --force exclude each other; give a new directory with -o, the same on all hosts")
    try:
        replace = force and not _is_running_run_of_this_job(path, job)
        if replace or not (join or job):
            run_directory.create(path, force=force)
            return True
        if not (path / paths.MANIFEST).exists():
            if _claim(path):
                return True
            _wait_for_manifest(path)
        _check(path, read_manifest(path), join=join, job=job)
        (path / paths.node_folder_name(writer.host_name())).mkdir(exist_ok=True)
    except OSError as error:
        raise run_directory.output_error(path, error) from error
    return False


def _is_running_run_of_this_job(path: Path, job: str | None) -> bool:
    """Say whether the run that --force would replace is a running one of this job, to be joined instead.

    Raises:
        OutputError: it is a running one of another job.
    """
    if not (path / paths.MANIFEST).is_file():
        return False
    manifest = read_manifest(path)
    if _is_over(manifest) or not _is_running(path, manifest):
        return False
    if job is None or manifest.job != job:
        process = f"process {manifest.starter.pid}" if manifest.starter else "an unknown process"
        raise OutputError(
            f"{path} holds a run that is still recorded (by {process}); --force replaces "
            "what has ended: end that job, or give another directory"
        )
    return True


def _claim(path: Path) -> bool:
    """Claim the directory for this launcher; of launchers that start together only one succeeds."""
    path.mkdir(parents=True, exist_ok=True)
    others = [entry.name for entry in path.iterdir() if entry.name != CLAIM]
    try:
        descriptor = os.open(path / CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    os.close(descriptor)
    if others:
        (path / CLAIM).unlink()
        raise run_directory.taken_error(path)
    (path / paths.node_folder_name(writer.host_name())).mkdir()
    return True


def _wait_for_manifest(path: Path) -> None:
    deadline_s = time.monotonic() + MANIFEST_WAIT_S
    while not (path / paths.MANIFEST).exists():
        if time.monotonic() > deadline_s:
            raise OutputError(
                f"{path} was taken by another launcher {MANIFEST_WAIT_S:.0f} s ago, and {paths.MANIFEST} is not there; "
                "give another directory"
            )
        time.sleep(POLL_EVERY_S)


def _check(path: Path, manifest: Manifest, *, join: bool, job: str | None) -> None:
    """Refuse to join a run of another job, or one that has ended."""
    if _is_over(manifest):
        raise OutputError(f"{path} holds a run that has ended; give another directory, or --force to replace it")
    if join:
        return
    if manifest.job != job:
        raise OutputError(
            f"{path} holds the run of another job ({manifest.job}; this one is {job}): "
            "give another directory, or --join where it is the same job all the same"
        )
    if not _is_running(path, manifest):
        raise OutputError(
            f"{path} holds a run whose launcher does not answer: give another directory, or --force to replace it; "
            "--join where the launcher does run and UDP between the hosts is closed"
        )


def _is_over(manifest: Manifest) -> bool:
    """Say whether a run has ended, or is none that a launcher began."""
    return bool(manifest.ended_realtime_ns) or not manifest.started_realtime_ns


def _is_running(path: Path, manifest: Manifest) -> bool:
    """Say whether the launcher that created a run still runs: as a process of this host, or its clock answers."""
    if manifest.is_running():
        return True  # else it has ended, or runs on another host or in another PID namespace
    is_new = abs(time.time_ns() - manifest.started_realtime_ns) < NEW_RUN_S * 1e9
    deadline_s = time.monotonic() + ANSWER_WAIT_S * is_new
    while (address := clock_probes.read_address(path)) is None or clock_probes.measure(address, rounds=1) is None:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_EVERY_S)
    return True
