"""Ranks whose operations in a group are shifted against those of the others, because they skipped or added some.

The backend cannot detect it if shapes agree. Call sites and steps show it: from some sequence number on, one rank's
operations are those that the others issue a few positions later, or earlier.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.diagnosis.blocked_ranks import call_sites, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, deviating_sites, part_sites
from dtprof.diagnosis.divergence.sequence_alignment import MAX_SHIFT
from dtprof.diagnosis.divergence.skip_branches import find_branches_past, operation_before
from dtprof.diagnosis.findings import ONLY_BRANCH, Finding, at_line, capitalised, explain, group_words, skip_evidence
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import at_position, checksum, group_tables, is_of_one_thread, line_of
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.codes import DONE
from dtprof.records.sites import Site
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


def find_shift(case: Case) -> list[Finding]:
    """Return the finding for the earliest shift: a rank out of step in one group is so in others."""
    return _earliest(shifts_by_group(case.job))


def shifts_by_group(job: JobState, *, clock: str = "step") -> dict[GroupId, Finding]:
    """Return the finding for the first shift in each group, by the column that counts rounds: `step` or `forwards`."""
    groups = group_tables(job.ranks).items()
    return {group: finding for group, tables in groups if (finding := _of_group(job, group, tables, clock))}


def explain_majority(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that wait in one more call of a line than most, who made all of theirs and ended.

    Who ends itself, by `sys.exit` for example, has not come to the end of its program.
    """
    job = case.job
    gone = [job.ranks[rank] for rank in left.culprit_ranks if rank in job.ranks]
    waiting = {
        rank: o for rank in left.waiting_ranks if (o := job.ranks[rank].first_blocking) is not None and not o.p2p
    }
    group = next((o.group for o in waiting.values()), None)
    tables = group_tables(job.ranks).get(group, {}) if group is not None else {}
    if group is None or len(tables) < len(group.ranks) or len(tables) != len(gone) + len(waiting):
        return
    seqs = {o.seq for o in waiting.values()} | {len(tables[rank.rank]) for rank in gone if rank.rank in tables}
    lines = {line_of(o.site) for o in waiting.values()}
    # Who left by sys.exit or an early return may have made too few calls; only an orderly end shows that the
    # calls were all.
    is_end = len(gone) > len(waiting) and all(rank.finished and rank.left_at is None for rank in gone)
    is_again = len(seqs) == len(lines) == 1 and all(np.isin([*lines], tables[r.rank]["line"]).all() for r in gone)
    if is_end and is_again:
        first = next(iter(waiting.values()))
        culprits, words = tuple(sorted(waiting)), f"{plural(first.seq, 'call')} of {group_words(job.group(group))}"
        yield explain(
            Finding(
                kind="step-mismatch",
                summary=f"{capitalised(culprits)} made more rounds than the others, which ended after {words}, "
                f"and went on to one more {first.op}{at_line(first.site)}.",
                culprit_ranks=culprits,
                grade=0.75,
                group=job.group(group),
                op=first.op,
                seq=first.seq,
                step=first.step,
                culprit_call_sites=call_sites(waiting),
                evidence=(f"{list_ranks(left.culprit_ranks)} came to the end of the program after equally many calls",),
                advice=("Look for a batch, a retry or a warm-up that only this rank makes.",),
            ),
            left,
        )


def find_apart(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks at another place of the round than most, by no fixed number of calls.

    As where ranks resume at different steps, and reduce a state at every third: calls of two lines were paired, each of
    which both sides make at other times. The lines follow one another in the source, or they are in two functions, and
    later calls of one line were made in different steps.
    """
    findings = []
    for group, tables in group_tables(case.job.ranks).items():
        if (first := _first_apart(case.job, tables)) is not None:
            findings.append(_apart_finding(case.job, group, *first))
    yield from sorted(findings, key=lambda finding: finding.step or 0)[:1]


def _first_apart(job: JobState, tables: dict[int, Array]) -> tuple[dict[int, Operation], tuple[int, ...]] | None:
    """Return the operations of the first position at which a few ranks are at another place, and these ranks."""
    start = max(int(table["seq"][0]) for table in tables.values())
    cut = {rank: table[np.searchsorted(table["seq"], start) :] for rank, table in tables.items()}
    shortest = min(map(len, cut.values()))
    if len(cut) < 2 or shortest < MIN_TAIL or not all(is_of_one_thread(table) for table in tables.values()):
        return None
    # Ranks that made the same calls have the same bytes: counting these is cheaper than comparing all pairs.
    lines = {rank: table["line"][:shortest].tobytes() for rank, table in cut.items()}
    (usual, most), *_ = Counter(lines.values()).most_common(1)
    # Without a majority nobody can say who is apart; of two ranks either may be.
    if most == len(lines) or (2 * most <= len(lines) and len(lines) > 2):
        return None
    reference = next(cut[rank] for rank, of_rank in lines.items() if of_rank == usual)
    apart = {}
    for rank in lines:
        differs = np.flatnonzero(cut[rank]["line"][:shortest] != reference["line"][:shortest])
        if len(differs) >= MIN_MISFITS and _are_mixed(reference, cut[rank], int(differs[0])):
            apart[rank] = int(differs[0])
    if not apart:
        return None
    seq = int(reference["seq"][min(apart.values())])
    ranks = tuple(sorted(rank for rank, at in apart.items() if at == min(apart.values())))
    present = at_position(job.ranks, tables, seq)
    theirs, mine = _both_sides(job, present, ranks)
    # Lines of two branches are alternatives, not places of one round, but where they take turns by a counter: it is
    # alike on ranks that keep pace. Of two functions steps tell, not the source.
    if _share_function(mine, theirs):
        are_apart = _follows(job, mine, theirs) or _follows(job, theirs, mine) or _take_turns(job, mine, theirs)
    else:
        are_apart = all(_differ_in_step(reference, cut[rank], apart[rank]) for rank in ranks)
    return (present, ranks) if are_apart and all(o.done for o in present.values()) else None


def _differ_in_step(reference: Array, odd: Array, at: int) -> bool:
    """Say whether two ranks kept pace up to a position, and made a later call of one line in different steps."""
    num = min(len(reference), len(odd))
    x, y = reference[:num], odd[:num]
    alike = (x["line"] == y["line"]) & x["in_step"] & y["in_step"]
    differs = x["step"] != y["step"]
    return not (alike & differs)[:at].any() and bool((alike & differs)[at:].any())


def _are_mixed(reference: Array, odd: Array, at: int) -> bool:
    """Say whether two calls that were paired are alike, and either side makes both, by no fixed number of calls apart.

    Operations with a root are left out: their two ends often have a line each.
    """
    theirs, mine = reference[at], odd[at]
    is_alike = theirs["op"] == mine["op"] and int(mine["op"]) in WITHOUT_ROOT
    makes_both = theirs["line"] in odd["line"] and mine["line"] in reference["line"]
    return (
        bool(is_alike and makes_both)
        and _shift(_codes(reference, "step"), _codes(odd, "step"), reference, odd, surplus=0) is None
    )


def _follows(job: JobState, earlier: Operation, later: Operation) -> bool:
    """Say whether the source comes from the line of one call to that of another in the same round."""
    place = job.place_in_source(earlier.site)
    lines = {line for _, line in place.following} if place is not None else set()
    return later.site is not None and later.site.line in lines and _share_function(earlier, later)


def _take_turns(job: JobState, a: Operation, b: Operation) -> bool:
    """Say whether conditions on counters of a loop alone lead to one of two lines in a round, and to the other else."""
    here, there = job.place_in_source(a.site), job.place_in_source(b.site)
    if here is None or there is None or not here.loops or here.loops[0] != there.loops[0]:
        return False
    first, _ = here.loops[0]
    asked = [[line for line in place.conditions if line > first] for place in (here, there)]
    return any(asked) and {*asked[0]} <= {*here.counted} and {*asked[1]} <= {*there.counted}


def _have_roles(job: JobState, a: Operation, b: Operation) -> bool:
    """Say whether one `if` leads to two lines by more than counters, as by the rank: they may rightly meet."""
    here, there = job.place_in_source(a.site), job.place_in_source(b.site)
    is_one_if = here is not None and there is not None and here.is_other_branch(there) and _share_function(a, b)
    return is_one_if and not _take_turns(job, a, b)


def _share_function(a: Operation, b: Operation) -> bool:
    return a.site is not None and b.site is not None and a.site.shares_function(b.site)


def _apart_finding(job: JobState, key: GroupId, present: dict[int, Operation], culprits: tuple[int, ...]) -> Finding:
    group = job.group(key)
    theirs, mine = _both_sides(job, present, culprits)
    tie = len(present) == 2
    words = "is" if len(culprits) == 1 else "are"
    finding = Finding(
        kind="step-mismatch",
        summary=f"{capitalised(culprits)} {words} at another place of the round than the others: {mine.op}"
        f"{at_line(mine.site)} met theirs{at_line(theirs.site)} at #{mine.seq} of {group_words(group)}, and calls that "
        "do not belong together were paired from there on: results are invalid.",
        culprit_ranks=tuple(sorted(present)) if tie else culprits,
        waiting_ranks=victims(job, set(culprits)) if job.went_wrong and not tie else (),
        grade=0.6 if tie else 0.8,
        group=group,
        op=mine.op,
        seq=mine.seq,
        step=mine.step,
        evidence=(
            "both lines are calls that either side makes, at other times",
            *(("which of the two is at the wrong place is not known",) if tie else ()),
        ),
        advice=("Compare the steps at which ranks began, as after a resume, and the conditions around both lines.",),
    )
    return _with_lines(finding, present)


def _earliest(shifts: dict[GroupId, Finding]) -> list[Finding]:
    return sorted(shifts.values(), key=lambda finding: finding.step or 0)[:1]


def find_skipped_round(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks of a hung job that skipped the operations of a round together with its step.

    Their step counts then agree with those of the others, but they ran one extra forward pass. That alone proves
    little: it counts only if such a rank has exited, or issued an operation that the others have not reached.
    """
    for finding in _earliest(shifts_by_group(case.job, clock="forwards")):
        is_past = all(_is_past_the_others(case.job, case.job.ranks[rank], finding) for rank in finding.culprit_ranks)
        if is_past and finding.kind == "rank-skipped-collective":
            yield finding


def explain_exit_by_skipped_round(case: Case, left: Finding) -> list[Finding]:
    """Return the finding for a skipped round that explains why ranks exited early: they were a round ahead."""
    return [skip for skip in case.findings(find_skipped_round) if skip.culprit_ranks == left.culprit_ranks]


def _is_past_the_others(job: JobState, culprit: RankState, finding: Finding) -> bool:
    """Say whether a rank has exited, or waits in a call that the others have not issued."""
    now = culprit.first_blocking
    if culprit.finished or now is None:
        return culprit.finished
    others = (rank for rank in job.ranks.values() if rank.rank not in finding.culprit_ranks)
    return all(operation.label != now.label for other in others for operation in other.operations)


def _of_group(job: JobState, group: GroupId, tables: dict[int, Array], clock: str) -> Finding | None:
    # The past of a rank may be lost: compare from the first position that all still have.
    start = max(int(table["seq"][0]) for table in tables.values())
    cut = {rank: table[np.searchsorted(table["seq"], start) :] for rank, table in tables.items()}
    if any(len(t) == 0 or int(t["seq"][-1]) != start + len(t) - 1 for t in cut.values()):
        return None  # positions are missing: nothing can be counted
    shortest = min(map(len, cut.values()))
    if shortest < MIN_TAIL:
        return None
    codes = {rank: _codes(table, clock) for rank, table in cut.items()}
    likeness = {rank: calls[:shortest].tobytes() for rank, calls in codes.items()}
    # An optimizer step that no backward pass preceded, as where a rank skips a batch, counts as none.
    if clock == "step" and len({*likeness.values()}) > 1 and _call_alike(cut, shortest, after="updates"):
        return None
    # What most ranks did is what the program says: they are the reference, and the odd ones shifted against it.
    usual = _usual(likeness, {rank: table[:shortest] for rank, table in cut.items()})
    surplus = _surplus(job, cut)
    reference = next(rank for rank, calls in likeness.items() if calls == usual)
    shifts = {
        rank: shift
        for rank, odd in codes.items()
        if likeness[rank] != usual
        and (
            shift := _shift(
                codes[reference],
                odd,
                cut[reference],
                cut[rank],
                surplus=surplus.get(rank, 0),
                tail=MIN_LAST if job.went_wrong and job.ranks[rank].finished else MIN_TAIL,
            )
        )
        is not None
    }
    if not shifts and job.went_wrong:
        shifts = {
            rank: shift
            for rank, odd in codes.items()
            if (shift := _added_before_the_end(codes[reference], odd, cut[reference], cut[rank])) is not None
        }
    if not shifts and job.went_wrong:
        # Of two ranks either may be the one whose calls are rare.
        pairs = [(reference, rank) for rank in cut if rank != reference]
        pairs += [(rank, reference) for _, rank in pairs if len(cut) == 2]
        shifts = {b: shift for a, b in pairs if (shift := _added_up_to_the_end(cut[a], cut[b])) is not None}
    if not shifts and len(cut) > 2:
        shifts = {
            rank: shift
            for rank, odd in codes.items()
            if (shift := _more_rounds(codes[reference], odd, surplus=surplus.get(rank, 0))) is not None
        }
    if job.went_wrong and shifts and _are_all_made(job, cut, shifts):
        return None
    if not shifts:
        odd = _find_odd_round(cut, reference, shortest) if clock == "step" and not job.went_wrong else None
        if odd is None:
            return None
        rank, at = odd
        present = at_position(job.ranks, tables, start + at)
        return _optimizer_finding(job, group, present, (rank,), seq=start + at, tie=len(tables) == 2)
    first = min(shifts.values(), key=lambda shift: shift.at)
    culprits = tuple(sorted(rank for rank, shift in shifts.items() if shift == first))
    tie = 2 * len(culprits) >= len(tables)
    by = first.by
    is_usual = _is_usual(cut[culprits[0]], first.at)
    if by is not None and tie and len(tables) == 2 and is_usual and not _is_usual(cut[reference], first.at):
        culprits, first, tie = (reference,), Shift(at=first.at, by=-by), False
    elif tie and len(tables) == 2 and _has_steps(cut) and not is_usual:
        tie = False
    seq = start + first.at
    present = at_position(job.ranks, tables, seq)
    if first.at == 0 and not job.went_wrong and _have_roles(job, *_both_sides(job, present, culprits)):
        return None
    if clock == "step" and not job.went_wrong and _call_alike(cut, shortest, after="forwards"):
        return _optimizer_finding(job, group, present, culprits, seq=seq, tie=tie)
    return _finding(job, group, present, culprits, first, seq=seq, tie=tie)


def _are_all_made(job: JobState, tables: dict[int, Array], odd: Iterable[int]) -> bool:
    """Say whether ranks that ended made all calls of a group that the others made: they differ in their steps alone."""
    made = {tuple(table[name].tobytes() for name in _PLACE) for table in tables.values()}
    return len(made) == 1 and all(job.ranks[rank].finished for rank in odd)


def _find_odd_round(tables: dict[int, Array], reference: int, shortest: int) -> tuple[int, int] | None:
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


def _call_alike(tables: dict[int, Array], shortest: int, *, after: str) -> bool:
    """Say whether all ranks make the same calls after as many forward passes, or steps of optimizers: none is extra."""
    known = all(table[after][:shortest].any() for table in tables.values())
    return known and len({_codes(table, after)[:shortest].tobytes() for table in tables.values()}) == 1


def _codes(table: Array, clock: str) -> Codes:
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


def _shift(
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
    return _other_round(reference, odd, reference_table, odd_table, at=at, tail=tail)


def _other_round(
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


def _more_rounds(reference: Codes, odd: Codes, *, surplus: int) -> Shift | None:
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


def _is_usual(table: Array, at: int) -> bool:
    """Say whether a rank made as many calls in the step of a position as in the step before."""
    step = int(table["step"][at])
    return int((table["step"] == step).sum()) == int((table["step"] == step - 1).sum())


def _has_steps(tables: dict[int, Array]) -> bool:
    return any(bool(table["in_step"].any()) for table in tables.values())


def _finding(
    job: JobState,
    key: GroupId,
    present: dict[int, Operation],
    culprits: tuple[int, ...],
    shift: Shift,
    *,
    seq: int,
    tie: bool,
) -> Finding:
    group = job.group(key)
    theirs, mine = _both_sides(job, present, culprits)
    branches = {} if shift.by is not None and shift.by > 0 else _branches_past(job, present, culprits)
    skipped = shift.by is not None and shift.by < 0
    if shift.by is None:
        # A forward pass that met a backward pass is extra, or that of the next round.
        skipped = all(branches.values()) and _begins_next_round(job, present, culprits)
    what = (
        f"never made {theirs.op}{at_line(theirs.site)}{_step_words(theirs)}"
        if skipped
        else f"made an extra {mine.op}{at_line(mine.site)}{_step_words(mine)}"
    )
    apart = "" if shift.by is None else f", {plural(abs(shift.by), 'call')} apart"
    finding = Finding(
        kind="rank-skipped-collective" if skipped and job.went_wrong else "step-mismatch",
        summary=f"{capitalised(culprits)} {what}. From #{seq} of {group_words(group)} on, ranks pair mismatched "
        f"collectives{apart}: results are invalid.",
        culprit_ranks=culprits,
        waiting_ranks=victims(job, set(culprits)) if job.went_wrong else (),
        grade=_sure(tie=tie),
        group=group,
        op=(theirs if skipped else mine).op,
        seq=seq,
        step=theirs.step,
        evidence=(
            f"before #{seq}, lines and steps agree on all members",
            f"at #{seq} {list_ranks(culprits)} {'is' if len(culprits) == 1 else 'are'}{_step_words(mine)}"
            f"{at_line(mine.site)}, the others{_step_words(theirs)}{at_line(theirs.site)}",
            *_caveats(tie=tie),
        ),
        advice=("Look for a branch, an early continue or an exception handler around the call on that rank.",),
    )
    finding = _with_lines(finding, present)
    if skipped:
        return _with_branch_past(finding, branches)
    if shift.by is not None:
        return finding
    # The ranks are still in what they made alone.
    now = {rank: o for rank in culprits if (o := job.ranks[rank].first_blocking) is not None}
    callers = deviating_sites(job, now, next(rank for rank in present if rank not in culprits))
    deviating = {rank: site for rank, site in callers.items() if site != now[rank].site}
    return replace(finding, culprit_call_sites={**finding.culprit_call_sites, **deviating})


def _branches_past(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> dict[int, list[Site]]:
    """Return the branches of the source that lead culprits past the call of one of the others."""
    usual = next(rank for rank in present if rank not in culprits)
    made = RankCall(job.ranks[usual], present[usual])
    after = operation_before(*made)
    return {rank: [b.site for b in find_branches_past(job, made, job.ranks[rank], after=after)] for rank in culprits}


def _begins_next_round(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> bool:
    """Say whether culprits are at the line to which the others went on from theirs in the round before."""
    usual = next(rank for rank in present if rank not in culprits)
    theirs, mine = line_of(present[usual].site), line_of(present[culprits[0]].site)
    lines = [line_of(o.site) for o in job.ranks[usual].operations if o.issued_ns < present[usual].issued_ns]
    went_on = (after for before, after in reversed([*pairwise(lines)]) if before == theirs != after)
    return next(went_on, None) == mine


def _with_branch_past(skip: Finding, branches: dict[int, list[Site]]) -> Finding:
    """Name the branches by which ranks skipped a call, where the source has one alone for each of them."""
    lines = {rank: sites[0] for rank, sites in branches.items() if len(sites) == 1}
    facts = (skip_evidence(rank, site, reason=ONLY_BRANCH) for rank, site in lines.items())
    return replace(skip, culprit_call_sites=skip.culprit_call_sites | lines, evidence=(*skip.evidence, *facts))


def _optimizer_finding(
    job: JobState, key: GroupId, present: dict[int, Operation], culprits: tuple[int, ...], *, seq: int, tie: bool
) -> Finding:
    """Return the finding for ranks whose operations match but whose optimizer steps do not."""
    group = job.group(key)
    theirs, mine = _both_sides(job, present, culprits)
    ahead = (mine.step or 0) - (theirs.step or 0)
    steps = "an optimizer step" if abs(ahead) == 1 else f"{abs(ahead)} optimizer steps"
    what = f"made {steps} more than the others" if ahead > 0 else f"skipped {steps}"
    finding = Finding(
        kind="step-mismatch",
        summary=f"{capitalised(culprits)} {what}: at #{seq} of {group_words(group)} "
        f"{'it is' if len(culprits) == 1 else 'they are'} in step {mine.step}, the others in step {theirs.step}. "
        "The operations match; parameters may differ from here on.",
        culprit_ranks=culprits,
        grade=_sure(tie=tie),
        group=group,
        op=mine.op,
        seq=seq,
        step=theirs.step,
        evidence=(
            f"before #{seq}, lines and steps agree on all members",
            f"#{seq} is {mine.op}{at_line(mine.site)} on all of them, after as many forward passes",
            *_caveats(tie=tie),
        ),
        advice=(
            "Look for a condition around optimizer.step() that differs between ranks: a skipped batch, a check of "
            "gradients, a scaler that only one rank has.",
        ),
    )
    return _with_lines(finding, present)


def _step_words(operation: Operation) -> str:
    return f" in step {operation.step}" if operation.step is not None else ""


def _both_sides(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> tuple[Operation, Operation]:
    """Return the calls of one of the others and of one of the culprits, at the lines that tell them apart."""
    theirs, mine = next(call for rank, call in present.items() if rank not in culprits), present[culprits[0]]
    if theirs.site is None or mine.site is None:
        return theirs, mine
    places = part_sites(job, theirs.site, mine.site)
    return replace(theirs, site=places[0]), replace(mine, site=places[1])


def _sure(*, tie: bool) -> float:
    return 0.6 if tie else 0.9


def _caveats(*, tie: bool) -> tuple[str, ...]:
    return ("the ranks split into equal halves: which half is wrong is a guess",) if tie else ()


def _with_lines(finding: Finding, present: dict[int, Operation]) -> Finding:
    """Add where the ranks are at the position."""
    culprits = {rank: operation for rank, operation in present.items() if rank in finding.culprit_ranks}
    others = {rank: operation for rank, operation in present.items() if rank not in culprits}
    return replace(finding, call_sites=call_sites(others), culprit_call_sites=call_sites(culprits))


KINDS = ("step-mismatch", "rank-skipped-collective")
ENDS = (Stage.WAIT, Stage.LATE)
RULES: Declared = (
    Rule(kinds=KINDS, stages=(Stage.DIVERGENCE, Stage.MISPAIRED), find=find_shift),
    Rule(kinds=("step-mismatch",), stages=(Stage.DIVERGENCE, Stage.MISPAIRED), find=find_apart),
    Rule(kinds=("rank-skipped-collective",), stages=(Stage.DIVERGENCE,), find=find_skipped_round),
    Refinement(
        kinds=("rank-skipped-collective",),
        causes=("rank-exited",),
        stages=(Stage.LATE,),
        refine=explain_exit_by_skipped_round,
    ),
    Refinement(kinds=("step-mismatch",), causes=("rank-exited",), stages=ENDS, refine=explain_majority),
)
