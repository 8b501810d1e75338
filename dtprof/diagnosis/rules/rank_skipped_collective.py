"""A rank went on without a collective that its peers wait in."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePath

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, operation_words, places_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, explain, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import OpenCollective, operation_at
from dtprof.diagnosis.parting_calls import (
    OTHER_ROUND_ADVICE,
    align_frames,
    find_handler,
    find_round_left_out,
    find_ways_past,
    frames_of,
    hangs_on_a_counter,
    left_loops,
    operation_before,
    part_sites,
)
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.diagnosis.rules.step_mismatch import MAX_SHIFT, find_apart
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import SIZES_AGREE, at_same_positions, checksum
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.own_pattern import (
    MAX_ALIKE,
    MIN_ALIKE,
    find_departures,
    is_short_in_step,
    keeps_pattern,
    turns_by_round,
    usual_operation,
)
from dtprof.lint.program_order import SourcePlace
from dtprof.records import codes
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS, Array

OR_SWAPPED = "it may as well have made the two calls in the other order: it issued nothing after the one it waits in"
ONE_ORDER = (
    "If a loop makes both calls, go through it in one order on all ranks: sort the keys of a dictionary or a set."
)
MAX_CALLERS = 4
"""Frames of a stack, from the caller of the innermost on, whose source is looked at."""
MAX_ROUND = 512
"""Operations in which an earlier call at the same line is looked for."""
MAX_WAYS = 2
"""Branches that may have led a rank past a call: of more, none is worth naming."""
MAX_ASKED = 8
"""Ranks that wait in one collective whose own pattern is looked at: they are at the same place."""


def find_skip(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that went on without a collective that the others wait in.

    In a loop each of two calls follows the other, and either rank may have skipped its own: then the one that is as
    many steps from the other's place as the program is there.
    """
    job = case.job
    questionable: Finding | None = None
    if case.findings(find_apart):
        return  # ranks were at other places long before, and completed what does not belong together
    for collective, chosen in ((c, rank) for c in case.open_collectives for rank in _references(c)):
        reference = job.ranks[chosen]
        program = _Program(operations=reference.operations)
        others = [r for r in collective.group.ranks if r in job.ranks and r != reference.rank]
        reference_label = collective.waiting[reference.rank].label
        companions = _find_companions(collective, reference.rank)
        usual = 2 * (len(companions) + _count_past(job, collective, reference_label)) > len(others) + 1
        half = 2 * len(companions) == len(others) + 1
        skips = {
            rank: skip
            for rank in others
            if (rank not in companions or collective.waiting[rank].label == reference_label)
            and (skip := _skipped(job, reference, program, job.ranks[rank], is_usual=usual, is_half=half)) is not None
            and not skip.operation.p2p  # a message of the reference is no call that the other could have made
            and rank in skip.operation.group.ranks  # a call of another subgroup shows only that the two differ
            and not _is_left_alone(job, job.ranks[rank], collective)
        }
        if not skips:
            continue
        earliest = min((skip.operation for skip in skips.values()), key=lambda operation: operation.issued_ns)
        culprits = tuple(sorted(r for r, skip in skips.items() if skip.operation.label == earliest.label))
        # Where more than half went on alike, the reference made a call too many: no skip.
        if len(culprits) <= (len(others) + 1) // 2:
            found = _skip_finding(job, earliest, culprits, confidence=0.95 if 2 * len(culprits) <= len(others) else 0.8)
            early = [_turns_words(job.ranks[rank], earliest) for rank in culprits]
            early = early if all(early) else []
            found = replace(found, evidence=(*early, *found.evidence))
            if all(_may_have_swapped(job, reference, earliest, job.ranks[rank]) for rank in culprits):
                found = replace(
                    found,
                    confidence=0.7 if len(others) > 1 else 0.6,
                    evidence=(*found.evidence, OR_SWAPPED),
                    advice=(*found.advice, *_advise_one_order(job, earliest, job.ranks[culprits[0]].first_blocking)),
                )
            found = _at_another_step(job, found, earliest) or found
            if all(_cannot_have_come_round(job, (reference, earliest), job.ranks[rank]) for rank in culprits):
                yield _more_turns(job, found, (reference, earliest))
                return
            if early or all(skips[rank].fits_steps for rank in culprits):
                yield found
                return
            if (one_more := _one_more_turn(job, found, (reference, earliest))) is not None:
                yield one_more
                return
            if earliest.step is not None:  # without steps, too little speaks for it
                questionable = questionable or found
    if questionable is not None:
        yield questionable


def _is_left_alone(job: JobState, rank: RankState, awaited: OpenCollective) -> bool:
    """Say whether a rank waits, as in its rounds before, for one that left its own rounds for a collective.

    What others wait in besides tells nothing of the two: they need not be members of the group of that call.
    """
    now = rank.first_blocking
    if now is None or now.p2p or now.group == awaited.group or usual_operation(rank.operations, now) is not None:
        return False
    left = (
        usual_operation(job.ranks[member].operations, operation)
        for member, operation in awaited.waiting.items()
        if member in now.group.ranks and job.ranks[member].counts.get((now.group, False), 0) <= now.seq
    )
    return any(usual is not None and usual.label == now.label for usual in left)


def _find_companions(collective: OpenCollective, reference: int) -> set[int]:
    """Return the ranks that wait in the call of one of them, itself included.

    Ranks may have a line each for one call, as a barrier before some work on some and after it on others: where they
    wait in different operations, these tell.
    """
    own, waiting = collective.waiting[reference], collective.waiting
    are_different = len({operation.op for operation in waiting.values()}) > 1
    return {rank for rank, o in waiting.items() if o.label == own.label or (are_different and o.op == own.op)}


def _count_past(job: JobState, collective: OpenCollective, label: object) -> int:
    """Return how many members have made a call, and gone on, as some do from a broadcast."""
    made = (
        operation_at(job.ranks[rank], collective.group, collective.seq)
        for rank in collective.group.ranks
        if rank in job.ranks and rank not in collective.waiting
    )
    return sum(operation is not None and operation.done and operation.label == label for operation in made)


def _may_have_swapped(job: JobState, reference: RankState, skipped: Operation, rank: RankState) -> bool:
    """Say whether a rank that waits in the call after the skipped one may have made the two in the other order.

    It issued nothing after what precedes both but the call that it waits in. Where the source can be read, and has
    the two at lines that are no branches of one `if`, the program reaches these in one order alone: another order has
    lines of its own.
    """
    now = rank.first_blocking
    newest = rank.operations[-2:]
    at = next((i for i in range(len(reference.operations) - 1, -1, -1) if reference.operations[i] == skipped), -1)
    if now is None or not newest or newest[-1] != now or at < 0:
        return False
    before = reference.operations[at - 1].label if at else None
    if (newest[0].label if len(newest) > 1 else None) != before:
        return False
    if skipped.site is None or now.site is None:
        return True
    ours, theirs = part_sites(job, skipped.site, now.site)
    here, there = map(job.place_in_source, (ours, theirs))
    if here is None or there is None:
        return True
    if not ours.shares_function(theirs):
        return False
    # Of a function that is called for each, as a hook is, one call makes the one or the other branch of an `if`.
    return ours.line == theirs.line or here.is_other_branch(there)


def _advise_one_order(job: JobState, skipped: Operation, now: Operation | None) -> tuple[str, ...]:
    """Return the advice where a loop makes both calls, at one line or in branches of one `if`."""
    here, there = (job.place_in_source(o.site) if o is not None else None for o in (skipped, now))
    is_one_line = now is not None and now.site == skipped.site
    is_one_if = here is not None and there is not None and here.is_other_branch(there)
    return (ONE_ORDER,) if is_one_line or is_one_if else ()


def find_left_loop(case: Case) -> Iterator[Finding]:
    """Give findings for ranks that left a round before the collective that always came there, and wait elsewhere.

    Several ranks wait together in a collective that was never made before, on another group: what comes after the
    loop. Their peers keep to the pattern of the loop.
    """
    job = case.job
    new = _find_new_places(job)
    for collective in sorted(case.open_collectives, key=lambda collective: collective.group.ranks) if new else ():
        expected = next(iter(collective.waiting.values()))
        elsewhere = first_blocking_of(job, collective.absent)
        left = tuple(
            rank
            for rank, now in elsewhere.items()
            if now.group != collective.group
            and now.label in new
            and (usual := usual_operation(job.ranks[rank].operations, now)) is not None
            and usual.label == expected.label
        )
        if left and all(_keeps_pattern(job.ranks[rank], o) for rank, o in [*collective.waiting.items()][:MAX_ASKED]):
            yield _skip_finding(job, expected, left, confidence=0.75)


def _keeps_pattern(rank: RankState, operation: Operation) -> bool:
    return usual_operation(rank.operations, operation) is None


def _find_new_places(job: JobState) -> set[object]:
    """Return the labels of collectives in which several ranks wait, and the like of which they have not completed."""
    places: dict[object, list[tuple[RankState, Operation]]] = {}
    for rank in job.ranks.values():
        if (now := rank.first_blocking) is not None and not now.p2p:
            places.setdefault(now.label, []).append((rank, now))
    return {label for label, here in places.items() if len(here) > 1 and not any(_made_before(*one) for one in here)}


def _made_before(rank: RankState, operation: Operation) -> bool:
    table = rank.collectives.groups.get(operation.group)
    return table is not None and bool(((table["op"] == checksum(operation.op)) & (table["state"] == codes.DONE)).any())


def _references(collective: OpenCollective) -> list[int]:
    """Return a rank of the largest set of waiting ranks that wait at the same place, or of each that is as large."""
    places = {rank: _place_of(o) for rank, o in collective.waiting.items()}
    counted = Counter(places.values())
    usual = [place for place, count in counted.items() if count == max(counted.values())]
    return [next(rank for rank, own in places.items() if own == place) for place in usual]


@dataclass(frozen=True, kw_only=True)
class Skip:
    """The operation that a rank skipped."""

    operation: Operation
    fits_steps: bool  # the rank is as many steps further as the program is between the two places


def _skipped(
    job: JobState, reference: RankState, program: "_Program", rank: RankState, *, is_usual: bool, is_half: bool
) -> Skip | None:
    """Return the operation of the reference that this rank went past without making it, or None.

    Both ranks' operations are compared in program order from the last collective that both completed alike. Where
    they part, the rank skipped what the reference did if it goes on with what follows that in the reference's
    program: read from the reference itself, or from the round before where the reference is still blocked. What was
    never made before, by most, was skipped by a rank that goes on as all did then.
    """
    start = _anchor(reference, rank)
    if start is None or (_made_call_of_its_own(reference, rank) and not _has_left_loop(job, reference, rank)):
        return None
    if not is_usual and _made_call_of_its_own(rank, reference):
        return None
    if _go_alike(reference, rank, start):
        return None
    ours, theirs = reference.operations, rank.operations
    at, there = start
    along_axis = False
    while at < len(ours) and there < len(theirs):
        a, b = ours[at], theirs[there]
        if _alike(a, b):
            at, there = at + 1, there + 1
        elif a.p2p and rank.rank != a.peer_rank:
            at += 1  # a message to somebody else: ranks differ in theirs
        elif b.p2p and reference.rank != b.peer_rank:
            there += 1
        elif a.done and a.on_device and rank.rank not in a.group.ranks:
            at += 1  # of a subgroup that the other is no member of: the device had it when it came
        elif b.done and b.on_device and reference.rank not in b.group.ranks:
            there += 1
        elif a.p2p and a.on_device:
            at += 1  # the message of one rank is no call that another could skip
        elif b.p2p and b.on_device:
            there += 1
        elif _is_along_axis(a, b):
            along_axis = True
            at, there = at + 1, there + 1
        else:
            steps = program.steps_until(at, b)
            along_axis |= bool(steps) and reference.rank not in b.group.ranks
            if along_axis and (_steps_between(a, b) or 0) <= 0:
                return None  # in one step, two groups in the other order leave the same records
            if not is_usual and keeps_pattern(ours, at) is False and keeps_pattern(theirs, there) is True:
                return None  # of two, the one that left its own pattern tells nothing of what the other skipped
            if b.p2p and keeps_pattern(theirs, there) is True:
                return None  # it waits for a message as in every round: the reference did not make the other end
            if _are_called_from_one_line((reference, a), (rank, b)) or _is_called_later(job, rank, reference, a):
                return None  # its source comes to it after all: an order of its own, no skip
            if _is_one_call_on_two_groups(a, b):
                return None  # the line takes groups by turns: another order, or the wrong handle
            if _begins_with_the_last(ours, at, b):
                return None  # the other order of a loop over tensors, rather than all of them skipped but the last
            # The same line with another size than ever before is a size mismatch, not a call that others skipped.
            goes_on = (
                bool(steps)
                or (is_usual and a.label != b.label and program.came_here(at, b))
                or (is_usual and is_short_in_step(theirs[: there + 1], a))
                or (is_usual and _begins_next_step((ours, at), (theirs, there)))
                or (is_usual and _has_passed(job, (reference, a), (rank, b)))
            )
            # Of two ranks neither is usual: then the one that does as in earlier rounds shows what the other left.
            kept = keeps_pattern(ours, at)
            may_be_usual = is_usual or kept or (is_half and kept is None)  # None: there were too few rounds
            if not goes_on and keeps_pattern(theirs, there) is not True and may_be_usual:
                goes_on = (
                    _are_around_a_loop(job, (reference, a), (rank, b))
                    or (a.done and b.done and _has_left_loop(job, reference, rank))
                    or _has_passed(job, (reference, a), (rank, b))
                    or (is_usual and there > 0 and _came_round(job, (reference, a), (rank, b), after=theirs[there - 1]))
                    or (
                        is_usual
                        and at > 0
                        and all(o.site != b.site for o in theirs[:there])
                        and _is_left_out_of_the_round(job, (reference, a), (rank, b), after=ours[at - 1])
                    )
                )
            if not goes_on or _made(theirs, there, a, program.distance(at, b)):
                return None
            if (_steps_between(a, b) or 0) < 0 and _is_in_a_loop_of_its_own(job, (reference, a), (rank, b)):
                return None  # one more round of an inner loop, before the step that the others have made
            return Skip(operation=a, fits_steps=not steps or _fits_steps(a, b, steps, theirs, there))
    return None


def _begins_with_the_last(usual: Sequence[Operation], at: int, other: Operation) -> bool:
    """Say whether a place is the first call of its line in a step, and the other call the last of the step before."""
    first = usual[at]
    if first.step is None or first.label != other.label:
        return False
    if any(o.step == first.step and o.label == first.label for o in usual[:at]):
        return False
    before = [o for o in usual[:at] if o.step == first.step - 1 and o.label == first.label]
    return len(before) > 2 and _alike(before[-1], other)


def _begins_next_step(usual: tuple[Sequence[Operation], int], other: tuple[Sequence[Operation], int]) -> bool:
    """Say whether a rank has made its step without the call that the usual rank is in, and begins the next step.

    It is in a call that both made in this step. No earlier round is needed: the call may end the first step of all.
    """
    (ours, at), (theirs, there) = usual, other
    step, now = ours[at].step, theirs[there]
    if not at or not there or step is None or now.step != step + 1:
        return False
    is_new = all(o.label != ours[at].label for o in ours[:at])
    kept_pace = ours[at - 1].step == theirs[there - 1].step == step
    return is_new and kept_pace and any(o.step == step and _alike(o, now) for o in ours[:at])


def _go_alike(a: RankState, b: RankState, start: tuple[int, int]) -> bool:
    """Say whether two ranks made the same collectives as far as both go; False where it takes a closer look.

    They are compared in columns, each pair of calls on one group or on groups without a common member, as those along
    an axis. Messages count where the two sent them to each other.
    """
    ours, theirs = a.newest_calls, b.newest_calls
    if ours is None or theirs is None or a.rank in theirs.peers or b.rank in ours.peers:
        return False
    from_a, from_b = (
        slice(int(np.searchsorted(calls.collectives["row"], rank.first_row + first)), None)
        for calls, rank, first in zip((ours, theirs), (a, b), start, strict=True)
    )
    num = min(len(ours.collectives[from_a]), len(theirs.collectives[from_b]))
    x, y = ours.collectives[from_a][:num], theirs.collectives[from_b][:num]
    same = (x["line"] != 0) & ((x["flags"] | y["flags"]) & codes.DEVICE == 0)
    for column in ("op", "line", "numel"):
        same &= x[column] == y[column]
    pairs = zip(ours.group[from_a][:num].tolist(), theirs.group[from_b][:num].tolist(), strict=True)
    return bool(same.all()) and all(
        ours.groups[i] == theirs.groups[j] or _have_no_common_member(ours.groups[i], theirs.groups[j])
        for i, j in set(pairs)
    )


@dataclass(frozen=True, kw_only=True)
class _Program:
    """Operations and next operations of a rank; each place is searched once for all other ranks."""

    operations: Sequence[Operation]
    _following: dict[int, list[tuple[Operation, Operation]]] = field(default_factory=dict)
    _before: dict[int, Operation | None] = field(default_factory=dict)
    _like: dict[int, list[int]] = field(default_factory=dict)

    def steps_until(self, at: int, wanted: Operation) -> set[int | None]:
        """Return how many steps after a place an operation follows soon; nothing where it does not, None: unknown."""
        if at not in self._following:
            pairs = (self._pair(at, shift) for shift in range(1, MAX_SHIFT + 1))
            self._following[at] = [pair for pair in pairs if pair is not None]
        return {
            _steps_between(place, later)
            for place, later in self._following[at]
            if _alike(later, wanted) or _is_along_axis(later, wanted)
        }

    def distance(self, at: int, wanted: Operation) -> int:
        """Return how many operations after the newest of one kind a round comes back to what stands at a place."""
        begin = self._newest(wanted, before=at)
        if begin is None:
            return len(self.operations)
        place = self.operations[at]
        return next(i - begin for i in range(begin, at + 1) if _alike(self.operations[i], place))

    def came_here(self, at: int, wanted: Operation) -> bool:
        """Say whether what stands at a place is new, and an operation came there in the round before."""
        if at not in self._before:
            self._before[at] = self._in_round_before(at)
        before = self._before[at]
        return before is not None and _alike(before, wanted)

    def _in_round_before(self, at: int) -> Operation | None:
        """Return what came a round before in the place of something new; None where it is not new.

        One call after the other at one line is a loop, which is new as a whole: who leaves it goes on as before it.
        """
        while at > 0 and _alike(self.operations[at - 1], self.operations[at]):
            at -= 1
        if at == 0 or self._newest(self.operations[at], before=at) is not None:
            return None
        before = next(iter(self._places_like(at - 1)), None)
        return self.operations[before + 1] if before is not None else None

    def _pair(self, at: int, shift: int) -> tuple[Operation, Operation] | None:
        """Return a place and what comes `shift` operations after it, found one round earlier where it lies ahead."""
        if at + shift >= len(self.operations):
            earlier = next((place for place in self._places_like(at) if place + shift <= at), None)
            if earlier is None:
                return None
            at = earlier
        return self.operations[at], self.operations[at + shift]

    def _places_like(self, at: int) -> list[int]:
        """Return the earlier places of the same call, those first before which the most was alike, then the newest.

        One line may call several times in a round: only what came before tells which of these calls it is.
        """
        if at not in self._like:
            first = max(0, at - MAX_ROUND)
            like = [place for place in range(first, at) if _alike(self.operations[place], self.operations[at])]
            self._like[at] = sorted(like, key=lambda place: (-self._count_alike_before(place, at), -place))
        return self._like[at]

    def _count_alike_before(self, place: int, at: int) -> int:
        most = min(place, MAX_ALIKE)
        pairs = ((self.operations[place - 1 - i], self.operations[at - 1 - i]) for i in range(most))
        return next((i for i, (a, b) in enumerate(pairs) if not _alike(a, b)), most)

    def _newest(self, wanted: Operation, *, before: int) -> int | None:
        return next((i for i in range(before - 1, -1, -1) if _alike(self.operations[i], wanted)), None)


def _are_called_from_one_line(*calls: tuple[RankState, Operation]) -> bool:
    """Say whether two ranks wait in calls of different functions that one line of the program calls."""
    stacks = [rank.stack.frames if rank.stack is not None else () for rank, _ in calls]
    for frames, (_, operation) in zip(stacks, calls, strict=True):
        at = (frames[0].file, frames[0].line) if len(frames) > 1 else None
        if operation.site is None or not operation.open or at != (operation.site.file, operation.site.line):
            return False
    if len({operation.step for _, operation in calls}) > 1:
        return False  # of two rounds
    shorter, longer = sorted(stacks, key=len)
    if len(shorter) < len(longer) and longer[-len(shorter) :] == shorter:
        return shorter[0].function.endswith("<lambda>")  # two of one line, one of which calls a function
    (a, *callers), (b, *others) = stacks
    are_two = a.function != b.function or (a.line != b.line and a.function.endswith("<lambda>"))
    return are_two and callers == others


def _is_one_call_on_two_groups(a: Operation, b: Operation) -> bool:
    return a.site is not None and (a.site, a.op, a.step) == (b.site, b.op, b.step) and a.group != b.group


def _is_called_later(job: JobState, rank: RankState, reference: RankState, wanted: Operation) -> bool:
    """Say whether the source calls the function of an operation after the line that a rank's stack is at.

    In the same round of the loop, or the same function, at another line than the reference is at: `a(); b()` there,
    and `b(); a()` here. The line of the reference itself is that of the next round.
    """
    mine, theirs = (r.stack.frames[1 : 1 + MAX_CALLERS] if r.stack is not None else () for r in (rank, reference))
    if (now := rank.first_blocking) is not None and (awaited := reference.first_blocking) is not None:
        _, frames, common = align_frames((reference, awaited), (rank, now))
        mine = mine[: len(frames) - 1 - common] if common is not None else mine  # further out both are at one line
    name = wanted.site.function.rpartition(".")[2] if wanted.site is not None else ""
    usual = {frame.line for frame in theirs}
    places = [place for frame in mine if (place := job.place_in_source(frame)) is not None]
    is_later = any(called == name and line not in usual for p in places for called, line in p.following)
    return bool(usual) and (is_later or _is_called_early(job, rank, reference))


def _is_called_early(job: JobState, rank: RankState, reference: RankState) -> bool:
    """Say whether a rank is in a function before the line of the reference, after which the source calls it.

    As in `if full: b()`, then `a()`, or a loop of collectives, then `if not full: b()`. The rank is in it for the first
    time in a step in which the reference has not been yet: else it may have come round the loop. Only steps that were
    made tell.
    """
    now, theirs = rank.first_blocking, reference.first_blocking
    if now is None or theirs is None or not now.step or now.step != theirs.step:
        return False
    if sum(o.step == now.step and o.label == now.label for r in (rank, reference) for o in r.operations) != 1:
        return False
    a, b, common = align_frames((reference, theirs), (rank, now))
    if common is None or common + 1 >= len(b) or b[common].line >= a[common].line:
        return False
    here, there = job.place_in_source(b[common]), job.place_in_source(a[common])
    if there is not None and (left := left_loops(there, b[common].line)):
        there = job.place_in_source(replace(a[common], line=left[-1][0]))  # what follows the loop it is in
    mine = b[common + 1].function.rpartition(".")[2]
    return (
        here is not None
        and there is not None
        and any(line == a[common].line for _, line in here.following)
        and any(called == mine and line > a[common].line for called, line in there.following)
    )


def _are_around_a_loop(job: JobState, inside: tuple[RankState, Operation], past: tuple[RankState, Operation]) -> bool:
    """Say whether one rank is in a loop of the source, and the other past its end.

    The loop is one of the function, or of what it calls there. The one inside has not left it where it would have come
    to the call of the other, which no branch leaves out.
    Else it may have, and be in the next round of a loop around both: then the other must have run out of batches first.
    """
    a, b, common = align_frames(inside, past)
    if common is None:
        return False
    x, y = a[common].line, b[common].line
    here, around = job.place_in_source(a[common]), [*filter(None, map(job.place_in_source, a[:common]))]
    there = [*filter(None, map(job.place_in_source, b[common:]))]
    if here is None or len(there) < len(b) - common:
        return False
    ends = [last for first, last in here.loops if first <= x <= last]
    within = [*filter(None, map(job.place_in_source, a[common + 1 :]))]  # in what the line of the function calls
    if not any(last < y for last in ends) and not (x < y and any(place.loops for place in within)):
        return False
    called = [
        *(branch for place in there[1:] for branch in place.branches),
        # The rounds of a loop, as one over callbacks, may be other ones on other ranks, and none.
        *(loop for place in there[1:] for loop in place.loops if loop[0] not in place.fixed_loops),
    ]
    branches = {*there[0].branches}.difference(here.branches).union(called)
    is_in_round = any(last >= y for last in ends) or any(place.loops for place in around)
    return not branches or not is_in_round or past[0].exhausted > inside[0].exhausted


def _has_left_loop(job: JobState, inside: RankState, past: RankState) -> bool:
    """Say whether a rank waits past the end of a loop of the source in which another rank waits.

    Calls of both that met before, as the gathers of sharded parameters do wherever they come from, do not tell that.
    """
    here, there = inside.first_blocking, past.first_blocking
    return here is not None and there is not None and _are_around_a_loop(job, (inside, here), (past, there))


def _has_passed(job: JobState, before: tuple[RankState, Operation], past: tuple[RankState, Operation]) -> bool:
    """Say whether the source always comes from the call of one rank to that of the other, as from `try` to `finally`.

    Then the other has left out the first call, if only because it raised.
    """
    a, b, common = align_frames(before, past)
    if common is None:
        return False
    here, there = job.place_in_source(a[common]), [*map(job.place_in_source, b[common:])]
    known = [place for place in there if place is not None]
    if here is None or len(known) < len(there) or not {*known[0].branches} <= {*here.branches}:
        return False
    x, y, (first, *_) = a[common].line, b[common].line, known
    if x < y and _is_run_once(job, a, common):
        return True
    if not {*first.loops} <= {*here.loops}:
        return False
    if any(place.branches for place in known[1:]) and not _is_made_in_round(*before, past[1]):
        return False
    is_around = first.block is not None and first.block[0] <= x <= first.block[1]
    # What a library calls there, as contextlib does, shows the line of the `with` alone: once inside, it is the end.
    has_been_inside = common == len(b) - 1 and not first.loops and any(_alike(o, before[1]) for o in past[0].operations)
    if is_around and (_is_at_exit(b, known, common + 1) or has_been_inside):
        return True
    if _steps_between(before[1], past[1]) == 0 and _makes_step_between(job, a[common], b[common]):
        return False  # it is at the end of the round before
    return any(line == y for _, line in here.following)


def _makes_step_between(job: JobState, earlier: Site, later: Site) -> bool:
    """Say whether the source makes an optimizer step between two lines of a function, whatever it does there."""
    here, there = job.place_in_source(earlier), job.place_in_source(later)
    if here is None or there is None or any(word.startswith("except") for _, word in there.ways_past):
        return False
    lines = (line for name, line in here.following if name == "step" and earlier.line < line < later.line)
    steps = [place for line in lines if (place := job.place_in_source(replace(earlier, line=line))) is not None]
    return there.handler is None and any({*step.branches} <= {*there.branches} for step in steps)


def _is_made_in_round(rank: RankState, mark: Operation, wanted: Operation) -> bool:
    """Say whether a rank made a call since it made another one, before it came to that again."""
    for operation in reversed([*takewhile(lambda operation: operation != mark, rank.operations)]):
        if _alike(operation, wanted):
            return True
        if _alike(operation, mark):
            return False
    return False


def _is_run_once(job: JobState, frames: Sequence[Site], at: int) -> bool:
    """Say whether the line of a frame is in no loop, nor are the lines in the same folder that call its function."""
    if not at and frames[0].function != "<module>":
        return False  # its callers are not known
    folder = PurePath(frames[at].file).parent
    places = [job.place_in_source(frame) for frame in frames[: at + 1] if PurePath(frame.file).parent == folder]
    return all(place is not None and not place.loops for place in places)


def _is_at_exit(frames: Sequence[Site], places: Sequence[SourcePlace], at: int) -> bool:
    """Say whether a frame that a `with` calls is its end: `__exit__`, or what follows the `yield` of a generator."""
    if at >= len(frames):
        return False
    frame, place = frames[at], places[at - len(frames)]
    return frame.function.endswith(("__exit__", "__aexit__")) or 0 < place.yields < frame.line


def _is_left_out_of_the_round(
    job: JobState, usual: tuple[RankState, Operation], instead: tuple[RankState, Operation], *, after: Operation
) -> bool:
    """Say whether the source comes to the call of one rank later in a round, and from that of the other no more.

    As from a branch that ends in `continue`, before the calls of the rest of the round.
    """
    a, b, common = align_frames(usual, instead)
    if (
        common is None
        or after.site is None
        or (after.site.file, after.site.function)
        != (
            a[common].file,
            a[common].function,
        )
    ):
        return False
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    if here is None or there is None or here.loops != there.loops or not set(here.branches) <= set(there.branches):
        return False  # a branch of its own is no rest of the round that the other left out
    x, y = a[common].line, b[common].line
    return after.site.line < min(x, y) and all(line != x for _, line in there.following)


def _came_round(
    job: JobState, left_out: tuple[RankState, Operation], again: tuple[RankState, Operation], *, after: Operation
) -> bool:
    """Say whether a rank came to a call once more, round the loop of the source that holds the call of the other."""
    a, b, common = align_frames(left_out, again)
    if common is None or not _alike(again[1], after):
        return False
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    is_whole = common == len(b) - 1  # what it calls there may hold a loop of its own
    return here is not None and there is not None and is_whole and {*there.loops[:1]} <= {*here.loops} != set()


def _is_in_a_loop_of_its_own(
    job: JobState, outside: tuple[RankState, Operation], inside: tuple[RankState, Operation]
) -> bool:
    """Say whether one of two ranks is in a loop of the function in which they part, or of what that calls."""
    a, b, common = align_frames(outside, inside)
    if common is None:
        return False
    place, *called = map(job.place_in_source, b[common:])
    is_around = place is not None and any(not first <= a[common].line <= last for first, last in place.loops)
    return is_around or any(inner is not None and inner.loops for inner in called)


def _cannot_have_come_round(job: JobState, after: tuple[RankState, Operation], rank: RankState) -> bool:
    """Say whether a rank is in a loop of its own before the call of another, and no loop is around both.

    Then it makes one more turn, and has not left the call out. Callers in the same folder are looked at.
    """
    now = rank.first_blocking
    if now is None or after[0].stack is None or rank.stack is None:
        return False
    a, b, common = align_frames(after, (rank, now))
    if common is None or b[common].line >= a[common].line:
        return False
    here, there = job.place_in_source(b[common]), job.place_in_source(a[common])
    if here is None or there is None or {*here.loops} & {*there.loops}:
        return False
    callers = (frame for frame in b[:common] if PurePath(frame.file).parent == PurePath(b[common].file).parent)
    around = [*filter(None, map(job.place_in_source, callers))]
    is_inside = any(last < a[common].line for _, last in here.loops)
    return is_inside and not any(place.loops for place in around)


def _turns_words(rank: RankState, turn: Operation) -> str:
    """Say that a rank made fewer turns of a loop than in each of its rounds before, and went on to its next call.

    Empty where it did not, or has made more of the next call than ever.
    """
    now = rank.first_blocking
    if now is None or now.label == turn.label:
        return ""
    *before, made = turns_by_round(rank.operations, turn, now) or [0]
    *others, again = turns_by_round(rank.operations, now, turn) or [0]
    if len(before) < MIN_ALIKE or not 0 < made < min(before) or again > min(others, default=0):
        return ""
    newest = "once" if made == 1 else f"{made} times"
    usual = f"{min(before)} times{' or more' if len({*before}) > 1 else ''}"
    return f"rank {rank.rank} made this call {newest} in its newest round, and {usual} in each before"


def _is_one_more_in_a_row(rank: RankState, current: Operation) -> bool:
    """Say whether a rank is in a call that it made more than once in a row before, in one step, as a loop makes it."""
    newest = rank.operations[-3:]
    alike = len(newest) == 3 and all(_alike(operation, current) for operation in newest)
    return alike and newest[-1] == current and current.step is not None and len({o.step for o in newest}) == 1


def _steps_between(earlier: Operation, later: Operation) -> int | None:
    return None if earlier.step is None or later.step is None else later.step - earlier.step


def _fits_steps(
    skipped: Operation,
    instead: Operation,
    steps: set[int | None],
    operations: Sequence[Operation],
    at: int,
) -> bool:
    """Say whether a rank is as many steps further as its program is between two places.

    Where steps are not known: whether it never came there before from the operation that precedes.
    """
    between = _steps_between(skipped, instead)
    if between is not None:
        return between in steps
    before = {operations[i - 1].label for i in range(1, at) if _alike(operations[i], instead)}
    return not before or at == 0 or operations[at - 1].label not in before


def _place_of(operation: Operation) -> tuple[Hashable, int]:
    """Return the place of an operation in the program; in a loop over tensors, sizes distinguish them."""
    return operation.label, operation.numel if operation.op in SIZES_AGREE else -1


def _alike(a: Operation, b: Operation) -> bool:
    """Say whether two operations are the same place in the program."""
    return _place_of(a) == _place_of(b)


def _is_along_axis(a: Operation, b: Operation) -> bool:
    """Say whether two operations are one call, which each rank makes on its own group, as of tensor parallel."""
    is_one_call = (a.op, a.site, a.p2p) == (b.op, b.site, False) and (a.op not in SIZES_AGREE or a.numel == b.numel)
    return is_one_call and a.site is not None and _have_no_common_member(a.group, b.group)


def _have_no_common_member(a: GroupId, b: GroupId) -> bool:
    return a.ranks != b.ranks and not {*a.ranks} & {*b.ranks}


def _made(operations: Sequence[Operation], first: int, wanted: Operation, distance: int) -> bool:
    """Say whether the wanted operation blocks the rank after all, in the first of these or a later one.

    For a device it may have issued the next round, too: there the operation comes again after some distance.
    """
    last = min(len(operations), first + distance) if wanted.on_device else len(operations)
    failed_ns = operations[first].done_ns if operations[first].failed else UNKNOWN_NS
    return any(
        o.open
        and not UNKNOWN_NS < failed_ns <= o.issued_ns  # what it makes on its way out, as at the end of a `with`
        and (_alike(o, wanted) or _is_like_call_of_other_thread(o, wanted, operations[first]))
        for o in (operations[i] for i in range(first, last))
    )


def _is_like_call_of_other_thread(operation: Operation, wanted: Operation, blocking: Operation) -> bool:
    """Say whether another thread than the one in the way has made a like call, be it at a line of its own."""
    is_like = (operation.op, operation.group, operation.p2p) == (wanted.op, wanted.group, False)
    return is_like and operation.thread != blocking.thread and operation.numel == wanted.numel


def _met_collectives(a: RankState, b: RankState) -> Iterator[tuple[Array, Array]]:
    """Give, for each group of both ranks, their newest collectives in columns: those at the same positions."""
    for group, mine in a.newest_collectives.items():
        if (theirs := b.newest_collectives.get(group)) is not None:
            yield at_same_positions(mine, theirs)


def _made_call_of_its_own(reference: RankState, rank: RankState) -> bool:
    """Say whether a rank met its peer, since the newest step began, with a call at a line that neither had come to.

    Then it has made a call more, and everything after it is a call apart (step_mismatch.py).
    """
    for x, y in _met_collectives(reference, rank):
        if len(y) and (odd := np.flatnonzero((x["line"] != y["line"]) & (y["step"] == y["step"][-1]))).size:
            first = int(odd[0])
            known = np.concatenate([x["line"], y["line"][:first]])
            if first > 0 and not np.isin(y["line"][first], known) and np.isin(x["line"][first], x["line"][:first]):
                return bool(y["state"][first] == codes.DONE)
    return False


def _anchor(a: RankState, b: RankState) -> tuple[int, int] | None:
    """Return the positions after the last collective that both ranks completed at the same place; both 0 for none."""
    best: tuple[int, int] | None = None
    for x, y in _met_collectives(a, b):
        alike = np.flatnonzero(
            (x["op"] == y["op"]) & (x["line"] == y["line"]) & (x["state"] == codes.DONE) & (y["state"] == codes.DONE)
        )
        if len(alike):
            newest = alike[np.argmax(x["row"][alike])]
            found = int(x["row"][newest]) + 1 - a.first_row, int(y["row"][newest]) + 1 - b.first_row
            best = found if best is None else max(best, found)
    if best is None and a.first_row == b.first_row == 0 and len(a.operations) < 1000 and len(b.operations) < 1000:
        return 0, 0  # the whole program is kept: compare from the start
    return best


def _skip_finding(job: JobState, skipped: Operation, culprits: tuple[int, ...], *, confidence: float) -> Finding:
    waiting = {
        rank.rank: found
        for rank in job.ranks.values()
        if rank.rank not in culprits
        and (found := operation_at(rank, skipped.group, skipped.seq)) is not None
        and found.open
    }
    group = job.group(skipped.group)
    now = places_of(job.ranks[rank] for rank in culprits)
    facts = []
    for rank in culprits:
        blocking = job.ranks[rank].first_blocking
        doing = (
            f"waits in {blocking.op} #{blocking.seq} of {group_words(job.group(blocking.group))}"
            if blocking
            else "runs on"
        )
        steps = job.ranks[rank].steps
        ended = f"has completed {plural(steps, 'step')} and " if steps is not None else ""
        facts.append(f"rank {rank} {ended}{doing}{at_line(now.get(rank))}")
    facts.append(f"the ranks agree on every operation before {skipped.op} #{skipped.seq}{at_line(skipped.site)}")
    name, first = capitalised(culprits), job.ranks[culprits[0]].first_blocking
    words = f"{wait_words(tuple(sorted(waiting)))} in it"
    if not waiting:  # it met another operation, and both completed: the group hangs later
        waiting = {
            rank.rank: next(o for o in rank.open_operations if o.group == skipped.group and not o.p2p)
            for rank in job.ranks.values()
            if rank.rank not in culprits and any(o.group == skipped.group and not o.p2p for o in rank.open_operations)
        }
        words = f"{wait_words(tuple(sorted(waiting)))} in a later one"
    blocked = tuple(sorted(waiting))
    ways = _ways_past(job, culprits, waiting, skipped)
    facts += [
        f"rank {rank} may have gone past it by the {_way_words(word)}{at_line(site)}" for rank, site, word in ways
    ]
    for rank in culprits:
        own = _without_counted([(site, word) for other, site, word in ways if other == rank])
        now |= {rank: own[0][0]} if len(own) == 1 else {}
    made = {
        rank.rank: found
        for rank in job.ranks.values()
        if rank.rank not in culprits and (found := operation_at(rank, skipped.group, skipped.seq)) is not None
    }
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{name} never entered {operation_words(job, skipped, beside=first)}; {words}.",
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        confidence=confidence,
        group=group,
        op=skipped.op,
        seq=skipped.seq,
        step=skipped.step,
        call_sites=call_sites(waiting or made),
        culprit_call_sites=now,
        evidence=tuple(facts),
        advice=(
            f"Make the call{at_line(skipped.site)} on every member of the group: look for a branch on the rank, "
            "the data or an early continue around it.",
        ),
    )


def _ways_past(
    job: JobState, culprits: tuple[int, ...], waiting: Mapping[int, Operation], skipped: Operation
) -> list[tuple[int, Site, str]]:
    """Return, by rank, the lines that may have led the culprits past what they skipped: nothing where many may.

    The others wait in what was skipped, or have gone on to a later call.
    """
    known = {rank: frames_of(job.ranks[rank], o) for rank, o in [*waiting.items()][:MAX_ASKED]}
    if not known:
        return []
    found = []
    for rank in culprits[:MAX_ASKED]:
        by = job.ranks[rank]
        own = {operation.site for operation in by.operations}  # of ranks with a line each, those that wait at its own
        reference = job.ranks[max(known, key=lambda r: (waiting[r].site in own, len(known[r])))]
        first = operation_at(reference, skipped.group, skipped.seq) or waiting[reference.rank]
        after = operation_before(reference, first)
        ways = find_ways_past(job, (reference, waiting[reference.rank]), by, after=after)
        if len(ways) > MAX_WAYS:
            ways = _without_counted(ways)
        if len(ways) <= MAX_WAYS and find_handler(job, by) is None:
            found += [(rank, site, word) for site, word in ways]
    return found


def _without_counted(ways: list[tuple[Site, str]]) -> list[tuple[Site, str]]:
    """Return the ways past a call but those on a counter of the loop, which is alike on a rank that keeps pace.

    Where there are no others, it does not keep pace.
    """
    return [way for way in ways if not hangs_on_a_counter(way[1])] or ways


def _one_more_turn(job: JobState, skip: Finding, made: tuple[RankState, Operation]) -> Finding | None:
    """Return the finding for ranks in one more turn of an inner loop that the others have left for what was skipped.

    They are not as many steps further as a later round would be, and have made more turns than in any round before.
    """
    now = first_blocking_of(job, skip.culprit_ranks)
    turns = [turns_by_round(job.ranks[rank].operations, o, made[1]) or [0] for rank, o in now.items()]
    if any(newest <= max(before, default=0) for *before, newest in turns):
        return None
    is_inside = [
        _is_one_more_in_a_row(job.ranks[rank], o) or _is_in_a_loop_of_its_own(job, made, (job.ranks[rank], o))
        for rank, o in now.items()
    ]
    if len(now) < len(skip.culprit_ranks) or not all(is_inside):
        return None
    return _more_turns(job, skip, made)


def _more_turns(job: JobState, skip: Finding, made: tuple[RankState, Operation]) -> Finding:
    now = first_blocking_of(job, skip.culprit_ranks)
    first = now[min(now)]
    return replace(
        skip,
        kind="step-mismatch",
        summary=f"{capitalised(skip.culprit_ranks)} made one more turn of a loop, to "
        f"{operation_words(job, first, beside=made[1])}; {wait_words(skip.waiting_ranks)} after it in "
        f"{operation_words(job, made[1], beside=first)}.",
        culprit_call_sites=call_sites(now),
        confidence=min(skip.confidence, 0.8),
        evidence=("no more steps lie between the two than there are without a round of the loop around both",),
        advice=("Look for what counts the turns of this loop, and differs on this rank.",),
    )


def _way_words(word: str) -> str:
    return "end of the loop" if word == "loop" else f"`{word.split()[0]}`"


def _at_another_step(job: JobState, skip: Finding, skipped: Operation) -> Finding | None:
    """Return the finding for ranks that a condition on the counter of a loop led past a call: they are in other rounds.

    As after a resume from another step. Had they left the round early, the source would show where.
    """
    waiting = first_blocking_of(job, skip.waiting_ranks)
    ways = _ways_past(job, skip.culprit_ranks, waiting, skipped)
    if {rank for rank, _, _ in ways} < {*skip.culprit_ranks} or not all(
        hangs_on_a_counter(word) for _, _, word in ways
    ):
        return None
    sites = {rank: site for rank, site, _ in ways}
    line = at_line(sites[skip.culprit_ranks[0]])
    words = "is" if len(skip.culprit_ranks) == 1 else "are"
    return replace(
        skip,
        kind="step-mismatch",
        summary=f"{capitalised(skip.culprit_ranks)} {words} in another round than the others: the condition{line} on "
        f"a counter of the loop led past {skipped.op} #{skipped.seq} of {group_words(skip.group)}"
        f"{at_line(skipped.site)}; {wait_words(skip.waiting_ranks)} in it. What was paired before is of other rounds.",
        confidence=0.8 if len(skip.waiting_ranks) > len(skip.culprit_ranks) else 0.6,
        culprit_call_sites=sites,
        evidence=(
            *(fact for fact in skip.evidence[: len(skip.culprit_ranks)]),
            "nothing else in the source leads past this call, and before it operations agree in form only",
        ),
        advice=(OTHER_ROUND_ADVICE,),
    )


KINDS = ("rank-skipped-collective",)


def explain_exit(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that completed a step, and their program, without a call that each step has.

    Their peers wait for them in that call, in a step that they have completed since.
    """
    job = case.job
    waiting = [job.ranks[r].first_blocking for r in left.waiting_ranks if r in job.ranks]
    awaited = next((o for o in waiting if o is not None and (o.op, o.seq) == (left.op, left.seq)), None)
    culprits = [job.ranks[r] for r in left.culprit_ranks if r in job.ranks]
    if (
        awaited is not None
        and culprits
        and all(rank.finished and _left_out(rank, awaited, reached=rank.steps_ended) for rank in culprits)
    ):
        yield explain(_skip_finding(job, awaited, left.culprit_ranks, confidence=0.8), left)
        return
    if awaited is None or awaited.p2p:
        return
    if by_rounds := [*_explain_by_rounds(job, left, first_blocking_of(job, left.waiting_ranks), awaited)]:
        yield from by_rounds
        return
    if len(culprits) != 1:
        return
    place = _left_out_of_rounds(job, culprits[0], awaited)
    if place is not None:
        skipped, instead = place
        (rank,) = left.culprit_ranks
        found = _skip_finding(job, skipped, left.culprit_ranks, confidence=0.8)
        yield explain(
            replace(
                found,
                summary=f"Rank {rank} left out {skipped.op} #{skipped.seq} of {group_words(found.group)}"
                f"{at_line(skipped.site)}, which it makes in every round: later ones took the place of those before, "
                f"and {wait_words(left.waiting_ranks)} for one more.",
                waiting_ranks=left.waiting_ranks,
                call_sites=left.call_sites,
                culprit_call_sites=call_sites({rank: instead}),
                evidence=(
                    f"rank {rank} made {operation_words(job, instead)} where {skipped.op} came in its rounds before",
                ),
            ),
            left,
        )


def _explain_by_rounds(
    job: JobState, left: Finding, waiting: Mapping[int, Operation], awaited: Operation
) -> Iterator[Finding]:
    """Give the finding for ranks that ended after all rounds, where no line may have led them out of a loop."""
    gone = [job.ranks[rank] for rank in left.culprit_ranks if rank in job.ranks and job.ranks[rank].left_at is None]
    ways = {rank.rank: find_round_left_out(job, rank, waiting) for rank in gone}
    if not gone or len(ways) < len(left.culprit_ranks) or not all(ways.values()):
        return
    one_more = f"#{awaited.seq} of {group_words(job.group(awaited.group))}"
    if left.waiting_ranks:
        words = f"{wait_words(left.waiting_ranks)} for one more, {one_more}"
    else:
        words = f"{list_ranks(tuple(waiting))} made one more, {one_more}, which failed, and went on"
    found = _skip_finding(job, awaited, left.culprit_ranks, confidence=0.8)
    yield explain(
        replace(
            found,
            summary=f"{capitalised(left.culprit_ranks)} left out a round of {awaited.op}{at_line(awaited.site)}, and "
            f"ended; {words}.",
            waiting_ranks=left.waiting_ranks,
            call_sites=left.call_sites,
            culprit_call_sites=left.culprit_call_sites | {rank: own[0] for rank, own in ways.items() if len(own) == 1},
            evidence=(
                "the source counts the rounds of the loop, or data loaders gave as many batches, and no line leads "
                "out of it",
                *(
                    f"rank {rank} may have gone past the call{at_line(site)}"
                    for rank, own in ways.items()
                    for site in own[:MAX_WAYS]
                ),
            ),
        ),
        left,
    )


def explain_caught_exit(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that ended without a call of some round, where the others caught what it raised."""
    made = {
        rank: own
        for rank in left.call_sites
        if left.seq is not None
        and rank in case.job.ranks
        and (
            own := next((o for o in case.job.ranks[rank].open_operations if (o.op, o.seq) == (left.op, left.seq)), None)
        )
    }
    if made:
        yield from _explain_by_rounds(case.job, left, made, made[min(made)])


def _left_out_of_rounds(job: JobState, gone: RankState, awaited: Operation) -> tuple[Operation, Operation] | None:
    """Return the one collective that a rank which ended left out of its rounds, and what it did instead.

    It made fewer calls in the group than others, and what it did instead oftener by then than who shares that line.
    """
    own = gone.operations
    found = [
        (at, usual)
        for at, usual in find_departures(own)
        if (usual.group, usual.op, usual.p2p) == (awaited.group, awaited.op, False)
    ]
    if len(found) != 1 or gone.counts.get((awaited.group, False), 0) > awaited.seq:
        return None
    ((at, usual),) = found
    instead = own[at]
    seq = next((o.seq for o in own[at:] if o.group == awaited.group and not o.p2p), None)
    if seq is None or (instead.group == awaited.group and not instead.p2p):
        return None
    made = sum(o.site == instead.site for o in own[: at + 1])
    for rank in job.ranks.values():
        call = next((i for i, o in enumerate(rank.operations) if _is_at(o, awaited.group, seq)), None)
        if rank.rank != gone.rank and call is not None:
            theirs = sum(o.site == instead.site for o in rank.operations[:call])
            if theirs >= made:
                return None
    return replace(usual, seq=seq), instead


def _is_at(operation: Operation, group: GroupId, seq: int) -> bool:
    return not operation.p2p and (operation.group, operation.seq) == (group, seq)


def explain_message(case: Case, unmatched: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that wait for a message of a later step than the collective they are waited for in."""
    job = case.job
    for collective in case.open_collectives:
        awaited = next(iter(collective.waiting.values()))
        ahead = tuple(
            rank
            for rank, now in first_blocking_of(job, collective.absent).items()
            if now.p2p and _left_out(job.ranks[rank], awaited, reached=now.step)
        )
        if ahead:
            yield explain(_skip_finding(job, awaited, ahead, confidence=0.85), unmatched)
            return


def explain_dead_thread(case: Case, cycle: Finding) -> Iterator[Finding]:
    """Give the finding for a rank whose thread ended by an exception, and had made all of its calls of a group."""
    job = case.job
    for collective in case.open_collectives:
        for own in (job.ranks[rank] for rank in collective.absent if rank in job.ranks):
            now, calls = own.first_blocking, [o for o in own.operations if o.group == collective.group and not o.p2p]
            if not own.thread_exceptions or now is None or not calls or now.thread in {o.thread for o in calls}:
                continue
            error, awaited = own.thread_exceptions[-1], next(iter(collective.waiting.values()))
            found = _skip_finding(job, awaited, (own.rank,), confidence=0.9)
            words = f"its thread {error.thread or 'of no name'}, which had made its calls of this group, ended by"
            yield explain(
                replace(
                    found,
                    culprit_call_sites={own.rank: error.frame} if error.frame is not None else found.culprit_call_sites,
                    evidence=(f"{words} {error.type}{at_line(error.frame)}", *found.evidence[:1]),
                ),
                cycle,
            )
            return


def _left_out(rank: RankState, awaited: Operation, *, reached: int | None) -> bool:
    """Say whether a rank made a call in each step before the one in which it is awaited, and is in a later one."""
    made = [o.step for o in rank.operations if o.label == awaited.label and o.step is not None]
    if awaited.step is None or reached is None:
        return False
    return reached > awaited.step and len(made) > 1 and max(made) < awaited.step


def explain_size(case: Case, mismatch: Finding) -> Iterator[Finding]:
    """Give the finding for a rank whose size is not that of the others, but that of their next call at this line.

    As in a loop over tensors that leaves one out on a rank. The root of an operation has a size of its own.
    """
    job = case.job
    if len(mismatch.culprit_ranks) != 1 or (odd := job.ranks.get(mismatch.culprit_ranks[0])) is None:
        return
    place = (mismatch.op, mismatch.seq, False)
    own = next((o for o in reversed(odd.operations) if (o.op, o.seq, o.p2p) == place), None)
    if own is None:
        return
    culprit = odd.rank
    for rank in job.ranks.values():
        made, following = (operation_at(rank, own.group, own.seq + ahead) for ahead in (0, 1))
        if rank.rank in (culprit, own.peer_rank) or made is None or following is None:
            continue
        is_one_line = made.label == following.label == own.label
        if is_one_line and following.numel == own.numel != made.numel:
            found = _skip_finding(job, made, (culprit,), confidence=0.7)
            size = f"{own.numel:,} elements, as the next call at this line has on rank {rank.rank}"
            fact = f"rank {culprit} has {size}; the others have {made.numel:,} here"
            evidence, advice = (fact, *found.evidence[1:], OR_SWAPPED), (*found.advice, ONE_ORDER)
            yield explain(replace(found, evidence=evidence, advice=advice), mismatch)
            return


RULES: Declared = (
    Rule(kinds=KINDS, stages=(Stage.DIVERGENCE,), find=find_skip),
    Rule(kinds=KINDS, stages=(Stage.DIVERGENCE,), find=find_left_loop, finds_all=True),
    Refinement(kinds=KINDS, causes=("rank-exited",), stages=(Stage.WAIT, Stage.LATE), refine=explain_exit),
    Refinement(kinds=KINDS, causes=("rank-exited",), stages=(Stage.RISK,), refine=explain_caught_exit),
    Refinement(kinds=KINDS, causes=("p2p-unmatched",), stages=(Stage.WAIT,), refine=explain_message),
    Refinement(kinds=KINDS, causes=("group-order-inversion",), stages=(Stage.WAIT,), refine=explain_dead_thread),
    Refinement(kinds=KINDS, causes=("size-mismatch",), stages=(Stage.BROKEN_MESSAGE,), refine=explain_size),
)
