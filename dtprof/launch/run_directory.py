"""Create the directory of a run, and write the documents of its launchers."""

import datetime
import errno
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import psutil

from dtprof import __version__
from dtprof.errors import DiskFullError, OutputError
from dtprof.launch import always_on, gpu_sampler, interpreter
from dtprof.records import paths, schema, writer
from dtprof.records.manifest import read_manifest
from dtprof.records.run_files import Place, is_written_by_dtprof

LOOKS_LIKE_SCRIPT = re.compile(r"[\w./-]+\.py$")


def default_directory(command: Sequence[str]) -> Path:
    """Return a new name under dtprof-runs/ with date and program."""
    name = next((Path(word).stem for word in command if LOOKS_LIKE_SCRIPT.fullmatch(word)), "")
    if not name and "-m" in command[:-1]:
        modules = [b for a, b in itertools.pairwise(command) if a == "-m"]
        name = modules[-1]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", name or Path(command[0]).name)
    stamp = datetime.datetime.now(tz=datetime.timezone.utc).astimezone().strftime("%Y%m%d-%H%M%S")
    base = always_on.runs_folder() / f"{stamp}-{name}"
    return next(free for name in paths.numbered(base.name) if not (free := base.with_name(name)).exists())


def create(path: Path, *, force: bool) -> None:
    """Create the run directory.

    Raises:
        OutputError: it is not empty and `force` is not given, holds something else than a run, or cannot be written.
    """
    try:
        if path.exists():
            if not path.is_dir():
                raise OutputError(f"{path} is a file; expected a directory that is empty or new: give another -o")
            _empty(path, force=force)
        path.mkdir(parents=True, exist_ok=True)
        (path / paths.node_folder_name(writer.host_name())).mkdir()
    except OSError as error:
        raise output_error(path, error) from error


def output_error(path: Path, error: OSError) -> OutputError:
    """Return the error for a directory that the system refuses to write to."""
    kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else OutputError
    return kind(f"{path} cannot be written to ({error.strerror}); give a directory that can with -o DIR")


def taken_error(path: Path) -> OutputError:
    """Return the error for a directory that is not empty."""
    manifest = read_manifest(path)
    if manifest.started_realtime_ns and not manifest.ended_realtime_ns:
        return OutputError(
            f"{path} holds a run that has not ended; give another directory, --join on every host where it is one job "
            "of several, or --force to replace what was left by a launcher that is gone"
        )
    return OutputError(f"{path} is not empty; give another directory, or --force to replace the run in it")


def _empty(path: Path, *, force: bool) -> None:
    entries = list(path.iterdir())
    if not entries:
        return
    if not force:
        raise taken_error(path)
    refuse_foreign_files(path)
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def refuse_foreign_files(path: Path) -> None:
    """Refuse to replace a directory with files that dtprof does not write into a run.

    Raises:
        OutputError: it holds such a file.
    """
    foreign = [entry.name for entry in path.iterdir() if not _is_ours(entry)] if path.is_dir() else []
    if foreign:
        raise OutputError(
            f"{path} holds {foreign[0]!r}, which dtprof did not write; "
            "--force replaces runs only: give another directory"
        )


def _is_ours(entry: Path) -> bool:
    """Say whether dtprof writes entries of this name into a run."""
    if entry.is_symlink():
        return False
    if not entry.is_dir():
        return is_written_by_dtprof(Place.RUN, entry.name)
    if paths.is_node_folder(entry.name):
        return all(is_written_by_dtprof(Place.NODE, file.name) for file in entry.iterdir())
    return paths.parse_rank_folder(entry.name) is not None


class JobEndFields(TypedDict, total=False):
    """What a launcher adds to its document when the job has ended."""

    ended_realtime_ns: int
    ended_monotonic_ns: int
    exit_status: int | None
    stopped_on_hang: bool
    hang_detected_ns: int | None
    oom_kills: int
    host_oom_kills: int
    oom_victims: list[dict[str, object]]
    truncated: bool
    hosts: list[str]


class LauncherDocument:
    """A JSON file of one launcher, rewritten whole when it learns something about the job."""

    def __init__(self, file: Path, fields: dict[str, object]) -> None:
        """Write the first version.

        Raises:
            OutputError: the directory went away; DiskFullError where there is no space.
        """
        self._file = file
        self._notes: list[str] = []
        ends: dict[str, object] = {"ended_realtime_ns": 0, "exit_status": None, "notes": self._notes}
        self._fields = fields | {"started_realtime_ns": time.time_ns()} | ends
        try:
            writer.write_json(file, self._fields)
        except OSError as error:
            raise output_error(file, error) from error

    def note(self, text: str) -> None:
        """Add a sentence about how the job was recorded."""
        self._notes.append(text)

    def update(self, fields: JobEndFields) -> bool:
        """Rewrite the file with new fields; return False where the disk refuses it."""
        self._fields.update(fields)
        try:
            writer.write_json(self._file, self._fields)
        except OSError:
            return False
        return True


class RunManifest(LauncherDocument):
    """run.json of the launcher that created the run."""

    def __init__(self, path: Path, command: Sequence[str], settings: dict[str, str], *, job: str | None = None) -> None:
        """Write the first version; raises as `LauncherDocument`."""
        fields: dict[str, object] = {
            "format_version": schema.FORMAT_VERSION,
            "dtprof_version": __version__,
            "command": list(command),
            "cwd": str(Path.cwd()),
            "settings": settings,
            "environment": relevant_environment(),
            "given_to_torch": interpreter.given_to_torch(),
            "hosts": [writer.host_name()],
            "machine": {
                "cpus": psutil.cpu_count(),
                "memory_bytes": psutil.virtual_memory().total,
                "platform": sys.platform,
                "gpus": gpu_names(),
            },
            "boot_id": writer.boot_id(),
            "job": job,
            "launcher_pid": os.getpid(),
            "launcher_start_ticks": writer.start_ticks(os.getpid()),
            "started_monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        }
        super().__init__(path / paths.MANIFEST, fields)


class JoinedLauncher(LauncherDocument):
    """launcher-PID.json, in its node's folder, of a launcher that joined a run."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        """Write the first version; raises as `LauncherDocument`."""
        host = writer.host_name()
        file = path / paths.node_folder_name(host) / f"launcher-{os.getpid()}.json"
        super().__init__(file, {"host": host, "boot_id": writer.boot_id(), "command": list(command)})


def version_remark(path: Path) -> str | None:
    """Return a sentence where another version of dtprof has created a run that this one joins."""
    begun = read_manifest(path).dtprof_version
    if begun in (__version__, ""):  # empty: it is being written, or damaged: readers say so
        return None
    return f"this launcher is of dtprof {__version__}, the run that it joins of {begun}: install one version"


def hosts_of(path: Path) -> list[str]:
    """Return this host and those whose launchers have joined the run."""
    joined = set()
    for file in paths.node_files(path, "launcher-*.json"):
        try:
            joined.add(str(json.loads(file.read_text(encoding="utf-8"))["host"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    this = writer.host_name()
    return [this, *sorted(joined - {this})]


def relevant_environment() -> dict[str, str]:
    """Return the environment variables that change how a distributed job behaves, without possible secrets."""
    wanted = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "CUDA_", "TORCHELASTIC_", "DTPROF_", "PYTORCH_")
    exact = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID")
    hidden = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(wanted) or name in exact) and not hidden.search(name)
    }


def gpu_names() -> list[str]:
    """Return the names of this host's NVIDIA GPUs; none where there is no driver."""
    devices, _ = gpu_sampler.open_gpus(os.getpid())
    if devices is None:
        return []
    try:
        return [str(device["name"]) for device in devices.describe()]
    finally:
        devices.close()
