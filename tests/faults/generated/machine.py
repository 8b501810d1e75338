"""Let a program of several ranks run as gloo would, and keep the records: which meet, which hang, who dies of whom.

The rules are the back end's: the n-th collective of a rank in a group meets the n-th of the others and ends when all
have come, with the same name and root, and sizes that fit. Messages of a channel arrive in order; a small one does not
wait for its receiver. Who loses a peer in an operation raises; who is left over is ended by the launcher.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.stack_groups import PythonState
from dtprof.records import events
from dtprof.records.schema import FLAG
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, build_job

FILE = "/home/me/train.py"
EAGER = 1024
"""Bytes up to which a blocking send does not wait for its receiver."""
_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
SIZED = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SILENT, HANGS, RAISES = "silent", "hangs", "raises"


@dataclass(frozen=True)
class Do:
    """One thing that a rank does. Which fields count depends on `what`."""

    what: str  # call, send, recv, wait, span, raise, exit, kill, stick, spin, freeze, exhausted
    line: int = 0
    name: str = ""  # of the operation, or of the phase
    group: str = "0"
    nbytes: int = 4096
    dtype: str = "float32"
    reduce_op: str | None = None
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    peer: int = -1  # global rank
    tag: int = 0
    handle: str = ""  # of an asynchronous operation
    ns: int = _MS
    inferred: bool = False  # issued by autograd, on behalf of the line that called backward
    slot: str = ""  # its place in a step
    function: str = "main"


@dataclass
class Plan:
    """What all ranks do, and the groups that there are."""

    world_size: int
    groups: dict[str, tuple[int, ...]]
    ranks: list[list[Do]]
    stalls: tuple[str, int] | None = None  # the back end does not end this operation of a group
    misfit: str = HANGS  # what becomes of sizes that do not fit


@dataclass
class _Record:
    rank: int
    do: Do
    step: int
    issued: int
    position: int
    done: int | None = None
    waits: tuple[int, int] | None = None
    is_async: bool = False
    failed: bool = False
    returned: int | None = None


@dataclass
class _Rank:
    number: int
    now: int
    at: int = 0
    step: int = 0
    blocked: _Record | None = None
    status: int | None = None
    ended: int = 0
    finished: bool = False
    held: Do | None = None  # stuck, spinning or frozen here
    begun: int | None = None  # when the span it is in began
    handles: dict[str, _Record] = field(default_factory=dict)
    positions: dict[tuple[str, bool], int] = field(default_factory=dict)
    backward: bool = False

    @property
    def gone(self) -> bool:
        return self.status is not None or self.finished


class Machine:
    """Runs a plan once."""

    def __init__(self, plan: Plan, seed: int) -> None:
        """Start all ranks, some microseconds apart."""
        self.plan = plan
        self._random = random.Random(seed)
        self.ranks = [_Rank(number=i, now=self._random.randrange(300 * _US)) for i in range(plan.world_size)]
        self.builders = [RankBuilder(i, plan.world_size, closed=False) for i in range(plan.world_size)]
        self._records: list[_Record] = []
        self._calls: dict[tuple[str, int], dict[int, _Record]] = defaultdict(dict)
        self._sends: dict[tuple[str, int, int, int], list[_Record]] = defaultdict(list)
        self._receives: dict[tuple[str, int, int, int], list[_Record]] = defaultdict(list)
        self._numbers: list[dict[str, int]] = []
        self._spans: list[tuple[int, str, int, int | None, int, int]] = []
        self._deaths: list[tuple[int, int, str, str, int]] = []
        for i, builder in enumerate(self.builders):
            own = {"0": 0}
            for name, members in plan.groups.items():
                if name != "0" and i in members:
                    own[name] = builder.group(name, members, f"group {name}")
            self._numbers.append(own)

    def run(self) -> None:
        """Let the job go on until nobody can, as long as ranks die one after the other."""
        while True:
            while sum(map(self._advance, self.ranks)):
                pass
            if not self._break_with_the_dead():
                break
        if any(rank.status not in (None, 0) for rank in self.ranks):
            last = max(rank.now for rank in self.ranks) + 5 * _S
            for rank in self.ranks:
                if not rank.gone:
                    rank.status, rank.ended = -15, last

    # One rank

    def _advance(self, rank: _Rank) -> bool:
        """Let a rank do as much as it can; say whether it did anything."""
        moved = False
        while not rank.gone and rank.held is None:
            if rank.blocked is not None:
                if rank.blocked.failed or rank.blocked.done is None:
                    return moved
                if rank.blocked.waits is not None:
                    begin = rank.blocked.waits[0]
                    rank.blocked.waits = (begin, max(begin, rank.blocked.done))
                rank.now = max(rank.now, rank.blocked.done) + 2 * _US
                rank.blocked = None
            program = self.plan.ranks[rank.number]
            if rank.at >= len(program):
                rank.finished, rank.ended = True, rank.now
                return True
            moved = True
            self._do(rank, program[rank.at])
            rank.at += 1
        return moved

    def _do(self, rank: _Rank, do: Do) -> None:
        if do.what == "span":
            took = int(do.ns * self._random.uniform(0.95, 1.15))
            self._spans.append((rank.number, do.name, rank.now, rank.now + took, rank.step, do.line))
            rank.now += took
            rank.backward |= do.name == events.BACKWARD
            if do.name == events.OPTIMIZER and rank.backward:
                rank.step, rank.backward = rank.step + 1, False
        elif do.what == "exhausted":
            self._spans.append((rank.number, events.DATA, rank.now, rank.now + _US, rank.step, -1))
        elif do.what in ("stick", "spin", "freeze"):
            rank.held = do
        elif do.what in ("raise", "exit", "kill"):
            rank.status = {"raise": 1, "exit": 0, "kill": -9}[do.what]
            rank.ended = rank.now
            if do.what == "raise":
                self._deaths.append((rank.number, rank.now, "ValueError", "bad sample 17", do.line))
        elif do.what == "wait":
            record = rank.handles.pop(do.handle)
            record.waits = (rank.now, rank.now)
            rank.blocked = record
        else:
            self._issue(rank, do)

    def _issue(self, rank: _Rank, do: Do) -> None:
        is_message = do.what in ("send", "recv")
        key = (do.group, is_message)
        position = rank.positions.get(key, 0)
        rank.positions[key] = position + 1
        record = _Record(rank.number, do, rank.step, rank.now, position, is_async=bool(do.handle))
        rank.now += self._random.randrange(2 * _US, 6 * _US)
        record.returned = rank.now
        self._records.append(record)
        if do.handle:
            rank.handles[do.handle] = record
        else:
            record.waits = (rank.now, rank.now)
            rank.blocked = record
        if is_message:
            self._post(rank.number, do, record)
        else:
            self._meet(do.group, position, rank.number, record)

    # Operations

    def _meet(self, group: str, position: int, rank: int, record: _Record) -> None:
        here = self._calls[group, position]
        here[rank] = record
        if len(here) < len(self.plan.groups[group]) or self.plan.stalls == (group, position):
            return
        calls = list(here.values())
        first = calls[0].do
        if any(call.do.name != first.name for call in calls):
            return
        if first.name in ROOTED and any(call.do.root != first.root for call in calls):
            return
        ends = max(call.issued for call in calls) + 80 * _US + first.nbytes // 100
        if not self._fits(group, calls):
            if self.plan.misfit == RAISES:
                usual = min(call.do.nbytes for call in calls)
                victim = next(call for call in calls if call.do.nbytes == usual)
                text = "[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096"
                victim.failed, victim.done = True, ends
                self._die(self.ranks[victim.rank], ends, text, victim.do.line)
            if self.plan.misfit != SILENT:
                return
        for call in calls:
            call.done = ends + self._random.randrange(20 * _US)

    def _fits(self, group: str, calls: Sequence[_Record]) -> bool:
        name = calls[0].do.name
        if name == "all_to_all" and calls[0].do.splits is not None:
            by_rank = {call.rank: call.do.splits for call in calls}
            sides = [by_rank[member] for member in self.plan.groups[group]]
            known = [side for side in sides if side is not None and len(side[0]) == len(sides)]
            pairs = itertools.product(range(len(sides)), repeat=2)
            return len(known) == len(sides) and all(known[a][0][b] == known[b][1][a] for a, b in pairs)
        return name not in SIZED or len({call.do.nbytes for call in calls}) == 1

    def _post(self, rank: int, do: Do, record: _Record) -> None:
        sends = do.what == "send"
        channel = (do.group, rank, do.peer, do.tag) if sends else (do.group, do.peer, rank, do.tag)
        mine, theirs = (self._sends, self._receives) if sends else (self._receives, self._sends)
        at = len(mine[channel])
        mine[channel].append(record)
        if sends and do.nbytes <= EAGER:
            record.done = record.issued + 10 * _US
        if at < len(theirs[channel]):
            other = theirs[channel][at]
            ends = max(record.issued, other.issued) + 30 * _US
            sent, taken = (record, other) if sends else (other, record)
            if sent.do.nbytes != taken.do.nbytes and self.plan.misfit != SILENT:
                return
            record.done, other.done = record.done or ends, other.done or ends

    # Deaths

    def _die(self, rank: _Rank, at: int, message: str, line: int) -> None:
        rank.status, rank.ended = 1, at
        self._deaths.append((rank.number, at, "RuntimeError", message, line))

    def _break_with_the_dead(self) -> bool:
        """Let the ranks die that are in an operation with a dead one; say whether there were any."""
        broken = False
        for rank in self.ranks:
            record = rank.blocked
            if rank.gone or record is None or record.done is not None:
                continue
            do = record.do
            others = {do.peer} if do.what in ("send", "recv") else set(self.plan.groups[do.group]) - {rank.number}
            dead = [self.ranks[other] for other in others if self.ranks[other].gone]
            # A process that ends well has its connections closed, too.
            if dead:
                at = max(record.issued, min(one.ended for one in dead)) + self._random.randrange(2, 40) * _MS
                record.failed, record.done = True, at
                rank.now = at
                self._die(rank, at, CONNECTION_LOST, do.line)
                broken = True
        return broken

    # Evidence

    def job(self) -> JobState:
        """Return what dtprof would have seen."""
        self._write()
        failed = any(rank.status not in (None, 0) for rank in self.ranks)
        all_well = all(rank.gone and not rank.status for rank in self.ranks)
        stacks = {} if failed or all_well else self._stacks()
        statuses = {rank.number: (rank.status or 0, rank.ended + _MS) for rank in self.ranks if rank.gone}
        return build_job(
            self.builders,
            statuses=statuses,
            exit_status=0 if all_well else 1 if failed else None,
            stalled=not all_well,
            stacks=stacks,
        )

    def _write(self) -> None:
        for number, name, begin, end, step, line in sorted(self._spans, key=lambda span: span[2]):
            builder = self.builders[number]
            site = builder.site(line=line) if line > 0 else 0
            flags = FLAG["skipped"] if line < 0 else 0
            builder.span(name, begin, end, step=step, site=site, flags=flags)
        for record in sorted(self._records, key=lambda one: one.issued):
            self._write_record(record)
        for rank in self.ranks:
            self.builders[rank.number].closed = rank.finished or rank.status in (0, 1)
        for number, at, kind, message, line in self._deaths:
            self.builders[number].exception(at, kind, message, line=line)

    def _write_record(self, record: _Record) -> None:
        do, builder = record.do, self.builders[record.rank]
        members = self.plan.groups[do.group]
        peer = do.peer if do.what in ("send", "recv") else do.root
        name = do.what if do.what in ("send", "recv") else do.name
        tag = do.tag
        if do.splits is not None:
            tag = next((number for number, known in builder.sizes.items() if known == do.splits), 0)
            if not tag:
                tag = len(builder.sizes) + 1
                builder.sizes[tag] = do.splits
        builder.op(
            name,
            record.issued,
            record.done,
            returned=record.returned,
            waits=record.waits,
            is_async=record.is_async,
            site=builder.site(
                ("i" if do.handle and do.what != "call" else "") + name, line=do.line, function=do.function
            ),
            group=self._numbers[record.rank][do.group],
            seq=record.position,
            nbytes=do.nbytes,
            peer=members.index(peer) if peer in members else -1,
            tag=tag,
            step=record.step,
            flags=FLAG["completion"] | FLAG["inferred_site"] * do.inferred,
            state="failed" if record.failed else None,
            dtype=do.dtype,
            reduce_op=do.reduce_op,
        )

    def _stacks(self) -> Mapping[int, Stack]:
        stacks = {}
        for rank in self.ranks:
            if rank.gone:
                continue
            do = rank.held or (rank.blocked.do if rank.blocked is not None else Do("stick"))
            frames = (Site(file=FILE, line=do.line, function=do.function),)
            spins = do.what == "spin"
            stacks[rank.number] = Stack(
                state="stopped" if do.what == "freeze" else "running" if spins else "sleeping",
                cpu_share=1.0 if spins else 0.0,
                frames=() if do.what == "freeze" else frames,
                reason="the process is stopped" if do.what == "freeze" else "",
                python_state=PythonState.UNCHANGED if spins else None,
            )
        return stacks
