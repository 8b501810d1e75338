"""The pattern of a rank over its earlier iterations: a rank that leaves it deviates, also of two ranks.

Programs of training repeat: after the same operations comes the same operation. Where several ranks wait for one
another, the ranks that kept to their patterns are where they would be if nothing were wrong.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from dtprof.job.issued_operations import Operation

MIN_ALIKE = 2
"""Operations before a place that must be as they were in an earlier round to call it the same place."""
MAX_ALIKE = 64
"""Operations compared before a place."""
MAX_AGAIN = 16
"""Operations in a row that a rank may make again to be recognised, and that it may have issued since."""
NEWEST = 256
"""Operations looked at: of a thousand ranks, objects for all would take seconds to make."""


def usual_operation(operations: Sequence[Operation], current: Operation) -> Operation | None:
    """Return the operation of the newest earlier round at a place where a rank now issued another one.

    None where it keeps to its pattern, or has none: the operations before were never made in this order, or were
    followed by different ones when they were.
    """
    newest = operations[-NEWEST:]
    at = next((i for i in range(len(newest) - 1, -1, -1) if newest[i] == current), None)
    usual = _usual_at(newest, at) if at is not None else None
    return usual if usual is not None and _label(usual) != _label(current) else None


def keeps_pattern(operations: Sequence[Operation], at: int) -> bool | None:
    """Say whether an operation is what the rank made at this place in its earlier rounds; None where it has none."""
    first = max(0, at + 1 - NEWEST)
    usual = _usual_at(operations[first : at + 1], at - first)
    return None if usual is None else _label(usual) == _label(operations[at])


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Operations that a rank made again, in one step, where it went on with others in its earlier rounds."""

    first: Operation  # of those made again
    usual: Operation  # of the newest earlier round, at this place
    count: int  # of the operations that are made again


def is_short_in_step(operations: Sequence[Operation], wanted: Operation) -> bool:
    """Say whether a rank made a call less often in one step, which it has ended, than in each of its earlier steps.

    Where one line calls several times, sizes tell its calls apart. False where less than two earlier steps are known.
    """
    newest = operations[-NEWEST:]
    if wanted.step is None or not newest or (newest[-1].step or 0) <= wanted.step:
        return False
    first = newest[0].step  # it may not be whole
    known = {o.step for o in newest if o.step is not None and o.step < wanted.step}
    known -= {first} if len(newest) < len(operations) else set()
    place = _label(wanted), wanted.numel
    made = Counter(o.step for o in newest if (_label(o), o.numel) == place)
    usual = {made[step] for step in known}
    return len(known) >= MIN_ALIKE and len(usual) == 1 and made[wanted.step] < min(usual)


def find_repetition(operations: Sequence[Operation]) -> Repetition | None:
    """Return the newest operations that a rank made once more in a step: a retry, or a forward pass too many.

    What comes after them is what came in their place before. One more turn of a loop over one line is none: loops take
    the turns that there is data for. Nor is what comes a step later: then the rank left out what is between, which
    only programs that make steps can tell. A retry may have a caller of its own.
    """
    made = operations[-NEWEST:]
    newest = _by_known_callers(made)
    for at in range(len(newest) - 1, max(len(newest) - 1 - MAX_AGAIN, MIN_ALIKE), -1):
        if newest[at].step != newest[-1].step:
            break
        for count in range(1, min(MAX_AGAIN, at) + 1):
            if not _are_made_again(newest, at, count):
                continue
            usual = _usual_at(newest[: at + 1], at)
            if usual is None or _label(usual) == _label(newest[at]) or not _is_of_earlier_step(newest, usual, at):
                continue
            if usual.group != newest[at].group and _comes_next(newest, usual, newest[at], at):
                continue  # two groups entered in the other order leave the same records
            if at + count >= len(newest) or _label(newest[at + count]) == _label(usual):
                return Repetition(first=made[at], usual=usual, count=count)
    return None


def _by_known_callers(operations: Sequence[Operation]) -> Sequence[Operation]:
    """Return the operations; those of the newest step by callers that are new have the site of one before in the step.

    That is one at the same line by callers that earlier steps had, too.
    """
    now = operations[-1].step if operations else None
    known = {_label(o) for o in operations if o.step != now}
    of_place: dict[Hashable, Operation] = {}
    found = list(operations)
    for at, operation in enumerate(operations):
        if operation.step != now or operation.site is None:
            continue
        if _label(operation) in known:
            of_place.setdefault(operation.place, operation)
        elif (before := of_place.get(operation.place)) is not None:
            found[at] = replace(operation, site=before.site)
    return found


def _are_made_again(operations: Sequence[Operation], at: int, count: int) -> bool:
    """Say whether the operations from a place on are those before it, as far as they go, in the same step."""
    first, again = operations[at - count], operations[at]
    if first.step is None or first.step != again.step or _label(first) != _label(again):
        return False
    kinds = {(_label(operation), operation.numel) for operation in operations[at - count : at + 1]}
    if len(kinds) < 2 and _is_in_a_row(operations, at):
        return False
    return all(
        (_label(a), a.numel) == (_label(b), b.numel)
        for a, b in zip(operations[at - count : at], operations[at : at + count], strict=False)
    )


def _is_of_earlier_step(operations: Sequence[Operation], usual: Operation, at: int) -> bool:
    """Say whether what preceded an operation in its round is of an earlier step than what precedes a place."""
    place = next(i for i in range(at) if operations[i] is usual)
    before, now = operations[place - 1].step, operations[at - 1].step
    return before is not None and now is not None and before < now


def _comes_next(operations: Sequence[Operation], usual: Operation, again: Operation, at: int) -> bool:
    """Say whether an operation came right after another in the round before."""
    place = next(i for i in range(at) if operations[i] is usual)
    return _label(operations[place + 1]) == _label(again)


def _is_in_a_row(operations: Sequence[Operation], at: int) -> bool:
    """Say whether the same call was made twice in a row before this place as well, as a loop makes it."""
    return at >= 2 and len({_label(operation) for operation in operations[at - 2 : at + 1]}) == 1


def iterations_by_round(operations: Sequence[Operation], turn: Operation, end: Operation) -> list[int]:
    """Return how often a rank made a call between each two runs of another one, and since: its turns of a loop.

    A first round whose begin is lost is omitted.
    """
    newest = operations[-NEWEST:]
    counts = [0]
    for operation in newest:
        if _label(operation) == _label(end):
            counts.append(0)
        elif _label(operation) == _label(turn):
            counts[-1] += 1
    return [count for i, count in enumerate(counts) if count and (i or len(newest) == len(operations))]


def newest_departure(operations: Sequence[Operation], expected: Hashable) -> int | None:
    """Return the newest place at which a rank issued another operation than in its earlier rounds, one of that label.

    The label is that of `Operation.label`. None where it has always gone on as before there.
    """
    first = max(0, len(operations) - MAX_ALIKE)
    for at in range(len(operations) - 1, first, -1):
        begin = max(0, at + 1 - NEWEST)
        usual = _usual_at(operations[begin : at + 1], at - begin)
        if usual is None or usual.label != expected or operations[at].label == expected:
            continue
        newest = operations[begin:]
        place = next(i for i in range(at - begin) if newest[i] is usual)
        if not _goes_on_so([_label(operation) for operation in newest], place, at - begin):
            return at
    return None


def find_departures(operations: Sequence[Operation]) -> Iterator[tuple[int, Operation]]:
    """Give the places at which a rank issued another operation than in the round before, and that operation."""
    newest = operations[-NEWEST:]
    labels = [_label(operation) for operation in newest]
    found = set[int]()
    for at in range(len(newest)):
        usual = _usual_at(newest, at)
        if usual is None or _label(usual) == labels[at]:
            continue
        place = next(i for i in range(at) if newest[i] is usual)
        # A rank that is back in its pattern does not depart from the one round in which it had left it.
        if place not in found and not _goes_on_so(labels, place, at):
            found.add(at)
            yield len(operations) - len(newest) + at, usual


def _goes_on_so(labels: Sequence[Hashable], place: int, at: int) -> bool:
    """Say whether a rank went on as at a place after the same operations once more: so its rounds go.

    Parameters:
        place: where it went on as usual, in the round before.
    """
    alike = _count_alike(labels, place, at)
    again = (i for i in range(len(labels)) if i != at and labels[i] == labels[at])
    return any(_count_alike(labels, i, at) >= alike for i in again)


def left_out_of_round(operations: Sequence[Operation], current: Operation) -> Operation | None:
    """Return what a rank made in every earlier round before it came to what it is in now, and left out of this round.

    A round begins after a collective. None where nothing is lacking, more is made than before, or rounds differ.
    """
    newest = operations[-NEWEST:]
    at = next((i for i in range(len(newest) - 1, -1, -1) if newest[i] == current), None)
    ends = [i for i in range(at or 0) if not newest[i].p2p]
    if at is None or not ends:
        return None
    mark, here = _label(newest[ends[-1]]), [_label(operation) for operation in newest[ends[-1] + 1 : at]]
    begins = [i for i in ends[:-1] if _label(newest[i]) == mark]
    found: Operation | None = None
    for begin in begins[-MIN_ALIKE:]:
        before = _before_turn(newest[begin + 1 : ends[-1]], _label(current), here.count(_label(current)))
        if before is None:
            return None
        counted = Counter(_label(operation) for operation in before)
        if Counter(here) - counted:
            return None
        lacking = next((o for o in before if counted[_label(o)] > here.count(_label(o))), None)
        if lacking is None or (found is not None and _label(found) != _label(lacking)):
            return None
        found = lacking
    return found


def _before_turn(operations: Sequence[Operation], label: Hashable, turns: int) -> Sequence[Operation] | None:
    """Return what comes before an operation is made once more than so many times; None where it is not."""
    places = [i for i, operation in enumerate(operations) if _label(operation) == label]
    return operations[: places[turns]] if len(places) > turns else None


def _usual_at(operations: Sequence[Operation], at: int) -> Operation | None:
    """Return what followed, in the newest round before, the operations that precede a place; None: nothing sure.

    Where one line calls several times in a row, sizes tell which of these calls it is.
    """
    labels = [_label(operation) for operation in operations]
    found = _places_alike(labels, at)
    if len({labels[place] for place in found}) > 1:
        found = _places_alike([(label, o.numel) for label, o in zip(labels, operations, strict=True)], at)
    if not found or len({labels[place] for place in found}) > 1:
        return None
    return operations[found[0]]


def _places_alike(labels: Sequence[Hashable], at: int) -> list[int]:
    """Return the earlier places before which the most was as it is before a place, the newest first."""
    longest, found = MIN_ALIKE - 1, list[int]()
    for place in range(at - 1, 0, -1):
        alike = _count_alike(labels, place, at)
        if alike > longest:
            longest, found = alike, [place]
        elif alike == longest >= MIN_ALIKE:
            found.append(place)
    return found


def _count_alike(labels: Sequence[Hashable], a: int, b: int) -> int:
    """Return how many labels before two places are the same, counted back from both."""
    most = min(a, b, MAX_ALIKE)
    return next((i for i in range(most) if labels[a - 1 - i] != labels[b - 1 - i]), most)


def _label(operation: Operation) -> Hashable:
    return operation.label, operation.peer if operation.p2p else -1
