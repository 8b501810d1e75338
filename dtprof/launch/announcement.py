"""Leave word of a running job for those of its processes whose environment was cleared.

One file a launcher, named by its pid and start time, in a folder that only this user may write to. A process that the
`.pth` file of `dtprof inject` starts in looks for the file of one of its ancestors.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dtprof import settings

ATTEMPTS = 3


def folder() -> Path:
    """Return where this user's jobs are announced."""
    return Path(settings.JOBS_FOLDER % os.getuid())


def announce(environment: Mapping[str, str]) -> Path | None:
    """Write what the job's processes need of their environment; None where that cannot be done safely."""
    for _ in range(ATTEMPTS):
        try:
            return _announce(environment)
        except FileNotFoundError:
            continue  # the last job before this one has just taken the folder away
        except OSError:
            break
    return None


def _announce(environment: Mapping[str, str]) -> Path | None:
    place = folder()
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return None  # somebody else's: what it names would be loaded into the job
    _forget_the_dead(place)
    ours = {name: value for name, value in environment.items() if name.startswith("DTPROF_")}
    file = place / f"{os.getpid()}-{start_ticks(os.getpid())}.json"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(ours), encoding="utf-8")
    draft.replace(file)
    return file


def withdraw(file: Path | None) -> None:
    """Take the word back; the folder, too, where it was the last."""
    if file is not None:
        with suppress(OSError):
            file.unlink(missing_ok=True)
            file.parent.rmdir()


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot: with the pid that names it for good.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _forget_the_dead(place: Path) -> None:
    """Remove what launchers left that were killed."""
    for file in place.iterdir():
        pid, _, started = file.stem.partition("-")
        try:
            is_alive = started.isdigit() and start_ticks(int(pid)) == int(started)
        except (OSError, ValueError):
            is_alive = False
        if not is_alive:
            file.unlink(missing_ok=True)
