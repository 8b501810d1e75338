"""Announce a running job to those of its processes whose environment was cleared.

One file a launcher, named by its pid and start time, in a folder that only this user may write to. In a new process the
`.pth` file of `dtprof inject` searches for the file of an ancestor.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dtprof import settings
from dtprof.records import writer

ATTEMPTS = 3


def folder() -> Path:
    """Return the folder of this user's announcements."""
    return Path(settings.JOBS_FOLDER % os.getuid())


def announce(environment: Mapping[str, str]) -> Path | None:
    """Write the variables of dtprof for the job's processes; return None where the folder is not safe."""
    for _ in range(ATTEMPTS):
        try:
            return _announce(environment)
        except FileNotFoundError:
            continue  # another launcher, the last before this one, has just removed the folder
        except OSError:
            break
    return None


def _announce(environment: Mapping[str, str]) -> Path | None:
    place = folder()
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return None  # another user could write here, and so load code into the job
    _remove_stale(place)
    variables = {name: value for name, value in environment.items() if name.startswith("DTPROF_")}
    file = place / f"{os.getpid()}-{writer.start_ticks(os.getpid())}.json"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(variables), encoding="utf-8")
    draft.replace(file)
    return file


def withdraw(file: Path | None) -> None:
    """Remove an announcement, and the folder where it was the last."""
    if file is not None:
        with suppress(OSError):
            file.unlink(missing_ok=True)
            file.parent.rmdir()


def _remove_stale(place: Path) -> None:
    """Remove the announcements of launchers that were killed."""
    for file in place.iterdir():
        pid, _, started = file.stem.partition("-")
        try:
            is_alive = started.isdigit() and writer.start_ticks(int(pid)) == int(started)
        except (OSError, ValueError):
            is_alive = False
        if not is_alive:
            file.unlink(missing_ok=True)
