"""How this process gets memory from the system and gives it back: for commands and workers, which own their process."""

import ctypes

LARGE_BYTES = 4 << 20
KEPT_BYTES = 64 << 20
"""What glibc itself would keep by the time it has seen a block of 32 MiB. It keeps 128 KiB once anything is set here,
and short columns, freed and taken again, would cost a page fault for each of their pages."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of mallopt(3)."""


def give_back_large_blocks() -> None:
    """Let blocks from LARGE_BYTES on go back as soon as they are free, here and from now on.

    glibc raises its own threshold to the largest block that was freed, 32 MB at most, and keeps what is smaller.
    Of smaller blocks KEPT_BYTES are kept.
    """
    _set(_M_MMAP_THRESHOLD, LARGE_BYTES)
    _set(_M_TRIM_THRESHOLD, KEPT_BYTES)


def use_one_pool() -> None:
    """Have all threads take memory from one pool; before any is started.

    What a worker sends is read by a thread of its own. With pools of their own (glibc), what one frees no other uses,
    and an export takes up to 100 MB more.
    """
    _set(_M_ARENA_MAX, 1)


def _set(option: int, value: int) -> None:
    """Without glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
