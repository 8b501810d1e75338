"""Ranks at another place of the iteration than most, by no fixed number of calls, as after a resume."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from dtprof.diagnosis.blocked_ranks import victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import both_sides, with_lines
from dtprof.diagnosis.divergence.shift_detection import (
    MIN_MISFITS,
    MIN_TAIL,
    WITHOUT_ROOT,
    codes_of,
    find_constant_shift,
)
from dtprof.diagnosis.divergence.source_paths import is_later_in_source, share_function, take_turns
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.group_collectives import at_position, group_tables, is_of_one_thread
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.tables import Array


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
    theirs, mine = both_sides(job, present, ranks)
    # Lines of two branches are alternatives, not places of one round, but where they take turns by a counter: it is
    # alike on ranks that keep pace. Of two functions steps tell, not the source.
    if share_function(mine, theirs):
        are_apart = (
            is_later_in_source(job, mine, theirs)
            or is_later_in_source(job, theirs, mine)
            or take_turns(job, mine, theirs)
        )
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
        and find_constant_shift(codes_of(reference, "step"), codes_of(odd, "step"), reference, odd, surplus=0) is None
    )


def _apart_finding(job: JobState, key: GroupId, present: dict[int, Operation], culprits: tuple[int, ...]) -> Finding:
    group = job.group(key)
    theirs, mine = both_sides(job, present, culprits)
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
    return with_lines(finding, present)


RULES: Declared = (Rule(kinds=("step-mismatch",), stages=(Stage.DIVERGENCE, Stage.MISPAIRED), find=find_apart),)
