"""Ranks whose operations in a group are shifted against those of the others, because they skipped or added some.

The backend cannot detect it if shapes agree. Call sites and steps show it: from some sequence number on, one rank's
operations are those that the others issue a few positions later, or earlier.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from dtprof.diagnosis.blocked_ranks import victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, both_sides, deviating_sites, with_lines
from dtprof.diagnosis.divergence.shift_detection import (
    MIN_TAIL,
    GroupCalls,
    Shift,
    call_alike,
    find_odd_iteration,
    find_shifts,
    has_steps,
    is_usual_step,
)
from dtprof.diagnosis.divergence.skip_branches import find_branches_past, operation_before
from dtprof.diagnosis.divergence.source_paths import have_roles
from dtprof.diagnosis.findings import ONLY_BRANCH, Finding, at_line, capitalised, group_words, skip_evidence
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import at_position, group_tables, line_of
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.sites import Site
from dtprof.records.tables import Array


def find_shift(case: Case) -> list[Finding]:
    """Return the finding for the earliest shift: a rank out of step in one group is so in others."""
    return earliest(shifts_by_group(case.job))


def shifts_by_group(job: JobState, *, clock: str = "step") -> dict[GroupId, Finding]:
    """Return the finding for the first shift in each group, by the column that counts rounds: `step` or `forwards`."""
    groups = group_tables(job.ranks).items()
    return {group: finding for group, tables in groups if (finding := _of_group(job, group, tables, clock))}


def earliest(shifts: dict[GroupId, Finding]) -> list[Finding]:
    return sorted(shifts.values(), key=lambda finding: finding.step or 0)[:1]


def _of_group(job: JobState, group: GroupId, tables: dict[int, Array], clock: str) -> Finding | None:
    # The past of a rank may be lost: compare from the first position that all still have.
    start = max(int(table["seq"][0]) for table in tables.values())
    cut = {rank: table[np.searchsorted(table["seq"], start) :] for rank, table in tables.items()}
    if any(len(t) == 0 or int(t["seq"][-1]) != start + len(t) - 1 for t in cut.values()):
        return None  # positions are missing: nothing can be counted
    if min(map(len, cut.values())) < MIN_TAIL:
        return None
    calls = GroupCalls(job, cut, clock)
    # An optimizer step that no backward pass preceded, as where a rank skips a batch, counts as none.
    if clock == "step" and len({*calls.likeness.values()}) > 1 and call_alike(cut, calls.shortest, after="updates"):
        return None
    reference, shortest = calls.reference, calls.shortest
    shifts = find_shifts(calls)
    if not shifts:
        odd = find_odd_iteration(cut, reference, shortest) if clock == "step" and not job.went_wrong else None
        if odd is None:
            return None
        rank, at = odd
        present = at_position(job.ranks, tables, start + at)
        return _optimizer_finding(job, group, present, (rank,), seq=start + at, tie=len(tables) == 2)
    first = min(shifts.values(), key=lambda shift: shift.at)
    culprits = tuple(sorted(rank for rank, shift in shifts.items() if shift == first))
    tie = 2 * len(culprits) >= len(tables)
    by = first.by
    is_usual = is_usual_step(cut[culprits[0]], first.at)
    if by is not None and tie and len(tables) == 2 and is_usual and not is_usual_step(cut[reference], first.at):
        culprits, first, tie = (reference,), Shift(at=first.at, by=-by), False
    elif tie and len(tables) == 2 and has_steps(cut) and not is_usual:
        tie = False
    seq = start + first.at
    present = at_position(job.ranks, tables, seq)
    if first.at == 0 and not job.went_wrong and have_roles(job, *both_sides(job, present, culprits)):
        return None
    if clock == "step" and not job.went_wrong and call_alike(cut, shortest, after="forwards"):
        return _optimizer_finding(job, group, present, culprits, seq=seq, tie=tie)
    return _finding(job, group, present, culprits, first, seq=seq, tie=tie)


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
    theirs, mine = both_sides(job, present, culprits)
    branches = {} if shift.by is not None and shift.by > 0 else _branches_past(job, present, culprits)
    skipped = shift.by is not None and shift.by < 0
    if shift.by is None:
        # A forward pass that met a backward pass is extra, or that of the next round.
        skipped = all(branches.values()) and _begins_next_iteration(job, present, culprits)
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
    finding = with_lines(finding, present)
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


def _begins_next_iteration(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> bool:
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
    theirs, mine = both_sides(job, present, culprits)
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
    return with_lines(finding, present)


def _step_words(operation: Operation) -> str:
    return f" in step {operation.step}" if operation.step is not None else ""


def _sure(*, tie: bool) -> float:
    return 0.6 if tie else 0.9


def _caveats(*, tie: bool) -> tuple[str, ...]:
    return ("the ranks split into equal halves: which half is wrong is a guess",) if tie else ()


KINDS = ("step-mismatch", "rank-skipped-collective")
RULES: Declared = (Rule(kinds=KINDS, stages=(Stage.DIVERGENCE, Stage.MISPAIRED), find=find_shift),)
