"""Find the line of the user's code that made a call, from Python frames."""

import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).resolve().parents[1]
TRANSPARENT = ("/c10d_logger.py", "/contextlib.py", "/_contextlib.py", f"{PACKAGE}/")
"""Files whose functions only wrap what the user called: never named as the api."""
MAX_DEPTH = 512


@dataclass(frozen=True, kw_only=True)
class CodeOwners:
    """Path prefixes that tell whose a file is: the tools' own, other installed code; all else is the user's."""

    tool: tuple[str, ...]
    library: tuple[str, ...]

    def is_tool(self, path: str) -> bool:
        """Say whether the file belongs to torch or dtprof."""
        return path.startswith(self.tool)

    def is_library(self, path: str) -> bool:
        """Say whether the file is installed code, or no file at all."""
        return not path or path.startswith(("<", *self.library))


def code_owners(torch_folder: str) -> CodeOwners:
    """Return the prefixes of this interpreter."""
    known = sysconfig.get_paths()
    library = {known["stdlib"], known["platstdlib"], known["purelib"], known["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        library.add(site.getusersitepackages())
    for name in ("os", "threading"):
        if origin := getattr(sys.modules.get(name), "__file__", None):
            library.add(str(Path(origin).parent))
    return CodeOwners(
        tool=(f"{torch_folder}/", f"{PACKAGE}/"),
        library=tuple(sorted(f"{folder}/" for folder in library if folder)),
    )


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A line of the user's code and what it called."""

    file: str
    line: int
    function: str
    api: str


class CallSites:
    """Ids of call sites, by code object and instruction."""

    def __init__(self, owners: CodeOwners) -> None:
        """Start with no site known."""
        self._owners = owners
        self._ids: dict[tuple[CodeType, int], int] = {}
        self._owner_of: dict[CodeType, int] = {}

    def find(self, frame: FrameType | None) -> tuple[int, CallSite | None]:
        """Return the id of the innermost user frame at or above `frame`, and its site when it is new; 0 for none."""
        innermost, library, depth = frame, None, 0
        while frame is not None and depth < MAX_DEPTH:
            owner = self._owner_of.get(frame.f_code)
            if owner is None:
                owner = self._owner_of[frame.f_code] = self._classify(frame.f_code.co_filename)
            if owner == 2:
                return self._identify(innermost, frame)
            if owner == 1 and library is None:
                library = frame
            frame = frame.f_back
            depth += 1
        return self._identify(innermost, library) if library is not None else (0, None)

    def _classify(self, path: str) -> int:
        return 0 if self._owners.is_tool(path) else 1 if self._owners.is_library(path) else 2

    def _identify(self, innermost: FrameType | None, frame: FrameType) -> tuple[int, CallSite | None]:
        key = (frame.f_code, frame.f_lasti)
        known = self._ids.get(key)
        if known is not None:
            return known, None
        new_id = self._ids.setdefault(key, len(self._ids) + 1)
        api, inner = "", innermost
        while inner is not None and inner is not frame:
            if not any(part in inner.f_code.co_filename for part in TRANSPARENT):
                api = inner.f_code.co_qualname
            inner = inner.f_back
        code = frame.f_code
        return new_id, CallSite(file=code.co_filename, line=frame.f_lineno or 0, function=code.co_qualname, api=api)
