"""The call sequences of two ranks side by side: which calls are the same, where both last agreed, what follows."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.diagnosis.job_state import RankState
from dtprof.job.group_collectives import SIZES_AGREE, at_same_positions
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import MAX_ALIKE
from dtprof.records import codes
from dtprof.records.tables import Array

MAX_SHIFT = 16
"""Operations a rank may have skipped or added in a row to be recognised."""
MAX_ROUND = 512
"""Operations in which an earlier call at the same line is looked for."""


def place_of(operation: Operation) -> tuple[Hashable, int]:
    """Return the place of an operation in the program; in a loop over tensors, sizes distinguish them."""
    return operation.label, operation.numel if operation.op in SIZES_AGREE else -1


def is_same_call(a: Operation, b: Operation) -> bool:
    """Say whether two operations are the same place in the program."""
    return place_of(a) == place_of(b)


def is_call_along_axis(a: Operation, b: Operation) -> bool:
    """Say whether two operations are one call, which each rank makes on its own group, as of tensor parallel."""
    is_one_call = (a.op, a.site, a.p2p) == (b.op, b.site, False) and (a.op not in SIZES_AGREE or a.numel == b.numel)
    return is_one_call and a.site is not None and _have_no_common_member(a.group, b.group)


def _have_no_common_member(a: GroupId, b: GroupId) -> bool:
    return a.ranks != b.ranks and not {*a.ranks} & {*b.ranks}


def steps_between(earlier: Operation, later: Operation) -> int | None:
    """Return how many steps later an operation is; None where steps are not known."""
    return None if earlier.step is None or later.step is None else later.step - earlier.step


def find_anchor(a: RankState, b: RankState) -> tuple[int, int] | None:
    """Return the positions after the last collective that both ranks completed at the same place; both 0 for none."""
    best: tuple[int, int] | None = None
    for x, y in _paired_collectives(a, b):
        alike = np.flatnonzero(
            (x["op"] == y["op"]) & (x["line"] == y["line"]) & (x["state"] == codes.DONE) & (y["state"] == codes.DONE)
        )
        if len(alike):
            newest = alike[np.argmax(x["row"][alike])]
            after = int(x["row"][newest]) + 1 - a.first_row, int(y["row"][newest]) + 1 - b.first_row
            best = after if best is None else max(best, after)
    if best is None and a.first_row == b.first_row == 0 and len(a.operations) < 1000 and len(b.operations) < 1000:
        return 0, 0  # the whole program is kept: compare from the start
    return best


def _paired_collectives(a: RankState, b: RankState) -> Iterator[tuple[Array, Array]]:
    """Give, for each group of both ranks, their newest collectives in columns: those at the same positions."""
    for group, mine in a.newest_collectives.items():
        if (theirs := b.newest_collectives.get(group)) is not None:
            yield at_same_positions(mine, theirs)


def issued_same_collectives(a: RankState, b: RankState, start: tuple[int, int]) -> bool:
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


def made_extra_call(reference: RankState, rank: RankState) -> bool:
    """Say whether a rank met its peer, since the newest step began, with a call at a line that neither had come to.

    Then it has made a call more, and everything after it is a call apart (divergence/shift_detection.py).
    """
    for x, y in _paired_collectives(reference, rank):
        if len(y) and (odd := np.flatnonzero((x["line"] != y["line"]) & (y["step"] == y["step"][-1]))).size:
            first = int(odd[0])
            known = np.concatenate([x["line"], y["line"][:first]])
            if first > 0 and not np.isin(y["line"][first], known) and np.isin(x["line"][first], x["line"][:first]):
                return bool(y["state"][first] == codes.DONE)
    return False


@dataclass(frozen=True, kw_only=True)
class ReferenceProgram:
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
            steps_between(place, later)
            for place, later in self._following[at]
            if is_same_call(later, wanted) or is_call_along_axis(later, wanted)
        }

    def distance(self, at: int, wanted: Operation) -> int:
        """Return how many operations after the newest of one kind a round comes back to what stands at a place."""
        begin = self._newest(wanted, before=at)
        if begin is None:
            return len(self.operations)
        place = self.operations[at]
        return next(i - begin for i in range(begin, at + 1) if is_same_call(self.operations[i], place))

    def came_here(self, at: int, wanted: Operation) -> bool:
        """Say whether what stands at a place is new, and an operation came there in the round before."""
        if at not in self._before:
            self._before[at] = self._in_round_before(at)
        before = self._before[at]
        return before is not None and is_same_call(before, wanted)

    def _in_round_before(self, at: int) -> Operation | None:
        """Return what came a round before in the place of something new; None where it is not new.

        One call after the other at one line is a loop, which is new as a whole: who leaves it goes on as before it.
        """
        while at > 0 and is_same_call(self.operations[at - 1], self.operations[at]):
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
            like = [place for place in range(first, at) if is_same_call(self.operations[place], self.operations[at])]
            self._like[at] = sorted(like, key=lambda place: (-self._count_alike_before(place, at), -place))
        return self._like[at]

    def _count_alike_before(self, place: int, at: int) -> int:
        most = min(place, MAX_ALIKE)
        pairs = ((self.operations[place - 1 - i], self.operations[at - 1 - i]) for i in range(most))
        return next((i for i, (a, b) in enumerate(pairs) if not is_same_call(a, b)), most)

    def _newest(self, wanted: Operation, *, before: int) -> int | None:
        return next((i for i in range(before - 1, -1, -1) if is_same_call(self.operations[i], wanted)), None)
