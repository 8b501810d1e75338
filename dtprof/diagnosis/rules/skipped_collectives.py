"""Ranks whose programs went different ways: a skipped or an extra collective."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, wait_words
from dtprof.diagnosis.job_state import Evidence, Operation, RankEvidence
from dtprof.diagnosis.rules.argument_mismatches import SIZES_AGREE
from dtprof.diagnosis.rules.rank_deaths import call_sites
from dtprof.job.groups import GroupId
from dtprof.records import codes

MAX_SHIFT = 16
"""Operations a rank may have skipped or added in a row to be recognised."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """A collective that some members wait in."""

    group: GroupId
    seq: int
    waiting: dict[int, Operation]
    elsewhere: dict[int, Operation]  # members that issued this position and do not wait in it, or do another operation
    absent: tuple[int, ...]  # members with a record that never issued this position


def find_fronts(evidence: Evidence) -> list[Front]:
    """Return the collectives in which ranks wait, those that began to wait first coming first."""
    places: dict[tuple[GroupId, int], dict[int, Operation]] = {}
    for rank in evidence.ranks.values():
        for operation in rank.open_operations:
            if not operation.p2p:
                places.setdefault((operation.group, operation.seq), {})[rank.rank] = operation
    fronts = []
    for (group, seq), waiting in places.items():
        members = [rank for rank in group.ranks if rank in evidence.ranks]
        absent = tuple(r for r in members if evidence.ranks[r].counts.get((group, False), 0) <= seq)
        issued = {r: found for r in members if r not in absent and (found := _at(evidence.ranks[r], group, seq))}
        elsewhere = {r: operation for r, operation in issued.items() if r not in waiting}
        fronts.append(Front(group=group, seq=seq, waiting=waiting, elsewhere=elsewhere, absent=absent))
    return sorted(fronts, key=lambda front: max(op.issued_ns for op in front.waiting.values()))


def _at(rank: RankEvidence, group: GroupId, seq: int) -> Operation | None:
    table = rank.sweep.groups.get(group) if rank.sweep is not None else None
    if rank.sweep is None or table is None:
        return None
    at = int(np.searchsorted(table["seq"], seq))
    return rank.sweep.operation(int(table["row"][at])) if at < len(table) and table["seq"][at] == seq else None


def find_skip(evidence: Evidence, fronts: list[Front]) -> Finding | None:
    """Return the finding for ranks that went on without a collective that the others wait in.

    In a loop each of two calls follows the other, and either rank may have left out its own: then the one that is as
    many steps from the other's place as the program is there.
    """
    questionable: Finding | None = None
    for front in fronts:
        reference = evidence.ranks[_reference(front)]
        program = _Program(operations=reference.operations)
        others = [r for r in front.group.ranks if r in evidence.ranks and r != reference.rank]
        reference_label = front.waiting[reference.rank].label
        usual = 2 * sum(operation.label == reference_label for operation in front.waiting.values()) > len(others) + 1
        skips = {
            rank: skip
            for rank in others
            if (skip := _skipped(reference, program, evidence.ranks[rank], is_usual=usual)) is not None
            and rank in skip.operation.group.ranks  # a call of another subgroup tells only that the two differ
        }
        if not skips:
            continue
        earliest = min((skip.operation for skip in skips.values()), key=lambda operation: operation.issued_ns)
        culprits = tuple(sorted(r for r, skip in skips.items() if skip.operation.label == earliest.label))
        if len(culprits) <= (len(others) + 1) // 2:
            found = _skip_finding(evidence, earliest, culprits, confidence=0.95 if len(others) > 1 else 0.8)
            if all(skips[rank].fits_steps for rank in culprits):
                return found
            questionable = questionable or found
    return questionable


def _reference(front: Front) -> int:
    """Return a rank of the largest set of waiting ranks that wait at the same line."""
    usual, _ = Counter(operation.label for operation in front.waiting.values()).most_common(1)[0]
    return next(rank for rank, operation in front.waiting.items() if operation.label == usual)


@dataclass(frozen=True, kw_only=True)
class Skip:
    """What a rank went past."""

    operation: Operation
    fits_steps: bool  # the rank is as many steps further as the program is between the two places


def _skipped(reference: RankEvidence, program: "_Program", rank: RankEvidence, *, is_usual: bool) -> Skip | None:
    """Return the operation of the reference that this rank went past without making it, or None.

    Both ranks' operations are compared in program order from the last collective that both completed alike. Where
    they part, the rank skipped what the reference did if it goes on with what follows that in the reference's
    program: read from the reference itself, or from the round before where the reference is still held up. What was
    never made before, by most, was skipped by a rank that goes on as all did then.
    """
    start = _anchor(reference, rank)
    if start is None:
        return None
    ours, theirs = reference.operations, rank.operations
    for at, there in zip(range(start[0], len(ours)), range(start[1], len(theirs)), strict=False):
        a, b = ours[at], theirs[there]
        if not _alike(a, b):
            steps = program.steps_until(at, b)
            goes_on = bool(steps) or (is_usual and program.came_here(at, b))
            if not goes_on or _made(theirs, there, a):
                return None
            return Skip(operation=a, fits_steps=not steps or b.step - a.step in steps)
    return None


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The operations of a rank, and what it does after them; each place is looked at once for all other ranks."""

    operations: Sequence[Operation]
    _following: dict[int, list[tuple[Operation, Operation]]] = field(default_factory=dict)
    _before: dict[int, Operation | None] = field(default_factory=dict)

    def steps_until(self, at: int, wanted: Operation) -> set[int]:
        """Return how many steps after a place an operation follows soon; nothing where it does not."""
        if at not in self._following:
            pairs = (self._pair(at, shift) for shift in range(1, MAX_SHIFT + 1))
            self._following[at] = [pair for pair in pairs if pair is not None]
        return {later.step - place.step for place, later in self._following[at] if _alike(later, wanted)}

    def came_here(self, at: int, wanted: Operation) -> bool:
        """Say whether what stands at a place is new, and an operation came there in the round before."""
        if at not in self._before:
            self._before[at] = self._in_round_before(at)
        before = self._before[at]
        return before is not None and _alike(before, wanted)

    def _in_round_before(self, at: int) -> Operation | None:
        """Return what came a round before in the place of something new; None where it is not new."""
        if at == 0 or self._newest_like(at, before=at) is not None:
            return None
        before = self._newest_like(at - 1, before=at - 1)
        return self.operations[before + 1] if before is not None else None

    def _pair(self, at: int, shift: int) -> tuple[Operation, Operation] | None:
        """Return a place and what comes `shift` operations after it, found one round earlier where it lies ahead."""
        if at + shift >= len(self.operations):
            earlier = self._newest_like(at, before=at - shift + 1)
            if earlier is None:
                return None
            at = earlier
        return self.operations[at], self.operations[at + shift]

    def _newest_like(self, at: int, *, before: int) -> int | None:
        wanted = self.operations[at]
        return next((i for i in range(before - 1, -1, -1) if _alike(self.operations[i], wanted)), None)


def _alike(a: Operation, b: Operation) -> bool:
    """Say whether two operations are the same place in the program; in a loop over tensors, sizes tell them apart."""
    return a.label == b.label and (a.op not in SIZES_AGREE or a.numel == b.numel)


def _made(operations: Sequence[Operation], first: int, wanted: Operation) -> bool:
    """Say whether the rank is held up in the wanted operation after all, in the first of these or a later one."""
    return any(o.open and _alike(o, wanted) for o in (operations[i] for i in range(first, len(operations))))


def _anchor(a: RankEvidence, b: RankEvidence) -> tuple[int, int] | None:
    """Return the positions after the last collective that both ranks completed at the same place; both 0 for none."""
    best: tuple[int, int] | None = None
    for group, mine in a.newest_collectives.items():
        theirs = b.newest_collectives.get(group)
        if theirs is None:
            continue
        _, at, there = np.intersect1d(mine["seq"], theirs["seq"], return_indices=True)
        x, y = mine[at], theirs[there]
        alike = np.flatnonzero(
            (x["op"] == y["op"]) & (x["line"] == y["line"]) & (x["state"] == codes.DONE) & (y["state"] == codes.DONE)
        )
        if len(alike):
            newest = alike[np.argmax(x["row"][alike])]
            found = int(x["row"][newest]) + 1 - a.first_row, int(y["row"][newest]) + 1 - b.first_row
            best = found if best is None else max(best, found)
    if best is None and len(a.operations) < 1000 and len(b.operations) < 1000:
        return 0, 0  # nothing was left out of the tail: compare from the start
    return best


def _skip_finding(evidence: Evidence, skipped: Operation, culprits: tuple[int, ...], *, confidence: float) -> Finding:
    waiting = {
        rank.rank: found
        for rank in evidence.ranks.values()
        if rank.rank not in culprits and (found := _at(rank, skipped.group, skipped.seq)) is not None and found.open
    }
    group = evidence.group(skipped.group)
    now = {rank: site for rank in culprits if (site := evidence.ranks[rank].place) is not None}
    facts = []
    for rank in culprits:
        front = evidence.ranks[rank].front
        doing = (
            f"waits in {front.op} #{front.seq} of {group_words(evidence.group(front.group))}" if front else "runs on"
        )
        facts.append(f"rank {rank} has ended {evidence.ranks[rank].steps} steps and {doing}{at_line(now.get(rank))}")
    facts.append(f"the ranks agree on every operation before {skipped.op} #{skipped.seq}{at_line(skipped.site)}")
    name = capitalised(culprits)
    held_up = tuple(sorted(waiting))
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{name} never entered {skipped.op} #{skipped.seq} of {group_words(group)}"
        f"{at_line(skipped.site)}; {wait_words(held_up)} in it.",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=confidence,
        group=group,
        op=skipped.op,
        seq=skipped.seq,
        step=skipped.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=now,
        evidence=tuple(facts),
        advice=(
            f"Make the call{at_line(skipped.site)} on every member of the group: look for a branch on the rank, "
            "the data or an early continue around it.",
        ),
    )
