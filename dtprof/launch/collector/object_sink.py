"""Send a run to object storage, or any file system that fsspec knows.

Objects are replaced whole and cannot be appended to, so what grows is sent seldomer: lines as the whole file, a segment
that is still written to as an archive of what it holds. Several hosts write below one URL: the first of a job is the
one whose manifest is the run's, the others appear as launchers that have joined it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtprof.errors import MissingDependencyError, UsageError
from dtprof.launch.collector.sinks import LauncherCard, Opened, SinkError, SinkRefusedError
from dtprof.records import paths, remote
from dtprof.records.run_files import kind_of

EVERY_S = 30.0
MOST_NAMES = 1000
UNKNOWN_VERSION = -1


class ObjectSink:
    """A folder of runs at a URL."""

    def __init__(self, url: str) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            MissingDependencyError: fsspec, or what it needs for the URL, is not installed.
            UsageError: fsspec does not know the URL.
        """
        self.tail_every_s = EVERY_S
        self._url = url
        try:
            import fsspec

            is_local = url.partition("://")[0] in remote.LOCAL
            self._files, root = fsspec.core.url_to_fs(url, **({"auto_mkdir": True} if is_local else {}))
        except ImportError as error:
            raise MissingDependencyError(
                f"--collect {remote.shown(url)} needs a package that is not installed ({error}): pip install "
                "'dtprof[remote]' and what fsspec needs for the URL"
            ) from error
        except (ValueError, OSError) as error:
            raise UsageError(f"--collect is {remote.shown(url)!r}, which fsspec does not know ({error})") from error
        self._root = str(root).rstrip("/")
        self._place = ""
        self._joined = ""  # the node folder, of a launcher whose manifest is not that of the run

    def open(self, card: LauncherCard) -> Opened:
        """Begin, or go on after this launcher was gone."""
        with self._translated():
            name = self._claim(card)
            self._place = f"{self._root}/{name}"
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.find(self._place, detail=True)
        files = {}
        for path, row in found.items():
            sent = path[len(self._place) :].lstrip("/") if path.startswith(self._place) else ""
            folder, _, file = sent.partition("/")
            if kind_of(folder, file):
                files[sent] = (int(row.get("size") or 0), UNKNOWN_VERSION)
        # Of what other launchers have sent nothing is known, and nothing is removed.
        return Opened(name=name, files={} if self._joined else files, appends=False)

    def _claim(self, card: LauncherCard) -> str:
        for number in range(1, MOST_NAMES):
            name = card.name if number == 1 else f"{card.name}-{number}"
            mark = f"{self._root}/{name}/{paths.COLLECTED}"
            self._files.invalidate_cache()
            if not self._files.exists(mark):
                if self._files.exists(f"{self._root}/{name}/{paths.MANIFEST}"):
                    owner: dict[str, Any] = {}
                else:
                    self._files.pipe_file(mark, json.dumps({"launcher": card.launcher, "job": card.job}).encode())
                    return name
            else:
                owner = json.loads(self._files.cat_file(mark))
            if owner.get("launcher") == card.launcher:
                return name
            if card.joins or (card.job is not None and owner.get("job") == card.job):
                self._joined = paths.node_folder_name(card.host)
                return name
            if card.is_named:
                break
        raise SinkRefusedError(
            f"{remote.shown(self._url)} holds a run {card.name} of another job; give another -o DIR, or --join on "
            "every host where it is one job of several hosts"
        )

    def put(self, name: str, data: bytes | Path, *, mtime_ns: int) -> None:
        """Send a whole file."""
        del mtime_ns  # objects keep the time at which they were written
        with self._translated():
            body = data if isinstance(data, bytes) else data.read_bytes()
            self._files.pipe_file(f"{self._place}/{name}", body)

    def put_manifest(self, data: bytes) -> None:
        """Send the manifest of the launcher."""
        if not self._joined:
            self.put(paths.MANIFEST, data, mtime_ns=0)
            return
        pid = json.loads(data).get("launcher_pid")
        self.put(f"{self._joined}/launcher-{pid if isinstance(pid, int) else 0}.json", data, mtime_ns=0)

    def append(self, name: str, at: int, data: bytes) -> int:
        """Objects cannot be appended to."""
        raise NotImplementedError

    def patch(self, name: str, packed: bytes) -> None:
        """Objects cannot be changed in place."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Remove a file."""
        with self._translated():
            if self._files.exists(f"{self._place}/{name}"):
                self._files.rm_file(f"{self._place}/{name}")

    def end(self) -> None:
        """Say that everything was sent: nothing waits for it."""

    def close(self) -> None:
        """Let go of connections: fsspec keeps its own."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (SinkError, SinkRefusedError):
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            raise SinkError(
                f"{remote.shown(self._url)} cannot be written to ({type(error).__name__}: {text})"
            ) from error
