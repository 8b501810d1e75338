"""Ranks at another place of the iteration than most."""

import functools

import pytest

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rules.ranks_apart import find_apart
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from tests.builders import RankBuilder
from tests.diagnosis.judging import STEP, build_job


def rounds_from(start: int, rank: RankBuilder, every: int, function: str = "main") -> None:
    """Let a rank average gradients in line 30 in each step up to 12, and a state in line 32 every few steps."""
    for i, step in enumerate(range(start, 12)):
        t = STEP * i
        rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=30), step=i, nbytes=8)
        if step % every == 0:
            rank.op(
                "all_reduce",
                t + 20,
                t + 29,
                site=rank.site("all_reduce", line=32, function=function),
                step=i + 1,
                nbytes=8,
            )


def resuming(starts: tuple[int, ...], *, in_order: bool = True, function: str = "main") -> JobState:
    """Return ranks that begin at these steps; the source comes from line 30 to 32 where the two are in order."""
    ranks = [RankBuilder(rank, len(starts)) for rank in range(len(starts))]
    for rank, start in zip(ranks, starts, strict=True):
        rounds_from(start, rank, every=3, function=function)

    def place(_: str, line: int) -> SourcePlace:
        after = frozenset({("all_reduce", 32)}) if line == 30 and in_order else frozenset[tuple[str, int]]()
        return SourcePlace(in_loop=True, following=after)

    return build_job(ranks, exit_status=1, find_place=place)


FAULTY = {"step-mismatch": functools.partial(resuming, (3, 3, 4))}
SOUND = functools.partial(resuming, (3, 3, 3))


@pytest.mark.parametrize(
    ("starts", "in_order", "function", "culprits"),
    [
        ((3, 3, 4), True, "main", (2,)),
        ((3, 4), True, "main", (0, 1)),
        ((3, 3, 3), True, "main", None),
        ((3, 3, 4), False, "main", None),
        ((3, 3, 4), False, "average", (2,)),  # of two functions, steps tell that ranks are apart
        ((3, 3, 3), False, "average", None),
    ],
)
def test_ranks_that_resumed_at_other_steps_pair_calls_of_other_steps(
    starts: tuple[int, ...], in_order: bool, function: str, culprits: tuple[int, ...] | None
) -> None:
    found = find_apart(Case(resuming(starts, in_order=in_order, function=function)))
    assert [(finding.kind, finding.culprit_ranks, finding.seq) for finding in found] == (
        [] if culprits is None else [("step-mismatch", culprits, 1)]
    )


def taking_turns(begins: tuple[int, ...], *, is_counted: bool, makes_steps: bool) -> list[tuple[tuple[int, ...], int]]:
    """Return whom the verdict names, and the first line, where `average` is called from lines 12 and 14 by turns."""
    ranks = [RankBuilder(rank, len(begins)) for rank in range(len(begins))]
    for rank, begin in zip(ranks, begins, strict=True):
        for turn in range(begin, begin + 12):
            t = 100 * turn
            site = rank.site("all_reduce", line=7, function="average", callers=(("train", 14 if turn % 2 else 12),))
            rank.op("all_reduce", t, t + 9, site=site, nbytes=8, step=turn - begin if makes_steps else 0)

    def place(_: str, line: int) -> SourcePlace | None:
        counted, loops, branches = (11,) if is_counted else (), ((10, 14),), ((line, line),)
        known = SourcePlace(
            in_loop=True, following=frozenset(), loops=loops, branches=branches, conditions=(11, 5), counted=counted
        )
        return known if line in (12, 14) else None

    findings = decide(build_job(ranks, exit_status=0, stalled=False, find_place=place)).findings
    assert {finding.kind for finding in findings} <= {"step-mismatch"}
    return [(finding.culprit_ranks, finding.culprit_call_sites[finding.culprit_ranks[0]].line) for finding in findings]


@pytest.mark.parametrize("makes_steps", [True, False])
@pytest.mark.parametrize("is_counted", [True, False])
def test_branches_that_meet_are_roles_unless_ranks_take_turns_by_a_counter(is_counted: bool, makes_steps: bool) -> None:
    """As the two models of a GAN, of which rank 1 begins with the other; a condition on the rank is by design."""
    found = taking_turns((0, 1, 0), is_counted=is_counted, makes_steps=makes_steps)
    assert found == [((1,), 14)] * is_counted
    assert not taking_turns((0, 0, 0), is_counted=is_counted, makes_steps=makes_steps)


@pytest.mark.parametrize(("begins", "found"), [((0, 1), [((0, 1), 12)]), ((0, 1, 0, 1), [])])
def test_two_halves_that_take_turns_have_no_culprit(
    begins: tuple[int, ...], found: list[tuple[tuple[int, ...], int]]
) -> None:
    assert taking_turns(begins, is_counted=True, makes_steps=True) == found
