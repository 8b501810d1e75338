"""Files that stay open in the job under descriptors that the job may close and reuse."""

import os
from pathlib import Path


class ReopenedFile:
    """A file that is opened again after a program closed all descriptors, as daemons do."""

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
        """Return the descriptor of the file, opened again if need be.

        Raises:
            OSError: it cannot be opened again.
        """
        try:
            is_open = _identity(self._descriptor) == self._identity
        except OSError:
            is_open = False
        if not is_open:
            self._open()
        return self._descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
