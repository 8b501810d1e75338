"""Memory of a process that holds large tables for short: given back to the system once they are free."""

import ctypes

LARGE_BYTES = 4 << 20
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of mallopt(3)."""


def give_back_large_blocks() -> None:
    """Let blocks from LARGE_BYTES on go back as soon as they are free, here and from now on.

    glibc raises its own threshold to the largest block that was freed, 32 MB at most, and keeps what is smaller.
    Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
