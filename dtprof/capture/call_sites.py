"""Find the line of the user's code that issued an operation, from Python frames."""

import functools
import itertools
import site
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from dtprof import fence
from dtprof.capture.string_entries import entry
from dtprof.records import schema
from dtprof.records.sites import Site

PACKAGE = Path(__file__).resolve().parents[1]
TRANSPARENT = (
    "/c10d_logger.py",
    "/contextlib.py",
    "/_contextlib.py",
    "/typing_extensions.py",
    "/warnings.py",
    f"{PACKAGE}/",
)
"""Files whose functions only wrap the call of the user: never reported as its api."""
PACKAGES = ("site-packages", "dist-packages")
MAX_DEPTH = 512
MOST_CODES = 100_000
"""Limit of code objects kept for ever, of which a program may create any number; further ones are ignored."""
MOST_THREADS = 4096
"""Threads of which the line that started them is written."""
TOOL, LIBRARY, USER = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class CodeOwners:
    """Path prefixes of torch and dtprof, and of other installed code; every other file is the user's."""

    tool: tuple[str, ...]
    library: tuple[str, ...]

    def is_tool(self, path: str) -> bool:
        """Say whether the file belongs to torch or dtprof."""
        return path.startswith(self.tool)

    def is_library(self, path: str) -> bool:
        """Say whether the file is installed code, or no file at all."""
        return not path or path.startswith(("<", *self.library))


@functools.cache
def code_owners(torch_folder: str) -> CodeOwners:
    """Return the prefixes of this interpreter."""
    known = sysconfig.get_paths()
    library = {known["stdlib"], known["platstdlib"], known["purelib"], known["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        library.add(site.getusersitepackages())
    # Virtual environments over others, PYTHONPATH and .pth files add folders of packages of other interpreters.
    library.update(folder for folder in sys.path if folder.rstrip("/").endswith(PACKAGES))
    for name in ("os", "threading"):
        if origin := getattr(sys.modules.get(name), "__file__", None):
            library.add(str(Path(origin).parent))
    return CodeOwners(
        tool=(f"{torch_folder}/", f"{PACKAGE}/"),
        library=tuple(sorted(f"{folder}/" for folder in library if folder)),
    )


def user_line(owners: CodeOwners) -> dict[str, str | int] | None:
    """Return `file`, `line` and `function` of the innermost frame of the user's code that calls this; None for none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        path = frame.f_code.co_filename
        if not owners.is_tool(path) and not owners.is_library(path):
            place = _place(frame)
            return {"file": place.file, "line": place.line, "function": place.function}
        frame = frame.f_back
    return None


@fence.fenced("the lines that start threads")
def follow_threads(owners: CodeOwners, write: Callable[[str], object]) -> None:
    """Write at the start of each thread the line of the user's code that starts it.

    A thread of a library runs no other: that of an executor, in which torch writes a checkpoint. Of a thread that
    serves several calls the first counts.
    """
    threads: Any = threading.Thread
    original, number = threads.start, itertools.count()

    @fence.stands_in
    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        try:
            original(thread)
        except BaseException as error:
            fence.hide_frame(error)
            raise
        write_origin(thread)

    @fence.fenced("the lines that start threads")
    def write_origin(thread: threading.Thread) -> None:
        if next(number) < MOST_THREADS and (place := user_line(owners)) is not None:
            write(entry("thread_start", native_id=thread.native_id, **place))

    threads.start = start


class CallSites:
    """Ids of call sites, by code object and instruction of the user's frames, and the library that was called."""

    def __init__(self, owners: CodeOwners) -> None:
        """Start without sites."""
        self._owners = owners
        self._codes: list[CodeType] = []  # referenced, so that Python reuses no id
        self._owner_of: dict[int, int] = {}  # by id: hashing a code object reads all of it
        self._ids: dict[tuple[int, ...], int] = {}

    def find(self, frame: FrameType | None) -> tuple[int, Site | None]:
        """Return the id of the innermost user frame at or above `frame`, and its site when it is new; 0 for none."""
        innermost, library, depth, end = frame, None, 0, MAX_DEPTH
        owner_of = self._owner_of
        users: list[FrameType] = []
        key: list[int] = []
        while frame is not None and depth < end and len(users) <= schema.MOST_CALLERS:
            code = frame.f_code
            owner = owner_of.get(id(code))
            if owner is None and len(self._codes) < MOST_CODES:
                self._codes.append(code)
                owner = owner_of[id(code)] = self._classify(code.co_filename)
            if owner == USER:
                if not users:
                    end = min(end, depth + schema.FRAMES_OF_CALLERS)
                users.append(frame)
                key += id(code), frame.f_lasti
            elif owner == LIBRARY and library is None and not users:
                library = frame
            frame = frame.f_back
            depth += 1
        if library is not None:
            key.append(id(library.f_code))
        if not users:
            if library is None:
                return 0, None
            users = [library]
            key.append(library.f_lasti)
        known = self._ids.get(tuple(key))
        return (known, None) if known is not None else self._declare(tuple(key), innermost, users)

    def _classify(self, path: str) -> int:
        return TOOL if self._owners.is_tool(path) else LIBRARY if self._owners.is_library(path) else USER

    def _declare(self, key: tuple[int, ...], innermost: FrameType | None, users: list[FrameType]) -> tuple[int, Site]:
        new_id = self._ids.setdefault(key, len(self._ids) + 1)
        api, package, inner = "", "", innermost
        while inner is not None:
            path = inner.f_code.co_filename
            is_transparent = any(part in path for part in TRANSPARENT)
            if not package and not is_transparent and self._classify(path) == LIBRARY:
                package = package_of(path)
            if inner is users[0]:
                break
            if not is_transparent:
                api = _qualified_name(inner.f_code)
            inner = inner.f_back
        site, *callers = map(_place, users)
        return new_id, replace(site, api=api, package=package, callers=tuple(callers))


def _place(frame: FrameType) -> Site:
    return Site(file=frame.f_code.co_filename, line=frame.f_lineno or 0, function=_qualified_name(frame.f_code))


def package_of(path: str) -> str:
    """Return the top-level package of an installed file; empty where it lies in none, as the standard library."""
    _, folder, inside = path.rpartition("-packages/")
    return inside.partition("/")[0].partition(".")[0] if folder else ""


def _qualified_name(code: CodeType) -> str:
    """Return the name with those of enclosing functions and classes, which Python 3.10 does not keep."""
    return str(getattr(code, "co_qualname", code.co_name))
