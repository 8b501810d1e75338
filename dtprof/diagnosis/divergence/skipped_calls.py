"""Which call of a reference a rank skipped, from the first calls at which their programs diverge.

Several things look like a skip: another order, an extra call, the wrong group. Each has a veto here. A rank skipped a
call only if a sign shows that it went on past it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dtprof.diagnosis.divergence.call_divergence import RankCall
from dtprof.diagnosis.divergence.sequence_alignment import (
    ReferenceProgram,
    find_anchor,
    is_call_along_axis,
    is_same_call,
    issued_same_collectives,
    made_extra_call,
    steps_between,
)
from dtprof.diagnosis.divergence.source_paths import (
    are_called_from_one_line,
    has_begun_next_round,
    has_looped_back,
    is_alone_in_loop,
    is_called_later,
    is_inside_loop_other_left,
    leaves_round_before,
    source_always_leads_to,
    waits_past_loop_of,
)
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import is_short_in_step, keeps_pattern
from dtprof.records.tables import UNKNOWN_NS


@dataclass(frozen=True, kw_only=True)
class Skip:
    """The operation that a rank skipped."""

    operation: Operation
    fits_steps: bool  # the rank is as many steps further as the program is between the two places


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first calls, in program order, at which a rank differs from a reference that waits in a collective."""

    job: JobState
    program: ReferenceProgram  # of the reference
    reference: RankState
    expected_at: int  # in the operations of the reference
    rank: RankState
    actual_at: int  # in the operations of the rank
    is_usual: bool  # most ranks did as the reference
    is_half: bool  # half of them did
    follows_axis: bool  # calls along an axis, each on a group of its own, were paired before

    @property
    def expected(self) -> Operation:
        """What the reference issued."""
        return self.reference.operations[self.expected_at]

    @property
    def actual(self) -> Operation:
        """What the rank issued instead."""
        return self.rank.operations[self.actual_at]

    @property
    def calls(self) -> tuple[RankCall, RankCall]:
        """Both calls with their ranks, that of the reference first."""
        return RankCall(self.reference, self.expected), RankCall(self.rank, self.actual)

    @cached_property
    def steps(self) -> set[int | None]:
        """How many steps after the expected call the actual one follows in the program; empty where it does not."""
        return self.program.steps_until(self.expected_at, self.actual)

    @cached_property
    def reference_keeps_pattern(self) -> bool | None:
        """Say whether the reference did as in its earlier rounds; None where there were too few."""
        return keeps_pattern(self.reference.operations, self.expected_at)

    @cached_property
    def rank_keeps_pattern(self) -> bool | None:
        """Say the same of the rank."""
        return keeps_pattern(self.rank.operations, self.actual_at)


def find_skipped_call(
    job: JobState, reference: RankState, program: ReferenceProgram, rank: RankState, *, is_usual: bool, is_half: bool
) -> Skip | None:
    """Return the operation of the reference that this rank went past without making it, or None.

    The rank skipped it if it goes on with what follows that in the reference's program: read from the reference
    itself, or from the round before where the reference is still blocked.

    Parameters:
        is_usual: most ranks did as the reference.
        is_half: half of them did.
    """
    start = find_anchor(reference, rank)
    if start is None or (made_extra_call(reference, rank) and not waits_past_loop_of(job, reference, rank)):
        return None
    if not is_usual and made_extra_call(rank, reference):
        return None
    if issued_same_collectives(reference, rank, start):
        return None
    at, other_at, follows_axis = _align(reference, rank, start)
    if at >= len(reference.operations) or other_at >= len(rank.operations):
        return None
    divergence = Divergence(
        job=job,
        program=program,
        reference=reference,
        expected_at=at,
        rank=rank,
        actual_at=other_at,
        is_usual=is_usual,
        is_half=is_half,
        follows_axis=follows_axis,
    )
    if any(veto(divergence) for veto in VETOES) or not _goes_on(divergence):
        return None
    return Skip(operation=divergence.expected, fits_steps=not divergence.steps or _fits_steps(divergence))


def _align(reference: RankState, rank: RankState, start: tuple[int, int]) -> tuple[int, int, bool]:
    """Return the positions of the first calls that differ, and whether calls along an axis came before them."""
    at, other_at = start
    follows_axis = False
    while at < len(reference.operations) and other_at < len(rank.operations):
        a, b = reference.operations[at], rank.operations[other_at]
        if is_same_call(a, b):
            at, other_at = at + 1, other_at + 1
            continue
        for is_of_one_rank in OF_ONE_RANK:
            if is_of_one_rank(a, rank):
                at += 1
                break
            if is_of_one_rank(b, reference):
                other_at += 1
                break
        else:
            if not is_call_along_axis(a, b):
                break
            follows_axis = True
            at, other_at = at + 1, other_at + 1
    return at, other_at, follows_axis


OF_ONE_RANK: tuple[Callable[[Operation, RankState], bool], ...] = (
    # Ranks differ in their messages to others.
    lambda operation, other: operation.p2p and operation.peer_rank != other.rank,
    # The device reaches a collective of a subgroup whenever it is its turn, however the host ordered it.
    lambda operation, other: operation.done and operation.on_device and other.rank not in operation.group.ranks,
    # A message of one rank is no call that another could skip.
    lambda operation, _: operation.p2p and operation.on_device,
)
"""Calls of one rank that another need not make: the alignment steps over them. In this order."""


def _swaps_groups_in_step(d: Divergence) -> bool:
    is_along_axis = d.follows_axis or (bool(d.steps) and d.reference.rank not in d.actual.group.ranks)
    return is_along_axis and (steps_between(d.expected, d.actual) or 0) <= 0


def _is_off_pattern(d: Divergence) -> bool:
    return not d.is_usual and d.reference_keeps_pattern is False and d.rank_keeps_pattern is True


def _awaits_usual_message(d: Divergence) -> bool:
    return d.actual.p2p and d.rank_keeps_pattern is True


def _is_yet_to_come(d: Divergence) -> bool:
    return are_called_from_one_line(*d.calls) or is_called_later(d.job, d.rank, d.reference, d.expected)


def _is_one_call_on_two_groups(d: Divergence) -> bool:
    a, b = d.expected, d.actual
    return a.site is not None and (a.site, a.op, a.step) == (b.site, b.op, b.step) and a.group != b.group


def _begins_with_last_of_loop(d: Divergence) -> bool:
    """Say whether a line's first call of a step is expected, and its last call of the step before came."""
    first = d.expected
    if first.step is None or first.label != d.actual.label:
        return False
    earlier = [o for o in d.reference.operations[: d.expected_at] if o.label == first.label]
    before = [o for o in earlier if o.step == first.step - 1]
    return len(before) > 2 and is_same_call(before[-1], d.actual) and all(o.step != first.step for o in earlier)


def _still_waits_in_expected(d: Divergence) -> bool:
    """Say whether the expected call blocks the rank after all, in the actual call or a later one.

    For a device it may have issued the next round, too: there the operation comes again after some distance.
    """
    operations, expected, actual = d.rank.operations, d.expected, d.actual
    distance = d.program.distance(d.expected_at, actual)
    end = min(len(operations), d.actual_at + distance) if expected.on_device else len(operations)
    failed_ns = actual.done_ns if actual.failed else UNKNOWN_NS
    return any(
        o.open
        and not UNKNOWN_NS < failed_ns <= o.issued_ns  # what it makes on its way out, as at the end of a `with`
        and (is_same_call(o, expected) or _is_call_of_other_thread(o, expected, actual))
        for o in (operations[i] for i in range(d.actual_at, end))
    )


def _is_call_of_other_thread(operation: Operation, expected: Operation, blocking: Operation) -> bool:
    """Say whether another thread than the blocked one has made a like call, be it at a line of its own."""
    is_like = (operation.op, operation.group, operation.p2p) == (expected.op, expected.group, False)
    return is_like and operation.thread != blocking.thread and operation.numel == expected.numel


def _repeats_inner_loop(d: Divergence) -> bool:
    return (steps_between(d.expected, d.actual) or 0) < 0 and is_alone_in_loop(d.job, *d.calls)


VETOES: tuple[Callable[[Divergence], bool], ...] = (
    # Within one step, entering two groups in the other order leaves the same records.
    _swaps_groups_in_step,
    # Of two ranks, the one that left its own pattern tells nothing of what the other skipped.
    _is_off_pattern,
    # The rank waits for a message as in every round: the reference did not make the other end.
    _awaits_usual_message,
    # The source comes to the expected call after all: an order of its own.
    _is_yet_to_come,
    # One line takes groups by turns: another order, or the wrong group.
    _is_one_call_on_two_groups,
    # Another order of a loop over tensors is likelier than that all of them were skipped but the last.
    _begins_with_last_of_loop,
    # Nothing was skipped: the rank, or a thread of it, waits in the expected call as well.
    _still_waits_in_expected,
    # One more iteration of an inner loop, before the step that the others have made.
    _repeats_inner_loop,
)
"""What else explains that two calls differ."""


def _goes_on(d: Divergence) -> bool:
    """Say whether any sign shows that the rank went past the expected call.

    The same line with another size than ever before gives none: a size mismatch, not a call that others skipped.
    """
    if d.steps or (d.is_usual and any(sign(d) for sign in SIGNS_OF_USUAL_REFERENCE)):
        return True
    # Of two ranks neither is usual: the one that does as in earlier rounds shows what the other skipped.
    keeps = d.reference_keeps_pattern
    may_be_usual = d.is_usual or keeps or (d.is_half and keeps is None)
    return bool(may_be_usual) and d.rank_keeps_pattern is not True and any(sign(d) for sign in SIGNS_OF_SOURCE)


def _takes_place_of_new_call(d: Divergence) -> bool:
    return d.expected.label != d.actual.label and d.program.came_here(d.expected_at, d.actual)


def _ended_step_short(d: Divergence) -> bool:
    return is_short_in_step(d.rank.operations[: d.actual_at + 1], d.expected)


def _begins_next_step(d: Divergence) -> bool:
    """Say whether a rank has made its step without the call that the reference is in, and begins the next step.

    It is in a call that both made in this step. No earlier round is needed: the call may end the first step of all.
    """
    step = d.expected.step
    if not d.expected_at or not d.actual_at or step is None or d.actual.step != step + 1:
        return False
    earlier = d.reference.operations[: d.expected_at]
    is_new = all(o.label != d.expected.label for o in earlier)
    kept_pace = earlier[-1].step == d.rank.operations[d.actual_at - 1].step == step
    return is_new and kept_pace and any(o.step == step and is_same_call(o, d.actual) for o in earlier)


def _is_past_in_source(d: Divergence) -> bool:
    return source_always_leads_to(d.job, *d.calls)


def _is_past_loop(d: Divergence) -> bool:
    return is_inside_loop_other_left(d.job, *d.calls)


def _is_past_loop_of_waiting_reference(d: Divergence) -> bool:
    return d.expected.done and d.actual.done and waits_past_loop_of(d.job, d.reference, d.rank)


def _looped_back(d: Divergence) -> bool:
    if not d.is_usual or not d.actual_at:
        return False
    before = d.rank.operations[d.actual_at - 1]
    return has_looped_back(d.job, *d.calls, after=before) or has_begun_next_round(d.job, *d.calls, after=before)


def _took_branch_out_of_round(d: Divergence) -> bool:
    if not d.is_usual or not d.expected_at or any(o.site == d.actual.site for o in d.rank.operations[: d.actual_at]):
        return False
    return leaves_round_before(d.job, *d.calls, after=d.reference.operations[d.expected_at - 1])


SIGNS_OF_USUAL_REFERENCE: tuple[Callable[[Divergence], bool], ...] = (
    # The expected call is new, and the rank goes on as all did in the round before.
    _takes_place_of_new_call,
    # It made the call less often in a step than in each step before.
    _ended_step_short,
    _begins_next_step,
    _is_past_in_source,
)
"""Signs that a rank went past a call that most ranks made."""
SIGNS_OF_SOURCE: tuple[Callable[[Divergence], bool], ...] = (
    # The reference is in a loop of the source, the rank past its end.
    _is_past_loop,
    # The two calls completed against each other, and only what the ranks wait in now shows it.
    _is_past_loop_of_waiting_reference,
    _is_past_in_source,
    # The rank came round the loop, to the call it had just made or to an earlier one.
    _looped_back,
    # It is in a branch from which the source does not come to the expected call in this round.
    _took_branch_out_of_round,
)
"""Signs in the source, where the rank is not where it usually is."""


def _fits_steps(d: Divergence) -> bool:
    """Say whether a rank is as many steps further as its program is between two places.

    Where steps are not known: whether it never came there before from the operation that precedes.
    """
    between = steps_between(d.expected, d.actual)
    if between is not None:
        return between in d.steps
    operations, at = d.rank.operations, d.actual_at
    before = {operations[i - 1].label for i in range(1, at) if is_same_call(operations[i], d.actual)}
    return not before or at == 0 or operations[at - 1].label not in before


def skipped_in_step(rank: RankState, awaited: Operation, *, reached: int | None) -> bool:
    """Say whether a rank made a call in each step before the one in which it is awaited, and is in a later one."""
    steps = [o.step for o in rank.operations if o.label == awaited.label and o.step is not None]
    if awaited.step is None or reached is None:
        return False
    return reached > awaited.step and len(steps) > 1 and max(steps) < awaited.step
