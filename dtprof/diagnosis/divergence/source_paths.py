"""What the source says of the calls that two ranks are in: whether it leads from one to the other, and in which loops.

Loops and branches are those that lint/program_order.py reads. Where a line has no source, every answer is no.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import PurePath

from dtprof.diagnosis.divergence.call_divergence import RankCall, align_frames
from dtprof.diagnosis.divergence.sequence_alignment import is_same_call, steps_between
from dtprof.diagnosis.divergence.skip_branches import HANDLERS, left_loops
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site

MAX_CALLERS = 4
"""Frames of a stack, from the caller of the innermost on, whose source is looked at."""


def are_called_from_one_line(*calls: RankCall) -> bool:
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


def is_called_later(job: JobState, rank: RankState, reference: RankState, wanted: Operation) -> bool:
    """Say whether the source calls the function of an operation after the line that a rank's stack is at.

    In the same round of the loop, or the same function, at another line than the reference is at: `a(); b()` there,
    and `b(); a()` here. The line of the reference itself is that of the next round.
    """
    mine, theirs = (r.stack.frames[1 : 1 + MAX_CALLERS] if r.stack is not None else () for r in (rank, reference))
    if (now := rank.first_blocking) is not None and (awaited := reference.first_blocking) is not None:
        _, frames, common = align_frames(RankCall(reference, awaited), RankCall(rank, now))
        mine = mine[: len(frames) - 1 - common] if common is not None else mine  # further out both are at one line
    name = wanted.site.function.rpartition(".")[2] if wanted.site is not None else ""
    usual = {frame.line for frame in theirs}
    places = [place for frame in mine if (place := job.place_in_source(frame)) is not None]
    is_later = any(called == name and line not in usual for p in places for called, line in p.following)
    return bool(usual) and (is_later or _is_called_after_reference(job, rank, reference))


def _is_called_after_reference(job: JobState, rank: RankState, reference: RankState) -> bool:
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
    a, b, common = align_frames(RankCall(reference, theirs), RankCall(rank, now))
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


def is_inside_loop_other_left(job: JobState, inside: RankCall, past: RankCall) -> bool:
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
    return not branches or not is_in_round or past.rank.exhausted > inside.rank.exhausted


def waits_past_loop_of(job: JobState, inside: RankState, past: RankState) -> bool:
    """Say whether a rank waits past the end of a loop of the source in which another rank waits.

    Calls of both that met before, as the gathers of sharded parameters do wherever they come from, do not tell that.
    """
    here, there = inside.first_blocking, past.first_blocking
    if here is None or there is None:
        return False
    return is_inside_loop_other_left(job, RankCall(inside, here), RankCall(past, there))


def source_always_leads_to(job: JobState, before: RankCall, past: RankCall) -> bool:
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
    if any(place.branches for place in known[1:]) and not _made_since(*before, past.operation):
        return False
    is_around = first.block is not None and first.block[0] <= x <= first.block[1]
    # What a library calls there, as contextlib does, shows the line of the `with` alone: once inside, it is the end.
    has_been_inside = (
        common == len(b) - 1
        and not first.loops
        and any(is_same_call(o, before.operation) for o in past.rank.operations)
    )
    if is_around and (_is_exit_of_with(b, known, common + 1) or has_been_inside):
        return True
    if steps_between(before.operation, past.operation) == 0 and _makes_step_between(job, a[common], b[common]):
        return False  # it is at the end of the round before
    return any(line == y for _, line in here.following)


def _makes_step_between(job: JobState, earlier: Site, later: Site) -> bool:
    """Say whether the source makes an optimizer step between two lines of a function, whatever it does there."""
    here, there = job.place_in_source(earlier), job.place_in_source(later)
    if here is None or there is None or any(kind in HANDLERS for _, kind in there.ways_past):
        return False
    lines = (line for name, line in here.following if name == "step" and earlier.line < line < later.line)
    steps = [place for line in lines if (place := job.place_in_source(replace(earlier, line=line))) is not None]
    return there.handler is None and any({*step.branches} <= {*there.branches} for step in steps)


def _made_since(rank: RankState, mark: Operation, wanted: Operation) -> bool:
    """Say whether a rank made a call since it made another one, before it came to that again."""
    for operation in reversed([*takewhile(lambda operation: operation != mark, rank.operations)]):
        if is_same_call(operation, wanted):
            return True
        if is_same_call(operation, mark):
            return False
    return False


def _is_run_once(job: JobState, frames: Sequence[Site], at: int) -> bool:
    """Say whether the line of a frame is in no loop, nor are the lines in the same folder that call its function."""
    if not at and frames[0].function != "<module>":
        return False  # its callers are not known
    folder = PurePath(frames[at].file).parent
    places = [job.place_in_source(frame) for frame in frames[: at + 1] if PurePath(frame.file).parent == folder]
    return all(place is not None and not place.loops for place in places)


def _is_exit_of_with(frames: Sequence[Site], places: Sequence[SourcePlace], at: int) -> bool:
    """Say whether a frame that a `with` calls is its end: `__exit__`, or what follows the `yield` of a generator."""
    if at >= len(frames):
        return False
    frame, place = frames[at], places[at - len(frames)]
    return frame.function.endswith(("__exit__", "__aexit__")) or 0 < place.yields < frame.line


def leaves_round_before(job: JobState, usual: RankCall, instead: RankCall, *, after: Operation) -> bool:
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


def has_looped_back(job: JobState, skipped: RankCall, again: RankCall, *, after: Operation) -> bool:
    """Say whether a rank came to a call once more, round the loop of the source that holds the call of the other."""
    a, b, common = align_frames(skipped, again)
    if common is None or not is_same_call(again.operation, after):
        return False
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    is_whole = common == len(b) - 1  # what it calls there may hold a loop of its own
    return here is not None and there is not None and is_whole and {*there.loops[:1]} <= {*here.loops} != set()


def has_begun_next_round(job: JobState, skipped: RankCall, now: RankCall, *, after: Operation) -> bool:
    """Say whether a rank is in an earlier line of a loop around both calls, after one that lies between the two.

    It has passed the call of the other on its way round the loop.
    """
    a, b, common = align_frames(skipped, now)
    before, mine, parted = align_frames(RankCall(now.rank, after), now)
    if common is None or parted is None or len(mine) - parted != len(b) - common:
        return False
    if not b[common].line < before[parted].line < a[common].line:
        return False
    places = [*map(job.place_in_source, (a[common], b[common], before[parted]))]
    return bool(set.intersection(*({*place.loops} if place is not None else set() for place in places)))


def is_alone_in_loop(job: JobState, outside: RankCall, inside: RankCall) -> bool:
    """Say whether one of two ranks is in a loop of the function in which they part, or of what that calls.

    The loop of a generator is none of its own: whoever takes what it yields is in it as well.
    """
    a, b, common = align_frames(outside, inside)
    if common is None:
        return False
    place, *called = map(job.place_in_source, b[common:])
    is_around = place is not None and any(not first <= a[common].line <= last for first, last in place.loops)
    return is_around or any(inner is not None and inner.loops and not inner.yields for inner in called)


def cannot_have_looped_back(job: JobState, after: RankCall, rank: RankState) -> bool:
    """Say whether a rank is in a loop of its own before the call of another, and no loop is around both.

    Then it makes one more turn, and has not left the call out. Callers in the same folder are looked at.
    """
    now = rank.first_blocking
    if now is None or after.rank.stack is None or rank.stack is None:
        return False
    a, b, common = align_frames(after, RankCall(rank, now))
    if common is None or b[common].line >= a[common].line:
        return False
    here, there = job.place_in_source(b[common]), job.place_in_source(a[common])
    if here is None or there is None or {*here.loops} & {*there.loops}:
        return False
    if any(first == b[common].line for first, _ in there.loops):
        return False  # what it iterates over, as a generator: the other is in a round of that loop
    callers = (frame for frame in b[:common] if PurePath(frame.file).parent == PurePath(b[common].file).parent)
    around = [*filter(None, map(job.place_in_source, callers))]
    within = [*filter(None, map(job.place_in_source, b[common + 1 :]))]  # in what the line of the function calls
    is_inside = any(last < a[common].line for _, last in here.loops) or any(place.loops for place in within)
    return is_inside and not any(place.loops for place in around)


def is_later_in_round(job: JobState, first: RankCall, later: RankCall) -> bool:
    """Say whether the source has the call of one rank after that of another in a loop around both.

    Not where the first is in a loop of its own that trains, as over epochs of a policy: the other may have left that.
    """
    a, b, common = align_frames(first, later)
    if common is None or a[common].line >= b[common].line:
        return False
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    within = [*filter(None, map(job.place_in_source, a[common + 1 :]))]
    trains = any(place.loops and {name for name, _ in place.following} & {"step", "backward"} for place in within)
    return (
        here is not None and there is not None and bool(here.loops) and {*here.loops} <= {*there.loops} and not trains
    )


def are_branches_in_loop(job: JobState, a: Site | None, b: Site | None) -> bool:
    """Say whether a loop makes the one or the other of two calls for each of its items, by the branches of one `if`.

    Its items come in another order where two ranks make both in turn: without one of them the loop would be shorter.
    """
    here, there = job.place_in_source(a), job.place_in_source(b)
    return here is not None and there is not None and here.in_loop and here.is_other_branch(there)


def is_later_in_source(job: JobState, earlier: Operation, later: Operation) -> bool:
    """Say whether the source comes from the line of one call to that of another in the same round."""
    place = job.place_in_source(earlier.site)
    lines = {line for _, line in place.following} if place is not None else set()
    return later.site is not None and later.site.line in lines and share_function(earlier, later)


def take_turns(job: JobState, a: Operation, b: Operation) -> bool:
    """Say whether conditions on counters of a loop alone lead to one of two lines in a round, and to the other else."""
    here, there = job.place_in_source(a.site), job.place_in_source(b.site)
    if here is None or there is None or not here.loops or here.loops[0] != there.loops[0]:
        return False
    first, _ = here.loops[0]
    asked = [[line for line in place.conditions if line > first] for place in (here, there)]
    return any(asked) and {*asked[0]} <= {*here.counted} and {*asked[1]} <= {*there.counted}


def have_roles(job: JobState, a: Operation, b: Operation) -> bool:
    """Say whether one `if` leads to two lines by more than counters, as by the rank: they may rightly meet."""
    here, there = job.place_in_source(a.site), job.place_in_source(b.site)
    is_one_if = here is not None and there is not None and here.is_other_branch(there) and share_function(a, b)
    return is_one_if and not take_turns(job, a, b)


def share_function(a: Operation, b: Operation) -> bool:
    return a.site is not None and b.site is not None and a.site.shares_function(b.site)
