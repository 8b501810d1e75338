"""Write the files of a run that are not written by the native hook. Standard library only."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from dtprof import settings
from dtprof.records import paths, schema

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the boot id of this host; processes with the same one share CLOCK_MONOTONIC."""
    try:
        return BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{socket.gethostname()}"


def host_name() -> str:
    """Return the name of this host in the run: DTPROF_HOST where host names are not unique, else the system's."""
    return os.environ.get(settings.ENV_HOST) or socket.gethostname()


def segment_header(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    attempt: int,
    hook: int,
    torch_version: str,
    dtprof_version: str,
) -> bytes:
    """Return the first bytes of the first segment of this process, clocks read now."""
    return schema.pack_header(
        segment=0,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        attempt=attempt,
        pid=os.getpid(),
        tap=hook,
        opened_monotonic_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        opened_realtime_ns=time.clock_gettime_ns(time.CLOCK_REALTIME),
        dropped=0,
        host=host_name(),
        boot_id=boot_id(),
        torch_version=torch_version,
        dtprof_version=dtprof_version,
    )


def claim_rank_folder(run: Path, rank: int, first_attempt: int) -> tuple[Path, int]:
    """Create the folder of a rank under the first attempt number that is free.

    Raises:
        OSError: the run directory cannot be written to.
    """
    attempt = first_attempt
    while True:
        folder = run / paths.rank_folder_name(rank, attempt)
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return folder, attempt


def append_line(path: Path, entry: Mapping[str, object]) -> int:
    """Append one JSON object as a line, in a single write that other processes cannot split; return the file's size.

    Raises:
        OSError: the file cannot be written to.
    """
    line = json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot: pid and start identify a process for ever.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def write_json(path: Path, document: Mapping[str, object], *, is_private: bool = False) -> None:
    """Write a JSON file as `write_whole` does."""
    write_whole(path, (json.dumps(document, indent=1, default=str) + "\n").encode(), is_private=is_private)


def write_whole(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write a file so that a reader sees the old one or the new one, never a half.

    Parameters:
        is_private: nobody but the user may read it, at no moment.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if is_private:
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
        else:
            draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
