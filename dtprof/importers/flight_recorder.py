"""Flight Recorder dumps of any torch 2.x, pickle or JSON, as tables; their format belongs to torch.

The dumps come from elsewhere: nothing of them is executed, and of every field only the expected type is taken.
"""

import gc
import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtprof.dumps import NO_LABEL, Dump, DumpGroup, Labels, Pending, Track
from dtprof.errors import NotADumpError
from dtprof.importers.plain_pickle import PlainPickleError, read_plain_pickle
from dtprof.tables import Site

MAX_FILE_BYTES = 1 << 30
MAX_RANK = 1 << 24
MAX_SEQ = 1 << 62
MAX_GAP = 1 << 16
"""Positions between two entries of one group above which the older ones are let go."""
MAX_TENSORS = 4096
MAX_DIMS = 64
MAX_TEXT = 1000

AGREEING = {"all_reduce", "broadcast", "reduce", "_reduce_scatter_base", "_all_gather_base"}
"""Operations, as torch names them here, whose sizes must be alike on all members."""
DONE_WHEN_RETIRED = {"gloo", "mpi", "ucc"}
"""Back ends that give no events: their entries stay scheduled, and are retired when they end."""
_P2P_NAME = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")
_OPS = (
    ("barrier", "barrier"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("coalesced", "coalesced"),
    ("reduce", "reduce"),
    ("scatter", "scatter"),
    ("gather", "gather"),
)
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
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _Reading(path, labels, is_user or is_user_file).dump(_document(path, data), status.st_mtime_ns)
    finally:
        if was_enabled:
            gc.enable()


def read_dumps(paths: Sequence[Path], labels: Labels) -> tuple[list[Dump], list[str], list[int]]:
    """Read dumps, one for each rank; return them, what could not be read, and the ranks whose files those are.

    Raises:
        NotADumpError: none can be read, or two are of one rank.
    """
    found: dict[int, Dump] = {}
    problems: list[str] = []
    unreadable: list[int] = []
    for path in paths:
        try:
            dump = read_dump(path, labels)
        except NotADumpError as error:
            if len(paths) == 1:
                raise
            problems.append(str(error))
            unreadable += [rank] if (rank := _rank_in_name(path)) is not None else []
            continue
        dump = replace(dump, rank=_rank(path, dump))
        if dump.rank in found:
            raise NotADumpError(
                f"{path} and {found[dump.rank].path} are both of rank {dump.rank}; expected one dump of each rank. "
                "Give those of one job and one attempt, with the rank at the end of the name."
            )
        found[dump.rank] = dump
    if not found:
        raise NotADumpError(f"none of {len(paths)} files is a dump that can be read. {problems[0]}")
    return [found[rank] for rank in sorted(found)], problems, unreadable


def _rank_in_name(path: Path) -> int | None:
    match = re.search(r"(\d{1,7})(\.[A-Za-z]\w*)*$", path.name)
    return int(match[1]) if match else None


def _rank(path: Path, dump: Dump) -> int:
    """Return the rank: what the name ends in, unless the groups, of which a rank is in every one, say otherwise."""
    named = _rank_in_name(path)
    sets = [set(group.ranks) for group in dump.groups.values() if group.ranks]
    possible = set.intersection(*sets) if sets else set()
    if named is not None and (not possible or named in possible):
        return named
    if len(possible) == 1:
        return possible.pop()
    listed = ", ".join(map(str, sorted(possible)[:8])) or "none that its groups tell"
    raise NotADumpError(
        f"{path} does not tell its rank: its name ends in {named if named is not None else 'no number'}, "
        f"possible are {listed}. Name the file as torch does, with the rank at the end."
    )


def is_user_file(path: str) -> bool:
    """Say whether a frame lies in the user's own code: Python, not torch, not dtprof, not installed."""
    return path.endswith(".py") and _NOT_USERS.search(path) is None


def _document(path: Path, data: bytes) -> dict[str, Any]:
    """Return what the file holds, entries at the least."""
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
    if isinstance(found, list):
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


def _text(value: object) -> str:
    if isinstance(value, bool):
        return ""
    if isinstance(value, int) and abs(value) < MAX_SEQ:
        return str(value)
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _integer(value: object, default: int = 0) -> int:
    return value if type(value) is int and -MAX_SEQ < value < MAX_SEQ else default


class _Reading:
    """One file on its way to a Dump."""

    def __init__(self, path: Path, labels: Labels, is_user: Callable[[str], bool]) -> None:
        self._path = path
        self._labels = labels
        self._is_user = is_user
        self._user_files: dict[str, bool] = {}
        self._ops: dict[str, tuple[str, bool, tuple[int, int] | None]] = {}
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
            newest_ns = max(newest_ns, _integer(entry.get("time_created_ns")))
            last_done_ns = max(last_done_ns, _integer(entry.get("time_discovered_completed_ns")))
        groups = self._groups(document.get("pg_config"))
        status = self._status(document.get("pg_status"), groups)
        problems = [f"{self._path.name}: {self._malformed} of {len(entries)} entries are malformed and were left out"]
        return Dump(
            rank=-1,
            path=str(self._path),
            version=_text(document.get("version")) or "unknown",
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
        name = entry.get("profiling_name")
        if type(name) is not str:
            self._malformed += 1
            return None
        op, agreeing, peers = self._ops.get(name) or self._operation(name)
        group = self._group(entry)
        p2p = entry.get("is_p2p") is True or peers is not None
        collective_seq = _integer(entry.get("collective_seq_id", entry.get("seq_id")), -1)
        seq = _integer(entry.get("p2p_seq_id"), -1) if p2p and "p2p_seq_id" in entry else collective_seq
        done = entry.get("state") == "completed" or bool(entry.get("time_discovered_completed_ns"))
        if not done and self._backend in DONE_WHEN_RETIRED:
            done = entry.get("retired") is True
        if op == "coalesced":
            self._close(group, seq, p2p=p2p, done=done)
            if done or any(p.group == group and p.seq == seq and p.p2p == p2p for p in self._pending[-1:]):
                return None
        site = self._site(entry.get("frames"))
        numel_in = numel_out = -1
        if agreeing or not done:
            numel_in, numel_out = _numel(entry.get("input_sizes")), _numel(entry.get("output_sizes"))
        dtype = _first_text(entry.get("input_dtypes")) or _first_text(entry.get("output_dtypes"))
        if p2p or _integer(entry.get("p2p_seq_id")) > 0:
            self._p2p_groups.add(group)
        if p2p:
            self._issued[group] = max(self._issued.get(group, 0), collective_seq)
        else:
            self._issued[group] = max(self._issued.get(group, 0), seq)
            self._keep(
                group,
                seq,
                self._labels.number(
                    op, numel_in if agreeing else -1, numel_out if agreeing else -1, dtype if agreeing else "", site
                ),
            )
        if peers is not None:
            self._p2p_counts[group, op, peers] = self._p2p_counts.get((group, op, peers), 0) + 1
        if done:
            self._done[group, peers if p2p else None] = order if p2p else seq
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
                    created_ns=_integer(entry.get("time_created_ns")),
                    timeout_ms=_integer(entry.get("timeout_ms")),
                    started=entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns")),
                    peers=peers,
                )
            )
        return site

    def _operation(self, name: str) -> tuple[str, bool, tuple[int, int] | None]:
        """Return the operation a profiling name stands for, whether sizes must agree, and sender and receiver."""
        backend, _, raw = name[:MAX_TEXT].rpartition(":")
        self._backend = self._backend or backend
        if match := _P2P_NAME.match(raw):
            ours, other = int(match[2]), int(match[3])
            found: tuple[str, bool, tuple[int, int] | None]
            found = (match[1], False, (ours, other) if match[1] == "send" else (other, ours))
        else:
            op = next((known for part, known in _OPS if part in raw and raw != "coalesced"), raw or "unknown")
            found = ("coalesced" if raw == "coalesced" else op, raw in AGREEING, None)
        if len(self._ops) < 10_000:
            self._ops[name] = found
        return found

    def _group(self, entry: dict[str, Any]) -> str:
        pg_id = _integer(entry.get("pg_id"), -1)
        held = entry.get("process_group")
        if type(held) in (tuple, list) and held:
            name = _text(held[0])
            if name not in self._descriptions:
                self._descriptions[name] = _text(held[1]) if len(held) > 1 else ""
        else:
            name = _text(entry.get("pg_name")) or ("0" if pg_id == 0 else f"unnamed {pg_id}")
        self._group_names[pg_id] = name
        return name

    def _site(self, frames: object) -> Site | None:
        """Return the innermost line of the user's own code; frames come innermost first."""
        for frame in frames if type(frames) is list else ():
            if type(frame) is not dict:
                return None
            file = frame.get("filename")
            if type(file) is not str:
                continue
            is_user = self._user_files.get(file)
            if is_user is None:
                is_user = self._user_files[file] = self._is_user(file[:MAX_TEXT])
            if is_user:
                return Site(
                    file=file[:MAX_TEXT], line=_integer(frame.get("line")), function=_text(frame.get("name")) or "?"
                )
        return None

    def _keep(self, group: str, seq: int, label: int) -> None:
        self._sequence.append(label)
        first, held = self._tracks.get(group) or (seq, array("i"))
        gap = seq - first - len(held)
        if gap > MAX_GAP or seq < first:
            first, held, gap = seq, array("i"), 0
        if gap > 0:
            held.extend([NO_LABEL] * gap)
        if gap >= 0:  # of coalesced operations, which share a position, the first one stands for all
            held.append(label)
        self._tracks[group] = (first, held)

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
        groups = {name: DumpGroup(name=name, description=text, ranks=()) for name, text in self._descriptions.items()}
        for key, held in list(config.items())[:100_000] if isinstance(config, dict) else ():
            name = _text(key)
            if name and isinstance(held, dict):
                ranks = _ranks(held.get("ranks"))
                groups[name] = DumpGroup(name=name, description=_text(held.get("desc")), ranks=ranks)
        return groups

    def _status(self, status: object, groups: dict[str, DumpGroup]) -> dict[str, tuple[int, int]]:
        """Return by group what was last enqueued and completed: torch keys it by a number of the process's own."""
        held = {
            int(_text(key)): (
                _integer(value.get("last_enqueued_collective"), -1),
                _integer(value.get("last_completed_collective"), -1),
            )
            for key, value in (list(status.items())[:100_000] if isinstance(status, dict) else ())
            if isinstance(value, dict) and re.fullmatch(r"\d{1,9}", _text(key))
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


def _ranks(value: object) -> tuple[int, ...]:
    """Return member ranks, which pickles hold as the text of a list."""
    found: Iterable[object] = ()
    if isinstance(value, str):
        found = [int(text) for text in re.findall(r"\d{1,9}", value[: 16 << 20])]
    elif isinstance(value, list | tuple):
        found = value
    return tuple(rank for rank in found if type(rank) is int and 0 <= rank < MAX_RANK)


def _first_text(values: object) -> str:
    return values[0] if type(values) is list and values and type(values[0]) is str else ""


def _numel(sizes: object) -> int:
    """Return the elements of all tensors, -1 where that is not told."""
    if type(sizes) is not list or not sizes:
        return -1
    total = 0
    for size in sizes[:MAX_TENSORS]:
        if type(size) is not list:
            return -1
        product = 1
        for extent in size[:MAX_DIMS]:
            if type(extent) is not int or not 0 <= extent < MAX_SEQ:
                return -1
            product *= extent
        total += product
    return total
