"""Flight Recorder dumps of any torch 2.x, pickle or JSON, as tables; their format belongs to torch.

The dumps come from elsewhere: nothing of them is executed, and of every field only the expected type is taken.
"""

import gc
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtprof.dumps import NO_LABEL, Dump, DumpGroup, Labels, Pending, Track
from dtprof.errors import NotADumpError
from dtprof.importers.dump_fields import MAX_SEQ, MAX_TEXT, first_text, integer, numel, parse_name, rank_numbers, text
from dtprof.importers.plain_pickle import PlainPickleError, read_plain_pickle
from dtprof.tables import Site

MAX_FILE_BYTES = 1 << 30
MAX_NAMES = 10_000
MAX_GAP = 1 << 16
"""Positions between two entries of one group above which the older ones are let go."""

DONE_WHEN_RETIRED = {"gloo", "mpi", "ucc"}
"""Back ends that give no events: their entries stay scheduled, and are retired when they end."""
_NOT_USERS = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|^<|/dtprof/(capture|marks|auto)|"
    r"(^|/)torch/(_|autograd|csrc|distributed|fx|multiprocessing|nn|optim|utils)"
)


def looks_like_dump(head: bytes) -> bool:
    """Say whether a file that begins so may be a dump: a pickle of protocol 2 or later, or JSON with its keys."""
    if head[:1] == b"\x80":
        return True
    is_json = re.match(rb'\s*(\[\s*)?\{\s*"', head) is not None
    return is_json and any(key in head for key in (b'"entries"', b'"pg_config"', b'"pg_status"', b'"profiling_name"'))


def read_dump(path: Path, labels: Labels, *, is_user: Callable[[str], bool] | None = None) -> Dump:
    """Read one rank's dump.

    Raises:
        NotADumpError: the file cannot be read, or holds something else.
    """
    try:
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise NotADumpError(
                f"{path} has {status.st_size >> 20} MiB; expected a Flight Recorder dump of at most "
                f"{MAX_FILE_BYTES >> 20} MiB. Record fewer operations (TORCH_FR_BUFFER_SIZE)."
            )
        data = path.read_bytes()
    except OSError as error:
        raise NotADumpError(f"{path} cannot be read: {error.strerror}. Give a file that you may read.") from None
    return dump_from(data, path, labels, written_ns=status.st_mtime_ns, is_user=is_user)


def dump_from(
    data: bytes, path: Path, labels: Labels, *, written_ns: int, is_user: Callable[[str], bool] | None = None
) -> Dump:
    """Read what a file holds.

    Raises:
        NotADumpError: it is something else.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # millions of small containers that live until the end: looking at them again and again is in vain
    try:
        return _Reading(path, labels, is_user or is_user_file).dump(read_document(path, data), written_ns)
    finally:
        if was_enabled:
            gc.enable()


def is_user_file(path: str) -> bool:
    """Say whether a frame lies in the user's own code: Python, not torch, not dtprof, not installed."""
    return path.endswith(".py") and _NOT_USERS.search(path) is None


def read_document(path: Path, data: bytes) -> dict[str, Any]:
    """Return what the file holds, entries at the least.

    Raises:
        NotADumpError: it is no dump.
    """
    found: Any
    try:
        found = json.loads(data) if data.lstrip()[:1] in (b"{", b"[") else read_plain_pickle(data)
    except PlainPickleError as error:
        raise NotADumpError(
            f"{path} is no Flight Recorder dump: as a pickle, {error}. Expected the file that torch wrote "
            "(TORCH_NCCL_DEBUG_INFO_TEMP_FILE), whole; copy it again."
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error)[:100] or type(error).__name__
        raise NotADumpError(
            f"{path} is no Flight Recorder dump: as JSON, {reason}. Expected the file that torch wrote; copy it again."
        ) from None
    if isinstance(found, list) and found and isinstance(found[0], dict):
        found = {"entries": found, "version": "1"}
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        keys = ", ".join(str(key)[:30] for key in list(found)[:5] if isinstance(key, str)) if _is_dict(found) else ""
        held = f"a dictionary with keys {keys or 'of its own'}" if _is_dict(found) else f"a {type(found).__name__}"
        raise NotADumpError(
            f"{path} holds {held}; expected a Flight Recorder dump with `entries`. "
            "Give the files that torch wrote, one for each rank."
        )
    return found


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


class _Reading:
    """One file on its way to a Dump."""

    def __init__(self, path: Path, labels: Labels, is_user: Callable[[str], bool]) -> None:
        self._path = path
        self._labels = labels
        self._is_user = is_user
        self._user_files: dict[str, bool] = {}
        self._ops: dict[str, tuple[str, bool, tuple[int, int] | None]] = {}
        self._sites: dict[int, Site | None] = {}
        self._equal_sites: dict[tuple[str, int, str], Site] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._tracks: dict[str, tuple[int, array[int]]] = {}
        self._sequence = array("i")
        self._pending: list[Pending] = []
        self._issued: dict[str, int] = {}
        self._group_names: dict[int, str] = {}
        self._descriptions: dict[str, str] = {}
        self._p2p_groups: set[str] = set()
        self._done: dict[tuple[str, object], int] = {}
        self._p2p_counts: dict[tuple[str, str, tuple[int, int]], int] = {}
        self._backend = ""
        self._malformed = 0

    def dump(self, document: dict[str, Any], written_ns: int) -> Dump:
        entries = document["entries"]
        newest_ns, last_done_ns, last_site = 0, 0, None
        for order, entry in enumerate(entries):
            if type(entry) is not dict:
                self._malformed += 1
                continue
            last_site = self._entry(entry, order) or last_site
            created, ended = entry.get("time_created_ns"), entry.get("time_discovered_completed_ns")
            if type(created) is int and newest_ns < created < MAX_SEQ:
                newest_ns = created
            if type(ended) is int and last_done_ns < ended < MAX_SEQ:
                last_done_ns = ended
        if entries and self._malformed == len(entries):
            raise NotADumpError(
                f"{self._path} has {len(entries)} entries, none of which names an operation; expected those of torch's "
                "Flight Recorder. Give the file as torch wrote it."
            )
        groups = self._groups(document.get("pg_config"))
        status = self._status(document.get("pg_status"), groups)
        problems = [f"{self._path.name}: {self._malformed} of {len(entries)} entries are malformed and were left out"]
        return Dump(
            rank=-1,
            path=str(self._path),
            version=text(document.get("version")) or "unknown",
            backend=self._backend,
            groups=groups,
            tracks={name: Track(first=first, labels=found) for name, (first, found) in self._tracks.items()},
            sequence=self._sequence,
            pending=tuple(p for p in self._pending if not self._overtaken(p, status.get(p.group))),
            issued=self._issued,
            status=status,
            p2p_groups=frozenset(self._p2p_groups),
            p2p_counts=self._p2p_counts,
            whole=_is_whole(entries),
            newest_ns=newest_ns,
            last_done_ns=last_done_ns,
            last_site=last_site,
            written_ns=written_ns,
            num_entries=len(entries),
            problems=tuple(problems if self._malformed else ()),
        )

    def _entry(self, entry: dict[str, Any], order: int) -> Site | None:
        get = entry.get
        name = get("profiling_name")
        if type(name) is not str:
            self._malformed += 1
            return None
        op, agreeing, peers = self._ops.get(name) or self._operation(name)
        group = self._group(entry)
        p2p = peers is not None or get("is_p2p") is True
        p2p_seq = get("p2p_seq_id")
        collective_seq = integer(get("collective_seq_id", get("seq_id")), -1)
        seq = integer(p2p_seq, -1) if p2p and p2p_seq is not None else collective_seq
        done = bool(get("time_discovered_completed_ns")) or get("state") == "completed"
        if not done and self._backend in DONE_WHEN_RETIRED:
            done = get("retired") is True
        if op == "coalesced":
            self._close(group, seq, p2p=p2p, done=done)
            track = self._tracks.get(group)
            if not p2p and track is not None and seq == track[0]:
                track[1][0] = NO_LABEL  # the first of those issued together may have been overwritten in the ring
            if done or any(p.group == group and p.seq == seq and p.p2p == p2p for p in self._pending[-1:]):
                return None
        site = self._site(get("frames"))
        numel_in = numel_out = -1
        dtype = ""
        if agreeing or not done:
            numel_in, numel_out = numel(get("input_sizes")), numel(get("output_sizes"))
            dtype = first_text(get("input_dtypes")) or first_text(get("output_dtypes"))
        if p2p or (p2p_seq and integer(p2p_seq) > 0):
            self._p2p_groups.add(group)
        if self._issued.setdefault(group, 0) < collective_seq:
            self._issued[group] = collective_seq
        if peers is not None:
            self._p2p_counts[group, op, peers] = self._p2p_counts.get((group, op, peers), 0) + 1
        if not p2p:
            key = (name, id(site), numel_in, numel_out, dtype) if agreeing else (name, id(site))
            number = self._numbers.get(key)
            if number is None:
                told = (numel_in, numel_out, dtype) if agreeing else (-1, -1, "")
                number = self._numbers[key] = self._labels.number(op, *told, site)
            self._keep(group, seq, number)
        if done:
            self._done[group, peers] = order if p2p else seq
        else:
            self._pending.append(
                Pending(
                    group=group,
                    op=op,
                    seq=seq,
                    p2p=p2p,
                    order=order,
                    numel_in=numel_in,
                    numel_out=numel_out,
                    dtype=dtype,
                    site=site,
                    created_ns=integer(get("time_created_ns")),
                    timeout_ms=integer(get("timeout_ms")),
                    started=get("state") == "started" or bool(get("time_discovered_started_ns")),
                    peers=peers,
                )
            )
        return site

    def _operation(self, name: str) -> tuple[str, bool, tuple[int, int] | None]:
        backend, found = parse_name(name[:MAX_TEXT])
        self._backend = self._backend or backend
        if len(self._ops) < MAX_NAMES:
            self._ops[name] = found
        return found

    def _group(self, entry: dict[str, Any]) -> str:
        held, pg_id = entry.get("process_group"), entry.get("pg_id")
        if type(held) in (tuple, list) and held and type(held[0]) is str and type(pg_id) is int:
            name: str = held[0]
            if self._group_names.get(pg_id) == name:
                return name
        return self._new_group(held, integer(pg_id, -1), entry.get("pg_name"))

    def _new_group(self, held: object, pg_id: int, pg_name: object) -> str:
        if isinstance(held, tuple | list) and held:
            name = text(held[0])
            if name not in self._descriptions:
                self._descriptions[name] = text(held[1]) if len(held) > 1 else ""
        else:
            name = text(pg_name) or ("0" if pg_id == 0 else f"unnamed {pg_id}")
        self._group_names[pg_id] = name
        return name

    def _site(self, frames: object) -> Site | None:
        """Return the innermost line of the user's own code; frames come innermost first."""
        if type(frames) is not list:
            return None
        known = self._sites
        for frame in frames:
            try:
                site = known[id(frame)]  # the document, and so the frame, lives as long as this reading
            except KeyError:
                site = known[id(frame)] = self._site_of(frame)
            if site is not None:
                return site
        return None

    def _site_of(self, frame: object) -> Site | None:
        file = frame.get("filename") if isinstance(frame, dict) else None
        if not isinstance(frame, dict) or type(file) is not str:
            return None
        is_user = self._user_files.get(file)
        if is_user is None:
            is_user = self._user_files[file] = self._is_user(file[:MAX_TEXT])
        if not is_user:
            return None
        key = (file[:MAX_TEXT], integer(frame.get("line")), text(frame.get("name")) or "?")
        if key not in self._equal_sites:
            self._equal_sites[key] = Site(file=key[0], line=key[1], function=key[2])
        return self._equal_sites[key]

    def _keep(self, group: str, seq: int, label: int) -> None:
        self._sequence.append(label)
        track = self._tracks.get(group)
        if track is None or seq < track[0] or seq - track[0] - len(track[1]) > MAX_GAP:
            self._tracks[group] = (seq, array("i", (label,)))
            return
        gap = seq - track[0] - len(track[1])
        if gap > 0:
            track[1].extend([NO_LABEL] * gap)
        if gap >= 0:  # of coalesced operations, which share a position, the first one stands for all
            track[1].append(label)

    def _close(self, group: str, seq: int, *, p2p: bool, done: bool) -> None:
        """Give operations that were issued together, whose own state is never set, the state of the whole."""
        while done and self._pending:
            last = self._pending[-1]
            if last.group != group or last.seq != seq or last.p2p != p2p:
                return
            self._pending.pop()

    def _overtaken(self, pending: Pending, status: tuple[int, int] | None) -> bool:
        """Say whether a later operation on the same stream has ended: then this one has.

        That is how operations issued together are known to have ended in dumps that leave out what has.
        """
        if self._backend != "nccl":
            return False
        done = self._done.get((pending.group, pending.peers if pending.p2p else None))
        if done is not None and done > (pending.order if pending.p2p else pending.seq):
            return True
        enqueued, completed = status or (-1, -1)
        if completed > enqueued:
            return False  # never set
        if pending.p2p:  # the status counts whichever kind came last
            return pending.seq <= completed and self._issued.get(pending.group, 0) < completed
        return pending.seq <= completed and pending.group not in self._p2p_groups

    def _groups(self, config: object) -> dict[str, DumpGroup]:
        groups = {name: DumpGroup(name=name, description=held, ranks=()) for name, held in self._descriptions.items()}
        for key, held in list(config.items())[:100_000] if isinstance(config, dict) else ():
            name = text(key)
            if name and isinstance(held, dict):
                ranks = rank_numbers(held.get("ranks"))
                groups[name] = DumpGroup(name=name, description=text(held.get("desc")), ranks=ranks)
        return groups

    def _status(self, status: object, groups: dict[str, DumpGroup]) -> dict[str, tuple[int, int]]:
        """Return by group what was last enqueued and completed: torch keys it by a number of the process's own."""
        held = {
            int(text(key)): (
                integer(value.get("last_enqueued_collective"), -1),
                integer(value.get("last_completed_collective"), -1),
            )
            for key, value in (list(status.items())[:100_000] if isinstance(status, dict) else ())
            if isinstance(value, dict) and re.fullmatch(r"\d{1,9}", text(key))
        }
        names = dict(self._group_names)
        by_name = sorted((int(name), name) for name in groups if re.fullmatch(r"\d{1,9}", name))
        if len(by_name) == len(groups) == len(held):  # both are counted in the order in which groups were made
            in_order = {pg_id: name for pg_id, (_, name) in zip(sorted(held), by_name, strict=True)}
            if all(in_order.get(pg_id, name) == name for pg_id, name in names.items()):
                names = in_order | names
        return {names[pg_id]: value for pg_id, value in held.items() if pg_id in names}


def _is_whole(entries: list[Any]) -> bool:
    """Say whether the entries are numbered from 0 without a gap."""
    last = entries[-1] if entries else None
    return isinstance(last, dict) and last.get("record_id") == len(entries) - 1
