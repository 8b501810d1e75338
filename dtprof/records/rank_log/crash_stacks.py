"""The Python stack that a fatal signal left in the folder of a rank."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dtprof.records.sites import Site
from dtprof.records.tables import CrashStack

MAX_BYTES = 1 << 18
_HEAD = re.compile(r"signal (\d{1,3}) at (\d{1,20}) in (the main|a Python|a native) thread(, computing)?")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?{3}) in (.*)')


def read_crash(file: Path) -> CrashStack | None:
    """Return the crash stack of the file; None where there is no such file, or another kind."""
    try:
        with file.open("rb") as opened:
            lines = opened.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    head = _HEAD.fullmatch(lines[0]) if lines else None
    if head is None:
        return None
    found = filter(None, map(_FRAME.fullmatch, lines[1:]))
    frames = (Site(file=f[1], line=int(f[2]) if f[2].isdecimal() else 0, function=f[3]) for f in found)
    return CrashStack(
        signal=int(head[1]), t_ns=int(head[2]), thread=head[3].split()[-1], computes=bool(head[4]), frames=tuple(frames)
    )


def qualify_names(crash: CrashStack, sites: Iterable[Site]) -> CrashStack:
    """Return the stack with the qualified names that the records have for the same lines.

    A fatal signal leaves the plain name `f` of a line from which operations were recorded as issued by `Class.f`.
    """
    qualified = {(site.file, site.line, site.function.rpartition(".")[2]): site.function for site in sites}
    names = (qualified.get((f.file, f.line, f.function), f.function) for f in crash.frames)
    frames = (replace(frame, function=name) for frame, name in zip(crash.frames, names, strict=True))
    return replace(crash, frames=tuple(frames))
