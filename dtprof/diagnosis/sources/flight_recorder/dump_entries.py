"""The entries of one Flight Recorder dump: call sites, progress of each group, unfinished operations."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from dtprof.diagnosis.sources.flight_recorder.dump_fields import (
    MAX_SEQ,
    MAX_TENSORS,
    MAX_TEXT,
    first_text,
    integer,
    numel,
    parse_name,
    text,
)
from dtprof.diagnosis.sources.flight_recorder.dump_tables import (
    NO_LABEL,
    ArgumentTable,
    OperationColumns,
    UnfinishedOperation,
)
from dtprof.records import schema
from dtprof.records.sites import Site, site_of_stack
from dtprof.records.user_files import is_user_file

MAX_NAMES = 10_000

DONE_WHEN_RETIRED = {"gloo", "mpi", "ucc"}
"""Backends that give no events: their entries stay scheduled, and are retired when they end."""
_FIELDS = (
    "profiling_name",
    "process_group",
    "pg_id",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "state",
    "time_created_ns",
    "time_discovered_completed_ns",
    "frames",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
)
_fields_of = itemgetter(*_FIELDS)

_PAIRS = (tuple, list)

Peers = tuple[int, int]
"""Sender and receiver, as ranks in the group."""

_Operation = tuple[str, bool, Peers | None, dict[int, tuple[Any, Any, Any, int]]]
"""Of a name: operation, whether its sizes must agree, peers; by line the sizes last seen there, and their label."""


@dataclass(slots=True)
class GroupProgress:
    """The progress of one group in the entries read so far."""

    group: str
    number: int  # in the order in which entries name groups
    issued: int = -1  # newest position, 0 where entries tell none; -1: no entry
    done: int = -1  # position of the last entry that has ended
    first: int = -1  # position of the first collective; -1: none
    cut: int = -1  # position of operations issued together of which the ring may have overwritten the first


class Entries:
    """Totals over the entries of a dump. Keep its document alive as long: frames are keyed by identity."""

    def __init__(self, labels: ArgumentTable) -> None:
        """Begin with none."""
        self.groups: dict[str, GroupProgress] = {}
        self.groups_by_id: dict[int, GroupProgress] = {}
        self.descriptions: dict[str, str] = {}
        self.rows = OperationColumns.empty()
        self.pending: list[UnfinishedOperation] = []
        self.p2p_groups: set[str] = set()
        self.p2p_done: dict[tuple[str, Peers | None], int] = {}
        self.p2p_counts: dict[tuple[str, str, Peers], int] = {}
        self.backend = ""
        self.malformed = 0
        self.newest_ns = 0
        self.last_done_ns = 0
        self.last_site: Site | None = None
        self._labels = labels
        self._user_files: dict[str, bool] = {}
        self._ops: dict[str, _Operation] = {}
        self._sites: dict[int, Site | None] = {}
        self._ways: dict[tuple[int, ...], Site] = {}  # by the ids of sites of frames, which are kept
        self._equal_sites: dict[tuple[str, int, str], Site] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def read(self, entries: list[Any]) -> None:
        """Read entries: a job has millions, nearly all of collectives that have ended, so these take no call here."""
        ops, groups, rows = self._ops, self.groups_by_id, self.rows
        add_group, add_seq = rows.groups.append, rows.seqs.append
        add_label, add_time = rows.labels.append, rows.issued_ns.append
        newest_ns, last_done_ns = self.newest_ns, self.last_done_ns
        for entry in entries:
            if type(entry) is not dict:
                self.malformed += 1
                continue
            # One call fetches all fields; entries of other versions of torch, which lack some, are rare.
            try:
                fields = _fields_of(entry)
            except KeyError:
                fields = _fields_of_other_torch(entry)
            name, held, pg_id, seq, p2p_seq, is_p2p, state, created_ns, ended_ns, frames, ins, outs, dtypes = fields
            if type(created_ns) is not int or not 0 < created_ns < MAX_SEQ:
                created_ns = 0
            elif newest_ns < created_ns:
                newest_ns = created_ns
            if type(ended_ns) is int and last_done_ns < ended_ns < MAX_SEQ:
                last_done_ns = ended_ns
            if type(name) is not str:
                self.malformed += 1
                continue
            op, agreeing, peers, alike = ops.get(name) or self._operation(name)
            # Ids of groups are those of one process, and may stand for another group after one is
            # destroyed: names decide.
            group = groups.get(pg_id) if type(pg_id) is int else None
            if group is None or type(held) not in _PAIRS or not held or held[0] != group.group:
                group = self._group(held, integer(pg_id, -1), entry.get("pg_name"))
            if type(seq) is not int or not 0 <= seq < MAX_SEQ:
                seq = -1
            done = state == "completed" or bool(ended_ns)
            if not done and self.backend in DONE_WHEN_RETIRED:
                done = entry.get("retired") is True
            if peers is not None or is_p2p is True:
                self._transfer(entry, group=group, seq=seq, done=done, created_ns=created_ns)
                continue
            if op == "coalesced":
                if seq == group.first:
                    group.cut = seq
                if self._is_whole(group.group, seq, p2p=False, done=done):
                    continue
            site = self._site(frames)
            # Calls of one line repeat sizes and types: then the number of the last one serves, without a
            # look-up of all fields.
            before = alike.get(id(site))
            if before is not None and (
                not agreeing or (before[0] == ins and before[1] == outs and before[2] == dtypes)
            ):
                number = before[3]
            else:
                number = self._number(entry, name, site)
            if p2p_seq and integer(p2p_seq) > 0:
                self.p2p_groups.add(group.group)
            if group.issued < seq or group.issued < 0:
                group.issued = max(seq, 0)
            if group.first < 0:
                group.first = seq
            if done:
                group.done = seq
            else:
                self._pend(entry, group=group.group, op=op, seq=seq, site=site)
            add_group(group.number)
            add_seq(seq)
            add_label(number)
            add_time(created_ns)
        self.newest_ns, self.last_done_ns = newest_ns, last_done_ns

    def _transfer(self, entry: dict[str, Any], *, group: GroupProgress, seq: int, done: bool, created_ns: int) -> None:
        """Read an entry of a point-to-point operation; only those that have not ended are rows."""
        op, _, peers, _ = self._operation(entry["profiling_name"])
        p2p_seq = entry.get("p2p_seq_id")
        position = seq if p2p_seq is None else integer(p2p_seq, -1)
        if op == "coalesced" and self._is_whole(group.group, position, p2p=True, done=done):
            return
        self.p2p_groups.add(group.group)
        group.issued = max(group.issued, seq, 0)
        if peers is not None:
            key = (group.group, op, peers)
            self.p2p_counts[key] = self.p2p_counts.get(key, 0) + 1
        site = self._site(entry.get("frames"))
        if done:
            self.p2p_done[group.group, peers] = len(self.rows)
        else:
            self._pend(entry, group=group.group, op=op, seq=position, site=site, p2p=True, peers=peers)
            self.rows.append(group.number, -1, NO_LABEL, created_ns)

    def _pend(
        self,
        entry: dict[str, Any],
        *,
        group: str,
        op: str,
        seq: int,
        site: Site | None,
        p2p: bool = False,
        peers: Peers | None = None,
    ) -> None:
        get = entry.get
        self.pending.append(
            UnfinishedOperation(
                group=group,
                op=op,
                seq=seq,
                p2p=p2p,
                row=len(self.rows),
                numel_in=numel(get("input_sizes")),
                numel_out=numel(get("output_sizes")),
                dtype=first_text(get("input_dtypes")) or first_text(get("output_dtypes")),
                site=site,
                created_ns=integer(get("time_created_ns")),
                timeout_ms=integer(get("timeout_ms")),
                started=get("state") == "started" or bool(get("time_discovered_started_ns")),
                peers=peers,
            )
        )

    def _is_whole(self, group: str, seq: int, *, p2p: bool, done: bool) -> bool:
        """Say whether an entry stands for operations issued together, and give these its state: theirs is never set."""
        while self.pending:
            last = self.pending[-1]
            if last.group != group or last.seq != seq or last.p2p != p2p:
                return done
            if not done:
                return True
            self.pending.pop()
        return done

    def _operation(self, name: str) -> _Operation:
        found = self._ops.get(name)
        if found is None:
            backend, parsed = parse_name(name[:MAX_TEXT])
            found = (*parsed, {})
            self.backend = self.backend or backend
            if len(self._ops) < MAX_NAMES:
                self._ops[name] = found
        return found

    def _group(self, held: object, pg_id: int, pg_name: object) -> GroupProgress:
        if isinstance(held, tuple | list) and held:
            name = text(held[0])
            self.descriptions.setdefault(name, text(held[1]) if len(held) > 1 else "")
        else:
            name = text(pg_name) or ("0" if pg_id == 0 else f"unnamed {pg_id}")
        group = self.groups.setdefault(name, GroupProgress(name, len(self.groups)))
        self.groups_by_id[pg_id] = group
        return group

    def _number(self, entry: dict[str, Any], name: str, site: Site | None) -> int:
        """Return the number of the label of a collective."""
        op, agreeing, _, alike = self._operation(name)
        sizes = (entry.get("input_sizes"), entry.get("output_sizes"), entry.get("input_dtypes"))
        arguments = (-1, -1, "")
        if agreeing:
            arguments = (
                numel(sizes[0]),
                numel(sizes[1]),
                first_text(sizes[2]) or first_text(entry.get("output_dtypes")),
            )
        key = (name, id(site), *arguments)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._labels.number(op, *arguments, site)
        if not agreeing or (min(arguments[:2]) >= 0 and _is_plain(sizes)):
            alike[id(site)] = (*sizes, number)
        return number

    def _site(self, frames: object) -> Site | None:
        """Return the innermost line of the user's own code, with those that led there; frames come innermost first."""
        if type(frames) is not list:
            return None
        known = self._sites
        users: list[Site] = []
        for frame in frames:
            try:
                site = known[id(frame)]
            except KeyError:
                site = known[id(frame)] = self._site_of(frame)
            if site is not None:
                users.append(site)
                if len(users) > schema.MOST_CALLERS:
                    break
        if not users:
            return None
        key = tuple(map(id, users))
        if key not in self._ways:
            self._ways[key] = site_of_stack(users)
        self.last_site = self._ways[key]
        return self.last_site

    def _site_of(self, frame: object) -> Site | None:
        file = frame.get("filename") if isinstance(frame, dict) else None
        if not isinstance(frame, dict) or type(file) is not str:
            return None
        is_user = self._user_files.get(file)
        if is_user is None:
            is_user = self._user_files[file] = is_user_file(file[:MAX_TEXT])
        if not is_user:
            return None
        key = (file[:MAX_TEXT], integer(frame.get("line")), text(frame.get("name")) or "?")
        if key not in self._equal_sites:
            self._equal_sites[key] = Site(file=key[0], line=key[1], function=key[2])
        return self._equal_sites[key]


def _fields_of_other_torch(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields of an entry that lacks some: None for these, the position from where torch 2.3 had it."""
    held = {"collective_seq_id": entry.get("seq_id"), **entry}
    return tuple(map(held.get, _FIELDS))


def _is_plain(sizes: tuple[Any, Any, Any]) -> bool:
    """Say whether sizes, known to be lists of whole numbers as far as they were looked at, and types are no more.

    Comparing anything with such lists ends soon.
    """
    ins, outs, dtypes = sizes
    seen = len(ins) <= MAX_TENSORS and len(outs) <= MAX_TENSORS
    return seen and type(dtypes) is list and dtypes != [] and all(type(dtype) is str for dtype in dtypes)
