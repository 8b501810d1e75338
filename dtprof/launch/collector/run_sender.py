"""Send the part of a run that lies on this host while the job writes it.

The files stay where they are: what is sent is a copy, so nothing is lost while the other end is away, and after either
end was gone the two are compared by size and time. Three kinds of files are sent in three ways. Whole files go when
they are new. Lines go from the offset that the other end has. Segments, whose records are completed in place, go twice:
while they are written, their new records and those of the newest MAX_OPEN that have changed since they were sent; and
once they are sealed, as the archive that the launcher makes of them, which takes the place of all that was sent before.
"""

import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dtprof import fence
from dtprof.launch.collector.sinks import (
    LauncherCard,
    Opened,
    Sink,
    SinkError,
    SinkFullError,
    SinkRefusedError,
    UnknownLauncherError,
)
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.records import paths, schema, writer
from dtprof.records.manifest import read_document
from dtprof.records.run_files import FileKind, kind_of

EVERY_S = 2.0
LONGEST_BACKOFF_S = 30.0
LAST_TRY_S = 30.0
"""How long the end of a job waits for what is still to be sent."""
OPEN_RECORDS = 4096
"""Of a segment that is still written to, how many behind the newest are looked at again: as followers do."""
LINES_BYTES = 1 << 20
PIECES_BYTES = 4 << 20
SHARE = 0.0005
"""Of a core a rank, that sending the newest records may take; more of it makes them come seldomer."""
LEVEL = 1


@dataclass(kw_only=True)
class _Tail:
    """What was sent of a segment that is still written to."""

    end: int = 0  # records sent
    first: int = 0  # of those kept for comparison
    kept: bytes = b""
    header: bytes = b""


@dataclass(kw_only=True)
class _Known:
    """What the other end has."""

    size: int
    mtime_ns: int
    inode: int = 0


@dataclass(kw_only=True)
class SendProgress:
    """How far sending has come."""

    name: str = ""  # of the run at the other end
    is_complete: bool = False
    trouble: str = ""  # why not
    sent_bytes: int = 0


class RunSender:
    """Sends a run directory to a sink; knows what was sent."""

    def __init__(self, root: Path, sink: Sink, card: LauncherCard) -> None:
        """Prepare; nothing is sent yet."""
        self.root = root
        self.progress = SendProgress()
        self.deadline_s = float("inf")
        """Monotonic time after which nothing more is sent."""
        self._sink, self._card = sink, card
        self._opened: Opened | None = None
        self._known: dict[str, _Known] = {}
        self._tails: dict[str, _Tail] = {}
        self._manifest: tuple[int, int] = (0, 0)
        self._tail_at_s = 0.0

    def sync(self, *, is_last: bool = False) -> None:
        """Send what is new.

        Parameters:
            is_last: nothing is written any more: what is left of segments goes, too.

        Raises:
            SinkError: not all could be sent.
            SinkRefusedError: the other end takes none of it.
            OSError: a file here cannot be read.
        """
        try:
            self._sync(is_last=is_last)
        except UnknownLauncherError:
            self._opened = None
            self._sync(is_last=is_last)

    def _sync(self, *, is_last: bool) -> None:
        if self._opened is None:
            self._open()
        self._send_manifest()
        sends_tails = is_last or time.monotonic() >= self._tail_at_s
        began_s = time.thread_time()
        present: set[str] = set()
        num_ranks = 0
        for folder in sorted(self.root.iterdir()):
            if not folder.is_dir() or folder.is_symlink():
                continue
            num_ranks += paths.parse_rank_folder(folder.name) is not None
            present |= self._send_folder(folder, sends_tails=sends_tails, is_last=is_last)
        if sends_tails:
            cost_s = time.thread_time() - began_s
            self._tail_at_s = time.monotonic() + max(self._sink.tail_every_s, cost_s / (SHARE * max(1, num_ranks)))
        for name in [name for name in self._known if name not in present]:
            self._forget(name)
        if is_last:
            self._send_manifest()
            self._sink.end()
            self.progress.is_complete = True

    def _open(self) -> None:
        opened = self._opened = self._sink.open(self._card)
        self.progress.name = opened.name
        self._tails = {}
        before, self._known = self._known, {}
        for name, (size, mtime_ns) in opened.files.items():
            known = before.get(name)
            self._known[name] = _Known(size=size, mtime_ns=mtime_ns, inode=known.inode if known else 0)
        self._manifest = (0, 0)

    def _send_manifest(self) -> None:
        file = self.root / paths.MANIFEST
        try:
            status = file.stat()
            if (status.st_mtime_ns, status.st_ino) != self._manifest:
                self._sink.put_manifest(file.read_bytes())
                self._manifest = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            return

    def _send_folder(self, folder: Path, *, sends_tails: bool, is_last: bool) -> set[str]:
        """Send what is new in a folder; return the names of what there is."""
        files: dict[str, tuple[FileKind, os.stat_result]] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                growth = kind_of(folder.name, entry.name)
                if growth is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        files[entry.name] = (growth, entry.stat(follow_symlinks=False))
        present = set()
        tails: list[tuple[str, bytes]] = []
        for file, (growth, _) in sorted(files.items()):
            name = f"{folder.name}/{file}"
            present.add(name)
            if growth is FileKind.SEGMENT and (is_last or not self._appends):
                present.add(f"{name}.z")
                if sends_tails:
                    self._send_rest(name)
            elif growth is FileKind.SEGMENT and sends_tails:
                tails += self._new_records(name)
                if sum(len(packed) for _, packed in tails) > PIECES_BYTES:  # of many ranks: memory stays bounded
                    self._send_strings(folder, files)
                    self._send_tails(tails)
                    tails = []
        for file, (growth, status) in sorted(files.items()):
            name = f"{folder.name}/{file}"
            with suppress(FileNotFoundError):  # dropped or archived since the folder was listed
                if growth is FileKind.LINES and self._appends:
                    self._send_lines(name)
                elif growth is not FileKind.SEGMENT and (growth is not FileKind.LINES or sends_tails):
                    self._send_whole(name, status)
        # An id is written before it is used: names go before the records that were read before them.
        self._send_tails(tails)
        return present

    @property
    def _appends(self) -> bool:
        return self._opened is not None and self._opened.appends

    def _send_strings(self, folder: Path, files: "dict[str, tuple[FileKind, os.stat_result]]") -> None:
        if paths.STRINGS in files:
            self._send_lines(f"{folder.name}/{paths.STRINGS}")

    def _send_whole(self, name: str, status: os.stat_result) -> None:
        known = self._known.get(name)
        # Nothing is written to an archive: its size is enough where the other end does not know the version.
        if (
            known is not None
            and known.size == status.st_size
            and (known.mtime_ns == status.st_mtime_ns or (known.mtime_ns < 0 and name.endswith(".z")))
        ):
            return
        self._sink.put(name, self.root / name, mtime_ns=status.st_mtime_ns)
        self._count(status.st_size)
        self._known[name] = _Known(size=status.st_size, mtime_ns=status.st_mtime_ns)
        if name.endswith(".z"):
            self._tails.pop(name.removesuffix(".z"), None)
            self._known.pop(name.removesuffix(".z"), None)

    def _send_lines(self, name: str) -> None:
        with (self.root / name).open("rb") as stream:
            status = os.fstat(stream.fileno())
            known = self._known.get(name)
            is_rewritten = known is not None and (
                status.st_size < known.size
                or (known.inode != status.st_ino and (known.inode or name.endswith("samples.jsonl")))
            )
            if is_rewritten:  # the older half of its lines was thinned out
                data = stream.read()
                self._sink.put(name, data, mtime_ns=status.st_mtime_ns)
                self._known[name] = _Known(size=len(data), mtime_ns=status.st_mtime_ns, inode=status.st_ino)
                self._count(len(data))
                return
            at = known.size if known is not None else 0
            while at < status.st_size:
                stream.seek(at)
                data = stream.read(LINES_BYTES)
                if not data:
                    break
                at = self._sink.append(name, at, data)
                self._count(len(data))
                self._known[name] = _Known(size=at, mtime_ns=0, inode=status.st_ino)

    # Segments that are still written to

    def _new_records(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield what has changed in a segment since it was sent, packed."""
        tail = self._tails.setdefault(name, _Tail())
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            header = os.pread(descriptor, schema.HEADER_SIZE, 0)
            end = _num_records(header)
            if end is None:
                return  # it was made, and has no header yet
            first = max(0, min(tail.end, end) - OPEN_RECORDS)
            data = os.pread(descriptor, (end - first) * schema.RECORD_SIZE, _place(first))
        finally:
            os.close(descriptor)
        pieces = list(_changed(data, first, tail))
        if not pieces and header == tail.header:
            return
        for position in range(0, max(1, len(pieces)), 64):
            part = pieces[position : position + 64]
            parts = [piece(at, records) for at, records in part]
            if position + 64 >= len(pieces):
                parts.append(piece(0, header))  # last: it says how many there are
            yield name, zlib.compress(b"".join(parts), LEVEL)
        keep = max(first, end - OPEN_RECORDS)
        self._tails[name] = _Tail(end=end, first=keep, kept=data[(keep - first) * schema.RECORD_SIZE :], header=header)

    def _send_tails(self, tails: list[tuple[str, bytes]]) -> None:
        try:
            for name, packed in tails:
                self._sink.patch(name, packed)
                self._count(len(packed))
                self._known.setdefault(name, _Known(size=schema.SEGMENT_SIZE, mtime_ns=0))
        except (SinkError, SinkRefusedError):
            for name, _ in tails:  # which of them arrived is not known
                self._tails.pop(name, None)
            raise

    def _send_rest(self, name: str) -> None:
        """Send a segment as it is at the end of the job, as an archive."""
        from dtprof.records.rank_log import archive

        file = self.root / name
        try:
            status = file.stat()
            data = file.read_bytes()
        except FileNotFoundError:
            return
        num_records = _num_records(data)
        if num_records is None:
            return
        packed = archive.pack(data[: _place(num_records)])
        self._sink.put(f"{name}.z", packed, mtime_ns=status.st_mtime_ns)
        self._count(len(packed))
        self._known[f"{name}.z"] = _Known(size=len(packed), mtime_ns=status.st_mtime_ns)
        self._known.pop(name, None)
        self._tails.pop(name, None)

    def _forget(self, name: str) -> None:
        """Remove at the other end what is gone here: dropped for want of room, or replaced by its archive."""
        growth = kind_of(*name.split("/", 1))
        if growth in (FileKind.SEGMENT, FileKind.ARCHIVE, FileKind.WHOLE) and f"{name}.z" not in self._known:
            self._sink.delete(name)
        self._known.pop(name, None)
        self._tails.pop(name, None)

    def _count(self, nbytes: int) -> None:
        self.progress.sent_bytes += nbytes
        if time.monotonic() > self.deadline_s:
            raise SinkError("the link is too slow for the rest")


class CollectThread:
    """A thread of the launcher that sends the run while the job goes on."""

    def __init__(self, sender: RunSender, *, run: Path, say: Callable[[str], None], target: str) -> None:
        """Begin.

        Parameters:
            run: where the run will lie. It holds from the first on who sends it: another process sends the rest
                under the same number where this one is killed.
        """
        self._sender, self._say, self._target = sender, say, target
        keep_state(run, sender, target)
        self._reported: set[str] = set()
        self._refused = False
        self._thread = LauncherThread(self._work, "collect", niceness=NICENESS)
        self._thread.start()

    def finish(self, run: Path, *, limit_s: float = LAST_TRY_S) -> None:
        """Send the rest, now that the job has ended, and say where it lies or what is missing.

        Parameters:
            run: where the run lies now.
        """
        self._thread.stop(limit_s)
        fence.fenced("the end of the run", "is not sent")(self._finish)(run, limit_s)

    def _finish(self, run: Path, limit_s: float) -> None:
        sender = self._sender
        sender.root = run
        deadline_s, wait_s = time.monotonic() + limit_s, 0.5
        sender.deadline_s = deadline_s
        while not self._refused and not self._thread.is_alive():
            if self._try(is_last=True):
                keep_state(run, sender, self._target)
                self._say(f"collected as {sender.progress.name} by {self._target}")
                return
            if not sender.progress.name or time.monotonic() + wait_s > deadline_s:
                break  # it was never reached: nobody waits for it
            time.sleep(wait_s)
            wait_s *= 2
        keep_state(run, sender, self._target)
        self._say(
            f"{self._target} has not got all of the run ({sender.progress.trouble}): it is kept in {run}; "
            f"send the rest with: dtprof collect --send {run}"
        )

    @fence.fenced("sending of this run to the collector", "has ended: it is kept here")
    def _work(self) -> None:
        wait_s = EVERY_S
        while not self._thread.ended.wait(wait_s) and not self._refused:
            wait_s = EVERY_S if self._try(is_last=False) else min(LONGEST_BACKOFF_S, 2 * wait_s)

    def _try(self, *, is_last: bool) -> bool:
        progress = self._sender.progress
        try:
            self._sender.sync(is_last=is_last)
        except SinkRefusedError as error:
            self._refused = True
            progress.trouble = str(error)
            self._tell("refused", f"{self._target} refuses this run ({error}): it is kept here, the job goes on")
        except SinkFullError as error:
            progress.trouble = str(error)
            self._tell("full", f"{error}: the run is kept here and sent once there is room; the job goes on")
        except SinkError as error:
            progress.trouble = str(error)
            self._tell("away", f"{error}: the run is kept here and sent once it can be; the job goes on")
        except OSError as error:
            progress.trouble = str(error)
        else:
            progress.trouble = ""
            return True
        return False

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(text)


def new_card(run: Path, *, is_named: bool, job: str | None, joins: bool, host: str) -> LauncherCard:
    """Return what a launcher says of itself; the number that it chose lies in the run, for those who send the rest."""
    state = read_document(run / paths.SENT)
    launcher = state.get("launcher")
    return LauncherCard(
        launcher=launcher if isinstance(launcher, str) else secrets.token_hex(16),
        name=str(state.get("name") or run.name),
        is_named=is_named,
        job=job,
        joins=joins,
        host=host,
    )


def keep_state(run: Path, sender: RunSender, target: str) -> None:
    """Keep in the run who sends it where, and whether all of it has arrived."""
    card = sender._card
    document = {**card.document(), "target": target, "is_complete": sender.progress.is_complete}
    with suppress(OSError):
        writer.write_json(run / paths.SENT, document, is_private=True)  # whoever knows the number may send in its name


def _num_records(segment: bytes) -> int | None:
    """Return how many records a segment holds, from its header; None where it has none yet."""
    if segment[: len(schema.MAGIC)] != schema.MAGIC:
        return None
    head = int.from_bytes(segment[schema.HEADER_OFFSET["head"] :][:8], "little")
    return min(head, schema.SEGMENT_CAPACITY)


def _place(record: int) -> int:
    return schema.HEADER_SIZE + record * schema.RECORD_SIZE


def piece(at: int, data: bytes) -> bytes:
    """Return bytes of a segment with their place, as a body holds one after the other."""
    return at.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


def _changed(data: bytes, first: int, tail: _Tail) -> Iterator[tuple[int, bytes]]:
    """Yield place and bytes of the records that differ from what was sent, runs of them together."""
    import numpy as np

    size = schema.RECORD_SIZE
    new = np.frombuffer(data, np.uint64).reshape(-1, size // 8)
    differs = np.ones(len(new), np.bool_)
    sent = np.frombuffer(tail.kept, np.uint64).reshape(-1, size // 8)
    skip = max(0, first - tail.first)
    both = min(len(sent) - skip, len(new))
    if tail.end and both > 0:
        differs[:both] = (new[:both] != sent[skip : skip + both]).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], differs.view(np.int8), [0]])))
    for begin, end in edges.reshape(-1, 2).tolist():
        for at in range(begin, end, 8192):
            stop = min(end, at + 8192)
            yield _place(first + at), data[at * size : stop * size]
