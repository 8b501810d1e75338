"""Runs at a URL that fsspec can read: the needed files are copied to the user's cache folder.

A file is fetched again when its size or its stamp at the source has changed. A copy that was not used for KEPT_S goes
when another run is fetched. Several processes may fetch into one copy.

fsspec lists and transfers; its caching file systems do not serve here. They keep files flat: with `same_names` the
files of all ranks share one name (`events.0`), else the names are not those that the reader of a run folder expects.
And they ask the source for each file again (measured with fsspec's memory file system: 2 requests a file that is
current), where one listing answers for all.
"""

import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtprof.errors import MissingDependencyError, NotARunError, OutputError, UsageError
from dtprof.records import paths
from dtprof.records.file_copies import dig_hole

LOCAL = ("file", "local")
KEPT_S = 7 * 86_400
LEFT_OUT = re.compile(r"trace/.*|report\.html|.*\.part")
"""Files of a run that no command reads."""
STAMPS = ("ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "last_modified", "updated", "created")
"""Keys under which file systems report a file's version; the first one present counts."""
_URL = re.compile(r"(?P<chain>(?:[a-z0-9+]+::)*)(?P<scheme>[a-z][a-z0-9+]+):/+(?P<rest>.*)", re.DOTALL)


def url_of(path: Path) -> str | None:
    """Return the URL that was given in place of a path, None for a path. A Path folds the slashes of a URL."""
    match = _URL.fullmatch(str(path))
    if match is None or (match["scheme"] in LOCAL and not match["chain"]) or path.exists():
        return None
    slashes = "///" if match["scheme"] in LOCAL else "//"
    return f"{match['chain']}{match['scheme']}:{slashes}{match['rest']}"


def plain(path: Path) -> Path:
    """Return the path that a `file://` URL names, any other as it is."""
    match = _URL.fullmatch(str(path))
    return Path("/", match["rest"]) if match and match["scheme"] in LOCAL and not match["chain"] else path


def shown(url: str) -> str:
    """Return a URL without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def named(path: Path) -> str:
    """Return how a path, or the URL that was given in its place, is named to the user."""
    url = url_of(path)
    return str(plain(path)) if url is None else shown(url)


def folder_here(path: Path, *, purpose: str) -> Path:
    """Return the folder of a path or a `file://` URL, for commands that cannot use a copy.

    Raises:
        UsageError: it is another URL.
    """
    if url_of(path) is not None:
        raise UsageError(
            f"{named(path)} is a URL, and {purpose}: expected a run directory of this machine. "
            f"What lies at the URL by now: dtprof summary {shlex.quote(named(path))}"
        )
    return plain(path)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file at the source."""

    name: str  # below the run
    size: int | None
    stamp: str | None  # changes with the file; None: the source does not tell


@dataclass(frozen=True, kw_only=True)
class RemoteFiles:
    """Files below a URL, and where their copies lie on this machine."""

    url: str
    root: str  # the URL without what names the file system
    files: Mapping[str, tuple[RemoteFile, ...]]  # by the folder of the run; a file of its own by its name
    is_file: bool = False  # the URL names one file

    @property
    def place(self) -> Path:
        """The folder of the copy."""
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return cache_folder() / digest / (self.url.rstrip("/").rpartition("/")[2] or "run")

    def of(self, folders: Iterable[str]) -> "RemoteFiles":
        """Return the files of some of the folders of the run."""
        return replace(self, files={name: self.files[name] for name in folders if name in self.files})

    def of_ranks(self, *, are_wanted: bool) -> "RemoteFiles":
        """Return the files in folders of ranks, or all others."""
        return self.of(name for name in self.files if (paths.parse_rank_folder(name) is not None) == are_wanted)

    def fetch(self) -> Path:
        """Bring the copies of the files up to date and return their folder.

        Raises:
            MissingDependencyError: a package that the URL needs is not installed.
            NotARunError: the source cannot be read.
        """
        place = self.place
        stale = [file for files in self.files.values() for file in files if not _is_current(place / file.name, file)]
        if stale:
            with _translated(self.url):
                file_system = _open(self.url)[0]
                drafts = {file: place / f"{file.name}.{os.getpid()}.part" for file in stale}
                for draft in drafts.values():
                    draft.parent.mkdir(parents=True, exist_ok=True)
                _get(file_system, {f"{self.root}/{file.name}": draft for file, draft in drafts.items()})
                for file, draft in drafts.items():
                    if draft.exists():
                        _sign(draft, file)
                        draft.replace(place / file.name)
        return place


def find_files(url: str) -> RemoteFiles:
    """List the files below a URL.

    Raises:
        MissingDependencyError: fsspec is not installed, or a package for this kind of URL.
        NotARunError: there is nothing, or it cannot be read.
        OutputError: there is no place for copies.
    """
    with _translated(url):
        file_system, root = _open(url)
        root = str(root).rstrip("/")
        found = file_system.find(root, detail=True)
        if not found:
            _ask(file_system, root)
    if is_file := list(found) == [root]:
        root = root.rpartition("/")[0]  # a file
    files: dict[str, tuple[RemoteFile, ...]] = {}
    for name, info in sorted(found.items()):
        name = name.removeprefix(root).lstrip("/")
        # Keys of a bucket can be anything: also a path that leads out of the copy, or the mark of a folder.
        if name and name[-1] != "/" and ".." not in name.split("/") and not LEFT_OUT.fullmatch(name):
            head = name.partition("/")[0]
            files[head] = (*files.get(head, ()), _describe(name, info))
    if not files:
        raise NotARunError(f"{shown(url)} does not exist, or is empty; expected a run directory")
    remote = RemoteFiles(url=url, root=root, files=files, is_file=is_file)
    try:
        _make_room(remote.place)
        _forget_others(remote)
    except OSError as error:
        raise OutputError(
            f"{cache_folder()} cannot be written to ({error.strerror}), where a copy of the run would lie: "
            "set DTPROF_CACHE_DIR to a folder that can"
        ) from error
    return remote


def _forget_others(remote: RemoteFiles) -> None:
    """Delete copies of files that are no longer at the source."""
    for entry in remote.place.iterdir():
        if entry.name not in remote.files and entry.is_file() and entry.suffix != ".part":
            entry.unlink(missing_ok=True)
        elif entry.name not in remote.files:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_dir():
            kept = {file.name for file in remote.files[entry.name]}
            for copy in entry.iterdir():
                if f"{entry.name}/{copy.name}" not in kept and copy.is_file() and copy.suffix != ".part":
                    copy.unlink(missing_ok=True)


def fetch(path: Path) -> Path:
    """Return the path, or where the copy lies of what is at the URL that was given in its place.

    Raises:
        MissingDependencyError, NotARunError: it cannot be fetched.
    """
    url = url_of(path)
    return plain(path) if url is None else find_files(url).fetch()


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {shown(url)} needs a package that is not installed ({error}): pip install 'dtprof[remote]'"
        ) from error
    found: tuple[Any, str] = url_to_fs(url)
    return found


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Translate an error of a file system into our words; other errors pass."""
    try:
        yield
    except MissingDependencyError:
        raise
    except ImportError as error:
        raise MissingDependencyError(f"reading {shown(url)} needs one more package: {error}") from error
    except FileNotFoundError as error:
        raise NotARunError(f"{shown(url)} does not exist; expected a run directory") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip(": ")
        raise NotARunError(
            f"{shown(url)} cannot be read ({said}); expected a run directory that fsspec can open"
        ) from error


def _ask(file_system: Any, root: str) -> None:
    """Raise why nothing is found at a path where that is not for want of it: a search passes over what fails."""
    with suppress(FileNotFoundError):
        file_system.ls(root, detail=False)


def _describe(name: str, info: dict[str, Any]) -> RemoteFile:
    size = info.get("size")
    stamp = next((str(info[key]) for key in STAMPS if info.get(key) is not None), None)
    return RemoteFile(name=name, size=size if isinstance(size, int) else None, stamp=stamp)


def _get(file_system: Any, wanted: dict[str, Path]) -> None:
    """Fetch files, at once where the file system can; those that went away meanwhile are left out."""
    try:
        file_system.get(list(wanted), [str(draft) for draft in wanted.values()])
    except FileNotFoundError:  # archived or dropped since they were listed: the job runs
        for source, draft in wanted.items():
            try:
                file_system.get_file(source, str(draft))
            except FileNotFoundError:
                draft.unlink(missing_ok=True)


def _sign(copy: Path, source: RemoteFile) -> None:
    """Note in the time of the copy which version it is: it goes with the file, whoever writes it."""
    dig_hole(copy, name=Path(source.name).name)
    if source.stamp is not None:
        signature = _signature(source)
        os.utime(copy, ns=(signature, signature))


def _is_current(copy: Path, source: RemoteFile) -> bool:
    if source.stamp is None:
        return False
    try:
        status = copy.stat()
    except OSError:
        return False
    return status.st_mtime_ns == _signature(source) and source.size in (None, status.st_size)


def _signature(source: RemoteFile) -> int:
    """Return a number of 60 bits, as nanoseconds a time before 2007, that tells versions of a file apart."""
    return int.from_bytes(hashlib.sha256(f"{source.size} {source.stamp}".encode()).digest()[:8], "big") >> 4


def cache_folder() -> Path:
    try:
        given = os.environ.get("DTPROF_CACHE_DIR")
        base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtprof"
    except RuntimeError:  # a user without a home folder, as in a container
        import tempfile

        base = Path(tempfile.gettempdir()) / f"dtprof-{os.getuid()}"
    return base / "runs"


def _make_room(place: Path) -> None:
    """Note that a copy is in use, and delete those that were not for long."""
    place.mkdir(parents=True, exist_ok=True)
    os.utime(place.parent)
    for other in place.parent.parent.iterdir():
        try:
            if time.time() - other.stat().st_mtime > KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
        except OSError:  # another process was first
            continue
