"""Say a thing once for all launchers of a run: a job may have one on each host, or one for each rank."""

import zlib
from pathlib import Path


def is_first(run: Path, text: str) -> bool:
    """Say whether no launcher of the run has told this yet, and mark it as told; so, too, where that cannot be kept."""
    try:
        (run / f".told-{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
