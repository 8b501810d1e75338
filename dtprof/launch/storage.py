"""The file system under a run: network, memory or disk, and its free space; a local folder where one is needed.

Records are written through memory mappings. A network file system reports missing space only when the kernel writes
pages back, and kills the process then. There ranks write to a local disk, and the launcher moves the run at the end.
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dtprof import settings
from dtprof.records import paths, writer

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = re.compile(
    r"nfs4?|cifs|smb3?|smbfs|afs|ceph|lustre|gpfs|beegfs|wekafs|panfs|pvfs2|orangefs"
    r"|fuse\.(sshfs|s3fs|gcsfuse|rclone|glusterfs|juicefs|ceph|mount-s3|goofys|blobfuse2?)"
)
IN_MEMORY = ("tmpfs", "ramfs")
LITTLE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The file system of a path, existing or not."""

    kind: str  # as in the mount table; empty if unknown
    free_bytes: int

    @property
    def is_network(self) -> bool:
        """Say whether it is a network file system."""
        return NETWORK.fullmatch(self.kind) is not None

    @property
    def is_memory(self) -> bool:
        """Say whether its files lie in memory."""
        return self.kind in IN_MEMORY


def examine(path: Path) -> Storage:
    """Return the file system of a path, which need not exist yet."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    return Storage(kind=_kind(existing.resolve()), free_bytes=shutil.disk_usage(existing).free)


def _kind(path: Path) -> str:
    """Return the type of the innermost mount over a path; of several at one place the last covers the others."""
    best, kind = -1, ""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields = head.split()
        if len(fields) < 5 or not tail:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if len(mount.parts) >= best and path.is_relative_to(mount):
            best, kind = len(mount.parts), tail.split()[0]
    return kind


def remark(path: Path, storage: Storage, *, max_log_mb: float) -> str | None:
    """Return a warning about the place of a run before the job starts, None for none."""
    free = f"{storage.free_bytes / 2**20:,.0f} MiB"
    if storage.is_memory and storage.free_bytes < max_log_mb * 2**20:
        return (
            f"{path} lies in memory ({storage.kind}, {free} free), which the records take from the job; "
            "give a directory on a disk with -o DIR"
        )
    if storage.free_bytes < LITTLE_BYTES:
        return f"only {free} are free at {path}: recording stops when they are used up; give another disk with -o DIR"
    return None


def local_place(run: Path) -> Path | None:
    """Create a local folder for the records of a run on a network file system; None where there is no local disk."""
    chosen = os.environ.get(settings.ENV_LOCAL_DIR) or tempfile.gettempdir()
    try:
        if examine(Path(chosen)).is_network:
            return None
        place = Path(tempfile.mkdtemp(prefix=f"dtprof-{run.name}-", dir=chosen))
    except OSError:
        return None
    try:
        (place / paths.node_folder_name(writer.host_name())).mkdir()
        if (run / paths.MANIFEST).exists():
            shutil.copyfile(run / paths.MANIFEST, place / paths.MANIFEST)
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        return None
    return place


def bring_home(place: Path, run: Path) -> None:
    """Move the local records into the run, and remove the local folder.

    Raises:
        OSError: the run cannot be written to; files not moved stay in the local folder.
    """
    (place / paths.MANIFEST).unlink(missing_ok=True)
    for entry in sorted(place.iterdir()):
        if parsed := paths.parse_rank_folder(entry.name):
            target, _ = writer.claim_rank_folder(run, *parsed)
        else:
            target = run / entry.name
            target.mkdir(exist_ok=True)
        for file in sorted(entry.iterdir()):
            _add(file, target / file.name)
        shutil.rmtree(entry)
    shutil.rmtree(place)


def _add(file: Path, target: Path) -> None:
    """Copy a file; append lines to a file that another launcher of this host has brought."""
    if target.exists() and target.suffix == ".jsonl":
        with target.open("ab") as stream:
            stream.write(file.read_bytes())
    else:
        shutil.copyfile(file, target)
