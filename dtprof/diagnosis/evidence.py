"""What the rules look at: the newest operations, the end and the stack of every rank, and who is in which group."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtprof import events
from dtprof.tables import UNKNOWN_NS, ExceptionRecord, Group, Manifest, ProcessExit, RankTables, Site

TAIL = 4096
"""Operations kept of each rank, newest last: causes lie near the end, and memory stays bounded."""

_STATE_ISSUED, _STATE_FAILED = 1, 4
_FLAG_COMPLETION = 2
_KIND_P2P = 2
_POLITE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
TRANSPORT_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "socket timeout",
    "wait timeout after",
    "read error",
    "write error",
    "remote process exited",
    "watchdog caught collective operation timeout",
    "failed to recv, got 0 bytes",
    "unhandled system error",
    "nccl communicator was aborted",
    "preamble.length",
)
"""Parts of messages by which gloo, NCCL and the store say that a peer is gone or late: victims say so, not culprits."""


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """A group across ranks: its name, its members, and how many of that name came before (after a re-init)."""

    name: str
    ranks: tuple[int, ...]
    occurrence: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one rank."""

    group: GroupKey
    op: str
    api: str
    seq: int
    p2p: bool
    peer: int
    tag: int
    numel: int
    dtype: int
    reduce_op: int
    site: Site | None
    step: int
    inside_call: bool
    failed: bool
    done: bool
    issued_ns: int
    done_ns: int
    observed: bool  # completion can be known

    @property
    def open(self) -> bool:
        """Say whether it is known not to have ended well."""
        return self.failed or (self.observed and not self.done) or self.inside_call

    @property
    def label(self) -> tuple[GroupKey, str, tuple[str, int] | None]:
        """What makes two operations of two ranks the same place in the program."""
        return self.group, self.op, (self.site.file, self.site.line) if self.site else None


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a process was seen doing from outside."""

    state: str
    cpu_share: float | None
    frames: tuple[Site, ...]  # of the main thread, innermost first
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """One rank."""

    rank: int
    attempt: int
    pid: int
    host: str
    operations: tuple[Operation, ...]  # the newest, in the order of issue
    counts: dict[tuple[GroupKey, bool], int]  # operations issued, by group and p2p
    groups: dict[GroupKey, Group]
    exceptions: tuple[ExceptionRecord, ...]
    exit: ProcessExit | None
    ended_ns: int
    last_ns: int
    last_site: Site | None
    open_phases: tuple[str, ...]
    steps: int
    in_init: bool
    stack: Stack | None
    alive: bool | None  # None: not known

    @property
    def open_operations(self) -> tuple[Operation, ...]:
        """Operations that had not ended well, oldest first."""
        return tuple(operation for operation in self.operations if operation.open)

    @property
    def front(self) -> Operation | None:
        """The oldest operation the rank is, or was at its end, held up in."""
        waiting = self.open_operations
        return waiting[0] if waiting else None

    @property
    def own_exception(self) -> ExceptionRecord | None:
        """The last exception that left the program, unless it only tells of a lost or late peer."""
        if not self.exceptions or self.transport_exception is not None:
            return None
        return self.exceptions[-1]

    @property
    def transport_exception(self) -> ExceptionRecord | None:
        """The last exception, where it only tells of a lost or late peer."""
        if not self.exceptions:
            return None
        last = self.exceptions[-1]
        text = f"{last.type}: {last.message}".lower()
        return last if any(words in text for words in TRANSPORT_WORDS) else None

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the process."""
        if self.exit is None or self.exit.status >= 0:
            return None
        try:
            return signal.Signals(-self.exit.status).name
        except ValueError:
            return f"signal {-self.exit.status}"

    @property
    def stopped_politely(self) -> bool:
        """Say whether it was ended by a signal that launchers and people send to stop a job."""
        return self.exit is not None and -self.exit.status in _POLITE

    @property
    def finished(self) -> bool:
        """Say whether the program ended in order, whatever became of the process during its shutdown."""
        if self.exceptions:
            return False
        return self.ended_ns != UNKNOWN_NS or (self.exit is not None and self.exit.status == 0)

    @property
    def place(self) -> Site | None:
        """Where the rank is or last was: its open operation, its stack, its last record."""
        if self.front is not None and self.front.site is not None:
            return self.front.site
        if self.stack is not None and self.stack.frames and self.ended_ns == UNKNOWN_NS:
            return self.stack.frames[0]
        return self.last_site


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The whole job."""

    ranks: dict[int, RankEvidence]
    world_size: int
    manifest: Manifest
    stalled: bool  # nobody made progress for long, or ranks ended while operations were open
    stopped_on_hang_ns: int | None  # dtprof stopped the job at this time
    oom_kills: int = 0
    problems: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job that left no record."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    def group(self, key: GroupKey) -> Group:
        """Return the group as the rank that knows most of it tells."""
        known = [evidence.groups[key] for evidence in self.ranks.values() if key in evidence.groups]
        return max(known, key=lambda group: (len(group.ranks), group.timeout_s is not None))


def rank_evidence(
    tables: RankTables,
    *,
    exit: ProcessExit | None,  # noqa: A002
    stack: Stack | None,
    alive: bool | None,
) -> RankEvidence:
    """Reduce the tables of one rank to what the rules need."""
    keys, groups = _group_keys(tables)
    unknown = GroupKey(name="?", ranks=(), occurrence=0)
    rows = tables.operations
    counts: dict[tuple[GroupKey, bool], int] = {}
    for group_id, key in keys.items():
        for p2p in (False, True):
            mine = rows[(rows["group"] == group_id) & ((rows["kind"] == _KIND_P2P) == p2p)]
            if len(mine):
                counts[key, p2p] = int(mine["seq"].max()) + 1
    operations = tuple(
        _operation(row, tables, keys.get(int(row["group"]), unknown))
        for row in rows[-TAIL:]
        if row["op"] < len(tables.ops)
    )
    spans = tables.spans
    open_spans = spans[spans["end_ns"] == UNKNOWN_NS]
    names = [tables.ops[int(op)] for op in open_spans["op"] if op < len(tables.ops)]
    return RankEvidence(
        rank=tables.rank,
        attempt=tables.attempt,
        pid=tables.pid,
        host=tables.host,
        operations=operations,
        counts=counts,
        groups=groups,
        exceptions=tables.exceptions,
        exit=exit,
        ended_ns=tables.ended_ns,
        last_ns=tables.last_ns,
        last_site=_last_site(tables),
        open_phases=tuple(name for name in names if name in events.PHASES),
        steps=int(max([0, *rows["step"][-1:], *spans["step"][-1:]])),
        in_init=events.INIT in names,
        stack=stack,
        alive=alive,
    )


def _group_keys(tables: RankTables) -> tuple[dict[int, GroupKey], dict[GroupKey, Group]]:
    keys: dict[int, GroupKey] = {}
    groups: dict[GroupKey, Group] = {}
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    for group_id in sorted(tables.groups):
        group = tables.groups[group_id]
        name = (group.name, group.ranks)
        key = GroupKey(name=group.name, ranks=group.ranks, occurrence=seen.get(name, 0))
        seen[name] = key.occurrence + 1
        keys[group_id] = key
        groups[key] = group
    return keys, groups


def _operation(row: Any, tables: RankTables, group: GroupKey) -> Operation:
    site = tables.sites.get(int(row["site"]))
    state = int(row["state"])
    return Operation(
        group=group,
        op=tables.ops[int(row["op"])],
        api=site.api if site else "",
        seq=int(row["seq"]),
        p2p=int(row["kind"]) == _KIND_P2P,
        peer=int(row["peer"]),
        tag=int(row["tag"]),
        numel=int(row["numel"]),
        dtype=int(row["dtype"]),
        reduce_op=int(row["reduce_op"]),
        site=site,
        step=int(row["step"]),
        inside_call=state == _STATE_ISSUED,
        failed=state == _STATE_FAILED,
        done=int(row["done_ns"]) != UNKNOWN_NS and state != _STATE_FAILED,
        issued_ns=int(row["issued_ns"]),
        done_ns=int(row["done_ns"]),
        observed=bool(int(row["flags"]) & _FLAG_COMPLETION),
    )


def _last_site(tables: RankTables) -> Site | None:
    """Return the line of the newest event that has one."""
    newest = [
        (int(table[begin][-1]), int(table["site"][-1]))
        for table, begin in ((tables.operations, "issued_ns"), (tables.spans, "begin_ns"))
        if len(table)
    ]
    return tables.sites.get(max(newest)[1]) if newest else None


def stacks_from(document: Mapping[str, Any], *, is_user: Any) -> dict[int, Stack]:
    """Return the stacks of a stacks.json, by pid; the frames of the main thread that `is_user` accepts come first."""
    found: dict[int, Stack] = {}
    processes = document.get("processes")
    for pid, facts in processes.items() if isinstance(processes, dict) else ():
        threads = facts.get("threads") or []
        main = next((t for t in threads if t.get("thread_name") == "MainThread"), threads[0] if threads else {})
        frames = [
            Site(file=str(f.get("filename")), line=int(f.get("line") or 0), function=str(f.get("name")))
            for f in main.get("frames", [])
        ]
        own = [frame for frame in frames if is_user(frame.file)]
        found[int(pid)] = Stack(
            state=str(facts.get("state", "")),
            cpu_share=facts.get("cpu_share"),
            frames=tuple(own or frames),
            reason=str(facts.get("reason", "")),
        )
    return found


def gather(ranks: Iterable[RankEvidence], **job: Any) -> Evidence:
    """Put the ranks together."""
    return Evidence(ranks={evidence.rank: evidence for evidence in ranks}, **job)
