"""The memory limit of this job: that of its control group with the smallest limit.

Groups nest, and every limit counts. A container sees its own group as the outermost; batch systems create a group for
each job.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""A limit of at least this is none: version 1 writes the largest number of whole pages for no limit."""


class Files(NamedTuple):
    """Names of a version's files, and of the line of `memory.stat` with the inactive page cache."""

    limit: str
    charged: str
    cache: str
    events: str


VERSION_1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
VERSION_2 = Files("memory.max", "memory.current", "inactive_file", "memory.events")


@dataclass(frozen=True, kw_only=True)
class MemoryCgroup:
    """A control group that counts memory."""

    folder: Path
    files: Files

    def limit_bytes(self) -> int | None:
        """Return the limit of the group; None for none."""
        limit = _read_number(self.folder / self.files.limit)
        return limit if limit is not None and limit < UNLIMITED else None

    def charged_bytes(self) -> int | None:
        """Return the memory charged to the group, page cache included."""
        return _read_number(self.folder / self.files.charged)

    def reclaimable_bytes(self) -> int | None:
        """Return the inactive page cache in that memory: the kernel reclaims it when memory is short."""
        return read_counter(self.folder / "memory.stat", self.files.cache)

    def oom_kills(self) -> int | None:
        """Return how many processes of the group the OOM killer ended."""
        return read_counter(self.folder / self.files.events, "oom_kill")


def count_oom_kills(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes of this process's group the OOM killer ended; 0 where the kernel does not count."""
    counts = (group.oom_kills() for group in _list_groups(mount, membership))
    return next((count for count in counts if count is not None), 0)


def find_memory_cgroup(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> MemoryCgroup | None:
    """Return the group with the smallest limit, without limits the outermost; None where none is visible."""
    counting = [group for group in _list_groups(mount, membership) if group.charged_bytes() is not None]
    return min(reversed(counting), key=lambda group: group.limit_bytes() or UNLIMITED, default=None)


def _list_groups(mount: Path, membership: Path) -> list[MemoryCgroup]:
    """Return the groups that this process is in, the innermost first; those above a container have no folder."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        files, top = (VERSION_1, mount / "memory") if controllers else (VERSION_2, mount)
        innermost = top / path.lstrip("/") if ".." not in path else top  # a container sees a part of the tree only
        groups += [
            MemoryCgroup(folder=folder, files=files)
            for folder in (innermost, *innermost.parents)
            if top in (folder, *folder.parents)
        ]
    return groups


def read_counter(file: Path, name: str) -> int | None:
    """Return the number of the line that begins with a name; None where the kernel does not count it."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such group, or the word "max"
