"""The runs that a collector keeps: files of launchers, checked and written below one folder.

A launcher owns the folders that it was first to send. A rank folder that another launcher owns becomes the next free
attempt, a node folder one with a number, as where launchers share a directory. `.collect.json` in each run says which
launcher sent what, so that a collector that was killed goes on where it was. Everything a launcher may send twice can
be sent twice: a byte has one place.
"""

import errno
import itertools
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtprof.launch.collector.sinks import LauncherCard
from dtprof.launch.run_gathering import launcher_file, merge_manifests, write_launcher
from dtprof.records import paths, run_facts, schema, writer
from dtprof.records.manifest import read_document
from dtprof.records.rank_log import archive
from dtprof.records.run_files import RUN_NAME, FileKind, kind_of

OF_LAUNCHER = ".collect-{}.json"
"""Of one launcher, by its number: what it has sent."""
DRAFT = ".collect-draft"
MOST_LAUNCHERS, MOST_FOLDERS = 4096, 4096
"""Of one run; and folders of one launcher."""
MOST_MANIFEST_BYTES = 1 << 20
MOST_PIECES_BYTES = 8 << 20
"""Of one request, once it is inflated."""
STALE_S = 120.0
"""After which a run that nobody sends to is not joined by its job's key alone: the next job may have the same."""
LEAST_FREE_BYTES = 256 << 20
RESCAN_S = 30.0
_PIECE_HEAD = 8


class Refusal(Exception):
    """A request cannot be served; the sentence goes to the launcher."""

    def __init__(self, status: int, sentence: str) -> None:
        """Give an HTTP status and the reason."""
        super().__init__(sentence)
        self.status = status


@dataclass(kw_only=True)
class SendingLauncher:
    """A launcher that sends its part of a run."""

    id: str
    host: str
    folders: dict[str, str] = field(default_factory=dict)  # as sent: as kept
    has_ended: bool = False
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class KeptRun:
    """A run that launchers send."""

    path: Path
    job: str | None
    launchers: dict[str, SendingLauncher] = field(default_factory=dict)
    heard_s: float = 0.0  # monotonic

    @property
    def is_open(self) -> bool:
        """Say whether a launcher of it has yet to end."""
        return any(not launcher.has_ended for launcher in self.launchers.values())

    first: str = ""  # the launcher whose manifest is that of the run

    def save(self, launcher: SendingLauncher) -> None:
        """Write what a launcher has sent, for the collector after this one."""
        # Whoever knows the number may send in the launcher's name.
        writer.write_json(self.path / OF_LAUNCHER.format(launcher.id), asdict(launcher), is_private=True)

    def in_order(self) -> list[SendingLauncher]:
        """Return the launchers that have a manifest, that of the lowest rank first."""
        return sorted((launcher for launcher in self.launchers.values() if launcher.manifest), key=_lowest_rank)


def read_opening(body: bytes) -> LauncherCard:
    """Read the request that opens a run.

    Raises:
        Refusal: it is not what a launcher sends.
    """
    try:
        row = json.loads(body)
        card = LauncherCard(
            launcher=str(row["launcher"]),
            name=str(row["name"]),
            is_named=bool(row["is_named"]),
            job=None if row.get("job") is None else str(row["job"])[:1000],
            joins=bool(row["joins"]),
            host=str(row["host"])[:255],
        )
        version = int(row["format"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refusal(400, "the opening cannot be read; expected that of a `dtprof run --collect`") from None
    if len(card.launcher) != 32 or not set(card.launcher) <= set("0123456789abcdef"):
        raise Refusal(400, "the launcher's number is not one of 32 hexadecimal digits")
    if not RUN_NAME.fullmatch(card.name):
        raise Refusal(
            400, f"{card.name!r} is no name for a run; expected letters, digits, dots, dashes: give another -o"
        )
    if version > schema.FORMAT_VERSION:
        raise Refusal(
            400,
            f"the run is of format {version}, this collector knows {schema.FORMAT_VERSION}: "
            "update dtprof where `dtprof collect` runs",
        )
    return card


class RunStore:
    """A folder of runs that launchers of other hosts send."""

    def __init__(self, folder: Path, *, max_bytes: int = 0) -> None:
        """Take up what a collector before this one has kept.

        Parameters:
            max_bytes: of all runs together; 0: as much as the disk holds.

        Raises:
            OSError: the folder cannot be made, read or written to.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):  # now, and not when the first job sends
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        self._runs: dict[str, KeptRun] = {}
        self._of: dict[str, KeptRun] = {}
        self._drafts = itertools.count()
        self._used = run_facts.disk_bytes(folder)
        self._scanned_s = time.monotonic()
        for path in sorted(folder.iterdir()):
            if path.name.startswith(f"{DRAFT}-") and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_symlink() and (path / paths.COLLECTED).is_file():
                self._take_up(path)

    def _take_up(self, path: Path) -> None:
        document = read_document(path / paths.COLLECTED)
        run = KeptRun(path=path, job=document.get("job"))
        for file in path.glob(OF_LAUNCHER.format("*")):
            try:
                launcher = SendingLauncher(**read_document(file))
            except TypeError:  # cut off while it was written
                continue
            run.launchers[launcher.id] = launcher
            self._of[launcher.id] = run
        # Its hosts may go on to come: a job that was heard of just now is not another one for a restart of ours.
        run.heard_s = time.monotonic() - max(0.0, time.time() - _last_written_s(path))
        self._runs[path.name] = run
        if run.is_open:
            self._tidy(run)

    @staticmethod
    def _tidy(run: KeptRun) -> None:
        """Remove what a killed collector was in the middle of: drafts, segments archived, folders of nobody."""
        claimed = {kept for launcher in run.launchers.values() for kept in launcher.folders.values()}
        for entry in run.path.iterdir():
            if entry.is_symlink() or not entry.is_dir():
                continue
            for file in entry.iterdir():
                if file.name.startswith(DRAFT) or (not paths.is_archive(file) and paths.archive_of(file).exists()):
                    file.unlink(missing_ok=True)
            if entry.name not in claimed:
                with suppress(OSError):  # not empty
                    entry.rmdir()

    # Openings

    def open(self, given: LauncherCard) -> tuple[str, dict[str, list[int]]]:
        """Return the name of the run that a launcher sends to, and size and time of each of its files.

        Raises:
            Refusal: the run is another job's, or there is no room.
        """
        run = self._of.get(given.launcher)
        if run is None or not run.path.is_dir():
            self.check_room(0)
            launcher = SendingLauncher(id=given.launcher, host=given.host)
            run = self._find_or_create(given, launcher)
            run.launchers[given.launcher] = launcher
            self._of[given.launcher] = run
        launcher = run.launchers[given.launcher]
        launcher.has_ended = False
        run.heard_s = time.monotonic()
        run.save(launcher)
        return run.path.name, dict(self._files(run, launcher))

    def _find_or_create(self, given: LauncherCard, launcher: SendingLauncher) -> KeptRun:
        if given.job is not None:
            for run in self._runs.values():
                is_live = run.is_open and time.monotonic() - run.heard_s < STALE_S
                if run.job == given.job and is_live and all(one.host != given.host for one in run.launchers.values()):
                    return self._with_room(run)
        known = self._runs.get(given.name)
        if known is not None and given.joins and known.is_open:
            return self._with_room(known)
        name = next(free for free in paths.numbered(given.name) if not os.path.lexists(self.folder / free))
        if given.is_named and name != given.name:
            raise Refusal(
                409,
                f"the collector holds a run {given.name} of another job; give another -o DIR, or --join on every host "
                "where it is one job of several hosts",
            )
        # Whole or not at all: a run without its launcher would be another job's, were the collector killed here.
        draft = KeptRun(path=self.folder / f"{DRAFT}-{launcher.id}", job=given.job)
        shutil.rmtree(draft.path, ignore_errors=True)
        draft.path.mkdir(mode=0o755)
        writer.write_json(draft.path / paths.COLLECTED, {"schema": 1, "job": given.job})
        draft.save(launcher)
        path = self.folder / name
        draft.path.rename(path)
        run = self._runs[name] = KeptRun(path=path, job=given.job)
        return run

    @staticmethod
    def _with_room(run: KeptRun) -> KeptRun:
        if len(run.launchers) >= MOST_LAUNCHERS:
            raise Refusal(409, f"{run.path.name} has {MOST_LAUNCHERS} launchers already, more than a run may have")
        return run

    @staticmethod
    def _files(run: KeptRun, launcher: SendingLauncher) -> Iterator[tuple[str, list[int]]]:
        for sent, kept in launcher.folders.items():
            try:
                entries = list(os.scandir(run.path / kept))
            except OSError:
                continue
            for entry in entries:
                if kind_of(kept, entry.name):
                    status = entry.stat(follow_symlinks=False)
                    yield f"{sent}/{entry.name}", [status.st_size, status.st_mtime_ns]

    # Files

    def target(self, id_: str, folder: str, file: str) -> tuple[Path, FileKind]:
        """Return where a file of a launcher goes, and how it grows; its folder is made.

        Raises:
            Refusal: nobody opened a run with this number, or the name is none of a run.
        """
        growth = kind_of(folder, file)
        if growth is None:
            raise Refusal(400, f"{folder[:80]!r}/{file[:80]!r} is no file of a run: nothing was written")
        run, launcher = self._known(id_)
        run.heard_s = time.monotonic()
        kept = launcher.folders.get(folder)
        if kept is None:
            if len(launcher.folders) >= MOST_FOLDERS:
                raise Refusal(400, f"more than {MOST_FOLDERS} folders of one launcher")
            kept = launcher.folders[folder] = self._claim(run, folder)
            run.save(launcher)
            if (ordered := run.in_order()) and ordered[0].id != run.first:
                self._write_manifest(run, run.launchers.values())  # another launcher has the lowest rank
        return run.path / kept / file, growth

    def _known(self, id_: str) -> tuple[KeptRun, SendingLauncher]:
        run = self._of.get(id_)
        if run is None or not run.path.is_dir():
            raise Refusal(404, "no run was opened with this number")
        return run, run.launchers[id_]

    @staticmethod
    def _claim(run: KeptRun, folder: str) -> str:
        parsed = paths.parse_rank_folder(folder)
        if parsed is not None:
            return writer.claim_rank_folder(run.path, *parsed)[0].name
        for name in paths.numbered(folder):
            with suppress(FileExistsError):
                (run.path / name).mkdir()
                break
        return name

    def check_room(self, nbytes: int) -> None:
        """Refuse what has no room.

        Raises:
            Refusal: the disk, or the space that the collector may take, is full.
        """
        if self._max_bytes and self._used + nbytes > self._max_bytes:
            if time.monotonic() - self._scanned_s > RESCAN_S:  # runs may have been removed meanwhile
                self._used, self._scanned_s = run_facts.disk_bytes(self.folder), time.monotonic()
            if self._used + nbytes > self._max_bytes:
                raise Refusal(
                    507, f"the collector is full: {self._max_bytes >> 20} MiB are used (dtprof collect --max-gb)"
                )
        if shutil.disk_usage(self.folder).free < nbytes + LEAST_FREE_BYTES:
            raise Refusal(507, "the disk of the collector is full")

    def append(self, target: Path, at: int, data: bytes) -> int:
        """Append to a file of lines; return its size. Bytes that are there already are passed over.

        Raises:
            Refusal: bytes before these are missing; with the size.
        """
        self.check_room(len(data))
        descriptor = _open(target)
        try:
            size = os.fstat(descriptor).st_size
            if at > size:
                raise Refusal(416, str(size))
            if at + len(data) > size:
                os.pwrite(descriptor, data[size - at :], size)
                self._used += at + len(data) - size
            return max(size, at + len(data))
        finally:
            os.close(descriptor)

    def write_pieces(self, target: Path, packed: bytes) -> None:
        """Write records into a segment, in the order given.

        Raises:
            Refusal: they are damaged, or lie outside a segment.
        """
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(packed, MOST_PIECES_BYTES)
        except zlib.error as error:
            raise Refusal(400, f"records of {target.name} are damaged ({error})") from None
        if inflater.unconsumed_tail or not inflater.eof:
            raise Refusal(400, f"records of {target.name} are cut short, or more than {MOST_PIECES_BYTES >> 20} MiB")
        pieces = list(_pieces(data, target.name))
        if paths.archive_of(target).exists():
            return  # complete
        self.check_room(len(data))
        descriptor = _open(target)
        try:
            if os.fstat(descriptor).st_size == 0:
                os.ftruncate(descriptor, schema.SEGMENT_SIZE)
            for at, piece in pieces:
                os.pwrite(descriptor, piece, at)
        finally:
            os.close(descriptor)
        self._used += len(data)

    def draft(self, target: Path) -> Path:
        """Return where a whole file is written to before it takes its place."""
        return target.with_name(f"{DRAFT}.{next(self._drafts)}.{target.name}")  # a request may be sent twice at once

    def put(self, draft: Path, target: Path, growth: FileKind, *, mtime_ns: int) -> None:
        """Let a whole file take its place, and remember the time of the version.

        Raises:
            Refusal: it is no archive where one is expected.
        """
        size = draft.stat().st_size
        before = target.stat().st_size if target.exists() else 0
        if growth is FileKind.ARCHIVE:
            _check_archive(draft)
            segment = target.with_suffix("")
            if segment.exists():
                _complete(segment, draft)
        if growth is not FileKind.LINES:  # those say when a host was last heard of, by the clock here
            os.utime(draft, ns=(mtime_ns, mtime_ns))
        draft.replace(target)
        if growth is FileKind.ARCHIVE:
            segment.unlink(missing_ok=True)
        self._used += size - before

    def delete(self, target: Path, growth: FileKind) -> None:
        """Remove what the launcher's host has dropped for want of room."""
        if growth in (FileKind.SEGMENT, FileKind.ARCHIVE, FileKind.WHOLE) and target.exists():
            self._used -= target.stat().st_blocks * 512
            target.unlink()

    # Manifests

    def put_manifest(self, id_: str, body: bytes) -> None:
        """Take the manifest of a launcher, and write that of the run.

        Raises:
            Refusal: it is no manifest.
        """
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or len(body) > MOST_MANIFEST_BYTES:
            raise Refusal(400, "the manifest is no JSON object")
        run, launcher = self._known(id_)
        launcher.manifest = document
        run.save(launcher)
        self._write_manifest(run, [launcher])

    def end(self, id_: str) -> None:
        """Note that a launcher has sent everything."""
        run, launcher = self._known(id_)
        launcher.has_ended = True
        run.save(launcher)
        self._write_manifest(run, [launcher])

    @staticmethod
    def _write_manifest(run: KeptRun, changed: Iterable[SendingLauncher]) -> None:
        """Write the manifest of the run, and the documents of launchers that have changed, or are the first no more."""
        launchers = run.in_order()
        if not launchers:
            return
        try:
            merged = merge_manifests([(one.host, one.manifest) for one in launchers], "collected from")
        except (TypeError, ValueError, AttributeError):
            raise Refusal(400, "the manifest is none that dtprof wrote") from None
        if not all(one.manifest.get("ended_realtime_ns") for one in launchers):
            merged |= {"ended_realtime_ns": 0, "exit_status": None}
        writer.write_json(run.path / paths.MANIFEST, merged)
        first_before, run.first = run.first, launchers[0].id
        for launcher in launchers:
            if launcher not in changed and launcher.id not in (first_before, run.first):
                continue
            kept = next((name for name in launcher.folders.values() if paths.is_node_folder(name)), None)
            if kept is None or not isinstance(launcher.manifest.get("launcher_pid"), int):
                continue
            file = launcher_file(run.path / kept, launcher.manifest)
            if launcher is launchers[0]:
                file.unlink(missing_ok=True)
            else:
                write_launcher(file, launcher.host, launcher.manifest)


def _last_written_s(run: Path) -> float:
    """Return when a launcher of a run was last heard of, by the clock of the file system."""
    newest_s = 0.0
    for pattern in (OF_LAUNCHER.format("*"), "node-*/samples.jsonl", "rank-*/events.*"):
        for file in run.glob(pattern):
            with suppress(OSError):
                newest_s = max(newest_s, file.stat().st_mtime)
    return newest_s


def _lowest_rank(launcher: SendingLauncher) -> tuple[int, str]:
    ranks = [found[0] for name in launcher.folders if (found := paths.parse_rank_folder(name))]
    return min(ranks, default=1 << 30), launcher.id


def _open(target: Path) -> int:
    return os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _pieces(data: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        at, length = (int.from_bytes(data[position + k : position + k + 4], "little") for k in (0, 4))
        position += _PIECE_HEAD
        piece = data[position : position + length]
        if len(piece) != length or at + length > schema.SEGMENT_SIZE:
            raise Refusal(400, f"records of {name} lie outside a segment")
        if at == 0 and piece[: len(schema.MAGIC)] != schema.MAGIC:
            raise Refusal(400, f"{name} does not begin as a segment does")
        position += length
        yield at, piece


def _check_archive(file: Path) -> None:
    """Refuse a file that is no whole archive, by the lengths of its columns; they are not inflated."""
    try:
        archive.check_lengths(file.read_bytes())
    except ValueError as error:
        raise Refusal(400, f"the archive is {error}") from None


def _complete(segment: Path, draft: Path) -> None:
    """Write what the archive holds into its segment: whoever follows that has it open."""
    try:
        data = archive.unpack(draft.read_bytes())
    except ValueError as error:
        raise Refusal(400, f"the archive is {error}") from None
    descriptor = _open(segment)
    try:
        os.pwrite(descriptor, data[schema.HEADER_SIZE :], schema.HEADER_SIZE)
        os.pwrite(descriptor, data[: schema.HEADER_SIZE], 0)
    finally:
        os.close(descriptor)
