"""Faults: each spoils a sound program, at a random place and on random ranks, and says what is true then."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dtprof.records import events
from tests.faults.generated.machine import HANGS, RAISES, ROOTED, SILENT, SIZED, Do, Plan

STRAY = 900
"""Lines from here on hold what the fault adds."""


class NotHereError(Exception):
    """The program has no place for this fault."""


@dataclass(frozen=True)
class Truth:
    """What a verdict must say: one of these kinds, these ranks, one of these lines (none: no line is marked)."""

    kinds: tuple[str, ...]
    culprits: frozenset[int]
    lines: frozenset[int]
    either: frozenset[int] = frozenset()  # as good as the culprits: two sides, neither of which is the majority


@dataclass(frozen=True)
class _Place:
    """A call that all members of a group make."""

    group: str
    slot: str
    turn: int  # how often a rank has made it before
    at: dict[int, int]  # where it is in the program of each member

    def do(self, plan: Plan) -> Do:
        rank, at = next(iter(self.at.items()))
        return plan.ranks[rank][at]


def _places(plan: Plan, *, what: str = "call", two_ranks: bool = True) -> list[_Place]:
    """Return the collectives but the first of each kind: a rank has a pattern to leave."""
    found: dict[tuple[str, str, int], dict[int, int]] = {}
    for rank, program in enumerate(plan.ranks):
        turns: dict[tuple[str, str], int] = {}
        for at, do in enumerate(program):
            if do.what == what:
                key = (do.group, do.slot)
                turns[key] = turns.get(key, -1) + 1
                found.setdefault((*key, turns[key]), {})[rank] = at
    return [
        _Place(group, slot, turn, at)
        for (group, slot, turn), at in found.items()
        if turn and len(at) == len(plan.groups[group]) >= (2 if two_ranks else 3)
    ]


def _pick(plan: Plan, choose: random.Random, fits: Callable[[Do], bool] = lambda _: True) -> tuple[_Place, list[int]]:
    """Return a call, and fewer than half of those who make it."""
    places = [place for place in _places(plan) if fits(place.do(plan))]
    if not places:
        raise NotHereError
    place = choose.choice(places)
    members = plan.groups[place.group]
    few = 1 if len(members) < 5 or choose.random() < 0.7 else choose.randrange(1, (len(members) + 1) // 2)
    return place, sorted(choose.sample(members, few))


def _truth(kind: str | tuple[str, ...], culprits: Sequence[int], *lines: int, either: Sequence[int] = ()) -> Truth:
    kinds = (kind,) if isinstance(kind, str) else kind
    return Truth(kinds, frozenset(culprits), frozenset(lines), frozenset(either))


def _others(plan: Plan, place: _Place, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the other side where neither is the majority."""
    members = plan.groups[place.group]
    return tuple(set(members) - set(ranks)) if 2 * len(ranks) == len(members) else ()


def skip(plan: Plan, choose: random.Random) -> Truth:
    """A rank leaves a collective out."""
    place, ranks = _pick(plan, choose)
    do = place.do(plan)
    kinds = ["rank-skipped-collective"]
    for rank in ranks:
        program = plan.ranks[rank]
        later = next((d for d in program[place.at[rank] + 1 :] if d.what == "call" and d.group == do.group), None)
        # Where the same call comes next, it takes the place of the one left out: the ranks are apart by a turn.
        if later is not None and (later.name, later.line, later.nbytes) == (do.name, do.line, do.nbytes):
            kinds.append("step-mismatch")
        if do.handle:
            wait = next(
                i
                for i in range(place.at[rank], len(program))
                if program[i].what == "wait" and program[i].handle == do.handle
            )
            del program[wait]
        del program[place.at[rank]]
    return _truth(tuple(dict.fromkeys(kinds)), ranks, do.line)


def add(plan: Plan, choose: random.Random) -> Truth:
    """A rank makes a call that the others do not make, at a line of its own."""
    place, ranks = _pick(plan, choose)
    do = place.do(plan)
    name = choose.choice(("all_reduce", "barrier", "broadcast", do.name))
    reduce_op = "sum" if name in ("all_reduce", "reduce_scatter") else None
    root = plan.groups[place.group][0] if name in ROOTED else -1
    for rank in ranks:
        extra = Do(
            "call", STRAY, name, group=do.group, nbytes=choose.choice((8, do.nbytes)), reduce_op=reduce_op, root=root
        )
        plan.ranks[rank].insert(place.at[rank], extra)
    return _truth(
        ("collective-order-mismatch", "step-mismatch", "size-mismatch", "rank-skipped-collective"), ranks, STRAY
    )


def swap(plan: Plan, choose: random.Random) -> Truth:
    """A rank makes two calls of a group in the other order."""
    pairs = []
    for place in _places(plan):
        rank, at = next(iter(place.at.items()))
        program = plan.ranks[rank]
        own = [
            i
            for i in range(at, min(at + 8, len(program)))
            if program[i].what == "call" and program[i].group == place.group
        ]
        if (
            len(own) > 1
            and program[own[1]].name != program[at].name
            and not program[at].handle
            and not program[own[1]].handle
        ):
            pairs.append((place, own[1] - at))
    if not pairs:
        raise NotHereError
    place, _ = choose.choice(pairs)
    rank = choose.choice(plan.groups[place.group])
    program, at = plan.ranks[rank], place.at[rank]
    other = next(
        i for i in range(at + 1, len(program)) if program[i].what == "call" and program[i].group == place.group
    )
    lines = program[at].line, program[other].line
    program[at], program[other] = program[other], program[at]
    return _truth("collective-order-mismatch", [rank], *lines, either=_others(plan, place, [rank]))


def other_name(plan: Plan, choose: random.Random) -> Truth:
    """A rank makes another call at the same line."""
    place, ranks = _pick(plan, choose, lambda do: not do.handle and do.name not in ROOTED)
    do = place.do(plan)
    name = choose.choice([name for name in ("all_reduce", "all_gather", "barrier") if name != do.name])
    for rank in ranks:
        reduce_op = "sum" if name == "all_reduce" else None
        plan.ranks[rank][place.at[rank]] = replace(do, name=name, reduce_op=reduce_op, splits=None)
    return _truth("collective-order-mismatch", ranks, do.line, either=_others(plan, place, ranks))


def _other_argument(kind: str, fits: Callable[[Do], bool], spoil: Callable[[Do, random.Random], Do]) -> "Mutation":
    def mutate(plan: Plan, choose: random.Random) -> Truth:
        place, ranks = _pick(plan, choose, fits)
        do = place.do(plan)
        plan.misfit = choose.choice((SILENT, HANGS, RAISES))
        changed = spoil(do, choose)
        for rank in ranks:
            own = plan.ranks[rank][place.at[rank]]
            values = {name: getattr(changed, name) for name in ("nbytes", "dtype", "reduce_op", "root")}
            plan.ranks[rank][place.at[rank]] = replace(own, **values)
        return _truth(kind, ranks, do.line, either=_others(plan, place, ranks))

    return mutate


def _split(plan: Plan, choose: random.Random) -> Truth:
    place, _ = _pick(plan, choose, lambda do: do.splits is not None)
    rank = choose.choice(plan.groups[place.group])
    do = plan.ranks[rank][place.at[rank]]
    sent, taken = do.splits or ((), ())
    to = choose.randrange(len(sent))
    wrong = tuple(n + 4 * (i == to) for i, n in enumerate(sent))
    plan.ranks[rank][place.at[rank]] = replace(do, splits=(wrong, taken), nbytes=4 * sum(wrong))
    # What one sends and the other expects disagree: who is wrong only their own earlier calls tell.
    return _truth("split-size-mismatch", [rank], do.line, either=[plan.groups[place.group][to]])


def invert(plan: Plan, choose: random.Random) -> Truth:
    """A rank takes two groups in the other order, in one step."""
    found = []
    for rank, program in enumerate(plan.ranks):
        calls = [i for i, do in enumerate(program) if do.what == "call" and not do.handle]
        for a, b in itertools.pairwise(calls):
            one, two = plan.groups[program[a].group], plan.groups[program[b].group]
            shared = set(one) & set(two)
            if program[a].group != program[b].group and len(shared) > 1 and a > len(program) // 3:
                found.append((rank, a, b))
    if not found:
        raise NotHereError
    rank, a, b = choose.choice(found)
    program = plan.ranks[rank]
    lines = program[a].line, program[b].line
    program[a], program[b] = program[b], program[a]
    return _truth("group-order-inversion", [rank], *lines)


def other_group(plan: Plan, choose: random.Random) -> Truth:
    """A rank makes a call in another of its groups."""
    place, ranks = _pick(plan, choose, lambda do: not do.handle)
    rank = ranks[0]
    do = place.do(plan)
    others = [name for name, members in plan.groups.items() if rank in members and name != do.group]
    if not others:
        raise NotHereError
    plan.ranks[rank][place.at[rank]] = replace(plan.ranks[rank][place.at[rank]], group=choose.choice(others))
    return _truth("wrong-group", [rank], do.line)


def _messages(plan: Plan, choose: random.Random, what: str) -> tuple[int, int]:
    found = [
        (rank, at)
        for rank, program in enumerate(plan.ranks)
        for at, do in enumerate(program)
        if do.what == what and at > len(program) // 3
    ]
    if not found:
        raise NotHereError
    return choose.choice(found)


def unsent(plan: Plan, choose: random.Random) -> Truth:
    """A rank leaves a send out."""
    rank, at = _messages(plan, choose, "send")
    do = plan.ranks[rank][at]
    _remove(plan.ranks[rank], at)
    return _truth("p2p-unmatched", [rank], do.line, *_matching(plan, rank, do))


def unreceived(plan: Plan, choose: random.Random) -> Truth:
    """A rank leaves a receive out."""
    rank, at = _messages(plan, choose, "recv")
    do = plan.ranks[rank][at]
    _remove(plan.ranks[rank], at)
    return _truth("p2p-unmatched", [rank], do.line, *_matching(plan, rank, do))


def other_tag(plan: Plan, choose: random.Random) -> Truth:
    """A rank sends with another tag."""
    rank, at = _messages(plan, choose, choose.choice(("send", "recv")))
    do = plan.ranks[rank][at]
    plan.ranks[rank][at] = replace(do, tag=do.tag + 7)
    return _truth("p2p-tag-mismatch", [rank], do.line, *_matching(plan, rank, do), either=[do.peer])


def other_length(plan: Plan, choose: random.Random) -> Truth:
    """A rank sends more than is expected."""
    rank, at = _messages(plan, choose, "send")
    do = plan.ranks[rank][at]
    plan.ranks[rank][at] = replace(do, nbytes=do.nbytes + 512)
    return _truth("p2p-size-mismatch", [rank], do.line, *_matching(plan, rank, do), either=[do.peer])


def face_each_other(plan: Plan, choose: random.Random) -> Truth:
    """Two ranks send each other a large message before they receive, or receive before they send."""
    first, second = choose.sample(range(plan.world_size), 2)
    step = choose.randrange(1, 4)
    at = {rank: _end_of_step(plan.ranks[rank], step) for rank in (first, second)}
    what = choose.choice((("send", "recv"), ("recv", "send")))
    for rank, peer in ((first, second), (second, first)):
        both = [Do(one, STRAY + i, peer=peer, nbytes=1 << 20, tag=3) for i, one in enumerate(what)]
        plan.ranks[rank][at[rank] : at[rank]] = both
    return _truth("p2p-deadlock-cycle", [first, second], STRAY)


def _matching(plan: Plan, rank: int, do: Do) -> set[int]:
    other = "recv" if do.what == "send" else "send"
    return {own.line for own in plan.ranks[do.peer] if own.what == other and own.peer == rank and own.tag == do.tag}


def _remove(program: list[Do], at: int) -> None:
    handle = program[at].handle
    if handle:
        del program[
            next(i for i in range(at, len(program)) if program[i].what == "wait" and program[i].handle == handle)
        ]
    del program[at]


def _end_of_step(program: list[Do], step: int) -> int:
    ends = [i for i, do in enumerate(program) if do.what == "span" and do.name == events.OPTIMIZER]
    return ends[min(step, len(ends) - 1)] + 1


def _insert(what: str, kind: str) -> "Mutation":
    def mutate(plan: Plan, choose: random.Random) -> Truth:
        rank = choose.randrange(plan.world_size)
        program = plan.ranks[rank]
        calls = [i for i, do in enumerate(program) if do.what in ("call", "recv") and i > len(program) // 4]
        at = choose.choice(calls)
        program.insert(at, Do(what, STRAY, function="load"))
        # Of who was killed or left, no line is known but that of the last record.
        lines = () if what in ("kill", "exit", "freeze") else (STRAY,)
        return _truth(kind, [rank], *lines)

    return mutate


def run_out(plan: Plan, choose: random.Random) -> Truth:
    """A rank has a batch less, and leaves the loop."""
    rank = choose.randrange(plan.world_size)
    program = plan.ranks[rank]
    starts = [i for i, do in enumerate(program) if do.what == "span" and do.name == events.DATA]
    if len(starts) < 4:
        raise NotHereError
    after = [do for do in program[starts[-1] :] if do.slot == "end"]
    program[starts[choose.randrange(len(starts) // 2, len(starts))] :] = [Do("exhausted"), *after]
    for other, own in enumerate(plan.ranks):
        if other != rank:
            end = next((i for i, do in enumerate(own) if do.slot == "end"), len(own))
            own.insert(end, Do("exhausted"))
    return _truth("uneven-inputs", [rank])


def stall(plan: Plan, choose: random.Random) -> Truth:
    """All have come, and the operation does not end."""
    place, _ = _pick(plan, choose)
    rank, at = next(iter(place.at.items()))
    position = sum(do.what == "call" and do.group == place.group for do in plan.ranks[rank][:at])
    plan.stalls = (place.group, position)
    return _truth("backend-stall", (), place.do(plan).line)


def forget(plan: Plan, choose: random.Random) -> Truth:
    """Handles of a line are dropped without a wait, on all ranks."""
    lines = sorted({do.line for do in plan.ranks[0] if do.what == "call" and not do.handle and do.name == "all_reduce"})
    if not lines:
        raise NotHereError
    line = choose.choice(lines)
    for program in plan.ranks:
        count = 0
        for at, do in enumerate(program):
            if do.what == "call" and do.line == line:
                program[at] = replace(do, handle=f"dropped {count}")
                count += 1
    return _truth("unwaited-async", range(plan.world_size), line)


Mutation = Callable[[Plan, random.Random], Truth]

MUTATIONS: dict[str, Mutation] = {
    "skipped call": skip,
    "extra call": add,
    "swapped calls": swap,
    "other operation": other_name,
    "other size": _other_argument(
        "size-mismatch", lambda do: do.name in SIZED, lambda do, _: replace(do, nbytes=2 * do.nbytes)
    ),
    "other type": _other_argument(
        "dtype-mismatch", lambda do: do.name in SIZED, lambda do, _: replace(do, dtype="int32")
    ),
    "other reduction": _other_argument(
        "reduce-op-mismatch",
        lambda do: do.reduce_op is not None,
        lambda do, _: replace(do, reduce_op="max" if do.reduce_op == "sum" else "sum"),
    ),
    "other root": _other_argument(
        "root-mismatch", lambda do: do.root >= 0, lambda do, _: replace(do, root=do.root + 1)
    ),
    "other splits": _split,
    "groups in the other order": invert,
    "other group": other_group,
    "send left out": unsent,
    "receive left out": unreceived,
    "other tag": other_tag,
    "other length": other_length,
    "sends that face each other": face_each_other,
    "exception": _insert("raise", "rank-crashed"),
    "SIGKILL": _insert("kill", "rank-killed"),
    "early exit": _insert("exit", "rank-exited"),
    "stuck": _insert("stick", "rank-stuck"),
    "endless loop": _insert("spin", "rank-stuck"),
    "frozen": _insert("freeze", "rank-frozen"),
    "a batch less": run_out,
    "stalled back end": stall,
    "dropped handle": forget,
}
