"""Keep the metrics of a node in a file, which the textfile collector of Prometheus' node exporter reads."""

import contextlib
import os
from pathlib import Path


class MetricsFile:
    """A file that holds the newest text, whole at any moment, until it is removed."""

    def __init__(self, path: Path) -> None:
        """Make sure that it can be written.

        Raises:
            OSError: it cannot.
        """
        self._path = path
        self._draft = path.with_name(f".{path.name}.{os.getpid()}")
        self._write(b"")

    def show(self, text: bytes) -> None:
        """Hold this from now on; a disk that is full for a while leaves the file as it was."""
        with contextlib.suppress(OSError):
            self._write(text)

    def remove(self) -> None:
        """Remove the file: a job that has ended must not look alive."""
        for path in (self._path, self._draft):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _write(self, text: bytes) -> None:
        self._draft.write_bytes(text)
        self._draft.chmod(0o644)
        self._draft.replace(self._path)
