"""A rank's own pattern in its earlier rounds: a rank that leaves it deviates, also of two ranks.

Programs of training repeat: after the same operations comes the same operation. Where several ranks wait for one
another, the ranks that kept to their patterns are where they would be if nothing were wrong.
"""

from collections.abc import Hashable, Sequence

from dtprof.job.issued_operations import Operation

MIN_ALIKE = 2
"""Operations before a place that must be as they were in an earlier round to call it the same place."""
MAX_ALIKE = 64
"""Operations compared before a place."""
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


def _usual_at(operations: Sequence[Operation], at: int) -> Operation | None:
    """Return what followed, in the newest round before, the operations that precede a place; None: nothing sure."""
    labels = [_label(operation) for operation in operations]
    longest, found = MIN_ALIKE - 1, list[int]()
    for place in range(at - 1, 0, -1):
        alike = _count_alike(labels, place, at)
        if alike > longest:
            longest, found = alike, [place]
        elif alike == longest >= MIN_ALIKE:
            found.append(place)
    if not found or len({labels[place] for place in found}) > 1:
        return None
    return operations[found[0]]


def _count_alike(labels: Sequence[Hashable], a: int, b: int) -> int:
    """Return how many labels before two places are the same, counted back from both."""
    most = min(a, b, MAX_ALIKE)
    return next((i for i in range(most) if labels[a - 1 - i] != labels[b - 1 - i]), most)


def _label(operation: Operation) -> Hashable:
    return operation.label, operation.peer if operation.p2p else -1
