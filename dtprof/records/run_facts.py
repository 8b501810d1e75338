"""The facts of one run that a list of many shows: from manifest, exit records and verdict, without reading an event.

`.verdict.json` holds the outcome that `dtprof run` or `dtprof diagnose` found, so that a list need not diagnose.
"""

import os
import pwd
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.records import paths, schema, writer
from dtprof.records.manifest import MOST_BYTES, Manifest, read_document, read_manifest
from dtprof.records.nodes.exit_records import is_stop

QUIET_S = 60.0
"""After which a job of another host no longer counts as running: its launcher samples the node every second."""
FORGOTTEN_S = 86_400.0
"""After which it is not looked at again."""
RUNNING, CUT_OFF, ENDED, ENDED_BY_SIGNAL, UNKNOWN = "running", "cut-off", "ended", "stopped", "unknown"
VERDICTS = ("healthy", "slow", "risk", "crash", "hang", UNKNOWN)
OUTCOMES = (RUNNING, CUT_OFF, ENDED, ENDED_BY_SIGNAL, *VERDICTS)
"""How runs may stand. `ended`: with status 0, and nobody has diagnosed it."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run of a list."""

    name: str  # below the folder that is listed
    user: str  # owner of the folder
    hosts: tuple[str, ...]
    command: str
    started_ns: int  # CLOCK_REALTIME; 0: not known
    ended_ns: int  # 0: it has not ended, or that is not known
    exit_status: int | None
    num_ranks: int
    outcome: str  # of OUTCOMES
    summary: str  # of the verdict; empty: nobody has diagnosed the run
    nbytes: int  # on the disk
    step_ns: float | None = None  # median duration of a step; None: not measured

    @property
    def took_ns(self) -> int | None:
        """How long the job ran; None where it has not ended, or the clock was set back meanwhile."""
        return self.ended_ns - self.started_ns if self.ended_ns > self.started_ns > 0 else None


def read_facts(run: Path, name: str, *, is_alive: bool) -> RunFacts:
    """Return the facts of a run; what is missing or damaged is unknown.

    Parameters:
        name: that it goes by in the list.
        is_alive: its launcher runs.

    Raises:
        OSError: the folder cannot be read.
    """
    manifest, verdict = read_manifest(run), read_document(run / paths.VERDICT)
    ranks = {found[0] for entry in os.scandir(run) if (found := paths.parse_rank_folder(entry.name))}
    return RunFacts(
        name=name,
        user=user_name(run.lstat().st_uid),
        hosts=manifest.hosts,
        command=" ".join(manifest.command),
        started_ns=manifest.started_realtime_ns,
        ended_ns=manifest.ended_realtime_ns,
        exit_status=manifest.exit_status,
        num_ranks=len(ranks),
        outcome=_outcome(run, manifest, verdict, is_alive=is_alive),
        summary=str(verdict.get("summary", "")),
        nbytes=disk_bytes(run),
    )


def find_launcher(path: Path) -> tuple[bool, bool]:
    """Say whether the launcher of a run may still run, and whether that is sure."""
    is_running = read_manifest(path).is_running()
    if is_running is not None:
        return is_running, True
    idle_s = time.time() - _last_written_s(path)
    return idle_s < QUIET_S, idle_s > FORGOTTEN_S


def write_verdict(run: Path, outcome: str, summary: str) -> None:
    """Keep the outcome of a diagnosis in the run.

    Raises:
        OSError: the run cannot be written to.
    """
    writer.write_json(run / paths.VERDICT, {"schema": 1, "outcome": outcome, "summary": summary})


def disk_bytes(folder: Path) -> int:
    """Return the disk space that the files below a folder take; links are not followed."""
    total = 0
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                total += disk_bytes(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # removed meanwhile
            continue
    return total


def user_name(uid: int) -> str:
    """Return the name of a user; the number where the system knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _outcome(run: Path, manifest: Manifest, verdict: Mapping[str, Any], *, is_alive: bool) -> str:
    has_ended = bool(manifest.ended_realtime_ns)
    if not manifest.started_realtime_ns or manifest.format_version > schema.FORMAT_VERSION:
        return UNKNOWN  # no manifest that this dtprof can read
    if is_alive and not has_ended:
        return RUNNING
    if verdict.get("outcome") in OUTCOMES:
        return str(verdict["outcome"])
    if manifest.stopped_on_hang or manifest.hang_detected_ns is not None:
        return "hang"
    status = manifest.exit_status
    if not has_ended:
        # Without a launcher (`import dtprof.auto`) nobody writes an end: parents may have seen their children's.
        statuses = _exit_statuses(run) if manifest.is_without_launcher else set()
        if not statuses:
            return UNKNOWN if manifest.is_without_launcher else CUT_OFF
        status = next(iter(statuses - {0}), 0)
    if status is None:
        return UNKNOWN
    if is_stop(status):
        return ENDED_BY_SIGNAL
    return "crash" if status else ENDED


def _last_written_s(path: Path) -> float:
    """Return when a launcher of a run last wrote to it, by the clock of the file system."""
    newest = 0.0
    for file in (path / paths.MANIFEST, *paths.node_files(path, paths.SAMPLES)):
        with suppress(OSError):
            newest = max(newest, file.lstat().st_mtime)
    return newest


def _exit_statuses(run: Path) -> set[int]:
    """Return how processes of the job ended, as their parents saw it."""
    statuses = set()
    for file in paths.node_files(run, paths.EXITS):
        try:
            data = file.read_bytes()[:MOST_BYTES]
        except OSError:
            continue
        statuses |= {int(found) for found in re.findall(rb'"status": ?(-?\d{1,4})\b', data)}
    return statuses
