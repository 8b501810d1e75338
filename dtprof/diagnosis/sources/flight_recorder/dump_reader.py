"""Flight Recorder dumps of any torch 2.x, pickle or JSON, as tables; their format belongs to torch.

The dumps come from elsewhere: nothing of them is executed, and of every field only the expected type is taken.
"""

import gc
import json
import re
from pathlib import Path
from typing import Any

from dtprof.diagnosis.sources.flight_recorder.dump_entries import Entries
from dtprof.diagnosis.sources.flight_recorder.dump_fields import integer, rank_numbers, text
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable, Dump, DumpGroup, UnfinishedOperation
from dtprof.diagnosis.sources.flight_recorder.plain_pickle import PlainPickleError, read_plain_pickle
from dtprof.errors import NotADumpError

MAX_FILE_BYTES = 1 << 30


def looks_like_dump(head: bytes) -> bool:
    """Say whether a file that begins so may be a dump: a pickle of protocol 2 or later, or JSON with its keys."""
    if head[:1] == b"\x80":
        return True
    is_json = re.match(rb'\s*(\[\s*)?\{\s*"', head) is not None
    return is_json and any(key in head for key in (b'"entries"', b'"pg_config"', b'"pg_status"', b'"profiling_name"'))


def read_dump(path: Path, labels: ArgumentTable) -> Dump:
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
    return dump_from(data, path, labels, written_ns=status.st_mtime_ns)


def dump_from(data: bytes, path: Path, labels: ArgumentTable, *, written_ns: int) -> Dump:
    """Read the document of a file.

    Raises:
        NotADumpError: it is something else.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # millions of small containers that live until the end: looking at them again and again is in vain
    try:
        return _dump(read_document(path, data), path, Entries(labels), written_ns)
    finally:
        if was_enabled:
            gc.enable()


def read_document(path: Path, data: bytes) -> dict[str, Any]:
    """Return the document of the file, at least its entries.

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


def _dump(document: dict[str, Any], path: Path, entries: Entries, written_ns: int) -> Dump:
    held = document["entries"]
    entries.read(held)
    if held and entries.malformed == len(held):
        version = text(document.get("version")) or "unknown"
        raise NotADumpError(
            f"{path} (version {version}) has {len(held)} entries, none of which names an operation; expected those of "
            "torch's Flight Recorder, versions 1 and 2. Give the file as torch wrote it."
        )
    groups = _groups(document.get("pg_config"), entries.descriptions)
    names = {pg_id: progress.group for pg_id, progress in entries.groups_by_id.items()}
    status = _status(document.get("pg_status"), groups, names)
    problems = [f"{path.name}: {entries.malformed} of {len(held)} entries are malformed and were left out"]
    return Dump(
        rank=-1,
        path=str(path),
        version=text(document.get("version")) or "unknown",
        backend=entries.backend,
        groups=groups,
        rows=entries.rows,
        cut={name: progress.cut for name, progress in entries.groups.items() if progress.cut >= 0},
        pending=tuple(one for one in entries.pending if not _overtaken(entries, one, status.get(one.group))),
        issued={name: progress.issued for name, progress in entries.groups.items()},
        status=status,
        p2p_groups=frozenset(entries.p2p_groups),
        p2p_counts=entries.p2p_counts,
        whole=_is_whole(held),
        newest_ns=entries.newest_ns,
        last_done_ns=entries.last_done_ns,
        last_site=entries.last_site,
        written_ns=written_ns,
        problems=tuple(problems if entries.malformed else ()),
    )


def _overtaken(entries: Entries, pending: UnfinishedOperation, status: tuple[int, int] | None) -> bool:
    """Say whether a later operation on the same stream has ended: then this one has.

    That is how operations issued together are known to have ended in dumps that leave out what has.
    """
    if entries.backend != "nccl":
        return False
    group = entries.groups[pending.group]
    if pending.p2p and entries.p2p_done.get((pending.group, pending.peers), -1) > pending.row:
        return True
    if not pending.p2p and group.done > pending.seq:
        return True
    enqueued, completed = status or (-1, -1)
    if completed > enqueued:
        return False  # never set
    if pending.p2p:  # the status counts whichever kind came last
        return pending.seq <= completed and group.issued < completed
    return pending.seq <= completed and pending.group not in entries.p2p_groups


def _groups(config: object, descriptions: dict[str, str]) -> dict[str, DumpGroup]:
    groups = {name: DumpGroup(name=name, description=held, ranks=()) for name, held in descriptions.items()}
    for key, held in list(config.items())[:100_000] if isinstance(config, dict) else ():
        name = text(key)
        if name and isinstance(held, dict):
            ranks = rank_numbers(held.get("ranks"))
            groups[name] = DumpGroup(name=name, description=text(held.get("desc")), ranks=ranks)
    return groups


def _status(status: object, groups: dict[str, DumpGroup], names: dict[int, str]) -> dict[str, tuple[int, int]]:
    """Return the last enqueued and completed operation by group: torch keys them by a process-local number."""
    held = {
        int(text(key)): (
            integer(value.get("last_enqueued_collective"), -1),
            integer(value.get("last_completed_collective"), -1),
        )
        for key, value in (list(status.items())[:100_000] if isinstance(status, dict) else ())
        if isinstance(value, dict) and re.fullmatch(r"\d{1,9}", text(key))
    }
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
