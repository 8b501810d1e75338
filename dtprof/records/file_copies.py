"""Copies of the files of a run. A segment ends in zeros, which are a hole in the original: so they are in the copy."""

import os
import shutil
from pathlib import Path

from dtprof.records import paths


def link_or_copy(source: Path, target: Path) -> None:
    """Make a file appear at another place, without copying where the file system can do that.

    Raises:
        OSError: it cannot be read, or not be written there.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        dig_hole(target, name=source.name)


def dig_hole(copy: Path, *, name: str) -> None:
    """Give back the space of the zeros at the end of a segment whose file has this name."""
    if not name.startswith("events.") or paths.is_archive(Path(name)):
        return
    data = copy.read_bytes()
    os.truncate(copy, len(data.rstrip(b"\0")))
    os.truncate(copy, len(data))
