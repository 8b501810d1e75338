"""Files that stay open in the job, under descriptors that the job may close, and give to files of its own."""

import os
from pathlib import Path


class OwnFile:
    """A file of ours: a program that closes all descriptors, as daemons do, has it opened again."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open it.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = path
        self._flags = flags | os.O_CLOEXEC
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, self._flags, 0o644)
        self._identity = _identity(self._descriptor)

    def descriptor(self) -> int:
        """Return the descriptor under which the file is open now.

        Raises:
            OSError: it had to be opened again, and cannot be.
        """
        try:
            is_ours = _identity(self._descriptor) == self._identity
        except OSError:
            is_ours = False
        if not is_ours:
            self._open()
        return self._descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
