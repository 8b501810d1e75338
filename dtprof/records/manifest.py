"""run.json: what `dtprof run` knows of the job as a whole. Standard library only."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtprof.records import paths, writer
from dtprof.records.oom_victims import OomVictim, read_oom_victims

MOST_BYTES = 1 << 20
"""Of a document; what is larger, dtprof did not write."""


class JobStarter(NamedTuple):
    """The process that started the ranks: while it runs, the job may."""

    pid: int
    start_ticks: int  # since boot
    boot_id: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts that `dtprof run` wrote about the whole job; empty for a run without them."""

    format_version: int = 0
    command: tuple[str, ...] = ()
    started_realtime_ns: int = 0
    ended_realtime_ns: int = 0  # 0: still running, or dtprof itself was killed
    exit_status: int | None = None
    stopped_on_hang: bool = False  # by dtprof
    hang_detected_ns: int | None = None  # when a hang was last diagnosed
    oom_kills: int = 0  # processes that the kernel ended in the launcher's control group
    host_oom_kills: int = 0  # and on the host
    oom_victims: tuple[OomVictim, ...] = ()
    hosts: tuple[str, ...] = ()
    boot_id: str = ""
    starter: JobStarter | None = None
    is_without_launcher: bool = False  # of `import dtprof.auto`: nobody writes how the job ended
    job: str | None = None  # key of the job that launchers of several hosts share
    dtprof_version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    imported: str = ""  # the format of the files that the run was imported from; empty: it was recorded
    imported_files: tuple[str, ...] = ()
    cannot_tell: tuple[str, ...] = ()  # of an imported run: what its format lacks; the subject, a colon, the reason
    replicas: int = 1  # groups of ranks that ran under the same numbers

    @property
    def stopped_on_hang_ns(self) -> int | None:
        """When the hang was detected for which dtprof stopped the job; None where it did not."""
        return self.hang_detected_ns if self.stopped_on_hang else None

    def is_running(self) -> bool | None:
        """Say whether what started the ranks runs on this host; None where it ran on another, or is not known."""
        if self.starter is None or self.starter.boot_id != writer.boot_id():
            return None
        try:
            return writer.start_ticks(self.starter.pid) == self.starter.start_ticks
        except (OSError, ValueError):
            return False


def is_run(path: Path) -> bool:
    """Say whether a path is a run directory, also one whose run.json is gone."""
    try:
        return path.is_dir() and (
            (path / paths.MANIFEST).is_file() or any(paths.parse_rank_folder(child.name) for child in path.iterdir())
        )
    except OSError:
        return False


def read_manifest(run: Path) -> Manifest:
    """Read run.json of a run; what is missing or damaged is unknown."""
    return parse_manifest(read_document(run / paths.MANIFEST))


def read_document(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; an empty one where there is none, or it is no file that dtprof wrote."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            document = json.loads(os.read(descriptor, MOST_BYTES))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def parse_manifest(fields: Mapping[str, Any]) -> Manifest:
    """Return the manifest in an object of run.json; what is missing or damaged is unknown."""
    settings, imported, job = fields.get("settings"), fields.get("imported"), fields.get("job")
    source = imported if isinstance(imported, dict) else {}
    return Manifest(
        format_version=_int(fields.get("format_version")) or 0,
        command=_words(fields.get("command")),
        started_realtime_ns=_time(fields.get("started_realtime_ns")),
        ended_realtime_ns=_time(fields.get("ended_realtime_ns")),
        exit_status=_int(fields.get("exit_status")),
        stopped_on_hang=fields.get("stopped_on_hang") is True,
        hang_detected_ns=_int(fields.get("hang_detected_ns")),
        oom_kills=_int(fields.get("oom_kills")) or 0,
        host_oom_kills=_int(fields.get("host_oom_kills")) or 0,
        oom_victims=tuple(read_oom_victims(fields.get("oom_victims"))),
        hosts=_words(fields.get("hosts")),
        boot_id=str(fields.get("boot_id", "")),
        starter=_starter(fields),
        is_without_launcher=bool(fields.get("started_by")),
        job=job if isinstance(job, str) else None,
        dtprof_version=str(fields.get("dtprof_version", "")),
        settings={str(k): str(v) for k, v in settings.items()} if isinstance(settings, dict) else {},
        notes=_words(fields.get("notes")),
        imported=str(source.get("format", "")),
        imported_files=_words(source.get("files")),
        cannot_tell=_words(fields.get("cannot_tell")),
    )


def _starter(fields: Mapping[str, Any]) -> JobStarter | None:
    given = fields.get("started_by")
    if not (isinstance(given, list) and len(given) == 3):
        given = [fields.get(name) for name in ("launcher_pid", "launcher_start_ticks", "boot_id")]
    return JobStarter(*given) if isinstance(given[0], int) else None


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _time(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 63 else 0
