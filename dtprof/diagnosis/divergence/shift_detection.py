"""By how many calls the operations of a rank in a group are shifted against those of most ranks, and from where on.

A call is a code of its operation, its line and its step: see `codes_of`. Each detector compares one rank with the
reference, which did what most ranks did; DETECTORS says in which order they are asked, and where they apply.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.diagnosis.divergence.sequence_alignment import MAX_SHIFT
from dtprof.diagnosis.job_state import JobState
from dtprof.job.group_collectives import checksum
from dtprof.records.codes import DONE
from dtprof.records.tables import Array

MIN_TAIL = 4
"""Calls that must fit when shifted."""
MIN_LAST = 2
"""The same of a rank that has come to its end: no more calls of it are to come."""
MIN_MISFITS = 2
"""Calls that must not fit otherwise."""
MIN_HISTORY = 2
"""Times that all ranks must have issued a call at the same position before one of them counts as having skipped it."""

WITHOUT_ROOT = tuple(map(checksum, ("all_reduce", "all_gather", "reduce_scatter", "barrier")))
"""Operations that every member calls alike."""

_PLACE = ("op", "line", "numel")
"""Columns in which the same calls of two ranks agree, whenever they are made."""

Codes = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Shift:
    """One rank against the reference."""

    at: int  # index of the first call that differs
    by: int | None  # calls skipped (negative) or added (positive) by the rank; None: added, how many is not known


class GroupCalls:
    """The calls of all members in one group, from the first position that all still have, and the reference among them.

    What most ranks did is what the program says: they are the reference, and the odd ones shifted against it.
    """

    def __init__(self, job: JobState, tables: dict[int, Array], clock: str) -> None:
        """Take the calls, and the column that counts iterations: `step` or `forwards`."""
        self.job = job
        self.tables = tables
        self.codes = {rank: codes_of(table, clock) for rank, table in tables.items()}
        self.shortest = min(map(len, tables.values()))
        self.likeness = {rank: calls[: self.shortest].tobytes() for rank, calls in self.codes.items()}
        usual = _usual(self.likeness, {rank: table[: self.shortest] for rank, table in tables.items()})
        self.reference = next(rank for rank, calls in self.likeness.items() if calls == usual)
        self.surplus = _surplus(job, tables)


class Detector(NamedTuple):
    """One way in which a rank gets out of step."""

    find: Callable[[GroupCalls, int, int], Shift | None]  # given the reference, and the rank compared with it
    applies: Callable[[GroupCalls], bool] = lambda _: True
    of_either: bool = False  # of two ranks either may be the odd one


def find_shifts(calls: GroupCalls) -> dict[int, Shift]:
    """Return the shifts by rank, of the first detector that finds any."""
    for detector in DETECTORS:
        pairs = [(calls.reference, rank) for rank in calls.tables if rank != calls.reference]
        pairs += [(rank, reference) for reference, rank in pairs if detector.of_either and len(calls.tables) == 2]
        shifts = {
            rank: shift
            for usual, rank in (pairs if detector.applies(calls) else ())
            if (shift := detector.find(calls, usual, rank)) is not None
        }
        if shifts:
            return {} if calls.job.went_wrong and _are_all_made(calls, shifts) else shifts
    return {}


def _are_all_made(calls: GroupCalls, odd: Iterable[int]) -> bool:
    """Say whether ranks that ended made all calls of a group that the others made: they differ in their steps alone."""
    made = {tuple(table[name].tobytes() for name in _PLACE) for table in calls.tables.values()}
    return len(made) == 1 and all(calls.job.ranks[rank].finished for rank in odd)


def find_odd_iteration(tables: dict[int, Array], reference: int, shortest: int) -> tuple[int, int] | None:
    """Return the one rank that made an optimizer step more or less before the calls of a round, and the first of these.

    The calls of all ranks are the same, and so are the steps before and after: a step is counted once, however often
    it is made without a backward pass between, and what one rank skipped in a round the others may skip in the next.
    """
    usual = tables[reference][:shortest]
    odd = {
        rank: differs
        for rank, table in tables.items()
        if len(differs := np.flatnonzero(table["step"][:shortest] != usual["step"]))
    }
    alike = all(np.array_equal(table[name][:shortest], usual[name]) for table in tables.values() for name in _PLACE)
    if len(odd) != 1 or not alike:
        return None
    ((rank, at),) = odd.items()
    steps = usual["step"]
    is_one_round = len(distinct(steps[at])) == 1 and len(at) == int(at[-1] - at[0]) + 1
    by = distinct(tables[rank]["step"][at] - steps[at])
    is_by_one = len(by) == 1 and abs(int(by[0])) == 1
    updates = [table["updates"] for table in tables.values()]
    is_real = not all(map(np.any, updates)) or bool((tables[rank]["updates"][at] != usual["updates"][at]).all())
    is_among = (
        _history(usual, int(at[0])) >= MIN_HISTORY and _history(usual[::-1], shortest - 1 - int(at[-1])) >= MIN_TAIL
    )
    makes_steps = bool(tables[rank]["in_step"][at].all()) and int(steps[-1]) > int(steps[0])
    return (rank, int(at[0])) if is_one_round and is_by_one and is_real and is_among and makes_steps else None


def _usual(likeness: dict[int, bytes], tables: dict[int, Array]) -> bytes:
    """Return what most ranks did; of two equal halves that which went on with calls that had been made before."""
    (usual, most), *others = Counter(likeness.values()).most_common(2)
    if not others or others[0][1] < most:
        return usual
    other = others[0][0]
    a, b = (tables[next(r for r, calls in likeness.items() if calls == chosen)] for chosen in (usual, other))
    differs = np.flatnonzero((a["line"] != b["line"]) | (a["op"] != b["op"]) | (a["step"] != b["step"]))
    at = int(differs[0]) if len(differs) else 0
    return other if _history(b, at) and not _history(a, at) else usual


def call_alike(tables: dict[int, Array], shortest: int, *, after: str) -> bool:
    """Say whether all ranks make the same calls after as many forward passes, or steps of optimizers: none is extra."""
    known = all(table[after][:shortest].any() for table in tables.values())
    return known and len({codes_of(table, after)[:shortest].tobytes() for table in tables.values()}) == 1


def codes_of(table: Array, clock: str) -> Codes:
    """Return a number for each call of a rank that only the same operation at the same line in the same step has."""
    op, place = (table[name].astype(np.uint64) for name in ("op", "line"))
    time = np.where(table["in_step"], table[clock], 0).astype(np.uint64)  # other threads keep no pace with steps
    return np.asarray(op * np.uint64(1_000_003) + place * np.uint64(31) + (time << np.uint64(40)), np.uint64)


def _surplus(job: JobState, tables: dict[int, Array]) -> dict[int, int]:
    """Return how many extra operations ranks issued of which all others exited without an error after equally many."""
    lengths = Counter(map(len, tables.values()))
    running = [rank for rank in tables if not job.ranks[rank].finished]
    if len(lengths) != 2 or len(running) > 1:
        return {}
    few, many = sorted(lengths)
    odd = [rank for rank, table in tables.items() if len(table) == many]
    return {odd[0]: many - few} if len(odd) == 1 and set(running) <= set(odd) else {}


def find_constant_shift(
    reference: Codes, odd: Codes, reference_table: Array, odd_table: Array, *, surplus: int, tail: int = MIN_TAIL
) -> Shift | None:
    common = min(len(reference), len(odd))
    differs = np.flatnonzero(reference[:common] != odd[:common])
    if len(differs) < (1 if surplus else MIN_MISFITS):
        return None
    at = int(differs[0])
    same_line = all(reference_table[name][at] == odd_table[name][at] for name in ("op", "line"))
    if same_line and _history(reference_table, at) < MIN_HISTORY:
        return None  # only steps differ, from the first call on: a rank that made steps of its own before
    for by in range(1, MAX_SHIFT + 1):
        for added in (False, True):
            a, b = (reference[at:], odd[at + by :]) if added else (reference[at + by :], odd[at:])
            overlap = min(len(a), len(b))
            few = len(differs) < MIN_MISFITS
            if few and (not added or by != surplus or np.isin(odd[at : at + by], reference).any()):
                continue  # then lines of its own must show which calls are extra
            if _is_enough(odd_table, overlap, tail) and np.array_equal(a[:overlap], b[:overlap]):
                num_skipped = _count_skipped(reference[at:], odd[at:], most=by - 1, tail=tail) if added else 0
                return Shift(at=at, by=-num_skipped or (by if added else -by))
    return _other_iteration(reference, odd, reference_table, odd_table, at=at, tail=tail)


def _other_iteration(
    reference: Codes, odd: Codes, reference_table: Array, odd_table: Array, *, at: int, tail: int
) -> Shift | None:
    """Find one round in which a rank made another number of calls, by other lines, as a retry in two halves does."""
    step = reference_table["step"][at]
    theirs, mine = ((table["step"] == step) & table["in_step"] for table in (reference_table, odd_table))
    by = int(mine.sum()) - int(theirs.sum())
    if odd_table["step"][at] != step or not 0 < abs(by) <= MAX_SHIFT:
        return None
    a, b = reference[~theirs], odd[~mine]
    overlap = min(len(a), len(b))
    is_enough = _is_enough(odd_table, overlap - int(np.argmax(theirs)), tail)
    return Shift(at=at, by=by) if is_enough and np.array_equal(a[:overlap], b[:overlap]) else None


def _is_enough(table: Array, overlap: int, tail: int) -> bool:
    """Say whether as many calls at the end of a rank are enough: fewer where each is of a step of its own."""
    if MIN_LAST <= overlap < tail:
        steps = table["step"][-overlap:]
        return bool(table["in_step"][-overlap:].all()) and len(distinct(steps)) == overlap
    return overlap >= tail


def _count_skipped(reference: Codes, odd: Codes, *, most: int, tail: int) -> int:
    """Return how many calls, up to `most`, a rank left out here and there before it goes on as the reference; else 0.

    A round with a few calls left out looks like most of a round added, where nothing counts the rounds.
    """
    for by in range(1, most + 1):
        for made in range(1, min(MAX_SHIFT, len(odd) - tail) + 1):
            a, b = reference[by + made :], odd[made:]
            overlap = min(len(a), len(b))
            if overlap >= tail and np.array_equal(a[:overlap], b[:overlap]):
                round_of_others = iter(reference[: by + made].tolist())
                if all(code in round_of_others for code in odd[:made].tolist()):
                    return by
    return 0


def _added_before_the_end(reference: Codes, odd: Codes, reference_table: Array, odd_table: Array) -> Shift | None:
    """Find extra operations at call sites that only one rank has, shortly before the job ended.

    The rank issues the usual operations after them, so the first that does not fit is paired with a later one of the
    others.
    """
    common = min(len(reference), len(odd))
    differs = np.flatnonzero(reference[:common] != odd[:common])
    if len(differs) < MIN_MISFITS:
        return None
    at = int(differs[0])
    places = np.r_[reference_table["line"], odd_table["line"][:at]]
    if _history(reference_table, at) < MIN_HISTORY:
        return None
    for by in range(1, MAX_SHIFT + 1):
        overlap = min(len(reference) - at, len(odd) - at - by)
        if overlap < 1 or np.isin(odd_table["line"][at + by - 1], places):
            return None
        theirs, mine = slice(at, at + overlap), slice(at + by, at + by + overlap)
        same_sizes = np.array_equal(reference_table["numel"][theirs], odd_table["numel"][mine])
        if same_sizes and np.array_equal(reference[theirs], odd[mine]):
            return Shift(at=at, by=by)
    return None


def _added_up_to_the_end(reference: Array, odd: Array) -> Shift | None:
    """Find extra operations of a rank that has not come back to the usual ones before the job hung.

    Calls of a line that the program rarely comes to met the usual ones of the others, as gathers of sharded parameters
    do in a forward pass too many.
    """
    common = min(len(reference), len(odd))
    differs = np.flatnonzero(reference["line"][:common] != odd["line"][:common])
    if len(differs) < MIN_MISFITS or len(differs) != common - int(differs[0]):
        return None
    at = int(differs[0])
    theirs, mine = reference[at], odd[at]
    met = theirs["op"] == mine["op"] and int(mine["op"]) in WITHOUT_ROOT
    is_over = theirs["state"] == mine["state"] == DONE
    follows = (reference["line"][:at][1:] == theirs["line"]) & (
        reference["line"][:at][:-1] == reference["line"][at - 1]
    )
    times = [int((table["line"][:at] == row["line"]).sum()) for table, row in ((reference, theirs), (odd, mine))]
    is_usual = at > 0 and int(follows.sum()) >= MIN_HISTORY and times[1] < times[0]
    return Shift(at=at, by=None) if met and is_over and is_usual else None


def _more_iterations(reference: Codes, odd: Codes, *, surplus: int) -> Shift | None:
    """Find calls at lines that all use which a rank makes more often before it comes to what all others end with."""
    if not surplus or len(odd) != len(reference) + surplus:
        return None
    differs = np.flatnonzero(reference != odd[: len(reference)])
    at = int(differs[0]) if len(differs) else len(reference)
    again = odd[at : at + surplus]
    fits = at < len(reference) and np.array_equal(reference[at:], odd[at + surplus :])
    return Shift(at=at, by=surplus) if fits and np.isin(again, reference[:at]).all() else None


def _history(table: Array, at: int) -> int:
    return int(((table["line"][:at] == table["line"][at]) & (table["op"][:at] == table["op"][at])).sum())


def is_usual_step(table: Array, at: int) -> bool:
    """Say whether a rank made as many calls in the step of a position as in the step before."""
    step = int(table["step"][at])
    return int((table["step"] == step).sum()) == int((table["step"] == step - 1).sum())


def has_steps(tables: dict[int, Array]) -> bool:
    return any(bool(table["in_step"].any()) for table in tables.values())


def _by_constant(calls: GroupCalls, reference: int, rank: int) -> Shift | None:
    if calls.likeness[rank] == calls.likeness[reference]:
        return None
    has_ended = calls.job.went_wrong and calls.job.ranks[rank].finished
    return find_constant_shift(
        calls.codes[reference],
        calls.codes[rank],
        calls.tables[reference],
        calls.tables[rank],
        surplus=calls.surplus.get(rank, 0),
        tail=MIN_LAST if has_ended else MIN_TAIL,
    )


def _before_the_end(calls: GroupCalls, reference: int, rank: int) -> Shift | None:
    return _added_before_the_end(calls.codes[reference], calls.codes[rank], calls.tables[reference], calls.tables[rank])


def _up_to_the_end(calls: GroupCalls, reference: int, rank: int) -> Shift | None:
    return _added_up_to_the_end(calls.tables[reference], calls.tables[rank])


def _by_iterations(calls: GroupCalls, reference: int, rank: int) -> Shift | None:
    return _more_iterations(calls.codes[reference], calls.codes[rank], surplus=calls.surplus.get(rank, 0))


def _went_wrong(calls: GroupCalls) -> bool:
    return calls.job.went_wrong


DETECTORS = (
    # It skipped or added calls, and went on as the others.
    Detector(_by_constant),
    # It added calls of its own shortly before the end.
    Detector(_before_the_end, _went_wrong),
    # It is in calls that it added.
    Detector(_up_to_the_end, _went_wrong, of_either=True),
    # It ran more iterations before what all end with.
    Detector(_by_iterations, lambda calls: len(calls.tables) > 2),
)
